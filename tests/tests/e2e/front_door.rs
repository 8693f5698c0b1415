//! Tests the command line on a node: the real `peerpod` asks the real node and relay about a real sandbox.

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use flate2::read::GzDecoder;
use peerpod_client::ContainerSpec;
use peerpod_test_reference::capture;
use peerpod_tests::{PATIENCE, Sandbox, sample};
use peerpod_world::{Daemons, Settings, World, binary, eventually};
use serde_json::Value;

/// Text of all secrets of these tests; no output may contain it.
const CANARY: &str = "c4n4ry-5ecret";

/// The command line in the node's network namespace, with the admin socket of these daemons.
struct CommandLine<'w> {
    world: &'w World,
    daemons: &'w Daemons,
}

impl CommandLine<'_> {
    /// Runs a command. Returns its exit code and output; errors are part of the output.
    fn run(&self, words: &[&str]) -> (Option<i32>, String) {
        self.run_by(Command::new(binary("peerpod").unwrap()), words)
    }

    /// Runs a command of a program that is the command line, or starts it.
    fn run_by(&self, mut command: Command, words: &[&str]) -> (Option<i32>, String) {
        let socket = self.daemons.run_dir().join("node-admin.sock");
        command.args(words).arg("--socket").arg(socket);
        command.env("PEERPOD_PROVIDER_AZURE_CLIENT_SECRET", format!("{CANARY}-variable"));
        command.env("AWS_SECRET_ACCESS_KEY", format!("{CANARY}-environment"));
        let output = self.world.node().run(move || command.output()).unwrap().unwrap();
        let text =
            format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(!text.contains(CANARY), "{words:?}: {text}");
        (output.status.code(), text)
    }

    /// Runs a command that must succeed, and returns its output.
    fn ok(&self, words: &[&str]) -> String {
        let (code, text) = self.run(words);
        assert_eq!(code, Some(0), "{words:?}: {text}\n{}", self.daemons.log_tails());
        text
    }

    fn json(&self, words: &[&str]) -> Value {
        let text = self.ok(words);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{words:?}: {error}: {text}"))
    }
}

#[tokio::test]
async fn an_operator_sees_a_pod_and_its_vm_and_the_reasons_of_a_fault() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "seen").await.unwrap();
    {
        let line = CommandLine { world: &world, daemons: &daemons };
        eventually("the guest's report of its path", PATIENCE, async || {
            let described = line.ok(&["describe", &sandbox.id]);
            (described.contains(" in the VM, ") && described.contains(" between VM and node")).then_some(())
        })
        .await
        .unwrap();
        shows(&line, &sandbox.id);
        logs_are_in_one_order(&line, &sandbox.id).await;
        the_guests_figures_are_metrics(&line, &sandbox.id).await;
        changes_are_watched(&line).await;
        sandbox_with_secrets(&line, &sandbox).await;
    }
    // A VM without a record.
    daemons.kill_node().unwrap();
    let record = daemons.state_dir().join(format!("sandboxes/{}.json", sandbox.id));
    fs::rename(&record, world.folder().join("moved.json")).unwrap();
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
    let line = CommandLine { world: &world, daemons: &daemons };
    let orphans = line.json(&["orphans", "--dry-run", "-o", "json"]);
    assert_eq!(orphans.as_array().map(Vec::len), Some(1), "{orphans}");
    let (code, text) = line.run(&["describe", "seen"]);
    assert!(code == Some(1) && text.contains("this node has no sandbox seen"), "{code:?} {text}");

    daemons.kill_relay().unwrap();
    let line = CommandLine { world: &world, daemons: &daemons };
    eventually("the state names the missing relay", PATIENCE, async || {
        let (code, text) = line.run(&["status"]);
        (code == Some(1) && text.contains("peerpod-relay is away") && text.contains("not ready"))
            .then_some(())
    })
    .await
    .unwrap();
    let (code, text) = line.run(&["status", "--wait", "--timeout", "10ms"]);
    assert!(code == Some(1) && text.contains("not ready"), "{code:?} {text}");
}

