//! Builds the tokio runtime and bounds the number of its threads.

use std::io;

use tokio::runtime::{Builder, Runtime};

/// Threads for steps that wait for disk or kernel. Tokio's default is 512, and each thread that a burst needs keeps its
/// stack and its heap. No step waits for another one, so a full queue slows the steps but never deadlocks them. Steps
/// that wait for another process are bounded where they begin (`RelayClient::hand_off`).
pub const BLOCKING_THREADS: usize = 64;

/// Builds the runtime. Fails if the kernel refuses threads or epoll.
pub fn new() -> io::Result<Runtime> {
    Builder::new_multi_thread().max_blocking_threads(BLOCKING_THREADS).enable_all().build()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::SeqCst;
    use std::time::Duration;

    use peerpod_proto::relay::ConfigureRequest;
    use tokio::task::{JoinSet, spawn_blocking};

    use super::*;
    use crate::metrics::Metrics;
    use crate::relay_client::RelayClient;

    #[test]
    fn a_burst_of_a_thousand_steps_completes_on_few_threads() {
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        new().unwrap().block_on(async {
            let mut steps = JoinSet::new();
            for _ in 0..1000 {
                let (now, most) = (now.clone(), most.clone());
                steps.spawn_blocking(move || {
                    most.fetch_max(now.fetch_add(1, SeqCst) + 1, SeqCst);
                    std::thread::sleep(Duration::from_millis(2));
                    now.fetch_sub(1, SeqCst);
                });
            }
            assert_eq!(steps.join_all().await.len(), 1000);
        });
        let most = most.load(SeqCst);
        assert!((2..=BLOCKING_THREADS).contains(&most), "{most} at once");
    }

    #[test]
    fn a_hung_relay_delays_no_local_step() {
        let dir = std::env::temp_dir().join(format!("peerpod-runtime-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        // The kernel completes connections to this socket; no program answers them.
        let deaf = peerpod_base::fd_handoff::listen(&dir.join(peerpod_base::fd_handoff::SOCKET)).unwrap();
        let identity = Arc::new(|| Ok(ConfigureRequest::default()));
        let client = RelayClient::new(dir.join("relay.sock"), identity, Metrics::default());
        let runtime = new().unwrap();
        runtime.block_on(async {
            let mut waiting = JoinSet::new();
            for n in 0..2 * BLOCKING_THREADS {
                let client = client.clone();
                waiting.spawn(async move {
                    client.held("localhost", Some(&format!("s{n}").parse().unwrap())).await
                });
            }
            tokio::task::yield_now().await;
            for _ in 0..20 {
                spawn_blocking(|| ()).await.unwrap();
                assert!(waiting.try_join_next().is_none(), "a step waited for a call of the relay");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            waiting.abort_all();
        });
        runtime.shutdown_background();
        drop(deaf);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
