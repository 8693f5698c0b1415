//! Which calls share a bucket, and what is known of it. Plain data.

/// A bucket's figures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Tokens a second; the cloud's published figure. What is learned stays below it.
    pub per_second: f64,
    /// Most tokens it holds.
    pub burst: u32,
    /// Most calls under way at once.
    pub at_once: u32,
}

/// Without a wish: so many connections a client has anyway.
const AT_ONCE: u32 = 64;

impl Limits {
    /// Limits that make sense: at least one token in a quarter of an hour, one in the bucket, one call at once.
    pub fn new(per_second: f64, burst: u32) -> Limits {
        Limits { per_second: per_second.max(0.001), burst: burst.max(1), at_once: AT_ONCE }
    }

    /// The same with another number of calls at once.
    pub fn at_once(self, at_once: u32) -> Limits {
        Limits { at_once: at_once.max(1), ..self }
    }
}

/// The buckets of an account. An action goes to the first bucket that names it, else to the one for others.
#[derive(Debug, Clone)]
pub struct Table {
    rows: Vec<Row>,
    other: Limits,
}

#[derive(Debug, Clone)]
struct Row {
    bucket: &'static str,
    actions: Vec<&'static str>,
    limits: Limits,
}

/// The bucket of what no row names.
const OTHER: &str = "other";

impl Table {
    /// A table of one bucket, for everything.
    pub fn new(other: Limits) -> Table {
        Table { rows: Vec::new(), other }
    }

    /// One more bucket, shared by these actions; `Describe*` is every action that begins so.
    #[must_use]
    pub fn with(mut self, bucket: &'static str, actions: &[&'static str], limits: Limits) -> Table {
        self.rows.push(Row { bucket, actions: actions.to_vec(), limits });
        self
    }

    /// Sets a bucket's figures, as an administrator whose account has others does. `false`: there is no such bucket.
    pub fn set(&mut self, bucket: &str, limits: Limits) -> bool {
        if bucket == OTHER {
            self.other = limits;
            return true;
        }
        let row = self.rows.iter_mut().find(|row| row.bucket == bucket);
        row.map(|row| row.limits = limits).is_some()
    }

    /// The bucket of this action.
    pub fn bucket(&self, action: &str) -> (&'static str, &Limits) {
        let named = |row: &&Row| {
            row.actions.iter().any(|one| match one.strip_suffix('*') {
                Some(start) => action.starts_with(start),
                None => *one == action,
            })
        };
        self.rows.iter().find(named).map_or((OTHER, &self.other), |row| (row.bucket, &row.limits))
    }

    /// All buckets.
    pub fn buckets(&self) -> impl Iterator<Item = (&'static str, &Limits)> {
        self.rows.iter().map(|row| (row.bucket, &row.limits)).chain([(OTHER, &self.other)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_action_goes_to_the_first_bucket_that_names_it() {
        let mut table = Table::new(Limits::new(5.0, 50))
            .with("run", &["RunInstances"], Limits::new(2.0, 5))
            .with("describe", &["Describe*", "Get*"], Limits::new(20.0, 100));
        assert_eq!(table.bucket("RunInstances").0, "run");
        assert_eq!(table.bucket("DescribeVolumes").0, "describe");
        assert_eq!(table.bucket("GetConsoleOutput").1.burst, 100);
        assert_eq!(table.bucket("CreateFleet").0, "other");
        assert!(table.set("run", Limits::new(10.0, 20)) && table.set("other", Limits::new(1.0, 1)));
        assert!(!table.set("unheard-of", Limits::new(1.0, 1)));
        assert_eq!((table.bucket("RunInstances").1.burst, table.bucket("AttachVolume").1.burst), (20, 1));
    }
}
