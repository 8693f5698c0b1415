//! Tests the stages that `make demo` shows, and related behaviour of the real daemons.

use std::io::{BufRead, BufReader, Lines};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant, UNIX_EPOCH};
use std::{fs, thread};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use peerpod_client::{AgentClient, Annotations};
use peerpod_tests::{Dice, PATIENCE, Sandbox, fresh_id, processor_time, sample, stop_in_time};
use peerpod_world::{Daemons, Settings, World, binary, eventually_blocking, stages};
use ttrpc::Code;

#[tokio::test]
async fn one_pod_from_create_to_exec_and_removal() {
    stages::walk(Settings::none(), &mut stages::Silent).await.unwrap();
}

#[tokio::test]
async fn two_runs_at_once_are_separate() {
    let (mut one, mut other) = (stages::Silent, stages::Silent);
    tokio::try_join!(stages::walk(Settings::none(), &mut one), stages::walk(Settings::none(), &mut other))
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

/// Starts a program in a new process group, and returns it with its output.
fn start(command: &mut Command) -> (Child, Lines<BufReader<ChildStdout>>) {
    let mut child = command.stdout(Stdio::piped()).process_group(0).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, lines)
}

/// Starts the demo. Everything it makes has its pid in the name.
fn demo() -> (Child, Lines<BufReader<ChildStdout>>) {
    start(&mut Command::new(binary("peerpod-demo").unwrap()))
}

#[test]
fn demo_and_guest_explain_their_usage_and_exit_with_2_after_a_mistake() {
    let run = |program: &str, word: &str| {
        let done = Command::new(binary(program).unwrap()).arg(word).output().unwrap();
        let text = String::from_utf8([done.stdout, done.stderr].concat()).unwrap();
        assert!(text.contains(&format!("usage: {program}")), "{program} {word}: {text}");
        done.status.code()
    };
    assert_eq!(run("peerpod-demo", "--help"), Some(0));
    assert_eq!(run("peerpod-demo", "--fast"), Some(2));
    assert_eq!(run("peerpod-guest", "--no.such=1"), Some(2));
}

/// Sends SIGINT to the whole process group, as a terminal does on Ctrl-C.
fn interrupt(group: u32) {
    killpg(Pid::from_raw(group as i32), Signal::SIGINT).unwrap();
}

/// Returns the leftovers of the demo with this pid: namespaces, mounts, processes, its folder.
fn left_of_demo(pid: u32) -> Vec<String> {
    let (prefix, folder) = (format!("pp{pid}n"), format!("/tmp/pp{pid}n0"));
    let mut left = Vec::new();
    for entry in fs::read_dir("/run/netns").unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        left.extend(name.starts_with(&prefix).then(|| format!("namespace {name}")));
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    left.extend(mounts.lines().filter(|line| line.contains(&prefix)).map(|line| format!("mount {line}")));
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(other) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        // A process that ends meanwhile is gone. Every process of the demo uses its folder: in its arguments, in its
        // mounts (a VM's root is there) or in its open files (the log).
        let mentions = |file: &str| {
            let text = fs::read(entry.path().join(file)).unwrap_or_default();
            String::from_utf8_lossy(&text).contains(&prefix)
        };
        let open = || {
            let files = fs::read_dir(entry.path().join("fd")).into_iter().flatten().flatten();
            files.filter_map(|file| fs::read_link(file.path()).ok()).any(|path| path.starts_with(&folder))
        };
        if other == pid || mentions("cmdline") || mentions("mountinfo") || open() {
            let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            left.push(format!("process {other} {}", name.trim()));
        }
    }
    left.extend(Path::new(&folder).exists().then(|| format!("folder {folder}")));
    left
}

fn assert_nothing_left(pid: u32, case: &str) {
    let mut left = Vec::new();
    eventually_blocking("nothing of the demo is left", PATIENCE, || {
        left = left_of_demo(pid);
        left.is_empty().then_some(())
    })
    .unwrap_or_else(|error| panic!("{case}: {error}\n{}", left.join("\n")));
}

/// Lines before the first stage. A stage's line is complete once the stage has passed: after these lines and `n` more,
/// stage `n + 1` runs.
const HEAD: usize = 2;

