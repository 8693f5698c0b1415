//! Programs of the node that are killed while pods run, and what a pod's user sees of it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use k8s_openapi::jiff::Timestamp;
use nix::mount::{MsFlags, mount};
use peerpod_world::{World, slowness};
use serde_json::{Value, json};

use crate::cases::network::{Forward, nft};
use crate::cases::{Case, SLEEP};
use crate::images_common::PORT;
use crate::left::Listing;
use crate::node::Node;

/// Pods that run during each fault. The users of the first three read numbers: by an exec, by the log, and by a forwarded
/// port. The fourth pod writes numbers to a volume.
const PODS: [&str; 5] = ["exec", "logs", "web", "writer", "idle"];
/// Kubernetes namespace of the pods.
const NAMESPACE: &str = "faults";
/// Time limit until all pods are as before, from the end of the fault.
const BACK: Duration = Duration::from_secs(60);
/// Limit of the time between two lines of a stream that must not notice a fault.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// Prints numbers.
const COUNTS: &str = "n=0; while :; do n=$((n+1)); echo $n; sleep 0.1; done";

/// What must be true after a fault.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// An open exec goes on without a missing line, and no container is restarted.
    Unnoticed,
    /// An open exec goes on. An answer that was on its way may be missing (docs/life-of-a-pod.md). No container is
    /// restarted.
    AnswersLost,
    /// Open execs may end. No container is restarted.
    StreamsEnd,
    /// Containers of pods end, and kubelet starts them again.
    Restarted,
}

type Fault = fn(&mut Node) -> anyhow::Result<()>;

const FAULTS: [(&str, Outcome, Fault); 14] = [
    ("node", Outcome::Unnoticed, |node| node.restart_daemon("node")),
    ("the guest program of each VM", Outcome::AnswersLost, |_| kill("peerpod-guest serve", None)),
    ("kubelet", Outcome::StreamsEnd, |node| node.restart("kubelet")),
    ("containerd", Outcome::StreamsEnd, |node| node.restart("containerd")),
    ("API server", Outcome::StreamsEnd, |node| node.restart_api_server()),
    ("etcd", Outcome::Unnoticed, |node| node.restart_etcd()),
    ("the image registry, for a while", Outcome::Unnoticed, registry_away),
    ("the space of the state's disk, until an event says so", Outcome::Unnoticed, disk_full),
    ("the right time of relay and node: one day forth and back", Outcome::Unnoticed, other_time),
    ("one shim", Outcome::Restarted, |_| kill("containerd-shim-kata", Some("-o"))),
    ("Kata's agent of one VM", Outcome::Restarted, |_| kill("kata-agent --config", Some("-o"))),
    ("one VM", Outcome::Restarted, |_| kill("/opt/peerpod/peerpod-guest", Some("-o"))),
    ("relay", Outcome::Restarted, |node| node.restart_daemon("relay")),
    ("the node but its control plane, as by a reboot", Outcome::Restarted, |node| node.reboot()),
];

/// Faults of many minutes, for long runs.
const LONG_FAULTS: &[(&str, Outcome, Fault)] =
    &[("API server, for five minutes", Outcome::StreamsEnd, |node| {
        node.without_api_server(Duration::from_secs(300))
    })];

/// Gives the daemons' state a disk of its own, which a fault fills.
pub(crate) fn mount_state(world: &World) -> anyhow::Result<()> {
    let folder = world.folder().join("state");
    std::fs::create_dir_all(&folder)?;
    Ok(mount(Some("tmpfs"), &folder, Some("tmpfs"), MsFlags::empty(), Some("size=256m,mode=700"))?)
}

/// Makes the pods that run during faults.
pub(crate) fn make_pods(case: &Case<'_>) -> anyhow::Result<()> {
    for name in ["exec", "idle"] {
        case.script(name, "Always", SLEEP)?;
    }
    case.script("logs", "Always", &format!("trap exit TERM; {COUNTS}"))?;
    // Each connection has numbers of its own.
    let serves = format!("trap exit TERM; nc -ll -p 8080 -e sh -c '{COUNTS}' & wait");
    let command = json!(["sh", "-c", serves]);
    case.pod(
        "web",
        &format!(
            "containers: [{{name: c, image: IMAGE, command: {command},
               readinessProbe: {{tcpSocket: {{port: 8080}}, periodSeconds: 1}}}}]"
        ),
    )?;
    let writes = "trap exit TERM; touch /v/n; n=$(wc -l </v/n); while :; do n=$((n+1)); echo $n >>/v/n; sleep 0.2; done";
    case.pod(
        "writer",
        &format!(
            "volumes: [{{name: v, emptyDir: {{}}}}], containers: [{{name: c, image: IMAGE,
               command: [sh, -c, '{writes}'], volumeMounts: [{{name: v, mountPath: /v}}]}}]"
        ),
    )
}

