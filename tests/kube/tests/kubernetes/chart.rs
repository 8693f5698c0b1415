//! The chart as users install it: its container image, its DaemonSets by kubelet under runc, and VMs of libvirt that boot
//! the minimal image with Kata's agent.

use std::cell::RefCell;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use nix::mount::{MsFlags, mount};
use peerpod_test_kube::{NODE, project, report};
use peerpod_world::{Libvirtd, World, binary, eventually_blocking};
use serde_json::{Value, json};

use crate::audit;
use crate::cases::Case;
use crate::images_common::{Image, Layer, PORT, Packing};
use crate::node::{ADDRESS, Layout, Node};

/// Namespace of the release.
const NAMESPACE: &str = "peerpod-system";
/// Time limit of a rollout, and of the start of a VM that is emulated.
const PATIENCE: Duration = Duration::from_secs(240);
/// Port of the private registry.
const PRIVATE: u16 = 5001;
/// Programs of the container image.
const PROGRAMS: [&str; 5] = ["peerpod-node", "peerpod-relay", "peerpod-cluster", "peerpod-csi", "peerpod"];

/// A node with libvirt, on which the chart is installed.
struct Installed<'a> {
    node: &'a Node,
    libvirtd: RefCell<Libvirtd>,
    folder: &'a Path,
    values: String,
    began: Instant,
}

type Step = fn(&Installed<'_>) -> anyhow::Result<()>;

/// Runs all steps; each builds on those before. Prints a line for each.
pub(crate) fn run(world: &World) -> anyhow::Result<bool> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let folder = world.folder().join("chart");
    fs::create_dir(&folder)?;
    let image = container_image(&folder)?;
    let images = [("peerpod:1", &image), ("peerpod:2", &image)];
    let layout = Layout::chart();
    let node = runtime.block_on(Node::start(world, &layout, &images)).context("start the node")?;
    let libvirtd = Libvirtd::start(world)?;
    // Where users have it.
    fs::create_dir_all("/run/libvirt")?;
    let sockets = libvirtd.socket();
    let sockets = sockets.parent().context("the socket's folder")?;
    mount(Some(sockets), "/run/libvirt", None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    let vm = vm_image(world, &folder)?;
    let values = folder.join("values.yaml");
    fs::write(&values, values_for(&folder, &vm).to_string())?;
    let values = values.to_string_lossy().into_owned();
    let folder = world.folder();
    let on =
        Installed { node: &node, libvirtd: RefCell::new(libvirtd), folder, values, began: Instant::now() };
    let steps: [(&str, Step); 9] = [
        ("helm install: all pods are ready", install),
        ("a pod with the runtime class and no other word runs in a VM", first_pod),
        ("an image of a private registry, by the secret of pod and of service account", private_image),
        ("helm upgrade under an open exec: no line is missing", upgrade),
        ("libvirtd is killed under a pod", restart_libvirtd),
        ("the node is drained", drain),
        ("no request was refused", |on| audit::check(on.node, on.folder)),
        ("helm uninstall", uninstall),
        ("nothing is left", nothing_is_left),
    ];
    for (name, step) in steps {
        let began = Instant::now();
        let result = step(&on);
        let took = began.elapsed().as_secs_f64();
        match result {
            Ok(()) => println!("ok     {took:6.1} s  chart: {name}"),
            Err(error) => {
                println!("FAILED {took:6.1} s  chart: {name}: {error:#}\n{}", on.state());
                node.keep_logs();
                report("chart_install_first_pod_failed", 1.0)?;
                return Ok(false);
            }
        }
    }
    report("chart_install_first_pod_failed", 0.0)?;
    Ok(true)
}

/// Returns the container image as deploy/Dockerfile makes it, of the test's programs without their symbols.
fn container_image(folder: &Path) -> anyhow::Result<Image> {
    let out = folder.join("dist");
    let built = binary("peerpod-dist")?;
    let from = built.parent().context("the programs' folder")?;
    let mut command = Command::new(&built);
    command.current_dir(project("")).arg("--from").arg(from).arg("--out").arg(&out);
    for program in PROGRAMS {
        command.arg("--program").arg(program);
    }
    succeed(&mut command)?;
    let root = out.join("rootfs");
    for program in PROGRAMS {
        succeed(Command::new("strip").arg(root.join("usr/bin").join(program)))?;
    }
    let mut tar = tar::Builder::new(Vec::new());
    tar.follow_symlinks(false);
    tar.append_dir_all("", &root)?;
    let layer = Layer::of(tar.into_inner()?, Packing::Plain);
    Ok(Image::configured(&[layer], |config| *config = json!({ "User": "65532:65532" })))
}

/// Builds the minimal image with Kata's agent, and returns its description.
fn vm_image(world: &World, folder: &Path) -> anyhow::Result<Value> {
    let target = binary("peerpod-image")?;
    let target = target.ancestors().nth(2).context("the target folder")?;
    let built = target.join("x86_64-unknown-linux-musl/image");
    let kata = world.folder().join("kata/pause_bundle");
    let agent = folder.join("kata-agent");
    fs::copy(kata.join("kata-agent"), &agent)?;
    succeed(
        Command::new(binary("peerpod-image")?)
            .current_dir(project(""))
            .args(["minimal", "--newest-if-gone", "--cache"])
            .arg(target.join("image/cache"))
            .arg("--guest")
            .arg(built.join("peerpod-guest"))
            .arg("--pull")
            .arg(built.join("peerpod-pull"))
            .arg("--kata-agent")
            .arg(agent)
            .arg("--pause-bundle")
            .arg(kata)
            .arg("--out")
            .arg(folder.join("vm")),
    )?;
    Ok(serde_json::from_slice(&fs::read(folder.join("vm/image.json"))?)?)
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
            "node": { "plain-http-registries": format!("{ADDRESS}:{PORT},{ADDRESS}:{PRIVATE}") },
            "provider": { "libvirt": {
                "pool": peerpod_world::POOL, "network": peerpod_world::NETWORK, "volume": null,
                "kernel": file("kernel"), "initrd": file("initrd"), "cmdline": vm["cmdline"],
            } },
        },
        // An upgrade replaces the relay, too.
        "relay": { "updateStrategy": "RollingUpdate" },
        "node": { "extraVolumes": volumes, "extraVolumeMounts": mounts },
        "controller": { "extraVolumes": volumes, "extraVolumeMounts": mounts },
    })
}

