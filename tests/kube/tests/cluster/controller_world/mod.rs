//! Provides the fixtures of the controller's tests: a cluster, a cloud, and the program with the rights that its
//! documentation lists.

#![allow(unreachable_pub, missing_docs)] // a module of tests
pub mod cloud;

use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt};
use peerpod_kube::crds::{FINALIZER, PeerPod};
use peerpod_kube::heartbeat;
use peerpod_provider_api::IdempotencyKey;
use peerpod_provider_external::serve::Serving;
use peerpod_test_kube::{Cluster, Options, Process, Rule, program, wait_for};
use serde_json::{Value, from_value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use cloud::Cloud;

pub const LIMIT: Duration = Duration::from_secs(60);
/// Namespace of the controller, its Lease and the heartbeats.
pub const HOME: &str = "peerpod-system";
pub const CLUSTER_ID: &str = "test";

pub struct World {
    pub cluster: Cluster,
    pub client: Client,
    kubeconfig: PathBuf,
}

fn rule(group: &str, resources: &[&str], verbs: &[&str]) -> Rule {
    from_value(json!({"apiGroups": [group], "resources": resources, "verbs": verbs})).unwrap()
}

impl World {
    pub async fn start() -> World {
        let options = Options { controllers: vec!["garbage-collector-controller"], ..Options::default() };
        let cluster = Cluster::start(options).await.unwrap();
        let client = cluster.client().unwrap();
        let crds = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/crds");
        cluster.kubectl(&["apply", "--server-side", "-f", crds]).unwrap();
        let name = "peerpods.confidentialcontainers.org";
        cluster.kubectl(&["wait", "--for=condition=Established", "--timeout=60s", "crd", name]).unwrap();
        cluster.namespace(HOME).await.unwrap();
        // Exactly the rights in the module's documentation.
        let ours = "confidentialcontainers.org";
        let rules = vec![
            peerpod_test_kube::cluster_uid(),
            rule(ours, &["peerpods"], &["get", "list", "watch", "delete", "patch"]),
            rule(ours, &["peerpods/status"], &["patch"]),
            rule("", &["pods", "nodes"], &["get", "list"]),
            rule("coordination.k8s.io", &["leases"], &["get", "list", "create", "update", "delete"]),
            rule("events.k8s.io", &["events"], &["create", "patch"]),
        ];
        cluster.service_account(HOME, "controller", rules).await.unwrap();
        let token = cluster.token(HOME, "controller", &[], None).await.unwrap();
        let kubeconfig = cluster.folder().join("controller.kubeconfig");
        let mut options = std::fs::OpenOptions::new();
        let mut file = options.write(true).create_new(true).mode(0o600).open(&kubeconfig).unwrap();
        file.write_all(cluster.kubeconfig(&token).as_bytes()).unwrap();
        World { cluster, client, kubeconfig }
    }

    /// Makes a cloud with deletes of this duration, and VMs of this cluster's installation alone.
    pub fn unserved_cloud(&self, takes: Duration) -> Arc<Cloud> {
        Cloud::new(takes, self.cluster.uid().unwrap())
    }

    /// Makes a cloud and the one socket by which a controller reaches it.
    pub async fn cloud(&self, takes: Duration) -> (Arc<Cloud>, Serving) {
        let cloud = self.unserved_cloud(takes);
        let serving = cloud.serve(&self.socket("a"), "a").await;
        (cloud, serving)
    }

    pub fn socket(&self, via: &str) -> PathBuf {
        self.cluster.folder().join(format!("{via}.sock"))
    }

    /// Starts the program; `via` names its socket and its identity.
    pub async fn controller(&self, via: &'static str, settings: &[(&str, &str)]) -> Controller {
        let folder = self.cluster.folder();
        let mut words = vec!["controller".to_owned()];
        let socket = self.socket(via).display().to_string();
        let (kubeconfig, state) = (self.kubeconfig.display().to_string(), folder.display().to_string());
        for (key, value) in [
            ("kubernetes.kubeconfig", kubeconfig.as_str()),
            ("cluster.namespace", HOME),
            ("node.cluster-id", CLUSTER_ID),
            ("paths.state-dir", &state),
            ("provider.kind", "external"),
            ("provider.external.socket", &socket),
            ("controller.admin-listen", "127.0.0.1:0"),
            ("controller.identity", via),
            ("controller.lease-duration", "3s"),
            ("controller.lease-renew-deadline", "2s"),
            ("controller.lease-retry", "300ms"),
            // The pull-secrets service of the same process has its own tests.
            ("secrets.serve", "false"),
            ("log.format", "json"),
        ]
        .into_iter()
        .chain(settings.iter().copied())
        {
            words.push(format!("--{key}={value}"));
        }
        let name = if via == "a" { "controller-a" } else { "controller-b" };
        let mut process = Process::start(name, &program("peerpod-cluster").unwrap(), &words, folder).unwrap();
        let said = wait_for("the controller to run", LIMIT, async || {
            process.check()?;
            Ok(line(&process.said(), "controller runs"))
        })
        .await
        .unwrap();
        Controller { admin: said["admin"].as_str().unwrap().parse().unwrap(), process }
    }

    pub fn peerpods(&self, namespace: &str) -> Api<PeerPod> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Makes a PeerPod with the controller's finalizer, owned by this pod if one is given.
    pub async fn peerpod(&self, namespace: &str, name: &str, spec: Value, pod: Option<&Pod>) -> PeerPod {
        let owners: Vec<Value> = pod
            .iter()
            .map(|pod| {
                json!({"apiVersion": "v1", "kind": "Pod", "name": pod.name_any(), "uid": pod.uid(),
                    "controller": true, "blockOwnerDeletion": false})
            })
            .collect();
        let metadata = json!({"name": name, "finalizers": [FINALIZER], "ownerReferences": owners});
        let kind = json!({"apiVersion": "confidentialcontainers.org/v1alpha1", "kind": "PeerPod"});
        let peerpod = json!({"apiVersion": kind["apiVersion"], "kind": kind["kind"], "metadata": metadata, "spec": spec});
        self.peerpods(namespace).create(&PostParams::default(), &from_value(peerpod).unwrap()).await.unwrap()
    }

    pub async fn delete(&self, namespace: &str, name: &str) {
        self.peerpods(namespace).delete(name, &DeleteParams::default()).await.unwrap();
    }

    pub async fn gone(&self, namespace: &str, name: &str) {
        let peerpods = self.peerpods(namespace);
        wait_for(&format!("PeerPod {name} to go"), LIMIT, async || {
            let found = peerpods.get_opt(name).await?;
            Ok(found.is_none().then_some(()))
        })
        .await
        .unwrap();
    }

    /// Waits until the PeerPod's status has this reason for its continued existence.
    pub async fn stays(&self, namespace: &str, name: &str, reason: &str) {
        let peerpods = self.peerpods(namespace);
        wait_for(&format!("PeerPod {name} to report {reason}"), LIMIT, async || {
            let status = peerpods.get(name).await?.status.unwrap_or_default();
            let said = status.conditions.iter().any(|condition| {
                condition.type_ == "Deleted" && condition.status == "False" && condition.reason == reason
            });
            Ok(said.then_some(()))
        })
        .await
        .unwrap();
    }

    pub async fn finalizers(&self, namespace: &str, name: &str, finalizers: &[&str]) {
        let patch = Patch::Merge(json!({"metadata": {"finalizers": finalizers}}));
        self.peerpods(namespace).patch(name, &PatchParams::default(), &patch).await.unwrap();
    }

    /// Waits until the PeerPod has exactly these finalizers; returns it.
    pub async fn has_finalizers(&self, namespace: &str, name: &str, finalizers: &[&str]) -> PeerPod {
        let peerpods = self.peerpods(namespace);
        wait_for(&format!("PeerPod {name} to have the finalizers {finalizers:?}"), LIMIT, async || {
            let found = peerpods.get(name).await?;
            Ok((found.finalizers() == finalizers).then_some(found))
        })
        .await
        .unwrap()
    }

    pub async fn pod(&self, namespace: &str, name: &str, node: Option<&str>) -> Pod {
        let pod = json!({
            "metadata": {"name": name},
            "spec": {"nodeName": node, "containers": [{"name": "c", "image": "x"}]},
        });
        Api::namespaced(self.client.clone(), namespace)
            .create(&PostParams::default(), &from_value(pod).unwrap())
            .await
            .unwrap()
    }

    /// Deletes a pod at once, like a forced deletion.
    pub async fn delete_pod(&self, namespace: &str, name: &str) {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        pods.delete(name, &DeleteParams::default().grace_period(0)).await.unwrap();
    }

    pub async fn node(&self, name: &str) {
        let node: Node = from_value(json!({"metadata": {"name": name}})).unwrap();
        Api::all(self.client.clone()).create(&PostParams::default(), &node).await.unwrap();
    }

    /// Writes a node's heartbeat of this age.
    pub async fn beat(&self, node: &str, ago: Duration, lasts: i32) {
        let at = Timestamp::now() - SignedDuration::try_from(ago).unwrap();
        let spec = LeaseSpec {
            lease_duration_seconds: Some(lasts),
            renew_time: Some(MicroTime(at)),
            ..LeaseSpec::default()
        };
        let name = heartbeat::name_of(node);
        let metadata = ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() };
        let lease = Lease { metadata, spec: Some(spec) };
        let leases: Api<Lease> = Api::namespaced(self.client.clone(), HOME);
        let params = PatchParams::apply("test").force();
        leases.patch(&name, &params, &Patch::Apply(&lease)).await.unwrap();
    }

    /// Returns the reasons of Events about an object of this name.
    pub async fn events(&self, namespace: &str, about: &str) -> Vec<String> {
        let events: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        let all = events.list(&Default::default()).await.unwrap();
        let about = all.items.into_iter().filter(|event| {
            event.regarding.as_ref().is_some_and(|object| object.name.as_deref() == Some(about))
        });
        about.filter_map(|event| event.reason).collect()
    }

    pub async fn has_event(&self, namespace: &str, about: &str, reason: &str) {
        wait_for(&format!("the Event {reason} about {about}"), LIMIT, async || {
            Ok(self.events(namespace, about).await.iter().any(|one| one == reason).then_some(()))
        })
        .await
        .unwrap();
    }
}

