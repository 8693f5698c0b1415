//! Tests a node that may die at any time: nothing is lost, and running pods are not disturbed.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use peerpod_client::{AgentClient, Annotations, ShimClient, exec_request};
use peerpod_tests::volumes::run;
use peerpod_tests::{
    CONTAINER, Dice, PATIENCE, Sandbox, fresh_id, long, nothing_beyond, sample, stop_in_time, stop_promptly,
};
use peerpod_world::{Daemons, Settings, Sight, World, eventually};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use ttrpc::Code;

/// Runs execs one after another until `ending` is set. Each output must be complete and in order. Returns their number.
async fn stream_execs(agent: AgentClient, name: String, ending: Arc<AtomicBool>) -> anyhow::Result<u32> {
    const NUMBERS: usize = 20_000;
    let expected: String = (1..=NUMBERS).map(|number| format!("{number}\n")).collect();
    let mut count = 0;
    while !ending.load(Ordering::Relaxed) {
        let exec = exec_request(CONTAINER, &format!("{name}-{count}"), &["seq", &NUMBERS.to_string()]);
        let output = agent.exec(&exec).await?;
        anyhow::ensure!(output.status == 0, "exec {name}-{count} ended with {}", output.status);
        anyhow::ensure!(
            output.stdout == expected.as_bytes(),
            "exec {name}-{count}: {} bytes",
            output.stdout.len()
        );
        count += 1;
    }
    Ok(count)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_again_and_again_is_not_noticed_by_running_execs() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "killed").await.unwrap();
    let vm = sandbox.shim.vm_id("default", &sandbox.id, true, PATIENCE).await.unwrap();
    let ending = Arc::new(AtomicBool::new(false));
    let streams: Vec<_> = (0..3)
        .map(|index| tokio::spawn(stream_execs(sandbox.agent.clone(), format!("s{index}"), ending.clone())))
        .collect();
    let mut dice = Dice(7);
    for kill in 0..if long() { 1000 } else { 200 } {
        // At any instruction, also before the node is up again.
        tokio::time::sleep(Duration::from_millis(dice.roll(120))).await;
        daemons.kill_node().unwrap();
        daemons.start_node().unwrap();
        if kill % 20 == 0 {
            daemons.ready().await.unwrap();
        }
        assert!(streams.iter().all(|stream| !stream.is_finished()), "a stream ended after {kill} kills");
    }
    daemons.ready().await.unwrap();
    ending.store(true, Ordering::Relaxed);
    for stream in streams {
        assert!(stream.await.unwrap().unwrap() > 0);
    }
    assert_eq!(sandbox.shim.vm_id("default", &sandbox.id, true, PATIENCE).await.unwrap(), vm);
    assert_eq!(daemons.ledger().unwrap()[0].phase(), "running", "{:?}", daemons.ledger());
    sandbox.lives().await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_in_any_phase_picks_the_sandbox_up() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let mut dice = Dice(11);
    for round in 0..if long() { 100 } else { 25 } {
        let pod = world.pod().unwrap();
        let before = Sight::of(&world, &[pod.namespace()], &daemons).unwrap();
        let (id, shim) = (fresh_id("phase"), daemons.shim().await.unwrap());
        let start = tokio::spawn({
            let (id, shim, netns) = (id.clone(), shim.clone(), pod.namespace().path());
            async move {
                let socket = shim.create_vm(&id, Annotations::new("default", &id), &netns).await?;
                shim.start_vm(&id).await.map(|()| socket)
            }
        });
        for _ in 0..1 + dice.roll(3) {
            tokio::time::sleep(Duration::from_millis(dice.roll(250))).await;
            daemons.kill_node().unwrap();
            daemons.start_node().unwrap();
        }
        let answered = tokio::time::timeout(PATIENCE, start).await;
        let socket = answered.unwrap_or_else(|_| panic!("round {round}\n{}", daemons.log_tails())).unwrap();
        let socket = socket.unwrap_or_else(|error| panic!("round {round}: {error}\n{}", daemons.log_tails()));
        let agent = AgentClient::connect(&socket).await.unwrap();
        agent.check().await.unwrap();
        let running = Sight::of(&world, &[pod.namespace()], &daemons).unwrap();
        stop_in_time(&shim, &id).await.unwrap();
        drop((agent, shim));
        // Also in the middle of the clean-up.
        tokio::time::sleep(Duration::from_millis(dice.roll(60))).await;
        daemons.kill_node().unwrap();
        daemons.start_node().unwrap();
        daemons.ready().await.unwrap();
        daemons.gone(&id, PATIENCE).await.unwrap();
        nothing_beyond(&world, &[pod.namespace()], &daemons, &before, &running).await.unwrap();
    }
}

