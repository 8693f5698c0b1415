//! Collects the figures of a run: a table for people, a flat JSON file for programs, and the verdict on goals.

use std::collections::BTreeMap;
use std::path::Path;
use std::{fs, io};

use anyhow::ensure;

/// Goal of a figure, with its direction.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Goal {
    /// At most this.
    AtMost(f64),
    /// At least this.
    AtLeast(f64),
    /// At least this, or the run fails: a condition of every release.
    Gate(f64),
    /// At most this, or the run fails: a condition of every release.
    Limit(f64),
    /// Exactly this, or the run fails: a fact, not a measurement.
    Exactly(f64),
    /// No goal.
    None,
}

impl Goal {
    fn is_met(self, value: f64) -> bool {
        match self {
            Goal::AtMost(goal) | Goal::Limit(goal) => value <= goal,
            Goal::AtLeast(goal) | Goal::Gate(goal) => value >= goal,
            Goal::Exactly(goal) => value == goal,
            Goal::None => true,
        }
    }

    /// Returns whether a run that misses the goal fails. The table shows other missed goals: a busy machine misses
    /// them, too.
    fn must_hold(self) -> bool {
        matches!(self, Goal::Gate(_) | Goal::Limit(_) | Goal::Exactly(_))
    }

    fn verdict(self, value: f64) -> (String, &'static str) {
        let wanted = match self {
            Goal::AtMost(goal) | Goal::Limit(goal) => format!("<= {goal}"),
            Goal::AtLeast(goal) | Goal::Gate(goal) => format!(">= {goal}"),
            Goal::Exactly(goal) => format!("= {goal}"),
            Goal::None => return (String::new(), ""),
        };
        let verdict = match (self.is_met(value), self.must_hold()) {
            (true, _) => "ok",
            (false, false) => "MISSED",
            (false, true) => "FAILED",
        };
        (wanted, verdict)
    }
}

/// Figures in the order of their arrival; each is printed at once.
#[derive(Default)]
pub(crate) struct Report {
    figures: BTreeMap<String, f64>,
    lines: Vec<String>,
    failed: Vec<String>,
}

impl Report {
    /// Adds a figure with its goal and a short description.
    pub(crate) fn figure(&mut self, key: &str, value: f64, goal: Goal, about: &str) {
        let (wanted, verdict) = goal.verdict(value);
        let line = format!("{key:38} {value:>10.3}  {wanted:>9}  {verdict:7} {about}");
        eprintln!("  {line}");
        if goal.must_hold() && !goal.is_met(value) {
            self.failed.push(format!("{key} is {value:.3}, not {wanted}"));
        }
        self.figures.insert(key.to_owned(), value);
        self.lines.push(line);
    }

    /// Adds a line without a figure to the table.
    pub(crate) fn row(&mut self, line: String) {
        eprintln!("  {line}");
        self.lines.push(line);
    }

    /// Prints the table and writes the file. A run of some parts keeps the earlier figures of the other parts.
    ///
    /// # Errors
    /// When the file cannot be written, or a gate or an exact figure was missed; the file is written then, too.
    pub(crate) fn finish(&self, path: &Path) -> anyhow::Result<()> {
        println!("{:38} {:>10}  {:>9}", "figure", "value", "goal");
        for line in &self.lines {
            println!("{line}");
        }
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let before = fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let mut all: BTreeMap<String, f64> = before.unwrap_or_default();
        all.extend(self.figures.clone());
        fs::write(path, serde_json::to_vec_pretty(&all)?)?;
        println!("written: {}", path.display());
        ensure!(self.failed.is_empty(), "what must hold does not: {}", self.failed.join("; "));
        Ok(())
    }
}

/// Removes the file before a full run, so that no figure of an older program remains, even if the run is aborted.
pub(crate) fn begin_afresh(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn summary(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("peerpod-report-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder.join("summary.json")
    }

    fn written(path: &Path) -> BTreeMap<String, f64> {
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    }

    #[test]
    fn a_missed_gate_and_an_exact_figure_that_is_another_fail_the_run_and_no_other_goal_does() {
        let path = summary("gate");
        let cases = [
            (0.87, Goal::Gate(0.88), false),
            (0.88, Goal::Gate(0.88), true),
            (1.031, Goal::Limit(1.03), false),
            (1.03, Goal::Limit(1.03), true),
            (1449.0, Goal::Exactly(1450.0), false),
            (1450.0, Goal::Exactly(1450.0), true),
            (2.0, Goal::AtMost(1.0), true),
            (0.5, Goal::AtLeast(1.0), true),
            (0.5, Goal::None, true),
        ];
        for (value, goal, passes) in cases {
            let mut report = Report::default();
            report.figure("the_figure", value, goal, "");
            let outcome = report.finish(&path);
            assert_eq!(outcome.is_ok(), passes, "{value} {goal:?}: {outcome:?}");
            assert!(passes || format!("{:#}", outcome.unwrap_err()).contains("the_figure"));
            assert_eq!(written(&path)["the_figure"], value, "a figure that fails is written, too");
        }
        fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }

    #[test]
    fn a_run_of_some_parts_keeps_the_others_and_a_full_one_begins_afresh() {
        let path = summary("fresh");
        let run = |key: &str| {
            let mut report = Report::default();
            report.figure(key, 1.0, Goal::None, "");
            report.finish(&path).unwrap();
            written(&path).into_keys().collect::<Vec<_>>()
        };
        begin_afresh(&path).unwrap();
        assert_eq!(run("stale"), ["stale"]);
        assert_eq!(run("part"), ["part", "stale"]);
        begin_afresh(&path).unwrap();
        assert_eq!(run("whole"), ["whole"]);
        fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }
}
