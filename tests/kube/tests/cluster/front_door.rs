//! Tests the command line with a kubeconfig: the real `peerpod` asks a real API server, beside a real controller.

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use k8s_openapi::api::apps::v1::{ControllerRevision, DaemonSet};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Namespace, Node, Pod, Secret};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource as _, ResourceExt};
use peerpod_kube::crds::{PeerPodConfig, PeerpodVolume};
use peerpod_kube::heartbeat;
use peerpod_test_kube::{program, servers, wait_for};
use peerpod_test_reference::capture;
use serde_json::{Value, from_value, json};

use super::controller_world::{HOME, LIMIT, World};

/// Text of all secrets of these tests; no output may contain it.
const CANARY: &str = "c4n4ry-5ecret";
const NS: &str = "front";

/// The command line with all rights.
fn command(world: &World, words: &[&str]) -> Command {
    let mut command = Command::new(program("peerpod").unwrap());
    command.args(words).current_dir(world.cluster.folder());
    command.arg("--kubeconfig").arg(world.cluster.folder().join("admin.kubeconfig"));
    // Its folder has a kubectl, see `kubectl`.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{}:{path}", world.cluster.folder().join("bin").display()));
    command
}

/// Runs the command line. Returns its exit code and output; errors are part of the output.
fn run(world: &World, words: &[&str]) -> (Option<i32>, String) {
    let output = command(world, words).output().unwrap();
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!text.contains(CANARY), "{words:?}: {text}");
    (output.status.code(), text)
}

fn ok(world: &World, words: &[&str]) -> String {
    let (code, text) = run(world, words);
    assert_eq!(code, Some(0), "{words:?}: {text}");
    text
}

fn read(world: &World, words: &[&str]) -> Value {
    let text = ok(world, words);
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{words:?}: {error}: {text}"))
}

