//! Tests `peerpod drain` with a real API server, its Eviction API and a real controller. The test plays kubelet.

use std::process::Command;
use std::time::Duration;

use k8s_openapi::api::apps::v1::ReplicaSet;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use peerpod_test_kube::{program, wait_for};
use peerpod_test_reference::capture;
use serde_json::{Value, from_value, json};

use super::controller_world::{HOME, LIMIT, World};

const NS: &str = "drained";
const NODE: &str = "drain-1";
const OTHER: &str = "drain-2";

/// Result of a drain.
struct Drained {
    code: Option<i32>,
    read: Value,
    errors: String,
}

impl Drained {
    /// Returns state and cause of a pod.
    fn of(&self, pod: &str) -> (String, String) {
        let rows = self.read["pods"].as_array().unwrap();
        let row = rows.iter().find(|row| row["pod"] == format!("{NS}/{pod}"));
        let row = row.unwrap_or_else(|| panic!("{pod} is not in {}", self.read));
        let text = |name: &str| row[name].as_str().unwrap_or_default().to_owned();
        (text("state"), text("cause"))
    }
}

fn drain(world: &World, words: &[&str]) -> Drained {
    let output = command(world, &[words, &["-o", "json"]].concat()).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let read = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    Drained { code: output.status.code(), read, errors }
}

fn command(world: &World, words: &[&str]) -> Command {
    let mut command = Command::new(program("peerpod").unwrap());
    command.args(["drain", NODE]).args(words);
    command.arg("--kubeconfig").arg(world.cluster.folder().join("admin.kubeconfig"));
    command
}

fn owner_of_pods(set: &ReplicaSet) -> Value {
    json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": set.name_any(), "uid": set.uid(), "controller": true})
}

/// Makes a pod of a set with a VM of the node, or without a VM.
async fn pod(world: &World, name: &str, node: &str, owner: Option<&ReplicaSet>, has_vm: bool) -> Pod {
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), NS);
    let owners: Vec<Value> = owner.into_iter().map(owner_of_pods).collect();
    let pod = json!({"metadata": {"name": name, "labels": {"app": name}, "ownerReferences": owners},
        "spec": {"nodeName": node, "containers": [{"name": "c", "image": "x"}]}});
    pods.create(&PostParams::default(), &from_value(pod).unwrap()).await.unwrap();
    // A budget does not count before the pod runs.
    let status = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
    let pod = pods.patch_status(name, &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
    if has_vm {
        let spec = json!({"cloudProvider": "external", "instanceID": format!("vm-{name}"),
            "sandboxID": format!("sandbox-{name}"), "nodeName": node, "idempotencyKey": "k"});
        world.peerpod(NS, name, spec, Some(&pod)).await;
    }
    pod
}

/// Makes a pod of another RuntimeClass, which the configuration names, before its PeerPod.
fn without_a_peerpod(world: &World, set: &ReplicaSet) {
    let apply = |object: Value| {
        let file = world.cluster.folder().join("early.json");
        std::fs::write(&file, object.to_string()).unwrap();
        world.cluster.kubectl(&["create", "-f", file.to_str().unwrap()]).unwrap();
    };
    let ours = json!({"app.kubernetes.io/name": "peerpod", "app.kubernetes.io/component": "node"});
    apply(json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": {"name": "drain-node", "labels": ours},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
        "subjects": [{"kind": "ServiceAccount", "namespace": HOME, "name": "peerpod-node"}]}));
    apply(
        json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "d", "namespace": HOME, "labels": ours},
        "data": {"peerpod.yaml": "webhook: {runtime-classes: [drain-class]}"}}),
    );
    apply(
        json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "drain-class"},
        "handler": "kata-remote"}),
    );
    apply(json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "early", "namespace": NS, "ownerReferences": [owner_of_pods(set)]},
        "spec": {"nodeName": NODE, "runtimeClassName": "drain-class", "containers": [{"name": "c", "image": "x"}]}}));
}

async fn unschedulable(world: &World) -> bool {
    let node = Api::<Node>::all(world.client.clone()).get(NODE).await.unwrap();
    node.spec.unwrap_or_default().unschedulable == Some(true)
}