/// One replica; drop kills it with SIGKILL.
pub struct Controller {
    pub process: Process,
    pub admin: SocketAddr,
}

impl Controller {
    async fn get(&self, path: &str) -> String {
        let mut stream = tokio::net::TcpStream::connect(self.admin).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    /// Returns its `/readyz`.
    pub async fn ready(&self) -> Value {
        let text = self.get("/readyz").await;
        serde_json::from_str(text.split_once("\r\n\r\n").unwrap().1).unwrap()
    }

    /// Returns the sum of all series with this prefix.
    pub async fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").await;
        let values =
            text.lines().filter(|line| line.starts_with(name)).filter_map(|line| line.rsplit_once(' '));
        values.map(|(_, value)| value.parse::<f64>().unwrap()).sum()
    }

    pub async fn leads(&self) {
        wait_for("the controller to lead", LIMIT, async || {
            Ok((self.metric("peerpod_controller_leading").await > 0.0).then_some(()))
        })
        .await
        .unwrap();
    }

    /// Returns whether its log contains this message.
    pub fn said(&self, what: &str) -> bool {
        line(&self.process.said(), what).is_some()
    }
}

fn line(said: &str, what: &str) -> Option<Value> {
    said.lines().filter(|line| line.contains(what)).find_map(|line| serde_json::from_str(line).ok())
}

/// Returns the key of this sandbox's attempt.
pub fn key(sandbox: &str, attempt: u32) -> IdempotencyKey {
    IdempotencyKey::derive(CLUSTER_ID, sandbox, attempt)
}