/// kubectl asks the program for the words of its plugin, by another name.
#[test]
fn kubectl_completes_the_words_of_its_plugin() {
    let folder = std::env::temp_dir().join(format!("peerpod-completes-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    for name in ["kubectl-peerpod", "kubectl_complete-peerpod"] {
        std::os::unix::fs::symlink(program("peerpod").unwrap(), folder.join(name)).unwrap();
    }
    let mut kubectl = Command::new(servers().unwrap());
    kubectl.args(["kubectl", "__complete", "peerpod", "st"]).env("PATH", &folder).env("HOME", &folder);
    let done = kubectl.output().unwrap();
    fs::remove_dir_all(&folder).unwrap();
    assert!(String::from_utf8_lossy(&done.stdout).contains("status\tShows whether"), "{done:?}");
}

/// Shows a cluster with a leader, a node and two PeerPods, of which one fails.
pub(super) async fn shows(world: &World) {
    // The heartbeats of earlier tests have lapsed.
    let leases: Api<Lease> = Api::namespaced(world.client.clone(), HOME);
    for lease in leases.list(&ListParams::default()).await.unwrap() {
        if heartbeat::node_of(&lease.name_any()).is_some() {
            leases.delete(&lease.name_any(), &DeleteParams::default()).await.unwrap();
        }
    }
    let (code, text) = run(world, &["status", "--wait", "--timeout", "10ms"]);
    assert!(code == Some(1) && text.contains("not ready"), "{code:?} {text}");
    let (_cloud, _serving) = world.cloud(Duration::from_millis(50)).await;
    let controller = world.controller("a", &[("controller.settle", "1h")]).await;
    controller.leads().await;
    world.cluster.namespace(NS).await.unwrap();
    objects(world).await;

    let status = ok(world, &["status", "--wait", "--timeout", "30s"]);
    for part in [
        "installation  ready",
        "controller    a, renewed",
        "front-1 ",
        " 7         behind",
        "peerpod-relay  1/1    1",
        "1 running",
        "failing (1):",
        "quota",
    ] {
        assert!(status.contains(part), "{part}: {status}");
    }
    capture("status of a cluster", "peerpod status", &status).unwrap();
    let list = read(world, &["list", "-o", "json"]);
    let ours: Vec<&Value> = list.as_array().unwrap().iter().filter(|one| one["node"] == "front-1").collect();
    assert_eq!(ours.len(), 2, "{list}");
    let described = ok(world, &["describe", "front/web"]);
    for part in ["vm          vm-web", "vm_made", "VMCreated", "node        front-1"] {
        assert!(described.contains(part), "{part}: {described}");
    }
    // The node posts it on the pod and on the PeerPod.
    assert_eq!(described.matches("VMCreated").count(), 1, "{described}");
    assert_eq!(read(world, &["describe", "sandbox-web", "-o", "json"])["pod"], "front/web");
    let trace = ok(world, &["trace", "web"]);
    assert!(trace.contains("running    18.000 s     +6.000 s"), "{trace}");
    let (code, text) = run(world, &["describe", "nobody"]);
    assert!(code == Some(1) && text.contains("no PeerPod is of pod or sandbox nobody"), "{code:?} {text}");
    asks_the_node(world).await;
    assert!(ok(world, &["version"]).contains("container node: v9.9.9: another version"));
    cleans_up_without_a_terminal(world).await;

    // A lapsed heartbeat is a fault.
    world.beat("front-1", Duration::from_secs(600), 40).await;
    let (code, text) = run(world, &["status"]);
    assert!(code == Some(1) && text.contains("lapsed, 10m ago"), "{code:?} {text}");
    for name in ["web", "broken"] {
        world.finalizers(NS, name, &[]).await;
        world.delete(NS, name).await;
        world.gone(NS, name).await;
    }
}

/// Asks the node by its pod for the console and for VMs without a record.
async fn asks_the_node(world: &World) {
    let (code, text) = run(world, &["console", "web"]);
    assert!(
        code == Some(1) && text.contains("node front-1 for the console: it has no running pod"),
        "{text}"
    );
    let (code, text) = run(world, &["orphans"]);
    assert!(code == Some(1) && text.contains("node front-1: it has no running pod"), "{text}");
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), NS);
    // It is not ready, and answers.
    let running = Patch::Merge(json!({"status": {"phase": "Running"}}));
    pods.patch_status("peerpod-node-x", &PatchParams::default(), &running).await.unwrap();
    // A tenant's pod with the same labels.
    let tenant: Api<Pod> = Api::namespaced(world.client.clone(), "default");
    let mut imitation = pods.get("peerpod-node-x").await.unwrap();
    imitation.metadata = ObjectMeta {
        name: imitation.metadata.name,
        labels: imitation.metadata.labels,
        ..ObjectMeta::default()
    };
    tenant.create(&PostParams::default(), &imitation).await.unwrap();
    tenant.patch_status("peerpod-node-x", &PatchParams::default(), &running).await.unwrap();
    kubectl(world);
    assert_eq!(ok(world, &["console", "web"]), "the kernel's line\n");
    let described = ok(world, &["describe", "web"]);
    for part in [
        "end of the console\n  the kernel's line",
        "fault       node, relay: it is away",
        "tunnel      vxlan, UDP port 4789",
        "vni         4242",
        "volumes     pvc-1 (vol-1) Attached\n",
    ] {
        assert!(described.contains(part), "{part}: {described}");
    }
    let orphans = read(world, &["orphans", "-o", "json"]);
    assert_eq!((&orphans[0]["node"], &orphans[0]["vm"]), (&"front-1".into(), &"vm-lost".into()), "{orphans}");
    let table = ok(world, &["orphans", "--dry-run"]);
    assert!(table.starts_with("NODE ") && table.contains("front-1  vm-lost"), "{table}");
    dump(world).await;
    fs::remove_dir_all(world.cluster.folder().join("bin")).unwrap();
    let (code, text) = run(world, &["console", "web"]);
    assert!(code == Some(1) && text.contains(&format!("{NS}/peerpod-node-x: ")), "{text}");
    world.delete_pod("default", "peerpod-node-x").await;
}