/// Interrupts the demo once or twice, `more` after `lines` lines of its output, and checks that nothing of it is left.
fn interrupted_after(lines: usize, more: Duration, again: Option<Duration>) {
    let (mut demo, mut output) = demo();
    let pid = demo.id();
    let seen: Vec<String> = output.by_ref().take(lines).map_while(Result::ok).collect();
    let case = format!("{more:?} after {lines} lines, and again after {again:?}: {seen:?}");
    if lines > HEAD + 3 && more.is_zero() {
        let there = left_of_demo(pid);
        for kind in ["namespace", "mount", "process", "folder"] {
            assert!(there.iter().any(|line| line.starts_with(kind)), "the witness sees no {kind}: {there:?}");
        }
    }
    // Any time is valid here; the test does not depend on it.
    thread::sleep(more);
    interrupt(pid);
    if let Some(again) = again {
        thread::sleep(again);
        // It may have ended already.
        killpg(Pid::from_raw(pid as i32), Signal::SIGINT).ok();
    }
    let rest: Vec<String> = output.map_while(Result::ok).collect();
    let status = demo.wait().unwrap();
    // The delay may exceed a short last stage: then the demo has completed.
    let ended = !more.is_zero() && status.success() && rest.iter().any(|line| line.starts_with("all of it"));
    assert!(status.code() == Some(130) || ended, "{status} {case} {rest:?}");
    // An `ip` of the group that died midway leaves a namespace, which the janitor removes shortly after.
    assert_nothing_left(pid, &case);
}

#[test]
fn an_interrupted_demo_leaves_nothing_wherever_it_was() {
    for lines in [2, 3, 4, 5, 6, 9, 11, 15] {
        interrupted_after(lines, Duration::ZERO, None);
    }
}

/// Stages with the longest delay in milliseconds: while the daemons start, while the VM is made and joins (twice),
/// while containers are made, and during the clean-up (twice).
const INSIDE: [(usize, u64); 6] = [(0, 300), (3, 150), (3, 500), (6, 100), (13, 5), (14, 60)];

#[test]
fn an_interrupt_in_the_middle_of_a_stage_leaves_nothing_either() {
    // Different delays in every run; a failure prints them.
    let mut dice = Dice(UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64 | 1);
    for (number, (stage, most)) in INSIDE.into_iter().enumerate() {
        let more = Duration::from_micros(dice.roll(most * 1000));
        // A second interrupt in the middle of the clean-up.
        let again = (number % 2 == 1).then(|| Duration::from_micros(dice.roll(60_000)));
        interrupted_after(HEAD + stage, more, again);
    }
}

#[test]
fn an_interrupt_of_make_demo_reaches_the_demo_and_leaves_nothing() {
    let program = binary("peerpod-demo").unwrap();
    let target = program.ancestors().nth(2).unwrap();
    let (mut make, lines) = start(
        // Every program was built before the tests.
        Command::new("make")
            .args(["demo", "CARGO=true"])
            .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))
            .env("CARGO_TARGET_DIR", target),
    );
    let mut seen = Vec::new();
    let demo = lines.map_while(Result::ok).find_map(|line| {
        let number =
            line.split("state in /tmp/pp").nth(1).and_then(|rest| rest.split('n').next()?.parse().ok());
        seen.push(line);
        number
    });
    let demo: u32 = demo.unwrap_or_else(|| panic!("no stage passed: {seen:?}"));
    assert!(demo != make.id() && !left_of_demo(demo).is_empty());
    interrupt(make.id());
    let status = make.wait().unwrap();
    assert!(!status.success(), "{status}");
    assert_nothing_left(demo, "make demo");
}

#[test]
fn two_demos_at_once_both_come_to_their_end() {
    let demos = [demo(), demo()];
    // Reads both outputs at once: neither demo may block on its output.
    let outputs = demos.map(|(demo, lines)| {
        (demo, thread::spawn(move || lines.map_while(Result::ok).collect::<Vec<String>>()))
    });
    for (mut demo, output) in outputs {
        let (pid, text) = (demo.id(), output.join().unwrap().join("\n"));
        let status = demo.wait().unwrap();
        assert!(status.success(), "{status}\n{text}");
        assert!(text.contains("all of it"), "{text}");
        assert_nothing_left(pid, &text);
    }
}