fn shows(line: &CommandLine<'_>, id: &str) {
    let status = line.ok(&["status", "--wait"]);
    for part in ["ready", "1 running", "peerpod-node 0.", "provider     external", "guests dial  "] {
        assert!(status.contains(part), "{part}: {status}");
    }
    // The build's features decide that list.
    let (before, rest) = status.split_once("in this build: ").unwrap();
    let rest = rest.split_once(')').unwrap().1;
    let released = format!(
        "{before}in this build: local, alibabacloud, aws, azure, byom, gcp, ibmcloud, ibmcloud-powervs, libvirt, vsphere, external){rest}"
    );
    capture("status of a node", "peerpod status", &released).unwrap();
    let status = line.json(&["status", "-o", "json"]);
    assert_eq!(
        (&status["node"]["ready"], &status["relay"]["ready"]),
        (&true.into(), &true.into()),
        "{status}"
    );

    let list = line.ok(&["list"]);
    assert!(list.starts_with("POD ") && list.contains(&format!("default/{id}")), "{list}");
    let vm = line.json(&["list", "-o", "json"])[0]["vm"].as_str().unwrap().to_owned();
    assert!(list.contains(&vm), "{list}");
    let wide = line.ok(&["list", "-o", "wide"]);
    assert!(wide.lines().next().unwrap().contains("SANDBOX") && !list.contains("SANDBOX"), "{wide}");
    assert!(line.ok(&["list", "-o", "yaml"]).lines().any(|line| line.trim() == format!("sandbox: {id}")));

    let described = line.ok(&["describe", id]);
    for part in [
        "guest       connected from ",
        "netns ",
        "tunnel      vxlan, UDP port ",
        "vni ",
        "addresses ",
        "running",
        "end of the console",
        &vm,
    ] {
        assert!(described.contains(part), "{part}: {described}");
    }
    capture("describe", "peerpod describe seen", &described).unwrap();
    let by_pod = line.json(&["describe", &format!("default/{id}"), "-o", "json"]);
    assert_eq!(by_pod["sandbox"], id);
    let stages = by_pod["stages"].as_array().unwrap();
    assert!(stages.len() >= 5 && stages.last().unwrap()["name"] == "running", "{by_pod}");

    let trace = line.ok(&["trace", id]);
    assert_eq!(trace.lines().count(), stages.len() + 1, "{trace}");
    capture("trace", "peerpod trace seen", &trace).unwrap();
    assert!(line.ok(&["console", id]).contains("agent listens"));
    assert_eq!(line.json(&["orphans", "-o", "json"]), serde_json::json!([]));
    // A second provider on the node would share the network of the node's VMs.
    let config = line.world.folder().join("local.yaml");
    let text =
        serde_json::json!({"provider": {"kind": "local"}, "paths": {"run-dir": line.daemons.run_dir()}});
    fs::write(&config, text.to_string()).unwrap();
    let mut command = Command::new(binary("peerpod").unwrap());
    command.args(["provider", "check", config.to_str().unwrap()]);
    let refused = line.world.node().run(move || command.output()).unwrap().unwrap();
    let text = String::from_utf8_lossy(&refused.stdout);
    assert!(refused.status.code() == Some(2) && text.contains("peerpod-node runs here"), "{refused:?}");
    let version = line.ok(&["version"]);
    assert!(version.contains("peerpod-node on ") && version.contains("same version"), "{version}");

    let socket = line.daemons.run_dir().join("node-admin.sock");
    assert_eq!(fs::metadata(socket).unwrap().permissions().mode() & 0o777, 0o600);
}

