//! The chart as users install it: its container image, its DaemonSets by kubelet under runc, and VMs of libvirt that boot
//! the minimal image with Kata's agent.

mod claims;
mod front_door;
mod images;
mod kustomize;
mod offers;
mod removal;
mod rights;

use std::cell::{Cell, RefCell};
use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use nix::mount::{MsFlags, mount};
use peerpod_test_kube::{NODE, project, report};
use peerpod_world::{Libvirtd, NETWORK, POOL, World};
use serde_json::{Value, json};

use crate::cases::images::slow_registry;
use crate::cases::{CASES, Case, NOTE, OF_SLICE};
use crate::churn::come_and_go;
use crate::faults::{Load, Outcome};
use crate::images_common::PORT;
use crate::left::Listing;
use crate::node::{ADDRESS, Layout, Node, SECOND, SLOW, busybox};
use crate::{SLICE, audit, faults};

/// Namespace of the release.
const NAMESPACE: &str = "peerpod-system";
/// Time limit of a rollout, and of the start of a VM that is emulated.
const PATIENCE: Duration = Duration::from_secs(240);
/// Bytes of a file that is copied into a pod during an upgrade.
const COPIED: usize = 60_000_000;
/// Pods that come and go in a long run.
const PODS: usize = 30;
/// Emulated VMs that start at once.
const AT_ONCE: usize = 3;
/// Number of the steps, and names of some.
const STEPS: usize = 25;
const INSTALL: &str = "helm install: all pods are ready";
const FIRST_POD: &str = "a pod with the runtime class and no other word runs in a VM";
const CHURN: &str = "pods come and go";

/// A node with libvirt, on which the chart is installed.
struct Installed<'a> {
    node: &'a Node,
    libvirtd: RefCell<Libvirtd>,
    folder: &'a Path,
    values: String,
    before: Listing,
    /// Text with all that libvirt had before, as of [`removal::of_libvirt`].
    of_libvirt: String,
    /// Begin of the installation.
    began: Cell<Instant>,
    /// Commands from the empty node to the first pod, each with its output.
    commands: RefCell<Vec<String>>,
}

