//! Runs a real Kubernetes API server with etcd for tests, one per [`Cluster`].
//!
//! No kubelet and no scheduler run: a test plays them, or starts them ([`Options::node`]). With [`Options::controllers`] the controller manager runs for
//! its own tasks (garbage collection by owner, DaemonSets, namespaces). Helm is available, too. Everything ends with
//! the cluster, and with the process. `tests/kube/build` builds the programs; etcd is Debian's.

mod access;
mod cluster;
mod helm;
mod hook;
mod process;

pub use access::{Rule, cluster_uid};
pub use cluster::{Cluster, NODE, Options};
pub use helm::{helm, helm_of, helm_program, kubectl, object, objects, project};
pub use hook::{Authority, Hook, registration};
pub use process::{Process, otlp_receiver, program, servers};

use std::collections::BTreeMap;
use std::time::Duration;
use std::{env, fs};

use peerpod_world::Patience;

/// Prints a figure, and adds it to the JSON file that `PEERPOD_TEST_BENCH` names.
///
/// # Errors
/// When the file cannot be written.
pub fn report(key: &str, value: f64) -> anyhow::Result<()> {
    println!("{key} = {value:.3}");
    let Some(path) = env::var_os("PEERPOD_TEST_BENCH") else { return Ok(()) };
    let before = fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let mut all: BTreeMap<String, f64> = before.unwrap_or_default();
    all.insert(key.to_owned(), value);
    Ok(fs::write(&path, serde_json::to_vec_pretty(&all)?)?)
}

/// Removes the figures whose names begin like this from the JSON file that `PEERPOD_TEST_BENCH` names.
///
/// # Errors
/// When the file cannot be written.
pub fn forget(prefixes: &[&str]) -> anyhow::Result<()> {
    let Some(path) = env::var_os("PEERPOD_TEST_BENCH") else { return Ok(()) };
    let before = fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let Some(mut all): Option<BTreeMap<String, f64>> = before else { return Ok(()) };
    all.retain(|key, _| !prefixes.iter().any(|prefix| key.starts_with(prefix)));
    Ok(fs::write(&path, serde_json::to_vec_pretty(&all)?)?)
}

/// Waits until `inspect` returns a value.
///
/// # Errors
/// When it returns none within `limit`; the error contains the description in the first argument.
pub async fn wait_for<T>(
    what: &str,
    limit: Duration,
    mut inspect: impl AsyncFnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let mut patience = Patience::new(limit);
    loop {
        if let Some(seen) = inspect().await? {
            return Ok(seen);
        }
        anyhow::ensure!(!patience.is_over(), "{what}: not within {limit:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
