//! Tests the life of a release on a real API server: beside Kata's own chart, its test, its upgrades, its removal.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client};
use peerpod_test_kube::{Cluster, Options, program, project, wait_for};
use serde_json::json;

use crate::chart::{NAMESPACE, a_node, install};

const LIMIT: Duration = Duration::from_secs(120);

/// A PeerPod whose VM still exists, and a RuntimeClass as kata-deploy makes it.
const BEFORE: &str = r#"
apiVersion: confidentialcontainers.org/v1alpha1
kind: PeerPod
metadata: {name: web-1, namespace: default}
spec: {cloudProvider: local, instanceID: local-1}
---
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata:
  name: kata-remote
  labels: {app.kubernetes.io/managed-by: kata-deploy}
  annotations: {meta.helm.sh/release-name: kata-deploy, meta.helm.sh/release-namespace: kata-system}
handler: kata-remote
scheduling: {nodeSelector: {katacontainers.io/kata-runtime: "true"}}
"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_release_is_tested_upgraded_and_removed_beside_katas() {
    let controllers = vec!["job-controller", "daemonset-controller"];
    let cluster = Cluster::start(Options { controllers, ..Options::default() }).await.unwrap();
    let client = cluster.client().unwrap();
    cluster.namespace(NAMESPACE).await.unwrap();
    let crds = project("deploy/crds");
    cluster.kubectl(&["apply", "--server-side", "-f", crds.to_str().unwrap()]).unwrap();
    let file = cluster.folder().join("before.yaml");
    fs::write(&file, BEFORE).unwrap();
    cluster.kubectl(&["apply", "-f", file.to_str().unwrap()]).unwrap();
    let words =
        ["create", "configmap", "-n", NAMESPACE, "peer-pods-cm", "--from-literal=PEERPOD_NODE_LEASE=20m"];
    cluster.kubectl(&words).unwrap();
    a_node(&client, "worker-1").await;

    let notes = install(&cluster, &["install"], &[]).unwrap();
    assert!(notes.contains("helm test peerpod -n peerpod-system"), "{notes}");
    assert!(notes.contains("The RuntimeClass kata-remote belongs to another release"), "{notes}");
    assert_eq!(class_owner(&cluster), "kata-deploy");

    a_changed_config_map_restarts_the_node_alone(&cluster, &client).await;
    the_test_pod_compares_kernels(&cluster, &client).await;

    let (job, done) = uninstalled(&cluster, &client, "Failed").await;
    assert_eq!(job.0, Some(1), "{}", job.1);
    assert!(job.1.contains("PeerPods exist: default/web-1;") && job.1.contains("--no-hooks"), "{}", job.1);
    assert!(done.is_err(), "{done:?}");
    // All objects are there. Helm upgrades the release again after a rollback to the same revision.
    cluster.kubectl(&["get", "daemonset", "-n", NAMESPACE, "peerpod-relay"]).unwrap();
    cluster.helm(&["rollback", "peerpod", "4", "-n", NAMESPACE]).unwrap();
    install(&cluster, &["upgrade"], &[]).unwrap();

    cluster.kubectl(&["delete", "peerpod", "-n", "default", "web-1"]).unwrap();
    let (job, done) = uninstalled(&cluster, &client, "Succeeded").await;
    assert_eq!(job.0, Some(0), "{}", job.1);
    done.unwrap();
    for kind in ["daemonsets", "jobs", "serviceaccounts", "roles"] {
        let left = cluster.kubectl(&["get", kind, "-n", NAMESPACE, "-o", "name"]).unwrap();
        assert!(!left.contains("peerpod"), "{left}");
    }
    assert_eq!(class_owner(&cluster), "kata-deploy", "it is not this release's to delete");

    // In the other order this release makes the class, and its upgrades keep it.
    cluster.kubectl(&["delete", "runtimeclass", "kata-remote"]).unwrap();
    install(&cluster, &["install"], &[]).unwrap();
    install(&cluster, &["upgrade"], &[]).unwrap();
    assert_eq!(class_owner(&cluster), "peerpod");
    cluster.helm(&["uninstall", "peerpod", "-n", NAMESPACE, "--no-hooks"]).unwrap();
}

fn class_owner(cluster: &Cluster) -> String {
    let path = "jsonpath={.metadata.annotations.meta\\.helm\\.sh/release-name}";
    cluster.kubectl(&["get", "runtimeclass", "kata-remote", "-o", path]).unwrap()
}