/// Calls CreateVM and StartVM on a separate connection, in a task.
fn begin(
    daemons: &Daemons,
    id: &str,
    pod: &peerpod_world::Pod,
) -> tokio::task::JoinHandle<Result<(ShimClient, std::path::PathBuf), peerpod_client::Error>> {
    let (id, socket, netns) = (id.to_owned(), daemons.hypervisor_socket(), pod.namespace().path());
    tokio::spawn(async move {
        let shim = ShimClient::connect(&socket).await?;
        let socket = shim.create_vm(&id, Annotations::new("default", &id), &netns).await?;
        shim.start_vm(&id).await.map(|()| (shim, socket))
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_for_a_dead_node_wait_in_their_order_and_a_stop_does_not() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let running = Sandbox::start(&world, &daemons, "running").await.unwrap();
    daemons.kill_node().unwrap();

    let (waiting, unwanted) = (world.pod().unwrap(), world.pod().unwrap());
    let (waiting_id, unwanted_id) = (fresh_id("waiting"), fresh_id("unwanted"));
    let started = begin(&daemons, &waiting_id, &waiting);
    let cancelled = begin(&daemons, &unwanted_id, &unwanted);
    // The call must reach the relay before the StopVM that cancels it.
    eventually("both calls wait in the relay", PATIENCE, async || {
        let metrics = daemons.metrics("relay").ok()?;
        (sample(&metrics, "peerpod_relay_queued_calls").unwrap() == 2.0).then_some(())
    })
    .await
    .unwrap();
    assert!(!started.is_finished() && !cancelled.is_finished());

    let other = daemons.shim().await.unwrap();
    stop_in_time(&other, &unwanted_id).await.unwrap();
    let answer = tokio::time::timeout(PATIENCE, cancelled).await.unwrap().unwrap();
    let error = answer.map(|_| ()).unwrap_err();
    assert_eq!(error.code(), Some(Code::CANCELLED), "{error}");
    stop_in_time(&running.shim, &running.id).await.unwrap();
    assert!(!started.is_finished());

    daemons.start_node().unwrap();
    let (shim, socket) = tokio::time::timeout(PATIENCE, started).await.unwrap().unwrap().unwrap();
    AgentClient::connect(&socket).await.unwrap().check().await.unwrap();
    daemons.gone(&unwanted_id, PATIENCE).await.unwrap();
    daemons.gone(&running.id, PATIENCE).await.unwrap();
    // Stopped before the node had a record of it: a late CreateVM makes nothing.
    let late = Annotations::new("default", &unwanted_id);
    other.create_vm(&unwanted_id, late, &unwanted.namespace().path()).await.unwrap();
    assert!(other.start_vm(&unwanted_id).await.is_err());
    assert!(daemons.ledger().unwrap().iter().any(|entry| entry.id == unwanted_id && entry.is_tombstone()));
    stop_in_time(&shim, &waiting_id).await.unwrap();
    daemons.gone(&waiting_id, PATIENCE).await.unwrap();
}

/// Calls CreateVM and StartVM on one connection, the second without waiting for the first, and returns both results.
async fn pipelined(
    shim: ShimClient,
    id: String,
    netns: PathBuf,
) -> (Result<PathBuf, peerpod_client::Error>, Result<(), peerpod_client::Error>) {
    // Polled in this order, so written in this order.
    tokio::join!(biased; shim.create_vm(&id, Annotations::new("default", &id), &netns), shim.start_vm(&id))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_for_a_dead_node_waits_too_and_keeps_its_place_behind_its_create() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let pods = [(); 4].map(|()| world.pod().unwrap());
    let [living, known, piped, unwanted] = ["living", "known", "piped", "unwanted"].map(fresh_id);
    let mut shims = Vec::new();
    for _ in 0..3 {
        shims.push(daemons.shim().await.unwrap());
    }
    let mut pipe = |id: &String, pod: usize| {
        let shim = shims.pop().unwrap();
        tokio::spawn(pipelined(shim, id.clone(), pods[pod].namespace().path()))
    };
    // Also while the node lives: a StartVM that overtook its CreateVM would have no sandbox.
    let (created, started) = pipe(&living, 0).await.unwrap();
    created.unwrap();
    started.unwrap();

    let shim = daemons.shim().await.unwrap();
    let netns = pods[1].namespace().path();
    let socket = shim.create_vm(&known, Annotations::new("default", &known), &netns).await.unwrap();
    daemons.kill_node().unwrap();
    let start = tokio::spawn({
        let (shim, known) = (shim.clone(), known.clone());
        async move { shim.start_vm(&known).await }
    });
    let (held, cancelled) = (pipe(&piped, 2), pipe(&unwanted, 3));
    eventually("all five calls wait in the relay", PATIENCE, async || {
        let metrics = daemons.metrics("relay").ok()?;
        (sample(&metrics, "peerpod_relay_queued_calls").unwrap() == 5.0).then_some(())
    })
    .await
    .unwrap();
    let other = daemons.shim().await.unwrap();
    stop_in_time(&other, &unwanted).await.unwrap();
    let (created, started) = tokio::time::timeout(PATIENCE, cancelled).await.unwrap().unwrap();
    assert_eq!(created.unwrap_err().code(), Some(Code::CANCELLED));
    assert_eq!(started.unwrap_err().code(), Some(Code::CANCELLED));
    assert!(!start.is_finished() && !held.is_finished());

    daemons.start_node().unwrap();
    tokio::time::timeout(PATIENCE, start).await.unwrap().unwrap().unwrap();
    let (created, started) = tokio::time::timeout(PATIENCE, held).await.unwrap().unwrap();
    started.unwrap();
    for socket in [socket, created.unwrap()] {
        AgentClient::connect(&socket).await.unwrap().check().await.unwrap();
    }
    for id in [&living, &known, &piped] {
        stop_promptly(&other, id).await.unwrap();
    }
    for id in [&living, &known, &piped, &unwanted] {
        daemons.gone(id, PATIENCE).await.unwrap();
    }
}

#[tokio::test]
async fn a_stopped_id_stays_stopped_across_a_restart() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "stopped").await.unwrap();
    let (id, socket, pod) = (sandbox.id, sandbox.socket, sandbox.pod);
    stop_in_time(&sandbox.shim, &id).await.unwrap();
    daemons.gone(&id, PATIENCE).await.unwrap();
    assert!(daemons.terminate_node().unwrap().success());
    daemons.start_node().unwrap();
    let shim = daemons.shim().await.unwrap();
    let again = shim.create_vm(&id, Annotations::new("default", &id), &pod.namespace().path()).await.unwrap();
    assert_eq!(again, socket);
    assert!(shim.start_vm(&id).await.is_err());
    let entries = daemons.ledger().unwrap();
    assert!(entries.len() == 1 && entries[0].is_tombstone(), "{entries:?}");
}

