//! Waits for a condition with a deadline and a name, never for a fixed time.

use std::time::{Duration, Instant};

use anyhow::bail;

const INTERVAL: Duration = Duration::from_millis(5);

/// Calls `probe` until it returns `Some`. After `patience` it fails with an error that names the condition.
pub async fn eventually<T>(
    what: &str,
    patience: Duration,
    mut probe: impl AsyncFnMut() -> Option<T>,
) -> anyhow::Result<T> {
    let began = Instant::now();
    loop {
        if let Some(found) = probe().await {
            return Ok(found);
        }
        if began.elapsed() > patience {
            bail!("{what}: not within {patience:?}");
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Does the same as [`eventually`], for code without a runtime.
pub fn eventually_blocking<T>(
    what: &str,
    patience: Duration,
    mut probe: impl FnMut() -> Option<T>,
) -> anyhow::Result<T> {
    let began = Instant::now();
    loop {
        if let Some(found) = probe() {
            return Ok(found);
        }
        if began.elapsed() > patience {
            bail!("{what}: not within {patience:?}");
        }
        std::thread::sleep(INTERVAL);
    }
}
