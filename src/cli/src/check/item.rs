//! Results of `peerpod check`, and their text. Pure.

use serde::Serialize;

use crate::output::safe;

/// Page of the documents that has the anchors of all items.
pub(super) const PAGE: &str = "docs/troubleshooting.md";

/// Verdict on one item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    /// Nothing to do.
    Ok,
    /// Pods run, and something will matter later.
    Warning,
    /// A pod could not start, or would not run well.
    Failed,
    /// The facts cannot be had here.
    Skipped,
}

/// Cause and remedy of an item that is not in order.
#[derive(Clone, Debug)]
pub(super) struct Fault {
    verdict: Verdict,
    cause: String,
    remedy: String,
}

/// Found state, or its fault.
pub(super) type Outcome = Result<String, Fault>;

/// Returns the outcome of a failed item.
pub(super) fn failed(cause: impl Into<String>, remedy: impl Into<String>) -> Outcome {
    Err(Fault { verdict: Verdict::Failed, cause: cause.into(), remedy: remedy.into() })
}

/// Returns the outcome of an item that blocks nothing now.
pub(super) fn warning(cause: impl Into<String>, remedy: impl Into<String>) -> Outcome {
    Err(Fault { verdict: Verdict::Warning, cause: cause.into(), remedy: remedy.into() })
}

/// Returns the outcome of an item without facts.
pub(super) fn skipped(cause: impl Into<String>) -> Outcome {
    Err(Fault { verdict: Verdict::Skipped, cause: cause.into(), remedy: String::new() })
}

/// One checked item.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Item {
    /// Area and name, like `kernel/vxlan`.
    pub(super) name: String,
    pub(super) verdict: Verdict,
    /// Found state, or the cause of the fault.
    pub(super) cause: String,
    /// Empty where there is nothing to do.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) remedy: String,
    /// Place in the documents.
    pub(super) docs: String,
}

/// Area of items; each has a section of the page.
#[derive(Clone, Copy, Debug)]
pub(super) enum Area {
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
    pub(super) const ALL: [Area; 8] = [
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
    pub(super) fn anchor(self) -> String {
        format!("check-{}", self.word())
    }

    /// Makes the item of an outcome.
    pub(super) fn item(self, name: &str, outcome: Outcome) -> Item {
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
pub(super) struct Report {
    pub(super) items: Vec<Item>,
    pub(super) warnings: usize,
    pub(super) failed: usize,
}

impl Report {
    pub(super) fn new(items: Vec<Item>) -> Report {
        let count = |verdict| items.iter().filter(|item| item.verdict == verdict).count();
        let (warnings, failed) = (count(Verdict::Warning), count(Verdict::Failed));
        Report { items, warnings, failed }
    }

    /// Renders one item per line, with remedy and place in the documents below each that is not in order.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for Item { name, verdict, cause, remedy, docs } in &self.items {
            let sign = match verdict {
                Verdict::Ok => '✓',
                Verdict::Warning => '!',
                Verdict::Failed => '✗',
                Verdict::Skipped => '-',
            };
            text += &format!("{}\n", safe(&format!("{sign} {name}: {cause}")));
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