/// Makes a kubectl that answers like a node for the commands of the command line alone: no kubelet runs here. The part
/// `cases` of tests/kubernetes has a real one.
fn kubectl(world: &World) {
    let bin = world.cluster.folder().join("bin");
    fs::create_dir(&bin).unwrap();
    let begin = format!(
        "--kubeconfig={} exec --namespace {NS} peerpod-node-x --container node -- /usr/bin/peerpod",
        world.cluster.folder().join("admin.kubeconfig").display()
    );
    let socket = "--socket /run/peerpod/node-admin.sock";
    let own = json!({"pod": "front/web", "faults": ["node, relay: it is away"], "console": ["the kernel's line"],
        "facts": {"tunnel": "vxlan, UDP port 4789", "vni": "4242"}});
    fs::write(bin.join("described.json"), own.to_string()).unwrap();
    let files = bin.display();
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in\n\
         '{begin} describe sandbox-web -o json {socket}') cat {files}/described.json;;\n\
         '{begin} sysdump --out - {socket}') cat {files}/node.tar.gz;;\n\
         '{begin} console sandbox-web {socket}') echo \"the kernel's line\";;\n\
         '{begin} orphans -o json {socket}') echo '[{{\"vm\": \"vm-lost\", \"state\": \"running\"}}]';;\n\
         *) echo \"unexpected: $*\" >&2; exit 1;;\nesac\n"
    );
    fs::write(bin.join("kubectl"), script).unwrap();
    fs::set_permissions(bin.join("kubectl"), fs::Permissions::from_mode(0o755)).unwrap();
}

/// Makes the objects, with secrets everywhere.
async fn objects(world: &World) {
    world.node("front-1").await;
    let nodes: Api<Node> = Api::all(world.client.clone());
    let status = Patch::Merge(
        json!({"status": {"capacity": {"kata.peerpods.io/vm": "7"}, "allocatable": {"kata.peerpods.io/vm": "7"}}}),
    );
    nodes.patch_status("front-1", &PatchParams::default(), &status).await.unwrap();
    world.beat("front-1", Duration::ZERO, 600).await;
    let post = PostParams::default();
    let secrets: Api<Secret> = Api::namespaced(world.client.clone(), NS);
    let secret = json!({"metadata": {"name": "s"}, "stringData": {"k": format!("{CANARY}-secret")}});
    secrets.create(&post, &from_value(secret).unwrap()).await.unwrap();
    let pull = json!({"metadata": {"name": "p"}, "type": "kubernetes.io/dockerconfigjson",
        "stringData": {".dockerconfigjson": json!({"auths": {"r": {"auth": CANARY}}}).to_string()}});
    secrets.create(&post, &from_value(pull).unwrap()).await.unwrap();
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), NS);
    let pod = |name: &str, image: &str, labels: Value| -> Pod {
        from_value(json!({
            "metadata": {"name": name, "labels": labels, "annotations": {"a": format!("{CANARY}-annotation")}},
            "spec": {"nodeName": "front-1", "imagePullSecrets": [{"name": "p"}], "containers": [
                {"name": "node", "image": image, "args": [format!("--x={CANARY}")],
                 "env": [{"name": "E", "value": format!("{CANARY}-variable")}]}]},
        }))
        .unwrap()
    };
    let ours = json!({"app.kubernetes.io/name": "peerpod", "app.kubernetes.io/component": "node"});
    let mut daemon = pod("peerpod-node-x", "r.example/peerpod:v9.9.9", ours.clone());
    daemon.metadata.owner_references = Some(vec![daemon_set(&world.client, NS, &ours).await]);
    daemon.spec.as_mut().unwrap().service_account_name = Some("peerpod-node".to_owned());
    pods.create(&post, &daemon).await.unwrap();
    for name in ["web", "broken"] {
        let pod = pods.create(&post, &pod(name, "x", json!({}))).await.unwrap();
        let spec = json!({"cloudProvider": "external", "instanceID": format!("vm-{name}"),
            "sandboxID": format!("sandbox-{name}"), "nodeName": "front-1", "idempotencyKey": "k"});
        world.peerpod(NS, name, spec, Some(&pod)).await;
    }
    let maps: Api<ConfigMap> = Api::namespaced(world.client.clone(), HOME);
    let map = json!({"metadata": {"name": "c", "labels": {"app.kubernetes.io/name": "peerpod"}},
        "data": {"peerpod.yaml": format!("provider:\n  aws:\n    secret-key: |\n      {CANARY}\nlog: {{level: info}}\n")}});
    maps.create(&post, &from_value(map).unwrap()).await.unwrap();
    let configs: Api<PeerPodConfig> = Api::namespaced(world.client.clone(), NS);
    let config = json!({"metadata": {"name": "c", "annotations": {"a": format!("{CANARY}-config")}},
        "spec": {"nodeSelector": {"example.org/token": format!("{CANARY}-selector")}}});
    configs.create(&post, &from_value(config).unwrap()).await.unwrap();
    volume(world).await;
    relay(world).await;
    states(world).await;
}

