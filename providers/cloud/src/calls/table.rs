//! Token buckets of an account: the actions that share a bucket, and its limits. Plain data.

/// Limits of a bucket.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BucketLimits {
    /// Tokens per second; the cloud's published figure. The learned rate never exceeds it.
    pub per_second: f64,
    /// Most tokens in the bucket.
    pub burst: u32,
    /// Most calls in flight.
    pub at_once: u32,
    /// Whether the bucket is filled at the start of each minute only, as on Google Cloud and Alibaba Cloud. Otherwise it
    /// is filled continuously.
    pub by_minute: bool,
}

/// Default limit of calls in flight: the number of connections that a client has anyway.
const AT_ONCE: u32 = 64;

impl BucketLimits {
    /// Returns limits of at least 0.001 tokens per second (one per 1000 s) and a burst of at least one, with 64 calls
    /// in flight.
    pub fn new(per_second: f64, burst: u32) -> BucketLimits {
        BucketLimits {
            per_second: per_second.max(0.001),
            burst: burst.max(1),
            at_once: AT_ONCE,
            by_minute: false,
        }
    }

    /// Returns limits of this many calls (at least one) in each minute of the clock, with 64 calls in flight.
    pub fn per_minute(calls: u32) -> BucketLimits {
        let burst = calls.max(1);
        BucketLimits { by_minute: true, ..BucketLimits::new(f64::from(burst) / 60.0, burst) }
    }
}

/// Buckets of an account. An action uses the first bucket that names it, otherwise the bucket for all others.
#[derive(Debug, Clone)]
pub struct Table {
    /// Name, actions and limits of each bucket.
    rows: Vec<(&'static str, Vec<&'static str>, BucketLimits)>,
    other: BucketLimits,
}

/// Name of the bucket for actions that no row names.
const OTHER: &str = "other";

impl Table {
    /// Returns a table with one bucket, for all actions.
    pub fn new(other: BucketLimits) -> Table {
        Table { rows: Vec::new(), other }
    }

    /// Adds a bucket shared by these actions; `Describe*` means every action with that prefix.
    #[must_use]
    pub fn with(mut self, bucket: &'static str, actions: &[&'static str], limits: BucketLimits) -> Table {
        self.rows.push((bucket, actions.to_vec(), limits));
        self
    }

    /// Returns the bucket of this action.
    pub fn bucket(&self, action: &str) -> (&'static str, &BucketLimits) {
        let is_named = |one: &&str| match one.strip_suffix('*') {
            Some(start) => action.starts_with(start),
            None => *one == action,
        };
        let row = self.rows.iter().find(|(_, actions, _)| actions.iter().any(is_named));
        row.map_or((OTHER, &self.other), |(bucket, _, limits)| (*bucket, limits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_action_goes_to_the_first_bucket_that_names_it() {
        let table = Table::new(BucketLimits::new(5.0, 50))
            .with("run", &["RunInstances"], BucketLimits::new(2.0, 5))
            .with("describe", &["Describe*", "Get*"], BucketLimits::new(20.0, 100));
        assert_eq!(table.bucket("RunInstances").0, "run");
        assert_eq!(table.bucket("DescribeVolumes").0, "describe");
        assert_eq!(table.bucket("GetConsoleOutput").1.burst, 100);
        assert_eq!(table.bucket("CreateFleet").0, "other");
        assert_eq!((table.bucket("RunInstances").1.burst, table.bucket("AttachVolume").1.burst), (5, 50));
    }
}