#[tokio::test]
async fn a_node_that_ends_in_order_leaves_its_pods_running() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "upgrade").await.unwrap();
    for _ in 0..3 {
        let status = daemons.terminate_node().unwrap();
        assert!(status.success(), "{status}\n{}", daemons.log_tails());
        sandbox.lives().await.unwrap();
        daemons.start_node().unwrap();
        daemons.ready().await.unwrap();
    }
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test]
async fn a_sandbox_that_is_never_started_is_reaped() {
    let world = World::new().unwrap();
    let settings = Settings::none().set("node.never-started-grace", "1s");
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let pod = world.pod().unwrap();
    let before = Sight::of(&world, &[pod.namespace()], &daemons).unwrap();
    let shim = daemons.shim().await.unwrap();
    let id = fresh_id("never");
    shim.create_vm(&id, Annotations::new("default", &id), &pod.namespace().path()).await.unwrap();
    daemons.gone(&id, PATIENCE).await.unwrap();
    nothing_beyond(&world, &[pod.namespace()], &daemons, &before, &before).await.unwrap();
    assert!(shim.start_vm(&id).await.is_err());
}

#[tokio::test]
async fn a_sandbox_with_a_vanished_network_namespace_is_reaped() {
    let world = World::new().unwrap();
    let settings = Settings::none().set("node.netns-gone-grace", "1s");
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let before = Sight::of(&world, &[], &daemons).unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "vanished").await.unwrap();
    let running = Sight::of(&world, &[], &daemons).unwrap();
    let id = sandbox.id.clone();
    // As a CNI does unexpectedly: dropping the pod deletes its namespace. The shim is gone too.
    drop(sandbox);
    daemons.gone(&id, PATIENCE).await.unwrap();
    nothing_beyond(&world, &[], &daemons, &before, &running).await.unwrap();
}

