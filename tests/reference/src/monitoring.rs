//! Tests the dashboard and the alert rules of the chart: promtool accepts and tests the rules, each named metric is
//! documented, and each alert has an entry in docs/operations.md.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(file(path)).unwrap()
}

const RULES: &str = "deploy/chart/files/monitoring/rules.yaml";
const DASHBOARD: &str = "deploy/chart/files/monitoring/dashboard.json";

fn promtool(words: &[&str], path: &Path) {
    let done = Command::new("promtool").args(words).arg(path).output().unwrap();
    let said = [done.stdout, done.stderr].concat();
    assert!(done.status.success(), "promtool {}: {}", words.join(" "), String::from_utf8_lossy(&said));
}

#[test]
fn promtool_accepts_the_rules_and_their_tests_pass() {
    promtool(&["check", "rules"], &file(RULES));
    let tests = "tests/reference/rules_test.yaml";
    promtool(&["test", "rules"], &file(tests));
    let (rules, tests) = (read(RULES), read(tests));
    for alert in alerts(&rules) {
        // One test in which it fires, and one in which it is silent.
        assert_eq!(tests.matches(&format!("alertname: {alert}\n")).count(), 2, "{alert}");
    }
}

fn alerts(rules: &str) -> Vec<&str> {
    let found: Vec<&str> = rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(found.len() > 10, "{found:?}");
    found
}

#[test]
fn each_alert_links_its_entry_in_the_documentation() {
    let (rules, page) = (read(RULES), read("docs/operations.md"));
    for alert in alerts(&rules) {
        assert!(page.contains(&format!("\n### {alert}\n")), "docs/operations.md has no entry {alert}");
        let link = format!("/docs/operations.md#{}\n", alert.to_lowercase());
        assert!(rules.contains(&link), "no link to {link}");
    }
}

/// Returns the names of Peerpod's metrics in a text.
fn named(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with("peerpod_") || word.starts_with("process_")).collect()
}

#[test]
fn each_metric_of_dashboard_and_rules_is_documented() {
    let (page, dashboard) = (read("docs/metrics.md"), read(DASHBOARD));
    let row = |name: &str, kind: &str| page.contains(&format!("| `{name}` | {kind}"));
    let is_documented = |name: &str| {
        let histogram = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
        row(name, "") || histogram.is_some_and(|name| row(name, "histogram"))
    };
    assert!(!is_documented("peerpod_node_unknown_total") && !is_documented("peerpod_node_sandboxes_bucket"));
    for text in [&read(RULES), &dashboard] {
        let names = named(text);
        assert!(names.len() > 10, "{names:?}");
        for name in names {
            assert!(is_documented(name), "{name} is not in docs/metrics.md");
        }
    }
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    for panel in dashboard["panels"].as_array().unwrap() {
        assert!(panel["title"].is_string() && panel["targets"][0]["expr"].is_string(), "{panel}");
    }
}
