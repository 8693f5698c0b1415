//! Tests `peerpod check` on a node with the real daemons and a real API server: a healthy node has no fault, and each
//! thing that is broken on purpose is named with its remedy.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use peerpod_test_kube::{program, project, wait_for};
use peerpod_test_reference::capture;
use peerpod_world::Settings;
use serde_json::Value;

use super::by_node;
use super::node_common::{LIMIT, NODE, OWN, Rig};

const CONTAINERD: &str = "etc/containerd/config.toml";
const HANDLER: &str = "etc/containerd/conf.d/kata-remote.toml";
const SHIM: &str = "opt/kata/bin/containerd-shim-kata-v2";
const KATA: &str = "opt/kata/share/defaults/kata-containers/configuration-remote.toml";

/// Result of one check.
struct Report {
    items: Vec<Value>,
    code: Option<i32>,
}

impl Report {
    /// Returns cause and remedy of the items with this verdict.
    fn of(&self, verdict: &str) -> Vec<String> {
        let items = self.items.iter().filter(|item| item["verdict"] == verdict);
        items.map(|item| format!("{}: {} => {}", item["name"], item["cause"], item["remedy"])).collect()
    }

    /// Checks that this item failed, and that its remedy has these words.
    fn names(&self, name: &str, remedy: &str) {
        let found = self.items.iter().find(|item| item["name"] == name && item["verdict"] == "failed");
        let found = found.unwrap_or_else(|| panic!("{name} is not named: {:#?}", self.items));
        let shown = found["remedy"].as_str().unwrap();
        assert!(shown.contains(remedy), "{name}: {shown}");
        println!("✗ {name}: {} => {shown}", found["cause"]);
        assert_eq!(self.code, Some(1));
    }
}

/// The files of a node with Kata, below another root folder.
struct Node<'r> {
    rig: &'r Rig,
    root: PathBuf,
}