#[tokio::test]
async fn a_sandbox_ends_after_its_shim_and_not_after_a_second_connection() {
    let world = World::new().unwrap();
    let settings = Settings::none().set("node.shim-gone-grace", "1s");
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let [kept, killed] = [(); 2].map(|()| Sandbox::start(&world, &daemons, "shim"));
    let (mut kept, killed) = tokio::try_join!(kept, killed).unwrap();
    // A process of the runtime comes and goes beside the shim, for `shim delete` or a metric.
    drop(AgentClient::connect(&kept.socket).await.unwrap());
    drop(daemons.shim().await.unwrap());
    // The Go shim has no connection to the hypervisor API between its calls.
    kept.shim = daemons.shim().await.unwrap();
    let Sandbox { id, agent, shim, pod, .. } = killed;
    drop(shim);
    agent.check().await.unwrap();
    drop(agent);
    daemons.gone(&id, PATIENCE).await.unwrap();
    assert!(pod.namespace().path().exists(), "its namespace did not end it");
    kept.lives().await.unwrap();
    kept.stop(&daemons).await.unwrap();
}

#[tokio::test]
async fn a_container_restarts_while_the_node_is_dead() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "restart").await.unwrap();
    daemons.kill_node().unwrap();
    for round in 0..3 {
        sandbox.agent.signal_process(CONTAINER, "", 9).await.unwrap();
        assert_eq!(sandbox.agent.wait_process(CONTAINER, "").await.unwrap(), 137, "round {round}");
        sandbox.agent.remove_container(CONTAINER).await.unwrap();
        sandbox.create_container(CONTAINER, &["sleep", "infinity"]).await.unwrap();
        sandbox.lives().await.unwrap();
    }
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
    sandbox.lives().await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test]
async fn a_relay_without_a_node_records_stops_and_holds_other_calls() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::prepare(&world, Settings::none()).unwrap();
    daemons.start_relay().unwrap();
    let socket = daemons.hypervisor_socket();
    let shim = eventually("the relay listens", PATIENCE, async || ShimClient::connect(&socket).await.ok())
        .await
        .unwrap();
    let pod = world.pod().unwrap();
    let held = begin(&daemons, "held-1", &pod);
    for id in ["unknown-1", "unknown-2", "unknown-1"] {
        stop_in_time(&shim, id).await.unwrap();
    }
    assert!(!held.is_finished());
    let inbox = std::fs::read_dir(daemons.state_dir().join("inbox")).unwrap().flatten();
    let mut names: Vec<_> = inbox.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    assert_eq!(names, ["unknown-1.json", "unknown-2.json"]);
    stop_in_time(&shim, "held-1").await.unwrap();
    let error = tokio::time::timeout(PATIENCE, held).await.unwrap().unwrap().map(|_| ()).unwrap_err();
    assert_eq!(error.code(), Some(Code::CANCELLED), "{error}");
    // A node that starts makes tombstones of all of them.
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
    for id in ["unknown-1", "unknown-2", "held-1"] {
        daemons.gone(id, PATIENCE).await.unwrap();
    }
    assert_eq!(std::fs::read_dir(daemons.state_dir().join("inbox")).unwrap().count(), 0);
}

