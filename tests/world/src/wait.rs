//! Waiting for a condition, with a deadline and a name; never for a time.

use std::time::{Duration, Instant};

use anyhow::bail;

const INTERVAL: Duration = Duration::from_millis(5);

/// Asks until the answer is `Some`, at the longest for `patience`; then an error with `what` was waited for.
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

/// As [`eventually`], for code without a runtime.
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