impl Node<'_> {
    fn write(&self, path: &str, text: &str) {
        let path = self.root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn kata(&self) -> String {
        let shipped = fs::read_to_string(project("deploy/kata/configuration-remote-rs.toml")).unwrap();
        let socket = self.rig.daemons.hypervisor_socket();
        shipped.replace("/run/peerpod/hypervisor.sock", socket.to_str().unwrap())
    }

    /// Writes everything as an installed node has it.
    fn heal(&self) {
        self.write(CONTAINERD, "version = 3\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n");
        self.write(HANDLER, &fs::read_to_string(project("deploy/kata/containerd-2.toml")).unwrap());
        self.write(SHIM, "ELF Kata Containers containerd shim (Rust): id: ");
        self.write(KATA, &self.kata());
    }

    fn admin(&self) -> PathBuf {
        self.rig.cluster.folder().join("admin.kubeconfig")
    }

    /// Runs the check on the node, as JSON.
    fn check(&self, kubeconfig: &Path, more: &[&str]) -> Report {
        self.report(self.command(kubeconfig, more))
    }

    fn report(&self, mut command: Command) -> Report {
        let output = self.rig.world.node().run(|| command.args(["-o", "json"]).output()).unwrap().unwrap();
        let read: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|why| panic!("{why}: {}", String::from_utf8_lossy(&output.stderr)));
        Report { items: read["items"].as_array().unwrap().clone(), code: output.status.code() }
    }

    /// Returns the text of a check, with the paths of a real node.
    fn text(&self) -> String {
        let mut command = self.command(&self.admin(), &[]);
        let output = self.rig.world.node().run(|| command.output()).unwrap().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let program = program("peerpod").unwrap();
        let [root, world, programs] = [&*self.root, self.rig.world.folder(), program.parent().unwrap()]
            .map(|folder| folder.to_str().unwrap());
        text.replace(root, "").replace(world, "").replace(programs, "/usr/bin")
    }

    fn command(&self, kubeconfig: &Path, more: &[&str]) -> Command {
        let mut command = Command::new(program("peerpod").unwrap());
        command.arg("check").arg("--config").arg(self.rig.daemons.config()).arg("--root").arg(&self.root);
        command.arg(format!("--kubernetes.kubeconfig={}", kubeconfig.display())).args(more);
        command.env("PEERPOD_TESTING", "1");
        command
    }

    fn runtime(&self, version: &str) {
        let empty = [
            "architecture",
            "bootID",
            "kernelVersion",
            "kubeProxyVersion",
            "kubeletVersion",
            "machineID",
            "operatingSystem",
            "osImage",
            "systemUUID",
        ];
        let mut info: serde_json::Map<String, Value> =
            empty.iter().map(|key| ((*key).to_owned(), "x".into())).collect();
        info.insert("containerRuntimeVersion".to_owned(), format!("containerd://{version}").into());
        let status = serde_json::json!({"status": {"nodeInfo": info}}).to_string();
        let words = ["patch", "node", NODE, "--subresource=status", "--type=merge", "-p", &status];
        self.rig.cluster.kubectl(&words).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_check_names_each_fault_and_its_remedy() {
    let mut rig = Rig::start(Settings::none()).await;
    rig.daemons().await;
    rig.wait_capacity(Some("50")).await;
    let root = rig.world.folder().join("host");
    let node = Node { rig: &rig, root: root.clone() };
    node.heal();
    node.runtime("1.7.24");
    another_node(&rig, "worker-2", "127.0.0.1");
    let mut report = node.check(&node.admin(), &[]);
    // The condition follows the capacity.
    wait_for("a node without faults", LIMIT, async || {
        report = node.check(&node.admin(), &[]);
        Ok(report.of("failed").is_empty().then_some(()))
    })
    .await
    .unwrap_or_else(|error| panic!("{error}: {:#?}\n{}", report.of("failed"), rig.daemons.log_tails()));
    assert_eq!(report.code, Some(0));
    let warnings = report.of("warning");
    let known =
        |text: &String| text.contains("VM sizes are not enforced") || text.contains("kernel/localhost");
    assert!(warnings.iter().all(known), "{warnings:#?}");
    let text = node.text();
    capture("check of a healthy node", "peerpod check", &text).unwrap();
    assert!(text.contains("✓ kata/configuration") && text.contains(" 0 faults"), "{text}");
    // The relay's own answers, and the provider's by the node.
    for part in ["✓ network/path-mtu: full packets reach", "✓ network/other-nodes", "✓ provider/"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    peerpod_tests::report("check_items", report.items.len() as f64);

    account_of_the_chart(&node).await;
    closed_ways(&node).await;
    faults_of_the_files(&node);
    faults_of_the_cluster(&node);
    // Without faults of the daemons, whose number grows with the time.
    node.runtime("1.6.20");
    node.write(KATA, &node.kata().replace("experimental = [\"force_guest_pull\"]", "experimental = []"));
    capture("check with faults", "peerpod check", &node.text()).unwrap();
    node.heal();
    // Before an installation the daemons' ports are free.
    let report = node.check(&node.admin(), &["--pre"]);
    report.names("network/relay.listen", "set relay.listen to another one");
    report.names("network/node.admin-listen", "ss -ltnp");
    let libvirt =
        ["--provider.kind=libvirt", "--provider.libvirt.uri=qemu:///system?socket=/nonexistent/sock"];
    let report =
        node.check(&node.admin(), &[&libvirt[..], &["--provider.libvirt.volume=v", "--pre"]].concat());
    report.names("provider/libvirt", "docs/install-libvirt.md");

    rig.daemons.kill_relay().unwrap();
    let node = Node { rig: &rig, root };
    wait_for(
        "the node to miss its relay",
        LIMIT,
        async || Ok((rig.readyz()["ready"] == false).then_some(())),
    )
    .await
    .unwrap();
    let report = node.check(&node.admin(), &[]);
    report.names("daemons/hypervisor-socket", "start peerpod-relay");
    report.names("daemons/node relay", "log of peerpod-node");
    report.names("daemons/relay", "start peerpod-relay");
}

/// Checks with the rights of the chart's account alone: no item stays unchecked for want of a right.
async fn account_of_the_chart(node: &Node<'_>) {
    let cluster = &node.rig.cluster;
    let rules = fs::read_to_string(project("deploy/chart/files/rbac/check.yaml")).unwrap();
    cluster.service_account(OWN, "peerpod-check", serde_yaml::from_str(&rules).unwrap()).await.unwrap();
    let token = cluster.token(OWN, "peerpod-check", &[], None).await.unwrap();
    let kubeconfig = cluster.folder().join("check.kubeconfig");
    fs::write(&kubeconfig, cluster.kubeconfig(&token)).unwrap();
    let report = node.check(&kubeconfig, &["--account", &format!("{OWN}/peerpod-node")]);
    let failed = report.of("failed");
    assert!(failed.is_empty(), "{failed:#?}");
    let skipped = report.of("skipped");
    assert!(!skipped.iter().any(|item| item.contains("forbidden")), "{skipped:#?}");
}

/// Makes another node, whose address leads to the relay of the first one.
fn another_node(rig: &Rig, name: &str, address: &str) {
    rig.apply(&serde_json::json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}));
    let status = serde_json::json!({"status": {
        "addresses": [{"type": "InternalIP", "address": address}], "capacity": {"kata.peerpods.io/vm": "50"},
    }});
    let words = ["patch", "node", name, "--subresource=status", "--type=merge", "-p", &status.to_string()];
    rig.cluster.kubectl(&words).unwrap();
}

/// A firewall that drops TCP to one relay, refuses UDP to another one, and drops UDP of the node's own VMs.
const FIREWALL: &str = "table inet closed {\n chain in {\n type filter hook input priority -290\n\
    ip daddr 127.0.0.3 tcp dport 15151 drop\n ip daddr 127.0.0.4 udp dport 15151 reject\n\
    iifname pplocal0 udp dport 15151 drop\n}\n}";