type Step = fn(&Installed<'_>) -> anyhow::Result<()>;

/// Runs all steps; each builds on those before. Prints a line for each.
pub(crate) fn run(world: &World) -> anyhow::Result<bool> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let folder = world.folder().join("chart");
    fs::create_dir(&folder)?;
    let image = images::container(&folder)?;
    let of_csi = claims::images()?;
    let mut images = vec![("peerpod:1", &image), ("peerpod:2", &image)];
    images.extend(of_csi.iter().map(|(name, image)| (name.as_str(), image)));
    let layout = Layout::chart();
    let node = runtime.block_on(Node::start(world, &layout, &images)).context("start the node")?;
    let libvirtd = Libvirtd::start(world)?;
    // Where users have it.
    fs::create_dir_all("/run/libvirt")?;
    let sockets = libvirtd.socket();
    let sockets = sockets.parent().context("the socket's folder")?;
    mount(Some(sockets), "/run/libvirt", None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    let vm = images::vm(world, &folder)?;
    let values = folder.join("values.yaml");
    fs::write(&values, values_for(&folder, &vm).to_string())?;
    let values = values.to_string_lossy().into_owned();
    let folder = world.folder();
    let before = Listing::before(&node)?;
    let of_libvirt = removal::of_libvirt(&libvirtd)?;
    let libvirtd = RefCell::new(libvirtd);
    let (began, commands) = (Cell::new(Instant::now()), RefCell::default());
    let on = Installed { node: &node, libvirtd, folder, values, before, of_libvirt, began, commands };
    let steps: [(&str, Step); STEPS] = [
        ("the check before the installation finds no fault", front_door::before),
        (INSTALL, install),
        ("each container has the rights that the chart asks for, and no more", rights::check),
        (FIRST_POD, first_pod),
        ("the command line shows the pod, and the lines of four programs by time", front_door::shows),
        ("the chart's check ends with 0, and names a fault of the node", front_door::check),
        ("Node, webhook and admission policies are those of the chart", offers::check),
        ("a dozen cases and OOMKilled in VMs of libvirt", dozen),
        (CHURN, churn),
        ("an image of a private registry, by the secret of pod and of service account", private_image),
        ("an image that takes longer than the shim waits, with its progress in Events", slow_image),
        ("a CSI driver with peerpod-csi before it", claims::install),
        ("peerpod test in VMs of libvirt: each test passes", claims::connectivity),
        ("a claim: the next pod reads the bytes", claims::next_pod),
        ("helm upgrade under an exec, a log, a copy and a volume: nothing is missing", upgrade),
        ("the claim's pod has missed nothing, and nothing is left of the claim", claims::removal),
        ("libvirtd is killed under five pods in use", restart_libvirtd),
        ("with a capacity of two a third pod waits for its turn", offers::capacity),
        ("helm uninstall is refused while pods run", removal::uninstall_refused),
        ("the node is drained", removal::drain),
        ("no request was refused", |on| audit::check(on.node, on.folder)),
        ("helm uninstall", removal::uninstall),
        ("nothing is left but the custom resources", |on| removal::nothing_is_left(on, true)),
        ("with kustomize: install, a pod in a VM, removal", kustomize::run),
        ("nothing is left of kustomize", |on| removal::nothing_is_left(on, false)),
    ];
    for (name, step) in steps {
        if name == CHURN && !crate::is_long() {
            println!("left out         chart: {name} (PEERPOD_TEST_LONG is not set)");
            continue;
        }
        let began = Instant::now();
        let result = step(&on).and_then(|()| node.no_bare_deadline("/api/v1/events"));
        let took = began.elapsed().as_secs_f64();
        if let Err(error) = result {
            println!("FAILED {took:6.1} s  chart: {name}: {error:#}\n{}", on.state());
            node.keep_logs();
            if [INSTALL, FIRST_POD].contains(&name) {
                report("chart_install_first_pod_failed", 1.0)?;
            }
            report("chart_failed", 1.0)?;
            return Ok(false);
        }
        println!("ok     {took:6.1} s  chart: {name}");
        if name == FIRST_POD {
            report("chart_install_first_pod_failed", 0.0)?;
        }
    }
    report("chart_failed", 0.0)?;
    Ok(true)
}

/// Returns the values that a user of libvirt writes.
fn values_for(folder: &Path, vm: &Value) -> Value {
    let files = folder.join("vm");
    let file = |key: &str| files.join(vm[key].as_str().unwrap_or_default());
    let volumes = json!([
        { "name": "libvirt", "hostPath": { "path": "/run/libvirt", "type": "Directory" } },
        { "name": "vm", "hostPath": { "path": files, "type": "Directory" } },
    ]);
    let mounts = json!([
        { "name": "libvirt", "mountPath": "/run/libvirt" },
        { "name": "vm", "mountPath": files, "readOnly": true },
    ]);
    json!({
        "image": { "repository": format!("{ADDRESS}:{PORT}/peerpod"), "tag": "1" },
        "config": {
            "node": { "plain-http-registries": format!("{ADDRESS}:{PORT},{ADDRESS}:{SECOND},{ADDRESS}:{SLOW}") },
            "provider": { "libvirt": {
                "pool": POOL, "network": NETWORK, "volume": null,
                "kernel": file("kernel"), "initrd": file("initrd"), "cmdline": vm["cmdline"],
            } },
        },
        // An upgrade replaces the relay, too.
        "relay": { "updateStrategy": "RollingUpdate" },
        "node": { "extraVolumes": volumes, "extraVolumeMounts": mounts },
        "controller": { "extraVolumes": volumes, "extraVolumeMounts": mounts },
        "csi": { "drivers": [claims::accounts()] },
        "check": { "enabled": true },
    })
}

fn install(on: &Installed<'_>) -> anyhow::Result<()> {
    claims::make_namespace(on)?;
    on.began.set(Instant::now());
    let label = ["label", "node", NODE, "katacontainers.io/kata-runtime=true"];
    on.record(&format!("kubectl {}", label.join(" ")), &on.node.kubectl(&label)?);
    let libvirt = project("providers/libvirt/values.yaml");
    let said = on.node.cluster.install(NAMESPACE, &["-f", &libvirt.to_string_lossy(), "-f", &on.values])?;
    let command = "helm install peerpod deploy/chart -n peerpod-system --create-namespace \
                   -f providers/libvirt/values.yaml -f mine.yaml";
    // The date has names of days and months.
    let said: Vec<&str> = said.lines().filter(|line| !line.starts_with("LAST DEPLOYED")).collect();
    on.record(command, &said.join("\n"));
    on.rolled_out()?;
    let programs = ["-n", NAMESPACE, "get", "daemonsets,deployments"];
    on.record(&format!("kubectl {}", programs.join(" ")), &on.node.kubectl(&programs)?);
    Ok(())
}

fn first_pod(on: &Installed<'_>) -> anyhow::Result<()> {
    let case = Case::new(on.node, "users")?;
    case.sleeper("p")?;
    println!(
        "       {:6.1} s  from helm install to the first pod's readiness",
        on.began.get().elapsed().as_secs_f64()
    );
    let vms = on.libvirtd.borrow().domains()?;
    ensure!(vms.len() == 1, "{vms:?}");
    let kernel = case.exec("p", &["uname", "-r"])?;
    let ours = nix::sys::utsname::uname()?.release().to_string_lossy().into_owned();
    ensure!(kernel.trim() != ours, "the pod has the node's kernel {kernel}");
    let columns = "custom-columns=NAME:.metadata.name,CLASS:.spec.runtimeClassName,PHASE:.status.phase";
    let pods = ["-n", "users", "get", "pods", "-o", columns];
    on.record(&format!("kubectl {}", pods.join(" ")), &on.node.kubectl(&pods)?);
    on.record("kubectl -n users exec p -- uname -r", &kernel);
    on.record("uname -r", &ours);
    front_door::installation(on)
}

fn dozen(on: &Installed<'_>) -> anyhow::Result<()> {
    let wanted = env::var("PEERPOD_TEST_CASES").unwrap_or_default();
    let is_named = |name: &str| OF_SLICE.contains(&name) || name == "OOMKilled";
    let is_wanted = |name: &str| is_named(name) && (wanted == SLICE || name.contains(&wanted));
    let cases = CASES.iter().filter(|(name, _)| is_wanted(name)).enumerate();
    let (cases, failed) = (Mutex::new(cases), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some((number, (name, run))) = crate::next(&cases) {
                    let began = Instant::now();
                    let result = crate::case(on.node, &format!("dozen-{number}"), *run);
                    println!("       {:6.1} s  {name}", began.elapsed().as_secs_f64());
                    if let Err(error) = result {
                        failed.lock().unwrap().push(format!("{name}: {error:#}"));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    ensure!(failed.is_empty(), "{}", failed.join("\n"));
    Ok(())
}

fn churn(on: &Installed<'_>) -> anyhow::Result<()> {
    let case = Case::new(on.node, "churn")?;
    let (times, failed) = come_and_go(&case, PODS, AT_ONCE, |_| ());
    ensure!(failed == 0, "{failed} pods failed");
    let running = times.last().context("times")?;
    report("apply_to_running_libvirt_p50_s", running[running.len() / 2])?;
    Ok(())
}

fn private_image(on: &Installed<'_>) -> anyhow::Result<()> {
    let registry = on.node.second_registry("busybox:1", &[busybox()], Some(("user", "word")))?;
    let at = registry.address;
    let case = Case::new(on.node, "private")?;
    let pod = |name: &str, more: &str| {
        case.pod(
            name,
            &format!("{more} containers: [{{name: c, image: '{at}/busybox:1', command: [sleep, '1000']}}]"),
        )
    };
    pod("without", "")?;
    case.event("Failed", "401")?;
    case.kubectl(&[
        "create",
        "secret",
        "docker-registry",
        "pull",
        &format!("--docker-server={at}"),
        "--docker-username=user",
        "--docker-password=word",
    ])?;
    pod("own", "imagePullSecrets: [{name: pull}],")?;
    case.ready("own")?;
    let patch = r#"{"imagePullSecrets":[{"name":"pull"}]}"#;
    case.kubectl(&["patch", "serviceaccount", "default", "-p", patch])?;
    pod("account", "")?;
    case.ready("account")?;
    case.kubectl(&["delete", "pods", "--all", "--timeout=120s"]).map(drop)
}

fn slow_image(on: &Installed<'_>) -> anyhow::Result<()> {
    let case = Case::new(on.node, "slow")?;
    slow_registry(&case)?;
    println!(
        "{NOTE}{}",
        case.kubectl(&["get", "events", "--field-selector=reason=PullingImage", "--no-headers"])?.trim()
    );
    case.kubectl(&["delete", "pods", "--all", "--timeout=120s"]).map(drop)
}

/// Output of kubectl that counts from one, a number in each line.
struct Counting {
    child: Child,
    seen: mpsc::Receiver<()>,
    reader: JoinHandle<anyhow::Result<u32>>,
}

impl Counting {
    /// Starts kubectl, and waits for the first line.
    fn start(on: &Installed<'_>, words: &[&str]) -> anyhow::Result<Counting> {
        let mut child = on.node.kubectl_command(words)?.stdout(Stdio::piped()).spawn()?;
        let mut lines = BufReader::new(child.stdout.take().context("stdout")?);
        let (sender, seen) = mpsc::channel();
        let reader = thread::spawn(move || -> anyhow::Result<u32> {
            let (mut line, mut count) = (String::new(), 0);
            while lines.read_line(&mut line)? > 0 {
                count += 1;
                ensure!(line.trim() == count.to_string(), "line {count} is {line:?}");
                line.clear();
                let _is_counted = sender.send(());
            }
            Ok(count)
        });
        let counting = Counting { child, seen, reader };
        counting.seen.recv_timeout(PATIENCE).context("the first line")?;
        Ok(counting)
    }

    /// Waits for one more line than those that came so far, whose number is returned.
    fn goes_on(&self) -> anyhow::Result<usize> {
        let before = self.seen.try_iter().count();
        self.seen.recv_timeout(PATIENCE).context("a further line")?;
        Ok(before)
    }

    /// Returns the number of lines and the exit code, when kubectl has ended.
    fn end(mut self) -> anyhow::Result<(u32, Option<i32>)> {
        let count = self.reader.join().map_err(|_| anyhow::anyhow!("panic"))??;
        Ok((count, self.child.wait()?.code()))
    }
}

fn upgrade(on: &Installed<'_>) -> anyhow::Result<()> {
    let script = "n=0; while [ ! -e /tmp/end ]; do n=$((n+1)); echo $n; sleep 0.1; done";
    let case = Case::of(on.node, "users");
    case.script("talks", "Never", script)?;
    case.ready("talks")?;
    let restarts = |pod: &str| -> anyhow::Result<Value> {
        Ok(case.get(&format!("pod/{pod}"))?["status"]["containerStatuses"][0]["restartCount"].clone())
    };
    let before = json!({ "p": restarts("p")?, "talks": restarts("talks")? });
    let exec =
        Counting::start(on, &["-n", "users", "exec", "p", "--", "sh", "-c", &format!("{script}; exit 7")])?;
    let logs = Counting::start(on, &["-n", "users", "logs", "-f", "talks"])?;
    // A copy that takes longer than the upgrade ends after it.
    let file = on.folder.join("copied");
    fs::write(&file, vec![7; COPIED])?;
    let file = file.to_string_lossy();
    let mut copy = on.node.kubectl_command(&["-n", "users", "cp", &file, "talks:/tmp/copied"])?.spawn()?;
    let libvirt = project("providers/libvirt/values.yaml");
    on.helm_upgrade(&["-f", &libvirt.to_string_lossy(), "-f", &on.values, "--set-string", "image.tag=2"])?;
    claims::upgrade(on)?;
    let during = [exec.goes_on()?, logs.goes_on()?];
    ensure!(copy.wait()?.success(), "kubectl cp failed");
    let copied =
        case.exec("talks", &["sh", "-c", "tr -d '\\007' </tmp/copied | wc -c; wc -c </tmp/copied"])?;
    ensure!(copied == format!("0\n{COPIED}\n"), "{copied:?}");
    for pod in ["p", "talks"] {
        case.exec(pod, &["touch", "/tmp/end"])?;
    }
    let (exec, logs) = (exec.end()?, logs.end()?);
    ensure!(exec.1 == Some(7), "exec: {exec:?}");
    ensure!(logs.1 == Some(0), "logs: {logs:?}");
    println!("{NOTE}lines of exec and logs: {} and {}, during the upgrade {during:?}", exec.0, logs.0);
    for pod in ["p", "talks"] {
        let (before, after) = (&before[pod], restarts(pod)?);
        ensure!(*before == after, "{before} restarts of {pod} before the upgrade, {after} after it");
    }
    case.kubectl(&["delete", "pod", "talks", "--timeout=120s"]).map(drop)
}

fn restart_libvirtd(on: &Installed<'_>) -> anyhow::Result<()> {
    let case = Case::new(on.node, "load")?;
    faults::make_pods(&case)?;
    let load = Load::start(&case)?;
    on.libvirtd.borrow_mut().kill()?;
    ensure!(case.exec("idle", &["echo", "lives"])? == "lives\n", "the pod does not answer");
    on.libvirtd.borrow_mut().begin()?;
    // The pod of another step has a VM, too.
    let machines = || Ok(on.libvirtd.borrow().domains()?.len() - 1);
    println!("{NOTE}{}", load.end(&case, Outcome::Unnoticed, machines)?);
    // The node has processors for no seventh peer pod.
    case.kubectl(&["delete", "pod", "idle", "--timeout=120s"])?;
    case.sleeper("after")?;
    on.node.kubectl(&["delete", "namespace", "load", "--timeout=240s"]).map(drop)
}

fn copy_folder(from: &Path, to: &Path) -> anyhow::Result<()> {
    succeed(Command::new("cp").arg("-r").args([from, to]))
}

impl Installed<'_> {
    /// Upgrades the release with these values, and waits until all programs run.
    fn helm_upgrade(&self, values: &[&str]) -> anyhow::Result<()> {
        let chart = project("deploy/chart");
        let chart = chart.to_string_lossy();
        self.node.cluster.helm(&[&["upgrade", "peerpod", &chart, "-n", NAMESPACE], values].concat())?;
        self.rolled_out()
    }

    /// Waits until all programs run. The rollout of the relay ends by itself with the values of this test alone.
    fn rolled_out(&self) -> anyhow::Result<()> {
        self.node.kubectl(&["-n", NAMESPACE, "rollout", "status", "ds/peerpod-relay", "--timeout=240s"])?;
        self.ready()
    }

    /// Waits until the relay is ready on the node, and the others run in their newest form.
    fn ready(&self) -> anyhow::Result<()> {
        let ready = "--for=jsonpath={.status.numberReady}=1";
        self.node.kubectl(&["-n", NAMESPACE, "wait", ready, "ds/peerpod-relay", "--timeout=240s"])?;
        for object in ["ds/peerpod-node", "deploy/peerpod-webhook", "deploy/peerpod-controller"] {
            self.node.kubectl(&["-n", NAMESPACE, "rollout", "status", object, "--timeout=240s"])?;
        }
        Ok(())
    }

    fn state(&self) -> String {
        let of = |words: &[&str]| self.node.kubectl(words).unwrap_or_else(|error| format!("{error:#}"));
        let pods = of(&["get", "pods", "-A", "-o", "wide"]);
        let events = of(&["get", "events", "-A", "--sort-by=.lastTimestamp"]);
        let ours = ["node", "relay", "webhook", "controller", "check"];
        let ours = ours.map(|part| (NAMESPACE, format!("app.kubernetes.io/component={part}")));
        let logs: Vec<_> = ours
            .into_iter()
            .chain(claims::SELECTORS.map(|(namespace, of)| (namespace, of.to_owned())))
            .map(|(namespace, selector)| {
                of(&["-n", namespace, "logs", "-l", &selector, "--all-containers", "--tail=15", "--prefix"])
            })
            .collect();
        format!("{pods}\n{events}\n{}", logs.join("\n"))
    }
}

fn succeed(command: &mut Command) -> anyhow::Result<()> {
    let done = command.output().with_context(|| format!("{command:?}"))?;
    ensure!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
    Ok(())
}