fn install(on: &Installed<'_>) -> anyhow::Result<()> {
    on.node.kubectl(&["label", "node", NODE, "katacontainers.io/kata-runtime=true"])?;
    let libvirt = project("providers/libvirt/values.yaml");
    on.node.cluster.install(NAMESPACE, &["-f", &libvirt.to_string_lossy(), "-f", &on.values])?;
    on.rolled_out()
}

fn first_pod(on: &Installed<'_>) -> anyhow::Result<()> {
    let case = Case::new(on.node, "users")?;
    case.sleeper("p")?;
    println!(
        "       {:6.1} s  from helm install to the first pod's readiness",
        on.began.elapsed().as_secs_f64()
    );
    let vms = on.libvirtd.borrow().domains()?;
    ensure!(vms.len() == 1, "{vms:?}");
    let kernel = case.exec("p", &["uname", "-r"])?;
    let ours = nix::sys::utsname::uname()?.release().to_string_lossy().into_owned();
    ensure!(kernel.trim() != ours, "the pod has the node's kernel {kernel}");
    Ok(())
}

fn private_image(on: &Installed<'_>) -> anyhow::Result<()> {
    let at = SocketAddr::from((ADDRESS, PRIVATE));
    let _registry = on.node.private_registry(at, ("user", "word"))?;
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

fn upgrade(on: &Installed<'_>) -> anyhow::Result<()> {
    let script = "n=0; while [ ! -e /tmp/end ]; do n=$((n+1)); echo $n; sleep 0.1; done; exit 7";
    let words = ["-n", "users", "exec", "p", "--", "sh", "-c", script];
    let mut child = on.node.kubectl_command(&words)?.stdout(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(child.stdout.take().context("stdout")?);
    let (first, seen) = mpsc::channel();
    let reader = thread::spawn(move || -> anyhow::Result<u32> {
        let (mut line, mut count) = (String::new(), 0);
        while lines.read_line(&mut line)? > 0 {
            count += 1;
            ensure!(line.trim() == count.to_string(), "line {count} is {line:?}");
            line.clear();
            let _is_heard = first.send(());
        }
        Ok(count)
    });
    seen.recv_timeout(PATIENCE).context("the first line")?;
    let libvirt = project("providers/libvirt/values.yaml");
    let chart = project("deploy/chart");
    on.node.cluster.helm(&[
        "upgrade",
        "peerpod",
        &chart.to_string_lossy(),
        "-n",
        NAMESPACE,
        "-f",
        &libvirt.to_string_lossy(),
        "-f",
        &on.values,
        "--set-string",
        "image.tag=2",
    ])?;
    on.rolled_out()?;
    let before = seen.try_iter().count();
    seen.recv_timeout(PATIENCE).context("a line after the upgrade")?;
    on.node.kubectl(&["-n", "users", "exec", "p", "--", "touch", "/tmp/end"])?;
    let count = reader.join().map_err(|_| anyhow::anyhow!("panic"))??;
    let status = child.wait()?;
    ensure!(status.code() == Some(7), "{status} after {count} lines");
    println!("                 {count} lines, {before} of them during the upgrade");
    let pod = on.node.read("/api/v1/namespaces/users/pods/p")?;
    let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
    ensure!(*restarts == 0, "{restarts} restarts");
    Ok(())
}

fn restart_libvirtd(on: &Installed<'_>) -> anyhow::Result<()> {
    let case = Case::of(on.node, "users");
    on.libvirtd.borrow_mut().kill()?;
    ensure!(case.exec("p", &["echo", "lives"])? == "lives\n", "the pod does not answer");
    on.libvirtd.borrow_mut().begin()?;
    case.sleeper("after")?;
    case.exec("p", &["true"])?;
    case.kubectl(&["delete", "pod", "after", "--timeout=120s"]).map(drop)
}

fn drain(on: &Installed<'_>) -> anyhow::Result<()> {
    on.node.kubectl(&["cordon", NODE])?;
    on.node.kubectl(&["-n", "users", "delete", "pod", "p", "--timeout=120s"])?;
    eventually_blocking("no VM is left", PATIENCE, || {
        on.libvirtd.borrow().domains().ok()?.is_empty().then_some(())
    })?;
    let peer_pods = on.node.kubectl(&["get", "peerpods", "-A", "-o", "name"])?;
    ensure!(peer_pods.is_empty(), "{peer_pods}");
    Ok(())
}

fn uninstall(on: &Installed<'_>) -> anyhow::Result<()> {
    on.node.cluster.helm(&["uninstall", "peerpod", "-n", NAMESPACE, "--wait"])?;
    on.node.kubectl(&["delete", "namespace", NAMESPACE, "--timeout=120s"]).map(drop)
}

fn nothing_is_left(on: &Installed<'_>) -> anyhow::Result<()> {
    for kind in
        ["runtimeclasses", "mutatingwebhookconfigurations", "validatingadmissionpolicies", "clusterroles"]
    {
        let names = on.node.kubectl(&["get", kind, "-o", "name"])?;
        let ours: Vec<_> =
            names.lines().filter(|name| name.contains("peerpod") || name.contains("kata")).collect();
        ensure!(ours.is_empty(), "{ours:?}");
    }
    let rules = String::from_utf8(Command::new("nft").args(["list", "tables"]).output()?.stdout)?;
    ensure!(!rules.contains("peerpod"), "{rules}");
    let sockets = Command::new("find").args(["/run/peerpod", "-type", "s"]).output()?.stdout;
    ensure!(sockets.is_empty(), "{}", String::from_utf8_lossy(&sockets));
    Ok(())
}

impl Installed<'_> {
    fn rolled_out(&self) -> anyhow::Result<()> {
        for object in
            ["ds/peerpod-relay", "ds/peerpod-node", "deploy/peerpod-webhook", "deploy/peerpod-controller"]
        {
            self.node.kubectl(&["-n", NAMESPACE, "rollout", "status", object, "--timeout=240s"])?;
        }
        Ok(())
    }

    fn state(&self) -> String {
        let of = |words: &[&str]| self.node.kubectl(words).unwrap_or_else(|error| format!("{error:#}"));
        let pods = of(&["get", "pods", "-A", "-o", "wide"]);
        let events = of(&["get", "events", "-A", "--sort-by=.lastTimestamp"]);
        let logs: Vec<_> = ["node", "relay", "webhook", "controller"]
            .iter()
            .map(|part| {
                let selector = format!("app.kubernetes.io/component={part}");
                of(&["-n", NAMESPACE, "logs", "-l", &selector, "--tail=15", "--prefix"])
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
