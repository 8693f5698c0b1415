//! Tests PeerPodConfig: the real controller, with the chart's own account and manifests, on a real API server with the
//! real controllers of DaemonSets and Deployments. The test plays the kubelet.

use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Binding, Pod};
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use peerpod_test_kube::{Cluster, Options, Process, program, wait_for};
use serde_json::{Value, from_value, json};

const LIMIT: Duration = Duration::from_secs(120);
const OWN: &str = "peerpod-system";

fn apply(cluster: &Cluster, object: &Value) {
    let file = cluster.folder().join("object.json");
    std::fs::write(&file, object.to_string()).unwrap();
    cluster.kubectl(&["apply", "-f", file.to_str().unwrap()]).unwrap();
}

fn get(cluster: &Cluster, kind: &str, name: &str) -> anyhow::Result<Value> {
    let text = cluster.kubectl(&["get", kind, "-n", OWN, name, "-o", "json", "--ignore-not-found"])?;
    Ok(if text.is_empty() { Value::Null } else { serde_json::from_str(&text)? })
}

/// Returns the `Ready` condition's status, reason and message.
fn ready(cluster: &Cluster, name: &str) -> (String, String, String) {
    let found = get(cluster, "peerpodconfig", name).unwrap();
    let condition = &found["status"]["conditions"][0];
    let text = |key: &str| condition[key].as_str().unwrap_or_default().to_owned();
    (text("status"), text("reason"), text("message"))
}

async fn until(cluster: &Cluster, name: &str, reason: &str, controller: &Process) -> String {
    let mut seen = Default::default();
    let waited = wait_for(reason, LIMIT, async || {
        seen = ready(cluster, name);
        Ok((seen.1 == reason).then(|| seen.2.clone()))
    });
    waited.await.unwrap_or_else(|why| panic!("{why}: {seen:?}\n{}", controller.said()))
}

async fn object(cluster: &Cluster, kind: &str, name: &str) -> Value {
    wait_for(name, LIMIT, async || Ok(Some(get(cluster, kind, name)?).filter(|found| !found.is_null())))
        .await
        .unwrap()
}

