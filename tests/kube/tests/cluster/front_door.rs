//! Tests the command line with a kubeconfig: the real `peerpod` asks a real API server, beside a real controller.

use std::fs;
use std::io::Read as _;
use std::process::Command;
use std::time::Duration;

use flate2::read::GzDecoder;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Node, Pod, Secret};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use peerpod_kube::heartbeat;
use peerpod_test_kube::{program, wait_for};
use serde_json::{Value, from_value, json};

use super::controller_world::{HOME, LIMIT, World};

/// Text of all secrets of these tests; no output may contain it.
const CANARY: &str = "c4n4ry-5ecret";
const NS: &str = "front";

/// Runs the command line with all rights. Returns its exit code and output; errors are part of the output.
fn run(world: &World, words: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(program("peerpod").unwrap());
    command.args(words).current_dir(world.cluster.folder());
    command.arg("--kubeconfig").arg(world.cluster.folder().join("admin.kubeconfig"));
    let output = command.output().unwrap();
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
        " 7",
        "1 running",
        "failing (1):",
        "quota",
    ] {
        assert!(status.contains(part), "{part}: {status}");
    }
    println!("{status}");
    let list = read(world, &["list", "-o", "json"]);
    let ours: Vec<&Value> = list.as_array().unwrap().iter().filter(|one| one["node"] == "front-1").collect();
    assert_eq!(ours.len(), 2, "{list}");
    let described = ok(world, &["describe", "front/web"]);
    for part in ["vm          vm-web", "vm_made", "VMCreated", "node        front-1"] {
        assert!(described.contains(part), "{part}: {described}");
    }
    println!("{described}");
    assert_eq!(read(world, &["describe", "sandbox-web", "-o", "json"])["pod"], "front/web");
    let trace = ok(world, &["trace", "web"]);
    assert!(trace.contains("running    18.000 s     +6.000 s"), "{trace}");
    let (code, text) = run(world, &["describe", "nobody"]);
    assert!(code == Some(1) && text.contains("no PeerPod is of pod or sandbox nobody"), "{code:?} {text}");
    let (code, text) = run(world, &["console", "web"]);
    assert!(code == Some(1) && text.contains("run this on node front-1"), "{code:?} {text}");
    assert!(ok(world, &["version"]).contains("container node: v9.9.9: another version"));
    dump(world);

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
    pods.create(&post, &pod("peerpod-node-x", "r.example/peerpod:v9.9.9", ours)).await.unwrap();
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
    states(world).await;
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
    let event = json!({"metadata": {"name": "web.1"}, "involvedObject": {"kind": "Pod", "namespace": NS, "name": "web"},
        "reason": "VMCreated", "message": "VM vm-web made", "type": "Normal",
        "count": 1, "lastTimestamp": "2026-01-01T00:00:00Z", "source": {"component": "peerpod-node"}});
    events.create(&PostParams::default(), &from_value(event).unwrap()).await.unwrap();
    wait_for("the PeerPod's status", LIMIT, async || {
        let found = peerpods.get("web").await?;
        Ok(found.status.is_some().then(|| found.name_any()))
    })
    .await
    .unwrap();
}

fn dump(world: &World) {
    let contents = ok(world, &["sysdump", "--out", "dump.tar.gz"]);
    for part in [
        "peerpods.yaml",
        "pods.yaml",
        "nodes.yaml",
        "leases.yaml",
        "events.yaml",
        "configuration.yaml",
        "failures.txt",
    ] {
        assert!(contents.contains(part), "{part}: {contents}");
    }
    let file = fs::File::open(world.cluster.folder().join("dump.tar.gz")).unwrap();
    let mut unpacked = Vec::new();
    GzDecoder::new(file).read_to_end(&mut unpacked).unwrap();
    let text = String::from_utf8_lossy(&unpacked);
    let line = text.lines().find(|line| line.contains(CANARY));
    assert_eq!(line, None);
    for part in ["vm-web", "peerpod-node-x", "peerpod-controller", "front-1", "VMCreated", "level: info"] {
        assert!(text.contains(part), "the archive has no {part}");
    }
}