/// Whether the relay closes a shim's connection.
async fn is_closed(mut shim: UnixStream) -> bool {
    let mut byte = [0];
    let read = tokio::time::timeout(PATIENCE, shim.read(&mut byte)).await;
    matches!(read, Ok(Ok(0) | Err(_)))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_dies_under_its_pod_is_noticed_by_its_shim_within_seconds() {
    let world = World::new().unwrap();
    let settings = Settings::none().set("node.vm-gone-grace", "1s");
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let before = Sight::of(&world, &[], &daemons).unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "dead").await.unwrap();
    let shim = UnixStream::connect(&sandbox.socket).await.unwrap();
    let waiting = tokio::spawn({
        let agent = sandbox.agent.clone();
        async move { agent.wait_process(CONTAINER, "").await }
    });
    sandbox.lives().await.unwrap();
    let running = Sight::of(&world, &[], &daemons).unwrap();
    let began = Instant::now();
    assert!(running.kill("peerpod-guest", "").unwrap() > 0, "the VM's init is killed, and all of it with it");
    // The shim's view: its calls end, its connections close.
    let answer = tokio::time::timeout(PATIENCE, waiting).await.unwrap().unwrap();
    assert!(answer.is_err());
    assert!(is_closed(shim).await);
    // On an idle machine: at most 8 s until the link counts as dead, and 1.25 s until the provider has answered twice.
    println!("a shim heard of it after {:?}", began.elapsed());
    // A late shim's connection is closed, or its socket is gone.
    if let Ok(late) = UnixStream::connect(&sandbox.socket).await {
        assert!(is_closed(late).await);
    }
    daemons.gone(&sandbox.id, PATIENCE).await.unwrap();
    let metrics = daemons.metrics("node").unwrap();
    assert_eq!(sample(&metrics, "peerpod_node_failures_total{stage=\"vm\"}").unwrap(), 1.0);
    let error = sandbox.shim.start_vm(&sandbox.id).await.unwrap_err();
    assert!(error.answer().contains("is gone"), "{error}");
    stop_in_time(&sandbox.shim, &sandbox.id).await.unwrap();
    drop(sandbox);
    nothing_beyond(&world, &[], &daemons, &before, &running).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_is_cut_for_long_is_not_taken_for_a_dead_vm() {
    let world = World::new().unwrap();
    let settings = Settings::none().set("node.vm-gone-grace", "500ms");
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "cut").await.unwrap();
    let waiting = tokio::spawn({
        let agent = sandbox.agent.clone();
        async move { agent.wait_process(CONTAINER, "").await }
    });
    sandbox.lives().await.unwrap();
    let nft = |rules: &str| world.node().shell(&format!("nft '{rules}'"), &[]).unwrap();
    nft(
        "add table inet cut; add chain inet cut in { type filter hook input priority 0; }; add rule inet cut in tcp dport 15151 drop",
    );
    let link = |state: f64| {
        let metrics = daemons.metrics("relay").unwrap();
        (sample(&metrics, "peerpod_relay_guests_connected").unwrap() == state).then_some(())
    };
    eventually("the link is dead", PATIENCE, async || link(0.0)).await.unwrap();
    // Ten times the duration of asking the provider twice: long enough for the wrong behaviour to happen.
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(!waiting.is_finished(), "the shim's call waits");
    nft("delete table inet cut");
    eventually("the link is back", PATIENCE, async || link(1.0)).await.unwrap();
    sandbox.lives().await.unwrap();
    assert!(!waiting.is_finished() && daemons.ledger().unwrap()[0].phase() == "running");
    sandbox.stop(&daemons).await.unwrap();
}

