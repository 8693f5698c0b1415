//! A real Kubernetes API server with etcd, one per [`Cluster`], for tests.
//!
//! No kubelet runs and no scheduler: a test plays them. With [`Options::controllers`] the controller manager runs, too, for
//! what it alone does (garbage collection by owner, DaemonSets, namespaces). Helm is there, too. Everything dies with the cluster, and with
//! the process. The programs are made by `tests/kube/build`; etcd is Debian's.

mod access;
mod cluster;
mod helm;
mod hook;
mod process;

pub use access::Rule;
pub use cluster::{Cluster, Options};
pub use helm::{helm, kubectl, object, objects, project};
pub use hook::{Authority, Hook, registration};
pub use process::{Process, program};

use std::time::{Duration, Instant};

/// Waits until `look` sees something.
///
/// # Errors
/// It did not within `limit`; `what` is named.
pub async fn wait_for<T>(
    what: &str,
    limit: Duration,
    mut look: impl AsyncFnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let began = Instant::now();
    loop {
        if let Some(seen) = look().await? {
            return Ok(seen);
        }
        anyhow::ensure!(began.elapsed() < limit, "{what}: not within {limit:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