async fn logs_are_in_one_order(line: &CommandLine<'_>, id: &str) {
    let files = ["node", "relay"].map(|daemon| line.daemons.log(daemon).display().to_string());
    let words = ["logs", id, "--file", &files[0], "--file", &files[1]];
    let text = eventually("lines of all four programs", PATIENCE, async || {
        let text = line.ok(&words);
        let has = |name: &str| text.lines().any(|line| line.starts_with(name));
        ["node ", "relay ", "guest ", "agent "].into_iter().all(has).then_some(text)
    });
    let text = text.await.unwrap();
    let times: Vec<&str> = text.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
    assert!(times.is_sorted() && times.len() > 10, "{text}");
    assert!(text.lines().all(|line| line.contains(id)), "{text}");
}

async fn the_guests_figures_are_metrics(line: &CommandLine<'_>, id: &str) {
    let of = format!(r#"{{namespace="default",pod="{id}""#);
    eventually("the guest's figures", PATIENCE, async || {
        let metrics = line.daemons.metrics("node").ok()?;
        let link = sample(&metrics, &format!("peerpod_node_vm_link_up{of}}}")).ok()?;
        let total = format!(r#"peerpod_node_vm_memory_bytes{of},kind="total"}}"#);
        (link == 1.0 && sample(&metrics, &total).ok()? > 0.0).then_some(())
    })
    .await
    .unwrap();
}

/// Follows the list while a second pod comes and goes.
async fn changes_are_watched(line: &CommandLine<'_>) {
    let socket = line.daemons.run_dir().join("node-admin.sock");
    let mut command = Command::new(binary("peerpod").unwrap());
    let file = line.world.folder().join("watched");
    command.args(["list", "-w", "--socket"]).arg(socket).stdout(fs::File::create(&file).unwrap());
    let mut watch = line.world.node().run(move || command.spawn()).unwrap().unwrap();
    let shows = async |text: &str| {
        let read =
            async || fs::read_to_string(&file).unwrap().lines().any(|line| line.contains(text)).then_some(());
        eventually(text, PATIENCE, read).await.unwrap();
    };
    shows("running").await;
    let second = Sandbox::start(line.world, line.daemons, "second").await.unwrap();
    let pod = format!("default/{}", second.id);
    shows(&pod).await;
    second.stop(line.daemons).await.unwrap();
    shows(&format!("{pod}  gone")).await;
    watch.kill().unwrap();
    watch.wait().unwrap();
}

/// Plants secrets everywhere on the node, and unpacks the archive.
async fn sandbox_with_secrets(line: &CommandLine<'_>, sandbox: &Sandbox) {
    let spec = ContainerSpec::new("secretive", &["sleep", "infinity"])
        .env(&format!("DATABASE={CANARY}-of-the-pod"))
        .annotation("example.org/note", &format!("{CANARY}-annotation"));
    sandbox.agent.create_container(&spec.request()).await.unwrap();
    let folder = line.world.folder();
    let config = folder.join("canary.yaml");
    let group = "/subscriptions/00000000-0000-0000-0000-000000000000/resourceGroups/g/providers";
    let id = "00000000-0000-0000-0000-000000000000";
    let azure = serde_json::json!({
        "subscription-id": id, "resource-group": "g", "region": "westeurope",
        "subnet-id": format!("{group}/Microsoft.Network/virtualNetworks/n/subnets/pods"),
        "image-id": format!("{group}/Microsoft.Compute/galleries/a/images/peerpod/versions/1.0.0"),
        "tenant-id": id, "client-id": id, "client-secret": format!("{CANARY}-file"),
    });
    let settings = serde_json::json!({
        "paths": {"state-dir": line.daemons.state_dir()}, "provider": {"kind": "azure", "azure": azure},
    });
    fs::write(&config, settings.to_string()).unwrap();
    let log = folder.join("canary.log");
    let lines = format!(
        "pull secret password={CANARY}-log\n{{\"message\":\"request\",\"env\":[\"A={CANARY}\"]}}\n\
         -----BEGIN PRIVATE KEY-----\n{CANARY}\n-----END PRIVATE KEY-----\n"
    );
    fs::write(&log, lines).unwrap();
    let ticket = ticket(&line.daemons.state_dir().join(format!("sandboxes/{}.json", sandbox.id)));
    let out = folder.join("dump.tar.gz");
    let files = ["node", "relay"].map(|daemon| line.daemons.log(daemon).display().to_string());
    let [config, log, out_text] = [&config, &log, &out].map(|path| path.display().to_string());
    let words = [
        "sysdump", "--out", &out_text, "--config", &config, "--file", &files[0], "--file", &files[1],
        "--file", &log,
    ];
    let (code, contents) = line.run_by(beside_kata(), &words);
    assert_eq!(code, Some(0), "{contents}");
    // The machine decides which programs have a version, and which files Kata has.
    let is_part =
        |line: &&str| line.starts_with(' ') && !["versions/", "kata/"].iter().any(|one| line.contains(one));
    let parts: Vec<&str> = contents.lines().filter(is_part).collect();
    capture("sysdump", "peerpod sysdump", &parts.join("\n")).unwrap();
    assert_eq!(fs::metadata(&out).unwrap().permissions().mode() & 0o777, 0o600);
    let (code, text) = line.run(&words);
    assert!(code == Some(1) && text.contains("remove it or name another"), "{code:?} {text}");

    let mut unpacked = Vec::new();
    GzDecoder::new(fs::File::open(&out).unwrap()).read_to_end(&mut unpacked).unwrap();
    let text = String::from_utf8_lossy(&unpacked);
    for secret in [CANARY, &*ticket] {
        assert!(
            !text.contains(secret),
            "{}",
            text.split(secret).next().unwrap_or_default().lines().next_back().unwrap_or_default()
        );
    }
    let network = format!("network/{}/addresses.txt", sandbox.id);
    for part in [
        "node/status.yaml",
        "relay/metrics.txt",
        "ledger-index.txt",
        "configuration.yaml",
        "failures.txt",
        "kata/opt-kata-share-defaults-kata-containers-configuration.toml",
        &network,
    ] {
        assert!(contents.contains(part), "{part}: {contents}");
    }
    for part in [
        &format!("sandboxes/{}.json", sandbox.id),
        "peerpod_node_",
        "agent listens",
        "eth0",
        "agent.log=debug x.token=…",
    ] {
        assert!(text.contains(part), "the archive has no {part}");
    }
    // As a cluster's sysdump asks for it.
    let socket = line.daemons.run_dir().join("node-admin.sock");
    let mut command = Command::new(binary("peerpod").unwrap());
    command.args(["sysdump", "--out", "-", "--socket"]).arg(socket);
    let output = line.world.node().run(move || command.output()).unwrap().unwrap();
    let mut unpacked = Vec::new();
    GzDecoder::new(&*output.stdout).read_to_end(&mut unpacked).unwrap();
    let text = String::from_utf8_lossy(&unpacked);
    assert!(text.contains("peerpod-sysdump/node/status.yaml") && !text.contains(&*ticket), "{text}");
}

/// Starts the command line on a machine whose Kata has a secret among the kernel's parameters.
fn beside_kata() -> Command {
    let folder = "/opt/kata/share/defaults/kata-containers";
    let script = format!(
        "mount -t tmpfs none /opt\nmkdir -p {folder}\n\
         echo 'kernel_params = \"agent.log=debug x.token={CANARY}-kernel quiet\"' > {folder}/configuration.toml\n\
         exec \"$@\"\n"
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-euc", &script, "sh"]).arg(binary("peerpod").unwrap());
    command
}

/// The secret of a ticket in a record; the user-data has the same one.
fn ticket(record: &Path) -> String {
    let record: Value = serde_json::from_slice(&fs::read(record).unwrap()).unwrap();
    let secret = record["ticket"]["secret"].as_str().map(str::to_owned);
    secret.unwrap_or_else(|| {
        panic!("the record has no ticket: {:?}", record.as_object().map(|r| r.keys().collect::<Vec<_>>()))
    })
}
