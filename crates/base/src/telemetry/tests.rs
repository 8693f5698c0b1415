//! Tests of the output on stderr. Logging is set up once per process, so each test runs this test program as a child.

use std::process::Command;

use super::*;
use crate::config::Sources;

const CHILD: &str = "PEERPOD_TEST_TELEMETRY_CHILD";

fn config(format: &str, level: &str) -> Result<LogConfig, String> {
    let flags = [("log.format", format), ("log.level", level)];
    let flags = flags.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
    let mut reader = Reader::load(Sources { flags, ..Sources::default() }, &["log"], &[]).unwrap();
    let config = LogConfig::read(&mut reader);
    reader.finish().map(|_| config).map_err(|mistakes| mistakes.to_string())
}

#[test]
fn invalid_levels_are_refused() {
    for level in ["info", "INFO", "warn,peerpod_link=trace", "off", "info,[{sandbox=a}]=debug"] {
        assert!(config("text", level).is_ok(), "{level}");
    }
    for level in ["inof", "info,", "peerpod_link", "info,a=b=c", "x=loud"] {
        let told = config("text", level).unwrap_err();
        assert!(told.contains("not a log level; write error, warn"), "{told}");
    }
    assert!(config("xml", "info").unwrap_err().contains("write one of text, json"));
}

/// Runs in the child; it is not a test of its own.
#[test]
#[ignore = "role: started by the tests of the fields of a line"]
fn child_that_logs() {
    let Ok(format) = std::env::var(CHILD) else { return };
    init(&config(&format, "info").unwrap()).unwrap();
    let span = tracing::info_span!("call", sandbox = "s1", pod = "default/web");
    let _entered = span.enter();
    tracing::info!(took_ms = 5, "vm started");
    tracing::debug!("not to be seen");
    switch_level();
    tracing::debug!("now to be seen");
    switch_level();
    tracing::debug!("not to be seen again");
    for _ in 0..30 {
        tracing::info!("the same");
    }
    assert!(init(&config(&format, "info").unwrap()).is_err(), "a second time must be refused");
}

fn lines(format: &str) -> Vec<String> {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "telemetry::tests::child_that_logs", "--ignored", "--nocapture"])
        .env(CHILD, format)
        .output()
        .unwrap();
    assert!(child.status.success());
    String::from_utf8(child.stderr).unwrap().lines().map(str::to_owned).collect()
}

#[test]
fn a_json_line_carries_the_fields_of_its_span() {
    let lines = lines("json");
    let line: serde_json::Value = serde_json::from_str(&lines[0]).unwrap();
    assert_eq!((&line["message"], &line["took_ms"]), (&json!("vm started"), &json!(5)));
    assert_eq!(line["level"], "INFO");
    assert_eq!(line["spans"][0]["sandbox"], "s1");
    assert_eq!(line["spans"][0]["pod"], "default/web");
}

#[test]
fn a_text_line_carries_the_fields_of_its_span_and_no_colours() {
    let lines = lines("text");
    for part in ["INFO", "sandbox=\"s1\"", "pod=\"default/web\"", "vm started", "took_ms=5"] {
        assert!(lines[0].contains(part), "{part} in {lines:?}");
    }
    assert!(!lines[0].contains('\u{1b}'), "{lines:?}");
}

#[test]
fn the_level_changes_at_run_time_and_repeated_lines_are_damped() {
    for format in ["json", "text"] {
        let lines = lines(format);
        let count = |part: &str| lines.iter().filter(|line| line.contains(part)).count();
        assert_eq!((count("not to be seen"), count("now to be seen")), (0, 1), "{lines:?}");
        assert_eq!(count("the level of the log has changed"), 2, "{lines:?}");
        assert_eq!(count("the same"), 10, "{lines:?}");
        assert_eq!(lines.len(), 14, "{lines:?}");
    }
}