/// Closes the ways to two other nodes, and from a VM to its node.
async fn closed_ways(node: &Node<'_>) {
    let rig = node.rig;
    rig.world.node().shell(&format!("nft -f - <<'EOF'\n{FIREWALL}\nEOF"), &[]).unwrap();
    for (name, address) in [("worker-3", "127.0.0.3"), ("worker-4", "127.0.0.4")] {
        another_node(rig, name, address);
    }
    rig.pod("closed");
    let running = rig.run("closed").await;
    by_node::seen(rig, "closed", &running.id).await;
    let report = node.check(&node.admin(), &[]);
    report.names("network/other-nodes", "open TCP and UDP 15151 and UDP 4789 between nodes and VMs");
    let warnings = report.of("warning").join("\n");
    for part in ["network/vms", "shop/closed: no probe came back", "open TCP and UDP 15151"] {
        assert!(warnings.contains(part), "{part}: {warnings}");
    }
    let failed = report.of("failed").join("\n");
    for closed in ["no way to TCP 127.0.0.3:15151 (", "UDP 127.0.0.4:15151 ("] {
        assert!(failed.contains(closed), "{closed}: {failed}");
    }
    assert!(!failed.contains("127.0.0.1:15151") && !failed.contains("TCP 127.0.0.4"), "{failed}");
    rig.stop(running).await;
    rig.delete_pod("closed");
    rig.cluster.kubectl(&["delete", "node", "worker-3", "worker-4"]).unwrap();
    rig.world.node().shell("nft delete table inet closed", &[]).unwrap();
}

/// Breaks the runtime's and Kata's files, one after another.
fn faults_of_the_files(node: &Node<'_>) {
    let admin = node.admin();
    let handler = fs::read_to_string(node.root.join(HANDLER)).unwrap();
    node.runtime("1.6.20");
    node.write(KATA, &node.kata().replace("experimental = [\"force_guest_pull\"]", "experimental = []"));
    let report = node.check(&admin, &[]);
    report.names("runtime/version", "link /usr/local/bin/containerd-shim-kata-remote-v2");
    report.names("kata/key runtime.experimental", "[\"force_guest_pull\"]");
    // The configuration of Kata's Go shim, which the Rust shim does not read.
    node.runtime("2.1.0");
    node.write(KATA, &fs::read_to_string(project("deploy/kata/configuration-remote-go.toml")).unwrap());
    node.write(HANDLER, &handler.replace("pod_annotations", "annotations"));
    let report = node.check(&admin, &["--tunnel.prot=4789"]);
    report.names("kata/key hypervisor.remote.hypervisor_socket", "configuration-remote-rs.toml");
    report.names("runtime/annotations", "io.katacontainers.*");
    report.names("configuration/settings", "peerpod config check");
    fs::remove_file(node.root.join(SHIM)).unwrap();
    node.check(&admin, &[]).names("kata/shim", "install Kata");
    node.write(HANDLER, &handler.replace("version = 3", "version = 2"));
    node.check(&admin, &[]).names("runtime/handler", "containerd-1.toml");
    node.write(HANDLER, "");
    node.check(&admin, &[]).names("runtime/handler", "ConfigMap peerpod-kata");
    node.heal();
}

/// Takes objects and rights of the cluster away.
fn faults_of_the_cluster(node: &Node<'_>) {
    let (admin, cluster) = (node.admin(), &node.rig.cluster);
    // The account of the check has not the rights of the node; another account may ask for that.
    let account = format!("{OWN}/peerpod-check");
    for (kubeconfig, more) in
        [(cluster.folder().join("check.kubeconfig"), &[][..]), (node.admin(), &["--account", &*account])]
    {
        let report = node.check(&kubeconfig, more);
        report.names("cluster/rights", "deploy/chart/files/rbac/node.yaml");
        let cause = report.of("failed").into_iter().find(|item| item.contains("cluster/rights"));
        assert!(cause.is_some_and(|cause| more.is_empty() || cause.contains(&account)), "{more:?}");
    }
    let away = fs::read_to_string(&admin).unwrap().replace(&format!(":{}", cluster.port()), ":1");
    let file = cluster.folder().join("away.kubeconfig");
    fs::write(&file, away).unwrap();
    node.check(&file, &[]).names("cluster/api-server", "correct the kubeconfig");
    // A pod without the token of its account.
    let config = node.root.join("empty.yaml");
    fs::write(&config, "{}\n").unwrap();
    let mut in_pod = Command::new(program("peerpod").unwrap());
    in_pod.arg("check").arg("--config").arg(&config).arg("--root").arg(&node.root);
    in_pod.env_remove("KUBECONFIG").env("KUBERNETES_SERVICE_HOST", "127.0.0.1").env("HOME", &node.root);
    node.report(in_pod).names("cluster/api-server", "mount its service account's token");
    cluster.kubectl(&["delete", "runtimeclass", "kata-remote"]).unwrap();
    cluster.kubectl(&["delete", "crd", "peerpodvolumes.confidentialcontainers.org"]).unwrap();
    let report = node.check(&admin, &[]);
    report.names("cluster/runtime-class", "runtimeClass.create");
    report.names("cluster/custom-resources", "peerpod-cluster crds");
}
