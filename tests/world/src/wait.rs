//! Waits for a condition with a deadline and a name, never for a fixed time.

use std::fs;
use std::time::{Duration, Instant};

use anyhow::bail;

const INTERVAL: Duration = Duration::from_millis(5);
/// Longest time between two looks that counts.
const LONGEST_STEP: Duration = Duration::from_secs(10);
/// Upper limit of [`slowness`].
const SLOWEST: f64 = 8.0;

/// Returns how much slower than usual this machine is: half its tasks per processor, from 1 to 8.
pub fn slowness() -> f64 {
    let load = fs::read_to_string("/proc/loadavg").ok();
    let load = load.and_then(|load| load.split(' ').next()?.parse::<f64>().ok()).unwrap_or_default();
    let processors = std::thread::available_parallelism().map_or(1.0, |count| count.get() as f64);
    (load / processors / 2.0).clamp(1.0, SLOWEST)
}

/// Deadline that is later on a busy machine.
#[derive(Debug)]
pub struct Patience {
    limit: Duration,
    spent: Duration,
    last: Instant,
}

impl Patience {
    /// Begins to wait for this time of a machine that is not busy.
    pub fn new(limit: Duration) -> Patience {
        Patience { limit, spent: Duration::ZERO, last: Instant::now() }
    }

    /// Counts the time since the last call, and returns whether the limit is reached.
    pub fn is_over(&mut self) -> bool {
        let now = Instant::now();
        // Longer times are those of a machine that stood still.
        self.spent += now.duration_since(self.last).min(LONGEST_STEP).div_f64(slowness());
        self.last = now;
        self.spent > self.limit
    }
}

/// Calls `probe` until it returns `Some`. After `patience`, or later on a busy machine, it fails with an error that names
/// the condition.
pub async fn eventually<T>(
    what: &str,
    patience: Duration,
    mut probe: impl AsyncFnMut() -> Option<T>,
) -> anyhow::Result<T> {
    let mut waits = Patience::new(patience);
    loop {
        if let Some(found) = probe().await {
            return Ok(found);
        }
        if waits.is_over() {
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
    let mut waits = Patience::new(patience);
    loop {
        if let Some(found) = probe() {
            return Ok(found);
        }
        if waits.is_over() {
            bail!("{what}: not within {patience:?}");
        }
        std::thread::sleep(INTERVAL);
    }
}
