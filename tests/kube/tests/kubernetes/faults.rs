//! Programs of the node that are killed while pods run, and what a pod's user sees of it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use k8s_openapi::jiff::Timestamp;
use nix::mount::{MsFlags, mount};
use peerpod_world::World;
use serde_json::Value;

use crate::cases::network::nft;
use crate::cases::{Case, SLEEP};
use crate::images_common::PORT;
use crate::node::Node;

/// Pods that run during each fault.
const PODS: [&str; 5] = ["exec", "logs", "web", "writer", "idle"];

/// What must be true after a fault.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// An open exec goes on without a missing line, and no container is restarted.
    Unnoticed,
    /// Open execs may end. No container is restarted.
    StreamsEnd,
    /// Containers of pods end, and kubelet starts them again.
    Restarted,
}

type Fault = fn(&mut Node) -> anyhow::Result<()>;

const FAULTS: [(&str, Outcome, Fault); 15] = [
    ("node", Outcome::Unnoticed, |node| node.restart_daemon("node")),
    ("the guest program of each VM", Outcome::Unnoticed, |_| kill("peerpod-guest serve", None)),
    ("kubelet", Outcome::StreamsEnd, |node| node.restart("kubelet")),
    ("containerd", Outcome::StreamsEnd, |node| node.restart("containerd")),
    ("API server", Outcome::StreamsEnd, |node| node.restart_api_server()),
    ("API server, for five minutes (long runs only)", Outcome::StreamsEnd, |node| {
        if std::env::var_os("PEERPOD_TEST_LONG").is_none() {
            return Ok(());
        }
        node.without_api_server(Duration::from_secs(300))
    }),
    ("etcd", Outcome::Unnoticed, |node| node.restart_etcd()),
    ("the image registry, for a while", Outcome::Unnoticed, registry_away),
    ("the space of the state's disk, for a while", Outcome::Unnoticed, disk_full),
    ("the right time of relay and node: one day forth and back", Outcome::Unnoticed, other_time),
    ("one shim", Outcome::Restarted, |_| kill("kata/shim", Some("-o"))),
    ("Kata's agent of one VM", Outcome::Restarted, |_| kill("kata-agent --config", Some("-o"))),
    ("one VM", Outcome::Restarted, |_| kill("/opt/peerpod/peerpod-guest", Some("-o"))),
    ("relay", Outcome::Restarted, |node| node.restart_daemon("relay")),
    ("the node, which starts again", Outcome::Restarted, |node| node.reboot()),
];

/// Gives the daemons' state a disk of its own, which a fault fills.
pub(crate) fn mount_state(world: &World) -> anyhow::Result<()> {
    let folder = world.folder().join("state");
    std::fs::create_dir_all(&folder)?;
    Ok(mount(Some("tmpfs"), &folder, Some("tmpfs"), MsFlags::empty(), Some("size=256m,mode=700"))?)
}

/// Runs all faults, and prints a line for each. Returns the numbers of those that passed and of those that failed.
pub(crate) fn run(node: &mut Node) -> anyhow::Result<(usize, usize)> {
    let case = Case::new(node, "faults")?;
    for name in PODS {
        case.script(name, "Always", "trap exit TERM; n=0; while :; do n=$((n+1)); echo $n; sleep 0.2; done")?;
    }
    let (mut passed, mut failed) = (0, 0);
    for (name, outcome, fault) in FAULTS {
        let began = Instant::now();
        match one(node, outcome, fault) {
            Ok(seen) => {
                passed += 1;
                println!("ok     {:6.1} s  gone: {name}: {seen}", began.elapsed().as_secs_f64());
            }
            Err(error) => {
                failed += 1;
                let state = Case::of(node, "faults").state();
                println!("FAILED {:6.1} s  gone: {name}: {error:#}\n{state}", began.elapsed().as_secs_f64());
            }
        }
    }
    if failed > 0 {
        node.keep_logs();
    }
    Ok((passed, failed))
}

/// A pod that starts meanwhile waits with the reason, and runs afterwards.
fn registry_away(node: &mut Node) -> anyhow::Result<()> {
    let table = "add table inet away\nadd chain inet away in { type filter hook input priority 0; }\n";
    nft(&format!("{table}add rule inet away in tcp dport {PORT} reject with tcp reset\n"))?;
    let case = Case::of(node, "faults");
    case.pod(
        "late",
        "containers: [{name: c, image: IMAGE, imagePullPolicy: Always, command: [sleep, '1000']}]",
    )?;
    case.event("Failed", "connection refused")?;
    nft("delete table inet away\n")?;
    runs_and_goes(&case, "late")
}

/// A pod that starts meanwhile waits with the reason, and runs afterwards.
fn disk_full(node: &mut Node) -> anyhow::Result<()> {
    let filler = node.state_dir()?.join("filler");
    let mut file = File::create(&filler)?;
    let piece = vec![0; 1 << 20];
    let full = loop {
        if let Err(error) = file.write_all(&piece) {
            break error;
        }
    };
    ensure!(full.kind() == ErrorKind::StorageFull, "{full}");
    let case = Case::of(node, "faults");
    case.script("late", "Always", SLEEP)?;
    case.event("FailedCreatePodSandBox", "No space left")?;
    // An open file keeps its space.
    drop(file);
    std::fs::remove_file(&filler)?;
    runs_and_goes(&case, "late")
}

