//! The progress of one pull.

use peerpod_image_job::{Error, Fetched, Outcome};
use peerpod_proto::guest;
use tokio::time::Instant;

/// Progress and result of a pull.
#[derive(Clone, Debug)]
pub(super) struct Pull {
    pub(super) began: Instant,
    /// First report of the puller, with the bytes of earlier pulls, and the last one.
    fetched: Option<(Fetched, Fetched)>,
    pub(super) result: Option<Result<Outcome, Error>>,
}

impl Pull {
    /// Makes a pull that begins now.
    pub(super) fn new() -> Pull {
        Pull { began: Instant::now(), fetched: None, result: None }
    }

    pub(super) fn is_over(&self) -> bool {
        self.result.is_some()
    }

    /// Takes a report of the puller.
    pub(super) fn add(&mut self, now: Fetched) {
        let first = self.fetched.map_or(now, |(first, _)| first);
        self.fetched = Some((first, now));
    }

    /// Returns the progress for the node.
    pub(super) fn report(&self, image: &str) -> guest::Pull {
        let (first, now) = self.fetched.unwrap_or_default();
        let elapsed_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        guest::Pull {
            image: image.to_owned(),
            bytes: now.bytes,
            of: now.of,
            bytes_per_second: now.bytes.saturating_sub(first.bytes).saturating_mul(1000) / elapsed_ms.max(1),
            elapsed_ms,
            ..guest::Pull::default()
        }
    }

    /// Returns the progress as text for people; `None` before the first bytes.
    pub(super) fn text(&self) -> Option<String> {
        let (_, Fetched { bytes, of }) = self.fetched?;
        let seconds = self.began.elapsed().as_secs();
        Some(format!("{} of {} MiB are in the VM after {seconds} s", bytes >> 20, of >> 20))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_rate_counts_the_bytes_of_this_pull() {
        let mut pull = Pull::new();
        assert_eq!(pull.text(), None);
        pull.add(Fetched { bytes: 100 << 20, of: 300 << 20 });
        tokio::time::advance(Duration::from_secs(10)).await;
        pull.add(Fetched { bytes: 120 << 20, of: 300 << 20 });
        let report = pull.report("r.example/a:1");
        assert_eq!((report.bytes, report.of, report.elapsed_ms), (120 << 20, 300 << 20, 10_000));
        assert_eq!(report.bytes_per_second, 2 << 20);
        assert_eq!(pull.text().unwrap(), "120 of 300 MiB are in the VM after 10 s");
    }
}