/// Makes the volume of the pod `web`, with secrets among the attributes of its request.
async fn volume(world: &World) {
    let volumes: Api<PeerpodVolume> = Api::namespaced(world.client.clone(), NS);
    let request = json!({"volume_context": {"password": CANARY}, "secrets": {"k": CANARY}}).to_string();
    let spec = json!({"podName": "web", "podNamespace": NS, "volumeID": "vol-1", "volumeName": "pvc-1",
        "nodeName": "front-1", "wrapperNodeStageVolumeReq": request});
    let object = json!({"metadata": {"name": "v"}, "spec": spec});
    volumes.create(&PostParams::default(), &from_value(object).unwrap()).await.unwrap();
    let attached = json!({"type": "Attached", "status": "True", "reason": "Attached", "message": "m",
        "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let status = Patch::Merge(json!({"status": {"conditions": [attached]}}));
    volumes.patch_status("v", &PatchParams::default(), &status).await.unwrap();
}

/// Makes the DaemonSet of `peerpod-node` and the binding of its account. Returns the owner of its pods.
pub(super) async fn daemon_set(client: &Client, namespace: &str, ours: &Value) -> OwnerReference {
    let post = PostParams::default();
    let bindings: Api<ClusterRoleBinding> = Api::all(client.clone());
    let binding = json!({"metadata": {"name": "front-node", "labels": ours},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
        "subjects": [{"kind": "ServiceAccount", "namespace": namespace, "name": "peerpod-node"}]});
    bindings.create(&post, &from_value(binding).unwrap()).await.unwrap();
    let sets: Api<DaemonSet> = Api::namespaced(client.clone(), namespace);
    let set = json!({"metadata": {"name": "peerpod-node"}, "spec": {"selector": {"matchLabels": ours},
        "template": {"metadata": {"labels": ours}, "spec": {"containers": [{"name": "node", "image": "x"}]}}}});
    let set = sets.create(&post, &from_value(set).unwrap()).await.unwrap();
    set.controller_owner_ref(&()).unwrap()
}

/// Ends `peerpod test` like a terminal that closes: no line of it can be written, and its namespace is still deleted.
async fn cleans_up_without_a_terminal(world: &World) {
    let nodes: Api<Node> = Api::all(world.client.clone());
    let ready = json!({"status": {"conditions": [{"type": "PeerPodsReady", "status": "True"}]}});
    nodes.patch_status("front-1", &PatchParams::default(), &Patch::Merge(&ready)).await.unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut child = command(world, &["test"]).stdout(Stdio::null()).stderr(writer).spawn().unwrap();
    let namespaces: Api<Namespace> = Api::all(world.client.clone());
    let made = async || {
        let all = namespaces.list(&ListParams::default()).await?;
        anyhow::Ok(all.items.into_iter().find(|one| one.name_any().starts_with("peerpod-test-")))
    };
    let name = wait_for("the namespace", LIMIT, made).await.unwrap().name_any();
    assert!(Command::new("kill").args(["-HUP", &child.id().to_string()]).status().unwrap().success());
    let mut ending = wait_for("the removal of the namespace", LIMIT, async || {
        let found = made().await?;
        Ok(found.filter(|one| one.metadata.deletion_timestamp.is_some()))
    })
    .await
    .unwrap();
    // No controller of namespaces runs here.
    ending.spec.get_or_insert_default().finalizers = Some(Vec::new());
    let file = world.cluster.folder().join("namespace.json");
    fs::write(&file, serde_json::to_string(&ending).unwrap()).unwrap();
    let path = format!("/api/v1/namespaces/{name}/finalize");
    world.cluster.kubectl(&["replace", "--raw", &path, "-f", file.to_str().unwrap()]).unwrap();
    let ended = wait_for("the end of peerpod test", LIMIT, async || Ok(child.try_wait()?)).await.unwrap();
    assert_eq!(ended.code(), Some(130));
}

/// Makes a relay's DaemonSet with two revisions, and its pod of the first one.
async fn relay(world: &World) {
    let post = PostParams::default();
    let sets: Api<DaemonSet> = Api::namespaced(world.client.clone(), HOME);
    let ours = json!({"app.kubernetes.io/name": "peerpod", "app.kubernetes.io/component": "relay"});
    let set = json!({"metadata": {"name": "peerpod-relay", "labels": ours}, "spec": {
        "selector": {"matchLabels": ours}, "updateStrategy": {"type": "OnDelete"},
        "template": {"metadata": {"labels": ours}, "spec": {"containers": [{"name": "relay", "image": "r.example/peerpod:v9.9.9"}]}}}});
    let set = sets.create(&post, &from_value(set).unwrap()).await.unwrap();
    let status = json!({"status": {"currentNumberScheduled": 1, "desiredNumberScheduled": 1, "numberMisscheduled": 0,
        "numberReady": 1, "updatedNumberScheduled": 0}});
    sets.patch_status("peerpod-relay", &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
    let owner = json!([{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "peerpod-relay", "uid": set.uid(), "controller": true}]);
    let revisions: Api<ControllerRevision> = Api::namespaced(world.client.clone(), HOME);
    let of = |hash: &str| {
        let mut labels = ours.clone();
        labels["controller-revision-hash"] = hash.into();
        labels
    };
    for (number, hash) in [(1, "old"), (2, "new")] {
        let revision = json!({"metadata": {"name": format!("peerpod-relay-{hash}"), "labels": of(hash), "ownerReferences": owner},
            "revision": number, "data": {}});
        revisions.create(&post, &from_value(revision).unwrap()).await.unwrap();
    }
    let pod = json!({"metadata": {"name": "peerpod-relay-y", "labels": of("old"), "ownerReferences": owner},
        "spec": {"nodeName": "front-1", "containers": [{"name": "relay", "image": "r.example/peerpod:v9.9.9"}]}});
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), HOME);
    pods.create(&post, &from_value(pod).unwrap()).await.unwrap();
}

/// Writes the states as a node does, and an Event.
async fn states(world: &World) {
    let peerpods = world.peerpods(NS);
    let stage =
        |name: &str, took: i64| json!({"name": name, "at": "2026-01-01T00:00:00Z", "tookMilliseconds": took});
    let condition = |reason: &str, status: &str, message: &str| json!({"type": "Ready", "status": status, "reason": reason, "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let running = json!({"phase": "Running", "addresses": ["10.0.0.1"], "stages": [stage("vm_made", 12000), stage("running", 6000)],
        "conditions": [condition("Running", "True", "the VM's agent answers")]});
    let failed = json!({"phase": "Leaving", "conditions": [condition("Failed", "False", "the provider refused: quota")]});
    for (name, status) in [("web", running), ("broken", failed)] {
        let patch = Patch::Merge(json!({"status": status}));
        peerpods.patch_status(name, &PatchParams::default(), &patch).await.unwrap();
    }
    let events: Api<Event> = Api::namespaced(world.client.clone(), NS);
    for (number, kind) in ["Pod", "PeerPod"].into_iter().enumerate() {
        let event = json!({"metadata": {"name": format!("web.{number}")},
            "involvedObject": {"kind": kind, "namespace": NS, "name": "web"},
            "reason": "VMCreated", "message": "VM vm-web made", "type": "Normal",
            "count": 1, "lastTimestamp": "2026-01-01T00:00:00Z", "source": {"component": "peerpod-node"}});
        events.create(&PostParams::default(), &from_value(event).unwrap()).await.unwrap();
    }
    wait_for("the PeerPod's status", LIMIT, async || {
        let found = peerpods.get("web").await?;
        Ok(found.status.is_some().then(|| found.name_any()))
    })
    .await
    .unwrap();
}

/// Packs the half of a node that leaves secrets in it.
fn half_of_a_node(file: &Path) {
    let mut archive = tar::Builder::new(GzEncoder::new(fs::File::create(file).unwrap(), Compression::fast()));
    let console = format!("login\npassword={CANARY}-console\n");
    for (name, text) in [("node/readyz.txt", "ready"), ("sandboxes/sandbox-web.console.txt", &*console)] {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o600);
        archive.append_data(&mut header, format!("peerpod-sysdump/{name}"), text.as_bytes()).unwrap();
    }
    archive.into_inner().unwrap().finish().unwrap();
}