/// Runs all faults, and prints a line for each. Afterwards the pods go, and nothing may be left of them. Returns the
/// numbers of those that passed and of those that failed.
pub(crate) fn run(node: &mut Node) -> anyhow::Result<(usize, usize)> {
    let before = Listing::before(node)?;
    make_pods(&Case::new(node, NAMESPACE)?)?;
    let (mut passed, mut failed) = (0, 0);
    let long = if crate::is_long() { LONG_FAULTS } else { &[] };
    if long.is_empty() {
        for (name, ..) in LONG_FAULTS {
            println!("left out         gone: {name} (PEERPOD_TEST_LONG is not set)");
        }
    }
    for (name, outcome, fault) in FAULTS.iter().chain(long) {
        let began = Instant::now();
        match one(node, *outcome, *fault) {
            Ok(seen) => {
                passed += 1;
                println!("ok     {:6.1} s  gone: {name}: {seen}", began.elapsed().as_secs_f64());
            }
            Err(error) => {
                failed += 1;
                let state = Case::of(node, NAMESPACE).state();
                println!("FAILED {:6.1} s  gone: {name}: {error:#}\n{state}", began.elapsed().as_secs_f64());
            }
        }
    }
    let began = Instant::now();
    match node
        .kubectl(&["delete", "namespace", NAMESPACE, "--timeout=180s"])
        .and_then(|_| before.is_again(node))
    {
        Ok(()) => {
            passed += 1;
            println!(
                "ok     {:6.1} s  nothing is left: {} things as before",
                began.elapsed().as_secs_f64(),
                before.len()
            );
        }
        Err(error) => {
            failed += 1;
            println!("FAILED {:6.1} s  nothing is left: {error:#}", began.elapsed().as_secs_f64());
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
    let case = Case::of(node, NAMESPACE);
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
    let case = Case::of(node, NAMESPACE);
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
        let case = Case::of(node, NAMESPACE);
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

/// Returns the number of the local provider's VMs: the first process of each is a guest program.
fn guests() -> anyhow::Result<usize> {
    let found = Command::new("pgrep").args(["-c", "-f", "^/opt/peerpod/peerpod-guest"]).output()?;
    Ok(String::from_utf8(found.stdout)?.trim().parse()?)
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
    let load = Load::start(&Case::of(node, NAMESPACE))?;
    fault(node)?;
    load.end(&Case::of(node, NAMESPACE), outcome, guests)
}

/// Users of the pods while a fault happens.
pub(crate) struct Load {
    /// Restarts of each pod's container before the fault.
    before: BTreeMap<String, Value>,
    streams: [Stream; 3],
}

impl Load {
    /// Waits until the pods are ready, and opens the streams.
    pub(crate) fn start(case: &Case<'_>) -> anyhow::Result<Load> {
        for name in PODS {
            case.ready(name)?;
        }
        let before = restarts(case)?;
        let streams = [
            Stream::of_kubectl(case, "exec", &["exec", "exec", "--", "sh", "-c", COUNTS])?,
            Stream::of_kubectl(case, "log", &["logs", "-f", "--tail=1", "logs"])?,
            Stream::of_port(case)?,
        ];
        Ok(Load { before, streams })
    }

    /// Checks the outcome of a fault, and returns what the users saw. `machines` returns the number of the pods' VMs
    /// without the node's ledger.
    pub(crate) fn end(
        self,
        case: &Case<'_>,
        outcome: Outcome,
        machines: impl Fn() -> anyhow::Result<usize>,
    ) -> anyhow::Result<String> {
        let began = Instant::now();
        let Load { before, streams } = self;
        case.within(BACK, "all pods are ready and can be entered, after a restart if one must be", || {
            if outcome == Outcome::Restarted && restarts(case).is_ok_and(|after| after == before) {
                return Ok(None);
            }
            let is_ready =
                |name: &&str| case.exec(name, &["true"]).is_ok() && case.is_ready(name).unwrap_or(false);
            Ok(PODS.iter().all(is_ready).then_some(()))
        })?;
        let took = began.elapsed().as_secs_f64();
        if matches!(outcome, Outcome::Unnoticed | Outcome::AnswersLost) {
            // A forwarded port may end with the guest program.
            let going_on = if outcome == Outcome::Unnoticed { &streams[..] } else { &streams[..2] };
            for stream in going_on {
                let seen = stream.count();
                ensure!(!stream.reader.is_finished(), "the {} has ended", stream.name);
                case.until(&format!("more lines of the {}", stream.name), || {
                    Ok((stream.count() > seen + 5).then_some(()))
                })?;
            }
        }
        let (mut seen, mut missing) = (String::new(), 0);
        for stream in streams {
            let pause = Duration::from_millis(stream.pause.load(Relaxed).into());
            ensure!(
                outcome != Outcome::Unnoticed || pause < LONGEST_PAUSE.mul_f64(slowness()),
                "no line of the {} for {pause:?}",
                stream.name
            );
            let (text, count) = stream.close()?;
            seen += &text;
            missing += count;
        }
        ensure!(missing == 0 || outcome == Outcome::AnswersLost, "{seen}{missing} lines are missing");
        let wrong = case.exec("writer", &["awk", "$1 != NR", "/v/n"])?;
        ensure!(wrong.is_empty(), "lines of the volume that are out of order: {wrong}");
        let written = case.exec("writer", &["sh", "-c", "wc -l </v/n"])?;
        let seen = format!("{seen}volume {} lines; {missing} missing", written.trim());
        let after = restarts(case)?;
        if outcome != Outcome::Restarted {
            ensure!(after == before, "restarts {before:?} -> {after:?}");
        }
        case.until("as many VMs as pods", || {
            Ok(([case.vms()?, machines()?] == [PODS.len(); 2]).then_some(()))
        })?;
        let ended = after.iter().filter(|(name, count)| before.get(*name) != Some(count)).count();
        Ok(match outcome {
            Outcome::Unnoticed | Outcome::AnswersLost => format!("{seen}; nothing restarted"),
            Outcome::StreamsEnd => format!("{seen}; nothing restarted, exec again after {took:.1} s"),
            Outcome::Restarted => {
                format!("{seen}; {ended} of {} containers restarted, all ready after {took:.1} s", PODS.len())
            }
        })
    }
}

/// Numbers that a user reads, each in a line and one more than the last.
struct Stream {
    name: &'static str,
    source: Source,
    count: Arc<AtomicU32>,
    /// Longest time between two lines in milliseconds.
    pause: Arc<AtomicU32>,
    /// Returns the number of missing lines.
    reader: JoinHandle<anyhow::Result<u32>>,
}

/// The program that carries a stream.
enum Source {
    Kubectl(Child),
    Forward(Forward),
}

impl Stream {
    fn of_kubectl(case: &Case<'_>, name: &'static str, words: &[&str]) -> anyhow::Result<Stream> {
        let mut command = case.node.kubectl_command(&[&["-n", case.namespace], words].concat())?;
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let lines = child.stdout.take().context("stdout")?;
        Stream::open(case, name, Source::Kubectl(child), lines)
    }

    fn of_port(case: &Case<'_>) -> anyhow::Result<Stream> {
        let forward = Forward::start(case)?;
        let lines = TcpStream::connect(("127.0.0.1", forward.port))?;
        Stream::open(case, "port", Source::Forward(forward), lines)
    }

    /// Waits for the first line.
    fn open(
        case: &Case<'_>,
        name: &'static str,
        source: Source,
        lines: impl Read + Send + 'static,
    ) -> anyhow::Result<Stream> {
        let [count, pause] = [(); 2].map(|()| Arc::new(AtomicU32::new(0)));
        let (counted, paused) = (count.clone(), pause.clone());
        let reader = thread::spawn(move || {
            let (mut lines, mut line) = (BufReader::new(lines), String::new());
            let (mut last, mut missing, mut read) = (None, 0, None::<Instant>);
            // A last line may be cut.
            while lines.read_line(&mut line).is_ok() && line.ends_with('\n') {
                let number: u32 =
                    line.trim_end().parse().with_context(|| format!("{line:?} after {last:?}"))?;
                if let Some(last) = last {
                    ensure!(number > last, "{number} after {last}");
                    missing += number - last - 1;
                }
                last = Some(number);
                if let Some(before) = read.replace(Instant::now()) {
                    let pause = before.elapsed().as_millis().try_into().unwrap_or(u32::MAX);
                    paused.fetch_max(pause, Relaxed);
                }
                counted.fetch_add(1, Relaxed);
                line.clear();
            }
            Ok(missing)
        });
        let stream = Stream { name, source, count, pause, reader };
        case.until(&format!("the first line of the {name}"), || Ok((stream.count() > 0).then_some(())))?;
        Ok(stream)
    }

    fn count(&self) -> u32 {
        self.count.load(Relaxed)
    }

    /// Ends the stream. Returns its description and the number of missing lines.
    fn close(self) -> anyhow::Result<(String, u32)> {
        let (name, lines) = (self.name, self.count());
        let pause = f64::from(self.pause.load(Relaxed)) / 1e3;
        let state = if self.reader.is_finished() { "until the fault" } else { "on and on" };
        let mut child = match self.source {
            Source::Kubectl(child) => child,
            Source::Forward(forward) => forward.child,
        };
        child.kill()?;
        child.wait()?;
        let read = self.reader.join().map_err(|_| anyhow::anyhow!("panic"))?;
        let missing = read.with_context(|| format!("the {name}"))?;
        Ok((format!("{name} {lines} lines {state}, longest pause {pause:.1} s, "), missing))
    }
}