async fn a_changed_config_map_restarts_the_node_alone(cluster: &Cluster, client: &Client) {
    let sets: Api<DaemonSet> = Api::namespaced(client.clone(), NAMESPACE);
    let template = async |name: &str| sets.get(name).await.unwrap().spec.unwrap().template;
    let before = (template("peerpod-node").await, template("peerpod-relay").await);
    install(cluster, &["upgrade"], &[]).unwrap();
    assert_eq!((template("peerpod-node").await, template("peerpod-relay").await), before, "nothing changed");
    let changed = r#"{"data":{"PEERPOD_NODE_LEASE":"30m"}}"#;
    let words = ["patch", "configmap", "-n", NAMESPACE, "peer-pods-cm", "--type=merge", "-p", changed];
    cluster.kubectl(&words).unwrap();
    install(cluster, &["upgrade"], &[]).unwrap();
    assert_ne!(template("peerpod-node").await, before.0);
    assert_eq!(template("peerpod-relay").await, before.1, "a changed relay would be a new one");
}

/// Runs Helm beside the test, which plays kubelet meanwhile.
fn helm_beside(
    cluster: &Cluster,
    words: &'static [&'static str],
) -> std::thread::JoinHandle<anyhow::Result<String>> {
    let (folder, kubeconfig) = (cluster.folder().to_owned(), cluster.folder().join("admin.kubeconfig"));
    std::thread::spawn(move || peerpod_test_kube::helm_of(&folder, &kubeconfig, words))
}

async fn ends(client: &Client, pod: &Pod, phase: &str) {
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let status = json!({"status": {"phase": phase}});
    let name = pod.metadata.name.as_deref().unwrap();
    pods.patch_status(name, &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
}

async fn pod_of(client: &Client, component: &str) -> Pod {
    let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
    let of = ListParams::default().labels(&format!("app.kubernetes.io/component={component}"));
    wait_for(&format!("a pod of {component}"), LIMIT, async || {
        let found = pods.list(&of).await?.items;
        // Not one of an earlier attempt.
        let is_new =
            |pod: &Pod| pod.status.as_ref().is_none_or(|status| status.phase.as_deref() == Some("Pending"));
        Ok(found.into_iter().find(is_new))
    })
    .await
    .unwrap()
}

async fn the_test_pod_compares_kernels(cluster: &Cluster, client: &Client) {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let status = json!({"status": {"nodeInfo": {"bootID": boot.trim(), "architecture": "", "containerRuntimeVersion": "",
        "kernelVersion": "", "kubeProxyVersion": "", "kubeletVersion": "", "machineID": "", "operatingSystem": "",
        "osImage": "", "systemUUID": ""}}});
    let nodes: Api<k8s_openapi::api::core::v1::Node> = Api::all(client.clone());
    nodes.patch_status("worker-1", &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
    install(cluster, &["upgrade"], &[]).unwrap();
    let helm = helm_beside(cluster, &["test", "peerpod", "-n", NAMESPACE, "--timeout", "120s"]);
    let pod = pod_of(client, "test").await;
    ends(client, &pod, "Succeeded").await;
    helm.join().unwrap().unwrap();
    let spec = pod.spec.unwrap();
    assert_eq!(spec.runtime_class_name.as_deref(), Some("kata-remote"));
    let container = spec.containers.into_iter().next().unwrap();
    let command = container.command.unwrap();
    let variable = container.env.unwrap().into_iter().next().unwrap();
    let run = |boots: &str| {
        let mut script = Command::new(&command[0]);
        script.args(&command[1..]).env(&variable.name, boots).output().unwrap().status.code()
    };
    let boots = variable.value.unwrap();
    assert!(boots.contains(boot.trim()), "{boots}");
    assert_eq!((run(&boots), run("another-boot")), (Some(1), Some(0)), "this machine plays the VM");
}

/// Uninstalls the release with its check's real program under its real account. Returns the program's end, and Helm's.
async fn uninstalled(
    cluster: &Cluster,
    client: &Client,
    phase: &str,
) -> ((Option<i32>, String), anyhow::Result<String>) {
    let helm = helm_beside(cluster, &["uninstall", "peerpod", "-n", NAMESPACE, "--timeout", "120s"]);
    let pod = pod_of(client, "idle").await;
    let kubeconfig = cluster.kubeconfig_of(NAMESPACE, "peerpod-idle", None).await.unwrap();
    let done = idle(&kubeconfig);
    ends(client, &pod, phase).await;
    (done, helm.join().unwrap())
}

fn idle(kubeconfig: &Path) -> (Option<i32>, String) {
    let mut command = Command::new(program("peerpod-cluster").unwrap());
    let done = command.arg("idle").arg("--kubernetes.kubeconfig").arg(kubeconfig).output().unwrap();
    (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
}