/// Plays the kubelet for all pods of this component without a node.
async fn run_pods(cluster: &Cluster, component: &str, count: usize) {
    let pods: Api<Pod> = Api::namespaced(cluster.client().unwrap(), OWN);
    let of = ListParams::default().labels(&format!("app.kubernetes.io/component={component}"));
    let what = format!("{count} pods of {component}");
    let all = wait_for(&what, LIMIT, async || {
        let all = pods.list(&of).await?.items;
        Ok((all.len() == count).then_some(all))
    });
    for pod in all.await.unwrap() {
        let name = pod.metadata.name.unwrap();
        if pod.spec.unwrap().node_name.is_none() {
            let to: Binding = from_value(json!({
                "metadata": {"name": name}, "target": {"apiVersion": "v1", "kind": "Node", "name": "worker-1"},
            }))
            .unwrap();
            let _: Value =
                pods.create_subresource("binding", &name, &PostParams::default(), &to).await.unwrap();
        }
        let ready = json!({"status": {"phase": "Running", "conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}});
        pods.patch_status(&name, &PatchParams::default(), &Patch::Merge(&ready)).await.unwrap();
    }
}

async fn start(cluster: &Cluster, who: &Path) -> Process {
    let config = cluster.kubectl(&[
        "get",
        "configmap",
        "-n",
        OWN,
        "peerpod-config",
        "-o",
        "jsonpath={.data.peerpod\\.yaml}",
    ]);
    let file = cluster.folder().join("peerpod.yaml");
    std::fs::write(&file, config.unwrap()).unwrap();
    let words = [
        "controller".to_owned(),
        format!("--config={}", file.display()),
        format!("--kubernetes.kubeconfig={}", who.display()),
        format!("--cluster.namespace={OWN}"),
        format!("--paths.state-dir={}", cluster.folder().join("state").display()),
        "--controller.admin-listen=127.0.0.1:0".to_owned(),
        "--controller.identity=one".to_owned(),
        "--secrets.serve=false".to_owned(),
    ];
    Process::start("peerpod-controller", &program("peerpod-cluster").unwrap(), &words, cluster.folder())
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_pod_config_becomes_daemon_sets_of_its_nodes() {
    let controllers = vec![
        "daemonset-controller",
        "deployment-controller",
        "replicaset-controller",
        "garbage-collector-controller",
    ];
    let cluster = Cluster::start(Options { controllers, ..Options::default() }).await.unwrap();
    let values = peerpod_test_kube::project("tests/fake/values.yaml");
    let set = ["--set", "rollout.mode=config", "--skip-schema-validation", "-f", values.to_str().unwrap()];
    cluster.install(OWN, &set).unwrap();
    assert!(get(&cluster, "daemonset", "peerpod-node").unwrap().is_null(), "the controller makes them");
    let class = || get(&cluster, "runtimeclass", "kata-remote").unwrap();
    let hooks =
        || get(&cluster, "mutatingwebhookconfiguration", "peerpod-webhook").unwrap()["webhooks"].clone();
    assert_eq!((class(), hooks()), (Value::Null, Value::Null), "no config wants peer pods");
    let who = cluster.kubeconfig_of(OWN, "peerpod-controller", None).await.unwrap();
    let mut controller = start(&cluster, &who).await;
    let config = |name: &str, spec: Value| {
        apply(
            &cluster,
            &json!({"apiVersion": "confidentialcontainers.org/v1alpha1", "kind": "PeerPodConfig",
            "metadata": {"name": name, "namespace": OWN}, "spec": spec}),
        );
    };
    config("gold", json!({"limit": "20", "nodeSelector": {"pool": "gold"}}));
    let said = until(&cluster, "gold", "NoNodes", &controller).await;
    assert!(said.contains("nodeSelector"), "{said}");
    apply(
        &cluster,
        &json!({"apiVersion": "v1", "kind": "Node",
        "metadata": {"name": "worker-1", "labels": {"pool": "gold"}}}),
    );

    let node = object(&cluster, "daemonset", "peerpod-node-gold").await;
    object(&cluster, "daemonset", "peerpod-relay-gold").await;
    let env = |set: &Value| set["spec"]["template"]["spec"]["containers"][0]["env"].clone();
    let has = |set: &Value, name: &str, value: &str| {
        env(set).as_array().unwrap().iter().any(|one| one["name"] == name && one["value"] == value)
    };
    assert!(has(&node, "PEERPOD_CLUSTER_CAPACITY", "20"), "{}", env(&node));
    assert_eq!(node["metadata"]["ownerReferences"][0]["name"], "gold");
    let made = object(&cluster, "runtimeclass", "kata-remote").await;
    assert_eq!(made["scheduling"]["nodeSelector"], json!({"pool": "gold"}));
    let condition = hooks()[0]["matchConditions"][0]["expression"].clone();
    assert!(condition.as_str().unwrap_or_default().contains("'kata-remote'"), "{}", hooks());

    until(&cluster, "gold", "NodesNotReady", &controller).await;
    run_pods(&cluster, "node", 1).await;
    run_pods(&cluster, "relay", 1).await;
    let said = until(&cluster, "gold", "WebhookNotReady", &controller).await;
    assert!(said.contains("no caBundle"), "{said}");
    let bundle = r#"[{"op":"add","path":"/webhooks/0/clientConfig/caBundle","value":"LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCk1BPT0KLS0tLS1FTkQgQ0VSVElGSUNBVEUtLS0tLQo="}]"#;
    cluster
        .kubectl(&["patch", "mutatingwebhookconfiguration", "peerpod-webhook", "--type=json", "-p", bundle])
        .unwrap();
    run_pods(&cluster, "webhook", 2).await;
    let said = until(&cluster, "gold", "Serving", &controller).await;
    assert!(said.contains("1 nodes"), "{said}");
    let found = get(&cluster, "peerpodconfig", "gold").unwrap();
    assert_eq!(
        (&found["status"]["setupCompleted"], &found["status"]["observedGeneration"]),
        (&json!(true), &found["metadata"]["generation"])
    );
    println!("{}", cluster.kubectl(&["get", "peerpodconfig,daemonset,runtimeclass", "-n", OWN]).unwrap());

    others_fields_survive(&cluster, &config, &has).await;
    impossible_values_are_reported(&cluster, &config, &controller).await;
    assert!(hooks()[0]["clientConfig"]["caBundle"].is_string(), "another owner has it, and it survives");

    cluster.kubectl(&["delete", "peerpodconfig", "-n", OWN, "gold"]).unwrap();
    wait_for("its objects to go", LIMIT, async || {
        let left = cluster.kubectl(&["get", "daemonset", "-n", OWN, "-o", "name"])?;
        Ok((!left.contains("gold") && class().is_null() && hooks().as_array().is_none_or(Vec::is_empty))
            .then_some(()))
    })
    .await
    .unwrap();
    refused(&cluster, r#"RuntimeClass "kata-remote" not found"#).await;
    config("gold", json!({"nodeSelector": {"pool": "gold"}}));
    object(&cluster, "runtimeclass", "kata-remote").await;
    // The webhook does not run here; a pod of the class is not admitted without it.
    refused(&cluster, "mwebhook.peerpods.io").await;

    somebody_elses_class_stays(&cluster, &controller).await;
    another_owners_class_is_left_alone(&cluster, &config, &controller).await;
    controller.check().unwrap();
    assert!(!controller.said().contains("forbidden"), "{}", controller.said());
}

/// Waits until a pod of the class is refused with this text.
async fn refused(cluster: &Cluster, words: &str) {
    let overrides = r#"--overrides={"spec":{"runtimeClassName":"kata-remote"}}"#;
    let run = ["run", "-n", "default", "pod", "--image=none", "--dry-run=server", overrides];
    let mut said = None;
    let waited = wait_for(words, LIMIT, async || {
        said = cluster.kubectl(&run).err().map(|why| why.to_string());
        Ok(said.as_ref().is_some_and(|said| said.contains(words)).then_some(()))
    });
    waited.await.unwrap_or_else(|why| panic!("{why}: {said:?}"));
}

/// Checks that a RuntimeClass with foreign annotations is kept after the last PeerPodConfig. The webhook then stays
/// registered, even through an upgrade.
async fn somebody_elses_class_stays(cluster: &Cluster, controller: &Process) {
    let class = ["kata-remote", "theirs=1"];
    cluster.kubectl(&[&["annotate", "runtimeclass"][..], &class].concat()).unwrap();
    cluster.kubectl(&["delete", "peerpodconfig", "-n", OWN, "--all"]).unwrap();
    wait_for("the controller to look", LIMIT, async || {
        Ok(controller.said().contains("others have a part in the RuntimeClass").then_some(()))
    })
    .await
    .unwrap();
    let values = peerpod_test_kube::project("tests/fake/values.yaml");
    let chart = peerpod_test_kube::project("deploy/chart");
    let words = ["upgrade", "peerpod", chart.to_str().unwrap(), "-n", OWN, "--set", "rollout.mode=config"];
    let values = ["--skip-schema-validation", "-f", values.to_str().unwrap()];
    cluster.helm(&[&words[..], &values].concat()).unwrap();
    assert!(!get(cluster, "runtimeclass", "kata-remote").unwrap().is_null());
    let hooks = get(cluster, "mutatingwebhookconfiguration", "peerpod-webhook").unwrap()["webhooks"].clone();
    assert_eq!(hooks.as_array().map(Vec::len), Some(1), "{hooks}");
}

/// Checks that a RuntimeClass that another release has made keeps its content, and that the status names it.
async fn another_owners_class_is_left_alone(
    cluster: &Cluster,
    config: &impl Fn(&str, Value),
    controller: &Process,
) {
    cluster.kubectl(&["delete", "runtimeclass", "kata-remote"]).unwrap();
    let class = json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "kata-remote",
        "metadata": {"name": "kata-remote", "annotations": {"meta.helm.sh/release-name": "kata-deploy"}}});
    apply(cluster, &class);
    let before = get(cluster, "runtimeclass", "kata-remote").unwrap();
    config("silver", json!({"nodeSelector": {"pool": "silver"}}));
    object(cluster, "daemonset", "peerpod-node-silver").await;
    let said = until(cluster, "silver", "NoNodes", controller).await;
    assert!(said.contains("RuntimeClass kata-remote has another owner"), "{said}");
    assert_eq!(get(cluster, "runtimeclass", "kata-remote").unwrap(), before);
}

/// Checks that foreign fields (a variable, an annotation) survive a changed limit and time, and that overwritten fields
/// of the controller are restored.
async fn others_fields_survive(
    cluster: &Cluster,
    config: &impl Fn(&str, Value),
    has: &impl Fn(&Value, &str, &str) -> bool,
) {
    let name = "peerpod-node-gold";
    cluster.kubectl(&["set", "env", "-n", OWN, "daemonset", name, "THEIRS=1"]).unwrap();
    cluster.kubectl(&["annotate", "daemonset", "-n", OWN, name, "theirs=2"]).unwrap();
    let relay = get(cluster, "daemonset", "peerpod-relay-gold").unwrap()["metadata"]["generation"].clone();
    config("gold", json!({"limit": "30", "nodeSelector": {"pool": "gold"}}));
    let both = async || {
        let set = get(cluster, "daemonset", name)?;
        let ours = has(&set, "PEERPOD_CLUSTER_CAPACITY", "30");
        let theirs = has(&set, "THEIRS", "1") && set["metadata"]["annotations"]["theirs"] == "2";
        assert!(theirs, "{set}");
        Ok((ours && set["spec"]["template"]["spec"]["nodeSelector"] == json!({"pool": "gold"})).then_some(()))
    };
    wait_for("the new limit", LIMIT, both).await.unwrap();
    let away = r#"{"spec":{"template":{"spec":{"nodeSelector":{"pool":"silver"}}}}}"#;
    cluster.kubectl(&["patch", "daemonset", "-n", OWN, name, "--type=merge", "-p", away]).unwrap();
    wait_for("our fields to come back", LIMIT, both).await.unwrap();
    let now = get(cluster, "daemonset", "peerpod-relay-gold").unwrap()["metadata"]["generation"].clone();
    assert_eq!(now, relay, "no relay changes with a node's settings");
}

async fn impossible_values_are_reported(
    cluster: &Cluster,
    config: &impl Fn(&str, Value),
    controller: &Process,
) {
    config("second", json!({"nodeSelector": {"pool": "gold"}}));
    let said = until(cluster, "second", "NodesTaken", controller).await;
    assert!(said.contains("worker-1") && said.contains("gold"), "{said}");
    assert!(get(cluster, "daemonset", "peerpod-node-second").unwrap().is_null());
    cluster.kubectl(&["delete", "peerpodconfig", "-n", OWN, "second"]).unwrap();

    config("typed", json!({"nodeSelector": {"pool": "none"}, "instanceType": "big"}));
    let said = until(cluster, "typed", "Invalid", controller).await;
    assert!(said.contains("instanceType"), "{said}");
    cluster.kubectl(&["delete", "peerpodconfig", "-n", OWN, "typed"]).unwrap();

    let literals = ["--from-literal=CLOUD_PROVIDER=x", "--from-literal=PODVM_INSTANCE_TYPE=x"];
    cluster.kubectl(&[&["create", "configmap", "-n", OWN, "old"][..], &literals].concat()).unwrap();
    config("old", json!({"nodeSelector": {"pool": "none"}, "configMapName": "old"}));
    let said = until(cluster, "old", "ForeignSettings", controller).await;
    assert!(said.contains("convert-caa"), "{said}");
    cluster.kubectl(&["delete", "peerpodconfig", "-n", OWN, "old"]).unwrap();
}