/// Collects the state with both halves of a node, and names another node that does not answer.
async fn dump(world: &World) {
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), NS);
    let mut silent = pods.get("peerpod-node-x").await.unwrap();
    silent.metadata = ObjectMeta {
        name: Some("peerpod-node-z".to_owned()),
        labels: silent.metadata.labels,
        owner_references: silent.metadata.owner_references,
        ..ObjectMeta::default()
    };
    silent.spec.as_mut().unwrap().node_name = Some("front-2".to_owned());
    pods.create(&PostParams::default(), &silent).await.unwrap();
    let running = Patch::Merge(json!({"status": {"phase": "Running"}}));
    pods.patch_status("peerpod-node-z", &PatchParams::default(), &running).await.unwrap();
    half_of_a_node(&world.cluster.folder().join("bin/node.tar.gz"));
    let contents = ok(world, &["sysdump", "--out", "dump.tar.gz"]);
    world.delete_pod(NS, "peerpod-node-z").await;
    for part in [
        "peerpods.yaml",
        "peerpodconfigs.yaml",
        "peerpodvolumes.yaml",
        "pods.yaml",
        " nodes.yaml",
        "runtimeclasses.yaml",
        "leases.yaml",
        "events.yaml",
        "configuration.yaml",
        "nodes/front-1/node/readyz.txt",
        "nodes/front-1/sandboxes/sandbox-web.console.txt",
        "nodes/front-2/no-answer.txt",
        "versions/peerpod.txt",
        "failures.txt",
        "peerpod: nodes/front-2: run peerpod sysdump in pod front/peerpod-node-z: ",
    ] {
        assert!(contents.contains(part), "{part}: {contents}");
    }
    let file = fs::File::open(world.cluster.folder().join("dump.tar.gz")).unwrap();
    let mut unpacked = Vec::new();
    GzDecoder::new(file).read_to_end(&mut unpacked).unwrap();
    let text = String::from_utf8_lossy(&unpacked);
    let line = text.lines().find(|line| line.contains(CANARY));
    assert_eq!(line, None);
    for part in [
        "vm-web",
        "peerpod-node-x",
        "peerpod-controller",
        "front-1",
        "VMCreated",
        "level: info",
        "pvc-1",
        "password=…",
    ] {
        assert!(text.contains(part), "the archive has no {part}");
    }
}