#[tokio::test]
async fn a_request_for_a_pod_s_vm_ends_at_its_deadline_and_uses_no_cpu() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let shim = daemons.shim().await.unwrap();
    let pids = [daemons.node_pid().unwrap(), daemons.relay_pid().unwrap()];
    let spent = || pids.map(|pid| processor_time(pid).unwrap()).iter().sum::<Duration>();
    let (before, began) = (spent(), Instant::now());
    // The node answers a tenth of the deadline earlier than the caller's own timer.
    let deadline = Duration::from_secs(5);
    let error = shim.vm_id("default", "none", true, deadline).await.unwrap_err();
    let took = began.elapsed();
    assert_eq!(error.code(), Some(Code::DEADLINE_EXCEEDED), "{error}");
    assert!(
        error.answer().contains("default/none"),
        "the node says why, not the caller's own clock: {error}"
    );
    assert!(took >= deadline / 2, "{took:?}");
    // Waiting must cost no processor time: a polling node would have used a good part of these seconds.
    let spent = spent() - before;
    assert!(spent <= deadline / 5, "{spent:?} of processor time");
    // Without waiting the result differs.
    let error = shim.vm_id("default", "none", false, deadline).await.unwrap_err();
    assert_eq!(error.code(), Some(Code::NOT_FOUND), "{error}");
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
    // The shim dies. Its clean-up process calls CreateVM first, when the network namespace may be gone already.
    drop((agent, pod));
    let again = daemons.shim().await.unwrap().create_vm(&id, annotations(), &netns).await.unwrap();
    assert_eq!(again, socket);
    let cleaner = AgentClient::connect(&socket).await.unwrap();
    cleaner.destroy_sandbox().await.unwrap();
    stop_in_time(&daemons.shim().await.unwrap(), &id).await.unwrap();
    daemons.gone(&id, PATIENCE).await.unwrap();
}

#[tokio::test]
async fn metrics_and_logs_show_the_result_of_a_pod() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "seen").await.unwrap();
    sandbox.lives().await.unwrap();
    let value = |metrics: &str, name: &str| sample(metrics, name).unwrap();
    let (node, relay) = (daemons.metrics("node").unwrap(), daemons.metrics("relay").unwrap());
    assert_eq!(value(&node, "peerpod_node_sandboxes{phase=\"running\"}"), 1.0);
    assert_eq!(value(&node, "peerpod_node_stage_seconds_count{stage=\"running\"}"), 1.0);
    assert_eq!(value(&node, "peerpod_node_claims_granted_total"), 1.0);
    assert_eq!(value(&node, "peerpod_node_panics_total"), 0.0);
    assert!(node.contains("peerpod_provider_calls_total{"), "{node}");
    assert_eq!(value(&relay, "peerpod_relay_guests_connected"), 1.0);
    for direction in ["to_guest", "from_guest"] {
        for what in ["bytes", "frames"] {
            let name = format!("peerpod_relay_{what}_total{{direction=\"{direction}\"}}");
            assert!(value(&relay, &name) > 0.0, "{name}");
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

/// From CreateVM to the tombstone, including refused calls: every line about the sandbox names its pod, and every line
/// about its VM names the sandbox.
#[tokio::test]
async fn every_log_line_of_a_sandbox_carries_its_id_and_its_pod() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let (pod, shim) = (world.pod().unwrap(), daemons.shim().await.unwrap());
    let (id, name) = (fresh_id("told"), format!("web-{}", std::process::id()));
    let create = || shim.create_vm(&id, Annotations::new("shop", &name), Path::new("/nonexistent"));
    create().await.unwrap_err();
    let annotations = Annotations::new("shop", &name);
    let socket = shim.create_vm(&id, annotations, &pod.namespace().path()).await.unwrap();
    shim.start_vm(&id).await.unwrap();
    let vm = shim.vm_id("shop", &name, true, PATIENCE).await.unwrap();
    let agent = AgentClient::connect(&socket).await.unwrap();
    agent.check().await.unwrap();
    // A restart, a StopVM while the node is down, and a StartVM that is refused.
    daemons.kill_node().unwrap();
    stop_in_time(&shim, &id).await.unwrap();
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
    shim.start_vm(&id).await.unwrap_err();
    daemons.gone(&id, PATIENCE).await.unwrap();
    stop_in_time(&shim, &id).await.unwrap();

    let whose = format!("shop/{name}");
    for (daemon, least) in [("node", 15), ("relay", 10)] {
        let log = fs::read_to_string(daemons.log(daemon)).unwrap();
        let lines: Vec<&str> = log.lines().filter(|line| line.contains(&id) || line.contains(&vm)).collect();
        assert!(lines.len() >= least, "{daemon}: {}", lines.join("\n"));
        for line in lines {
            assert!(
                line.contains(&format!("sandbox={id}")) || line.contains(&format!("sandbox=\"{id}\"")),
                "{line}"
            );
            assert!(
                line.contains(&format!("pod={whose}")) || line.contains(&format!("pod=\"{whose}\"")),
                "{line}"
            );
        }
    }
}