/// A pod starts and ends in each of the two times.
fn other_time(node: &mut Node) -> anyhow::Result<()> {
    const DAY: u32 = 86_400;
    // As log lines begin.
    let tomorrow = Timestamp::now() + Duration::from_secs(DAY.into());
    let tomorrow = tomorrow.to_string().split_once('T').context("a date")?.0.to_owned();
    for (seconds, is_seen) in [(DAY, true), (0, false)] {
        node.clock()?.set(seconds.into())?;
        let before = ["relay", "node"].map(|daemon| node.log(daemon).map_or(0, |log| log.len()));
        let case = Case::of(node, "faults");
        case.script("late", "Always", SLEEP)?;
        runs_and_goes(&case, "late")?;
        for (daemon, before) in ["relay", "node"].into_iter().zip(before) {
            let log = node.log(daemon)?;
            let lines = log.get(before..).unwrap_or_default();
            ensure!(lines.contains(&tomorrow) == is_seen, "{daemon}, clock +{seconds} s: {lines}");
        }
    }
    Ok(())
}

fn runs_and_goes(case: &Case<'_>, pod: &str) -> anyhow::Result<()> {
    case.ready(pod)?;
    case.kubectl(&["delete", "pod", pod, "--timeout=90s"]).map(drop)
}

fn kill(pattern: &str, which: Option<&str>) -> anyhow::Result<()> {
    let done = Command::new("pkill").arg("-KILL").args(which).args(["-f", pattern]).status()?;
    ensure!(done.success(), "no process {pattern}");
    Ok(())
}

/// Returns the restarts of each pod's container.
fn restarts(case: &Case<'_>) -> anyhow::Result<BTreeMap<String, Value>> {
    let pods = case.get("pod/")?;
    let all = pods["items"].as_array().context("pods")?.iter();
    let of = |pod: &Value| {
        let name = pod["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        (name, pod["status"]["containerStatuses"][0]["restartCount"].clone())
    };
    Ok(all.map(of).collect())
}

fn one(node: &mut Node, outcome: Outcome, fault: Fault) -> anyhow::Result<String> {
    let case = Case::of(node, "faults");
    for name in PODS {
        case.ready(name)?;
    }
    let before = restarts(&case)?;
    let stream = Stream::open(&case, PODS[0])?;
    fault(node)?;
    let began = Instant::now();
    let case = Case::of(node, "faults");
    if outcome == Outcome::Restarted {
        case.until("a container was restarted", || {
            Ok(restarts(&case).ok().filter(|after| *after != before).map(drop))
        })?;
    }
    case.until("all pods are ready and can be entered", || {
        let is_ready =
            |name: &&str| case.exec(name, &["true"]).is_ok() && case.is_ready(name).unwrap_or(false);
        Ok(PODS.iter().all(is_ready).then_some(()))
    })?;
    let took = began.elapsed().as_secs_f64();
    if outcome == Outcome::Unnoticed {
        let seen = stream.count();
        case.until("more lines of the exec", || Ok((stream.count() > seen + 5).then_some(())))?;
    }
    let lines = stream.close()?;
    let after = restarts(&case)?;
    if outcome != Outcome::Restarted {
        ensure!(after == before, "restarts {before:?} -> {after:?}");
    }
    case.until("as many VMs as pods", || Ok((case.vms()? == PODS.len()).then_some(())))?;
    let ended = after.iter().filter(|(name, count)| before.get(*name) != Some(count)).count();
    Ok(match outcome {
        Outcome::Unnoticed => format!("nothing seen; {lines} lines of an exec, none missing"),
        Outcome::StreamsEnd => format!("execs may end; no container restarted; exec again after {took:.1} s"),
        Outcome::Restarted => {
            format!("{ended} of {} containers restarted, all ready after {took:.1} s", PODS.len())
        }
    })
}

/// An exec that prints numbers.
struct Stream {
    child: Child,
    count: Arc<AtomicU32>,
    wrong: Arc<Mutex<Option<String>>>,
}

impl Stream {
    fn open(case: &Case<'_>, pod: &str) -> anyhow::Result<Stream> {
        let script = "n=0; while :; do n=$((n+1)); echo $n; sleep 0.1; done";
        let words = ["-n", case.namespace, "exec", pod, "--", "sh", "-c", script];
        let mut command = case.node.kubectl_command(&words)?;
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let lines = BufReader::new(child.stdout.take().context("stdout")?).lines();
        let (count, wrong) = (Arc::new(AtomicU32::new(0)), Arc::new(Mutex::new(None)));
        let (counted, report) = (count.clone(), wrong.clone());
        thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let expected = counted.fetch_add(1, Relaxed) + 1;
                if line != expected.to_string() {
                    report.lock().unwrap().get_or_insert(format!("line {expected} is {line:?}"));
                }
            }
        });
        let stream = Stream { child, count, wrong };
        case.until("the exec's first line", || Ok((stream.count() > 0).then_some(())))?;
        Ok(stream)
    }

    fn count(&self) -> u32 {
        self.count.load(Relaxed)
    }

    fn close(mut self) -> anyhow::Result<u32> {
        self.child.kill()?;
        self.child.wait()?;
        let wrong = self.wrong.lock().unwrap().take();
        ensure!(wrong.is_none(), "{wrong:?}");
        Ok(self.count())
    }
}
