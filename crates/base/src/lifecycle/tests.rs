//! Tests of process ends. Signals are sent to a child, which is this test program run with one test.

use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, Stdio};

use super::*;

const CHILD: &str = "PEERPOD_TEST_LIFECYCLE_CHILD";

#[tokio::test]
async fn every_waiter_gets_the_shutdown() {
    let shutdown = Shutdown::default();
    let waiting = tokio::spawn({
        let shutdown = shutdown.clone();
        async move { shutdown.wait().await }
    });
    assert!(!shutdown.is_triggered());
    shutdown.trigger();
    waiting.await.unwrap();
    shutdown.wait().await;
    assert!(shutdown.is_triggered());
}

#[tokio::test]
async fn a_drain_ends_when_the_last_one_is_done() {
    let drain = Drain::default();
    let busy = [drain.busy("calls"), drain.busy("calls"), drain.busy("pods")];
    let working = tokio::spawn(async move {
        busy[0].draining().await;
        drop(busy);
    });
    assert_eq!(drain.drain(Duration::from_secs(10)).await, Ok(()));
    working.await.unwrap();
}

#[tokio::test]
async fn a_drain_ends_at_its_deadline_and_names_the_unfinished_work() {
    let drain = Drain::default();
    let _calls = (drain.busy("calls"), drain.busy("calls"));
    drop(drain.busy("pods"));
    let left = drain.drain(Duration::from_millis(20)).await.unwrap_err();
    assert_eq!(left.to_string(), "not finished at the deadline: calls (2)");
}

#[tokio::test]
async fn a_drain_with_nothing_under_way_ends_at_once() {
    assert_eq!(Drain::default().drain(Duration::ZERO).await, Ok(()));
}

/// Runs in the child; it is not a test of its own.
#[tokio::test]
#[ignore = "role: started by the tests that send signals"]
async fn child_that_gets_signals() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let shutdown = signals().unwrap();
    println!("child: ready");
    shutdown.wait().await;
    println!("child: stopped");
    tokio::time::sleep(Duration::from_secs(60)).await;
}

fn child() -> (Child, Lines<BufReader<ChildStdout>>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "lifecycle::tests::child_that_gets_signals", "--ignored", "--nocapture"])
        .env(CHILD, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, lines)
}

fn wait_for(lines: &mut Lines<BufReader<ChildStdout>>, text: &str) {
    assert!(lines.any(|line| line.unwrap().contains(text)), "the child never printed {text:?}");
}

fn kill(child: &Child, signal: &str) {
    let done = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(done.success());
}

#[test]
fn the_first_signal_asks_and_the_second_one_ends() {
    for (first, second, code) in [("-TERM", "-INT", 130), ("-INT", "-TERM", 143)] {
        let (mut child, mut lines) = child();
        wait_for(&mut lines, "child: ready");
        kill(&child, first);
        wait_for(&mut lines, "child: stopped");
        assert!(child.try_wait().unwrap().is_none(), "it ended at the first signal");
        kill(&child, second);
        assert_eq!(child.wait().unwrap().code(), Some(code));
    }
}
