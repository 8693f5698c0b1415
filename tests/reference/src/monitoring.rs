//! Tests the dashboard and the alert rules of the chart: promtool accepts the queries of both and tests the rules, each
//! named metric and label is documented, and each alert has an entry in docs/operations.md.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

fn file(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

fn read(path: &str) -> String {
    std::fs::read_to_string(file(path)).unwrap()
}

const RULES: &str = "deploy/chart/files/monitoring/rules.yaml";
const DASHBOARD: &str = "deploy/chart/files/monitoring/dashboard.json";

fn promtool(words: &[&str], path: &Path) -> Result<(), String> {
    let done = Command::new("promtool").args(words).arg(path).output().unwrap();
    let said = String::from_utf8([done.stdout, done.stderr].concat()).unwrap();
    if done.status.success() { Ok(()) } else { Err(format!("promtool {}: {said}", words.join(" "))) }
}

#[test]
fn promtool_accepts_the_rules_and_their_tests_pass() {
    promtool(&["check", "rules"], &file(RULES)).unwrap();
    let tests = "tests/reference/rules_test.yaml";
    promtool(&["test", "rules"], &file(tests)).unwrap();
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

/// Returns the labels of a documented metric; `None` if there is no such metric.
fn documented(page: &str, name: &str) -> Option<BTreeSet<String>> {
    let labels = |name: &str, kind: &str| {
        let row = page.lines().find_map(|line| line.strip_prefix(&format!("| `{name}` | {kind}")))?;
        let cell = row.split(" | ").nth(1)?;
        Some(cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<BTreeSet<_>>())
    };
    labels(name, "gauge").or_else(|| labels(name, "counter")).or_else(|| {
        let (name, end) =
            name.rsplit_once('_').filter(|(_, end)| ["bucket", "sum", "count"].contains(end))?;
        let mut labels = labels(name, "histogram")?;
        labels.extend((end == "bucket").then(|| "le".to_owned()));
        Some(labels)
    })
}

/// A query of the dashboard or of the rules.
struct Query {
    text: String,
    /// The text that shows the result, with labels.
    shown: String,
}

/// Returns the queries of all panels and all rules.
fn queries() -> Vec<Query> {
    let dashboard: Value = serde_json::from_str(&read(DASHBOARD)).unwrap();
    let targets = dashboard["panels"].as_array().unwrap().iter().flat_map(|panel| {
        assert!(panel["title"].is_string(), "{panel}");
        panel["targets"].as_array().unwrap()
    });
    let text = |value: &Value| value.as_str().unwrap_or_else(|| panic!("{value}")).to_owned();
    let mut found: Vec<Query> = targets
        .map(|target| Query { text: text(&target["expr"]), shown: text(&target["legendFormat"]) })
        .collect();
    assert!(found.len() > 20);
    let rules = read(RULES);
    for rule in rules.split("- alert: ").skip(1) {
        let line =
            |name: &str| rule.lines().find_map(|line| line.trim().strip_prefix(name)).unwrap().to_owned();
        found.push(Query { text: line("expr: "), shown: line("summary: ") });
    }
    found
}

/// Labels that Prometheus or the chart's monitors add to every series.
const OF_TARGETS: [&str; 4] = ["instance", "job", "daemon", "node"];

/// Returns the word at the end of a text.
fn last_word(text: &str) -> &str {
    let text = text.trim_end();
    let from = text.rfind(|c: char| !c.is_ascii_alphanumeric() && c != '_').map_or(0, |at| at + 1);
    &text[from..]
}

/// Returns the names of a list that ends with `end`: labels, or conditions of a selector.
fn list(text: &str, end: char) -> impl Iterator<Item = String> {
    let names = text.split(end).next().unwrap().split(',').map(str::trim);
    let is_part = |c: &char| c.is_ascii_alphanumeric() || *c == '_';
    names
        .map(move |name| name.chars().take_while(is_part).collect::<String>())
        .filter(|name| !name.is_empty())
}

/// Returns the first mistake in the metrics and labels of a query.
fn mistake(page: &str, query: &Query) -> Option<String> {
    // Strings lose their content.
    let bare = query.text.split('"').step_by(2).collect::<Vec<_>>().join("\"\"");
    let mut known: BTreeSet<String> = OF_TARGETS.map(str::to_owned).into();
    for metric in named(&bare) {
        let Some(labels) = documented(page, metric) else { return Some(format!("no metric {metric}")) };
        known.extend(labels);
    }
    for (at, _) in bare.match_indices('{') {
        let metric = last_word(&bare[..at]);
        let own = documented(page, metric).unwrap_or_default();
        let is_own = |label: &String| own.contains(label) || OF_TARGETS.contains(&label.as_str());
        if let Some(label) = list(&bare[at + 1..], '}').find(|label| !is_own(label)) {
            return Some(format!("{metric} has no label {label}"));
        }
    }
    let (mut grouped, mut is_grouped) = (BTreeSet::new(), false);
    for (at, _) in bare.match_indices('(') {
        let word = last_word(&bare[..at]);
        if !["by", "on", "ignoring", "group_left"].contains(&word) {
            continue;
        }
        let labels: Vec<String> = list(&bare[at + 1..], ')').collect();
        if let Some(label) = labels.iter().find(|label| !known.contains(*label)) {
            return Some(format!("{word}: no metric has a label {label}"));
        }
        if word == "by" {
            is_grouped = true;
            grouped.extend(labels);
        }
    }
    let shown = query.shown.split("{{").skip(1).map(|rest| rest.split("}}").next().unwrap());
    let mut labels = shown.flat_map(|shown| match shown.contains('$') {
        true => shown.split("$labels.").skip(1).flat_map(|rest| list(rest, ' ')).collect::<Vec<_>>(),
        false => vec![shown.to_owned()],
    });
    let kept = if is_grouped { grouped } else { known };
    labels.find(|label| !kept.contains(label)).map(|label| format!("the result has no label {label}"))
}

#[test]
fn each_metric_and_label_of_dashboard_and_rules_is_documented() {
    let page = read("docs/metrics.md");
    let queries = queries();
    for query in &queries {
        assert_eq!(mistake(&page, query), None, "{}", query.text);
    }
    for (text, shown, wrong) in [
        ("peerpod_node_unknown_total", "", "no metric peerpod_node_unknown_total"),
        ("peerpod_node_sandboxes_bucket", "", "no metric peerpod_node_sandboxes_bucket"),
        ("peerpod_node_stage_seconds", "", "no metric peerpod_node_stage_seconds"),
        (r#"peerpod_node_vms{type="a,b",stage="c"}"#, "", "peerpod_node_vms has no label stage"),
        ("sum by (le, colour) (peerpod_node_stage_seconds_bucket)", "", "by: no metric has a label colour"),
        ("sum by (phase) (peerpod_node_sandboxes)", "{{zone}}", "the result has no label zone"),
        (
            "sum by (cause) (peerpod_node_start_failures_total)",
            "{{ $labels.instance }}",
            "the result has no label instance",
        ),
    ] {
        let query = Query { text: text.to_owned(), shown: shown.to_owned() };
        assert_eq!(mistake(&page, &query).as_deref(), Some(wrong), "{text}");
    }
}

#[test]
fn promtool_accepts_the_queries_of_the_dashboard() {
    let path = std::env::temp_dir().join(format!("peerpod-dashboard-{}.json", std::process::id()));
    let check = |queries: &[&str]| {
        let rule = |(number, text): (usize, &&str)| {
            // Grafana fills in the variables.
            let text = text.replace("$__rate_interval", "5m").replace("$instance", ".*");
            json!({"record": format!("panel:{number}"), "expr": text})
        };
        let rules: Vec<Value> = queries.iter().enumerate().map(rule).collect();
        // Each JSON text is YAML.
        std::fs::write(&path, json!({"groups": [{"name": "x", "rules": rules}]}).to_string()).unwrap();
        promtool(&["check", "rules"], &path)
    };
    let queries = queries();
    let outcome = check(&queries.iter().map(|query| query.text.as_str()).collect::<Vec<_>>());
    let broken = check(&["sum by (phase) (peerpod_node_sandboxes"]);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(outcome, Ok(()));
    assert!(broken.is_err());
}