/// Permits this number of disruptions, like the controller of PodDisruptionBudgets.
async fn permit(world: &World, disruptions: u32) {
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(world.client.clone(), NS);
    let generation = budgets.get("web").await.unwrap().metadata.generation;
    let status = json!({"status": {"disruptionsAllowed": disruptions, "observedGeneration": generation,
        "currentHealthy": 1, "desiredHealthy": 0, "expectedPods": 1}});
    budgets.patch_status("web", &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
}

/// Ends the containers of an evicted pod, like kubelet.
async fn end(world: &World, name: &str) {
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), NS);
    wait_for(&format!("the eviction of {name}"), LIMIT, async || {
        let pod = pods.get(name).await?;
        Ok(pod.metadata.deletion_timestamp)
    })
    .await
    .unwrap();
    world.delete_pod(NS, name).await;
}

pub(super) async fn drains(world: &World) {
    let (cloud, _serving) = world.cloud(Duration::from_millis(50)).await;
    let controller = world.controller("a", &[("controller.settle", "1h")]).await;
    controller.leads().await;
    world.cluster.namespace(NS).await.unwrap();
    for node in [NODE, OTHER] {
        world.node(node).await;
        world.beat(node, Duration::ZERO, 600).await;
    }
    let sets: Api<ReplicaSet> = Api::namespaced(world.client.clone(), NS);
    let set = json!({"metadata": {"name": "set"}, "spec": {"selector": {"matchLabels": {"app": "set"}},
        "template": {"metadata": {"labels": {"app": "set"}}, "spec": {"containers": [{"name": "c", "image": "x"}]}}}});
    let set = sets.create(&PostParams::default(), &from_value(set).unwrap()).await.unwrap();
    for (name, node) in [("web", NODE), ("elsewhere", OTHER)] {
        cloud.make(&format!("vm-{name}"), Some(node), None);
        pod(world, name, node, Some(&set), true).await;
    }
    cloud.make("vm-bare", Some(NODE), None);
    pod(world, "bare", NODE, None, true).await;
    pod(world, "ordinary", NODE, None, false).await;
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(world.client.clone(), NS);
    let budget = json!({"metadata": {"name": "web"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}}});
    budgets.create(&PostParams::default(), &from_value(budget).unwrap()).await.unwrap();
    permit(world, 0).await;
    without_a_peerpod(world, &set);

    // A pod that nothing would start again keeps everything as it is.
    let kept = drain(world, &[]);
    assert_eq!(kept.code, Some(1), "{}", kept.errors);
    assert!(matches!(kept.of("bare"), (state, cause) if state == "kept" && cause.contains("--force")));
    assert!(!unschedulable(world).await);

    // A budget delays one pod, and no other.
    let blocked = tokio::task::block_in_place(|| drain(world, &["--force", "--timeout", "1ms"]));
    assert_eq!((blocked.code, &blocked.read["drained"]), (Some(1), &false.into()), "{}", blocked.errors);
    let (state, cause) = blocked.of("web");
    assert!(state == "blocked" && cause.contains("disruption budget"), "{state}: {cause}");
    assert_eq!(blocked.of("bare").0, "ending");
    assert!(blocked.errors.contains("it stays cordoned") && unschedulable(world).await);
    assert_eq!(blocked.of("early").0, "ending");
    for name in ["bare", "early"] {
        end(world, name).await;
    }

    permit(world, 1).await;
    let mut going = command(world, &["--force"]);
    let going = tokio::task::spawn_blocking(move || going.output());
    let (done, ()) = tokio::join!(going, end(world, "web"));
    let done = done.unwrap().unwrap();
    let text = String::from_utf8_lossy(&done.stdout);
    assert_eq!(done.status.code(), Some(0), "{text}{}", String::from_utf8_lossy(&done.stderr));
    capture("drain", "peerpod drain drain-1 --force", &text).unwrap();
    assert!(text.contains("kubectl uncordon drain-1") && text.matches("vm-web").count() == 1, "{text}");
    assert_eq!((cloud.has("vm-web"), cloud.has("vm-bare"), cloud.has("vm-elsewhere")), (false, false, true));
    let pods: Api<Pod> = Api::namespaced(world.client.clone(), NS);
    for name in ["ordinary", "elsewhere"] {
        let stays = pods.get(name).await.unwrap();
        assert_eq!(stays.metadata.deletion_timestamp, None, "{name}");
    }
    let none = drain(world, &[]);
    assert_eq!((none.code, &none.read["pods"]), (Some(0), &json!([])), "{}", none.errors);
    let away = command(world, &[]).args(["--timeout", "x"]).output().unwrap();
    assert_eq!(away.status.code(), Some(2));
    for name in ["ordinary", "elsewhere"] {
        pods.delete(name, &DeleteParams::default().grace_period(0)).await.unwrap();
    }
    world.gone(NS, "elsewhere").await;
}
