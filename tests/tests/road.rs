//! The main road, as `peerpod demo` shows it, as tests.

#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use peerpod_client::{AgentClient, Annotations};
use peerpod_tests::{PATIENCE, Sandbox, fresh_id, stop_in_time};
use peerpod_world::{Daemons, Settings, World, binary, eventually_blocking, road};

#[tokio::test]
async fn one_pod_from_create_to_exec_and_away_again() {
    road::walk(Settings::none(), &mut road::Silent).await.unwrap();
}

#[tokio::test]
async fn two_roads_at_once_do_not_meet() {
    let (mut one, mut other) = (road::Silent, road::Silent);
    tokio::try_join!(road::walk(Settings::none(), &mut one), road::walk(Settings::none(), &mut other))
        .unwrap();
}

#[tokio::test]
async fn pods_of_one_node_come_and_go_beside_each_other() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let (one, two, three) = tokio::try_join!(
        Sandbox::start(&world, &daemons, "one"),
        Sandbox::start(&world, &daemons, "two"),
        Sandbox::start(&world, &daemons, "three"),
    )
    .unwrap();
    two.stop(&daemons).await.unwrap();
    one.lives().await.unwrap();
    three.lives().await.unwrap();
    let four = Sandbox::start(&world, &daemons, "four").await.unwrap();
    stop_in_time(&one.shim, "an-id-nobody-knows").await.unwrap();
    for sandbox in [one, three, four] {
        sandbox.stop(&daemons).await.unwrap();
    }
    let live: Vec<_> = daemons.ledger().unwrap().into_iter().filter(|entry| !entry.is_tombstone()).collect();
    assert!(live.is_empty(), "{live:?}");
}

/// Interrupts `peerpod demo` after so many of its lines, and waits until everything of it is gone.
fn interrupted_after(lines: usize) {
    use std::os::unix::process::CommandExt;
    let mut demo = Command::new(binary("peerpod").unwrap())
        .arg("demo")
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .unwrap();
    let pid = demo.id();
    let mut output = BufReader::new(demo.stdout.take().unwrap()).lines();
    let seen: Vec<String> = output.by_ref().take(lines).map_while(Result::ok).collect();
    // As a terminal does it: to the whole group.
    killpg(Pid::from_raw(pid as i32), Signal::SIGINT).unwrap();
    let status = demo.wait().unwrap();
    assert_eq!(status.code(), Some(130), "after {lines} lines: {seen:?}");
    let left = || {
        let names = std::fs::read_dir("/run/netns").unwrap().flatten();
        let prefix = format!("pp{pid}n");
        names.filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix)).count()
    };
    assert_eq!(left(), 0, "after {lines} lines: {seen:?}");
    eventually_blocking("the folder is gone", Duration::from_secs(5), || {
        (!Path::new(&format!("/tmp/pp{pid}n0")).exists()).then_some(())
    })
    .unwrap();
}

#[test]
fn an_interrupted_demo_leaves_nothing_wherever_it_was() {
    // Two lines come before the first stage's.
    for lines in [2, 3, 4, 5, 6, 9, 11, 15] {
        interrupted_after(lines);
    }
}

#[tokio::test]
async fn a_shim_that_dials_anew_for_every_call_is_served_too() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let pod = world.pod().unwrap();
    let (id, netns) = (fresh_id("go"), pod.namespace().path());
    let annotations = || Annotations::new("default", "go").size("0", 0);
    let socket = daemons.shim().await.unwrap().create_vm(&id, annotations(), &netns).await.unwrap();
    daemons.shim().await.unwrap().start_vm_within(&id, Duration::from_secs(600)).await.unwrap();
    let agent = AgentClient::connect(&socket).await.unwrap();
    agent.check().await.unwrap();
    // The shim dies. Its clean-up process begins with CreateVM, when the network namespace may be gone already.
    drop((agent, pod));
    let again = daemons.shim().await.unwrap().create_vm(&id, annotations(), &netns).await.unwrap();
    assert_eq!(again, socket);
    let cleaner = AgentClient::connect(&socket).await.unwrap();
    cleaner.destroy_sandbox().await.unwrap();
    stop_in_time(&daemons.shim().await.unwrap(), &id).await.unwrap();
    daemons.gone(&id, PATIENCE).await.unwrap();
}

/// The value of the first sample whose line begins so.
fn sample(metrics: &str, name: &str) -> f64 {
    let line = metrics.lines().find(|line| line.starts_with(name));
    let line = line.unwrap_or_else(|| panic!("no {name} in\n{metrics}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn metrics_and_logs_tell_what_became_of_a_pod() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "seen").await.unwrap();
    sandbox.lives().await.unwrap();
    let (node, relay) = (daemons.metrics("node").unwrap(), daemons.metrics("relay").unwrap());
    assert_eq!(sample(&node, "peerpod_node_sandboxes{phase=\"running\"}"), 1.0);
    assert_eq!(sample(&node, "peerpod_node_stage_seconds_count{stage=\"running\"}"), 1.0);
    assert_eq!(sample(&node, "peerpod_node_claims_granted_total"), 1.0);
    assert_eq!(sample(&node, "peerpod_node_panics_total"), 0.0);
    assert!(node.contains("peerpod_provider_calls_total{"), "{node}");
    assert_eq!(sample(&relay, "peerpod_relay_guests_connected"), 1.0);
    for direction in ["to_guest", "from_guest"] {
        for what in ["bytes", "frames"] {
            let name = format!("peerpod_relay_{what}_total{{direction=\"{direction}\"}}");
            assert!(sample(&relay, &name) > 0.0, "{name}");
        }
    }
    let (id, pod) = (sandbox.id.clone(), "pod=");
    sandbox.stop(&daemons).await.unwrap();
    let log = std::fs::read_to_string(daemons.log("node")).unwrap();
    let closing: Vec<_> = log.lines().filter(|line| line.contains("sandbox gone")).collect();
    assert_eq!(closing.len(), 1, "one closing line: {closing:?}");
    assert!(
        closing[0].contains(&id) && closing[0].contains(pod) && closing[0].contains("running"),
        "{closing:?}"
    );
}