/// A file system of its own for the state folder, whose writes can be held up.
struct StateDisk(PathBuf);

impl StateDisk {
    fn mount(folder: &Path) -> StateDisk {
        let image = folder.with_extension("img");
        std::fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
        std::fs::create_dir_all(folder).unwrap();
        run("mkfs.ext4", &["-q", image.to_str().unwrap()]);
        run("mount", &["-o", "loop", image.to_str().unwrap(), folder.to_str().unwrap()]);
        StateDisk(folder.to_owned())
    }

    fn freeze(&self) {
        run("fsfreeze", &["--freeze", self.0.to_str().unwrap()]);
    }

    fn thaw(&self) {
        run("fsfreeze", &["--unfreeze", self.0.to_str().unwrap()]);
    }
}

impl Drop for StateDisk {
    fn drop(&mut self) {
        let umount = |flag: &str| Command::new("umount").arg(flag).arg(&self.0).status().is_ok();
        drop(Command::new("fsfreeze").arg("--unfreeze").arg(&self.0).stderr(Stdio::null()).status());
        umount("--lazy");
    }
}

/// Writes to the state folder stall for 5 s, and then for ever. Stops are answered all the same, and are not lost when
/// both daemons are killed meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn stops_wait_for_no_stalled_disk_and_survive_a_kill_of_both_daemons() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::prepare(&world, Settings::none()).unwrap();
    let disk = StateDisk::mount(&daemons.state_dir());
    daemons.start_relay().unwrap();
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
    let mut sandboxes = Vec::new();
    for name in ["one", "two"] {
        sandboxes.push(Sandbox::start(&world, &daemons, name).await.unwrap());
    }
    let shim = &sandboxes[0].shim;
    let stops = daemons.run_dir().join("stops");
    let none_is_kept = || std::fs::read_dir(&stops).ok()?.next().is_none().then_some(());
    disk.freeze();
    let unknown: Vec<String> = (0..100).map(|_| fresh_id("slow")).collect();
    let stopped = join_all(unknown.iter().map(|id| stop_in_time(shim, id))).await;
    let is_kept = none_is_kept().is_none();
    // The stall under test: all calls are answered before it ends.
    tokio::time::sleep(Duration::from_secs(5)).await;
    disk.thaw();
    for stop in stopped {
        stop.unwrap_or_else(|error| panic!("{error:#}\n{}", daemons.log_tails()));
    }
    assert!(is_kept, "the run folder has the stops that the disk has not");
    for id in &unknown {
        daemons.gone(id, PATIENCE).await.unwrap();
    }
    eventually("no stop is kept any more", PATIENCE, async || none_is_kept()).await.unwrap();

    disk.freeze();
    let unknown = (sandboxes.len()..100).map(|_| fresh_id("none"));
    let ids: Vec<String> = sandboxes.iter().map(|one| one.id.clone()).chain(unknown).collect();
    let stopped = join_all(ids.iter().map(|id| stop_in_time(shim, id))).await;
    // Both are killed before a write ends; the kernel ends a process that writes only after the thaw.
    let pids = [daemons.relay_pid().unwrap(), daemons.node_pid().unwrap()];
    for pid in pids {
        kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGKILL).unwrap();
    }
    disk.thaw();
    for stop in stopped {
        stop.unwrap_or_else(|error| panic!("{error:#}\n{}", daemons.log_tails()));
    }
    daemons.kill_relay().unwrap();
    daemons.kill_node().unwrap();
    let log = std::fs::read_to_string(daemons.log("relay")).unwrap();
    assert!(log.contains("the state's disk stalls: stop kept in the run-dir"), "{log}");
    daemons.start_relay().unwrap();
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
    for id in &ids {
        daemons.gone(id, PATIENCE).await.unwrap();
    }
    eventually("no stop is kept any more", PATIENCE, async || none_is_kept()).await.unwrap();
    daemons.terminate_node().unwrap();
    daemons.terminate_relay().unwrap();
    drop(disk);
}
