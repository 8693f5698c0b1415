//! Results of checks and tests, and the text of `peerpod check`. Pure, but for the colours of a terminal.

use serde::Serialize;

use crate::output::{Colour, paint, safe};

/// Page of the documents that has the anchors of all items.
pub(crate) const PAGE: &str = "docs/troubleshooting.md";

/// Verdict on one item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    /// Nothing to do.
    Ok,
    /// Pods run, and something will matter later.
    Warning,
    /// A pod could not start, or would not run well.
    Failed,
    /// The facts cannot be had here.
    Skipped,
}

impl Verdict {
    /// The sign in front of an item.
    pub(crate) fn sign(self) -> String {
        match self {
            Verdict::Ok => paint(Colour::Green, "✓"),
            Verdict::Warning => paint(Colour::Yellow, "!"),
            Verdict::Failed => paint(Colour::Red, "✗"),
            Verdict::Skipped => "-".to_owned(),
        }
    }
}

/// Cause and remedy of an item that is not in order.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) verdict: Verdict,
    pub(crate) cause: String,
    pub(crate) remedy: String,
}

impl Fault {
    /// The fault of a failed item.
    pub(crate) fn failed(cause: impl Into<String>, remedy: impl Into<String>) -> Fault {
        Fault { verdict: Verdict::Failed, cause: cause.into(), remedy: remedy.into() }
    }
}

/// Found state, or its fault.
pub(crate) type Outcome = Result<String, Fault>;

/// Returns the outcome of a failed item.
pub(crate) fn failed(cause: impl Into<String>, remedy: impl Into<String>) -> Outcome {
    Err(Fault::failed(cause, remedy))
}

/// Returns the outcome of an item that blocks nothing now.
pub(crate) fn warning(cause: impl Into<String>, remedy: impl Into<String>) -> Outcome {
    Err(Fault { verdict: Verdict::Warning, cause: cause.into(), remedy: remedy.into() })
}

/// Returns the outcome of an item without facts.
pub(crate) fn skipped(cause: impl Into<String>) -> Outcome {
    Err(Fault { verdict: Verdict::Skipped, cause: cause.into(), remedy: String::new() })
}

/// One checked item.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Item {
    /// Area and name, like `kernel/vxlan`.
    pub(crate) name: String,
    pub(crate) verdict: Verdict,
    /// Found state, or the cause of the fault.
    pub(crate) cause: String,
    /// Empty where there is nothing to do.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) remedy: String,
    /// Place in the documents.
    pub(crate) docs: String,
}

/// Area of items; each has a section of the page.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Area {
    Configuration,
    Kernel,
    Runtime,
    Kata,
    Daemons,
    Cluster,
    Network,
    Provider,
}

impl Area {
    #[cfg(test)]
    pub(crate) const ALL: [Area; 8] = [
        Area::Configuration,
        Area::Kernel,
        Area::Runtime,
        Area::Kata,
        Area::Daemons,
        Area::Cluster,
        Area::Network,
        Area::Provider,
    ];

    fn word(self) -> &'static str {
        match self {
            Area::Configuration => "configuration",
            Area::Kernel => "kernel",
            Area::Runtime => "runtime",
            Area::Kata => "kata",
            Area::Daemons => "daemons",
            Area::Cluster => "cluster",
            Area::Network => "network",
            Area::Provider => "provider",
        }
    }

    /// Anchor of the section in [`PAGE`].
    pub(crate) fn anchor(self) -> String {
        format!("check-{}", self.word())
    }

    /// Makes the item of an outcome.
    pub(crate) fn item(self, name: &str, outcome: Outcome) -> Item {
        let (verdict, cause, remedy) = match outcome {
            Ok(found) => (Verdict::Ok, found, String::new()),
            Err(Fault { verdict, cause, remedy }) => (verdict, cause, remedy),
        };
        let docs = format!("{PAGE}#{}", self.anchor());
        Item { name: format!("{}/{name}", self.word()), verdict, cause, remedy, docs }
    }
}

/// All items, with their summary.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) items: Vec<Item>,
    pub(crate) warnings: usize,
    pub(crate) failed: usize,
}

impl Report {
    pub(crate) fn new(items: Vec<Item>) -> Report {
        let count = |verdict| items.iter().filter(|item| item.verdict == verdict).count();
        let (warnings, failed) = (count(Verdict::Warning), count(Verdict::Failed));
        Report { items, warnings, failed }
    }

    /// Renders one item per line, with remedy and place in the documents below each that is not in order.
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for Item { name, verdict, cause, remedy, docs } in &self.items {
            let sign = verdict.sign();
            text += &format!("{sign} {}\n", safe(&format!("{name}: {cause}")));
            if !remedy.is_empty() {
                text += &format!("    remedy: {}\n    see {docs}\n", safe(remedy));
            }
        }
        format!("{text}\n{} items: {} faults, {} warnings\n", self.items.len(), self.failed, self.warnings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_area_has_a_section_in_the_documents() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/troubleshooting.md");
        let page = std::fs::read_to_string(page).unwrap();
        let anchor = |line: &str| {
            let heading = line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
            line.starts_with('#').then(|| heading.replace([':', '`'], ""))
        };
        let anchors: Vec<String> = page.lines().filter_map(anchor).collect();
        for area in Area::ALL {
            assert!(anchors.contains(&area.anchor()), "{} in {anchors:?}", area.anchor());
        }
    }

    #[test]
    fn an_item_shows_its_cause_its_remedy_and_its_place() {
        let report = Report::new(vec![
            Area::Kernel.item("tun", Ok("works".to_owned())),
            Area::Kata.item("shim", failed("no file", "install Kata")),
            Area::Network.item("mtu", warning("small", "raise it")),
            Area::Cluster.item("node", skipped("no API server")),
        ]);
        let shown = report.text();
        for part in [
            "✓ kernel/tun: works\n",
            "✗ kata/shim: no file\n    remedy: install Kata\n    see docs/troubleshooting.md#check-kata\n",
            "! network/mtu: small\n",
            "- cluster/node: no API server\n",
            "4 items: 1 faults, 1 warnings",
        ] {
            assert!(shown.contains(part), "{part} in {shown}");
        }
        let read: serde_json::Value = serde_json::to_value(&report).unwrap();
        assert_eq!((&read["failed"], &read["items"][1]["verdict"]), (&1.into(), &"failed".into()));
        assert!(read["items"][0]["remedy"].is_null());
    }
}
