//! What a run found: a table for people, a flat JSON file for machines.

use std::{collections::BTreeMap, fs, path::Path};

/// A goal, and on which side of it one wants to be.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Goal {
    /// No more than.
    AtMost(f64),
    /// No less than.
    AtLeast(f64),
    /// This and nothing else.
    Exactly(f64),
    /// Just a figure.
    None,
}

impl Goal {
    fn verdict(self, value: f64) -> (String, &'static str) {
        match self {
            Goal::AtMost(goal) => (format!("<= {goal}"), if value <= goal { "ok" } else { "MISSED" }),
            Goal::AtLeast(goal) => (format!(">= {goal}"), if value >= goal { "ok" } else { "MISSED" }),
            Goal::Exactly(goal) => (format!("= {goal}"), if value == goal { "ok" } else { "MISSED" }),
            Goal::None => (String::new(), ""),
        }
    }
}

/// Collects figures in the order they come, prints each as it does.
#[derive(Default)]
pub(crate) struct Report {
    figures: BTreeMap<String, f64>,
    lines: Vec<String>,
}

impl Report {
    /// A figure with its goal and a word about it.
    pub(crate) fn figure(&mut self, key: &str, value: f64, goal: Goal, about: &str) {
        let (wanted, verdict) = goal.verdict(value);
        let line = format!("{key:38} {value:>10.3}  {wanted:>9}  {verdict:7} {about}");
        eprintln!("  {line}");
        self.figures.insert(key.to_owned(), value);
        self.lines.push(line);
    }

    /// Prints the table and writes the file.
    pub(crate) fn finish(&self, path: &Path) -> anyhow::Result<()> {
        println!("{:38} {:>10}  {:>9}", "figure", "value", "goal");
        for line in &self.lines {
            println!("{line}");
        }
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        // A run of some parts keeps what earlier ones found of the others.
        let before = fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let mut all: BTreeMap<String, f64> = before.unwrap_or_default();
        all.extend(self.figures.clone());
        fs::write(path, serde_json::to_vec_pretty(&all)?)?;
        println!("written: {}", path.display());
        Ok(())
    }
}
