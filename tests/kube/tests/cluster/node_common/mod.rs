//! Provides a cluster with one node that runs the real daemons, and plays its kubelet and shims.

use std::ffi::OsStr;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use peerpod_client::{Annotations, ShimClient};
use peerpod_kube::crds::PeerPod;
use peerpod_test_kube::{Cluster, Options, Rule, otlp_receiver, wait_for};
use peerpod_tests::{fresh_id, stop_in_time};
use peerpod_world::proxy::Proxy;
use peerpod_world::{Daemons, Pod, Settings, World, binary};
use serde_json::{Value, json};

pub(crate) const LIMIT: Duration = Duration::from_secs(90);
pub(crate) const NODE: &str = "worker-1";
pub(crate) const RESOURCE: &str = "kata.peerpods.io/vm";
pub(crate) const OWNER: &str = "kata.peerpods.io/caa-owner";
/// Namespace of Peerpod's own pods.
pub(crate) const OWN: &str = "peerpod-system";

pub(crate) struct Rig {
    pub(crate) cluster: Cluster,
    pub(crate) client: Client,
    pub(crate) world: World,
    pub(crate) daemons: Daemons,
    /// Forwards the API server's port into the node's namespace.
    _proxy: Proxy,
}

/// A sandbox as its shim sees it.
pub(crate) struct Running {
    pub(crate) id: String,
    pub(crate) shim: ShimClient,
    pub(crate) network: Pod,
}

/// Returns the rights of the node's service account, as the module's documentation lists them.
fn rights() -> Vec<Rule> {
    let rule = |group: &str, resources: &[&str], verbs: &[&str]| Rule {
        api_groups: Some(vec![group.to_owned()]),
        resources: Some(resources.iter().map(|resource| (*resource).to_owned()).collect()),
        verbs: verbs.iter().map(|verb| (*verb).to_owned()).collect(),
        ..Rule::default()
    };
    let ours = "confidentialcontainers.org";
    vec![
        peerpod_test_kube::cluster_uid(),
        rule("", &["nodes"], &["get", "list", "watch", "patch"]),
        rule("", &["nodes/status"], &["patch"]),
        rule("", &["pods"], &["list", "watch"]),
        rule("", &["events"], &["create", "patch"]),
        rule(ours, &["peerpods"], &["get", "list", "create", "patch", "delete"]),
        rule(ours, &["peerpods/status"], &["patch"]),
        rule("coordination.k8s.io", &["leases"], &["get", "create", "update"]),
        rule("authentication.k8s.io", &["tokenreviews"], &["create"]),
        rule("authorization.k8s.io", &["subjectaccessreviews"], &["create"]),
    ]
}

impl Rig {
    pub(crate) async fn start(settings: Settings) -> Rig {
        let cluster = Cluster::start(Options::default()).await.unwrap();
        let client = cluster.client().unwrap();
        let crds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/crds");
        cluster.kubectl(&["apply", "--server-side", "-f", crds.to_str().unwrap()]).unwrap();
        let established = ["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"];
        cluster.kubectl(&established).unwrap();
        for namespace in ["shop", OWN] {
            cluster.namespace(namespace).await.unwrap();
        }
        cluster.service_account(OWN, "peerpod-node", rights()).await.unwrap();
        let token = cluster.token(OWN, "peerpod-node", &[], None).await.unwrap();
        let kubeconfig = cluster.folder().join("node.kubeconfig");
        std::fs::write(&kubeconfig, cluster.kubeconfig(&token)).unwrap();
        let world = World::new().unwrap();
        // The node's namespace has its own loopback; the proxy makes the API server reachable there.
        let server = SocketAddr::from(([127, 0, 0, 1], cluster.port()));
        let proxy = Proxy::to_outside(world.node(), cluster.port(), server).unwrap();
        // A kubeconfig replaces the service account's token.
        let settings = settings
            .with_volume(cluster.folder())
            .set("kubernetes.kubeconfig", kubeconfig.to_str().unwrap())
            .set("cluster.node-name", NODE)
            .set("cluster.namespace", OWN)
            .set("cluster.pod-uid", "first-daemon")
            .set("cluster.capacity", 50);
        let daemons = Daemons::prepare(&world, settings).unwrap();
        let rig = Rig { cluster, client, world, daemons, _proxy: proxy };
        rig.apply(&json!({
            "apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "kata-remote"}, "handler": "kata-remote",
        }));
        rig.make_node();
        rig
    }

    /// Makes the Node object like a registering kubelet.
    pub(crate) fn make_node(&self) {
        self.apply(&json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}));
        let status =
            json!({"status": {"capacity": {"cpu": "4", "memory": "8Gi", "pods": "110"}}}).to_string();
        self.cluster
            .kubectl(&["patch", "node", NODE, "--subresource=status", "--type=merge", "-p", &status])
            .unwrap();
    }

    /// Scrapes the node's metrics port with Python's client, as from another machine. Returns status and text.
    pub(crate) fn scrape(&self, path: &str, token: Option<&str>) -> (u16, String) {
        let script = "import http.client, ssl, sys\n\
            to = http.client.HTTPSConnection('127.0.0.1', 15157, timeout=60, context=ssl._create_unverified_context())\n\
            to.request('GET', sys.argv[1], headers={'Authorization': 'Bearer ' + t for t in sys.argv[2:]})\n\
            answer = to.getresponse()\n\
            print(answer.status, answer.read().decode())\n";
        let mut words = vec!["-c", script, path];
        words.extend(token);
        let ask = || std::process::Command::new("python3").args(&words).output();
        let said = self.world.node().run(ask).unwrap().unwrap();
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        let said = String::from_utf8(said.stdout).unwrap();
        let (status, text) = said.split_once(' ').unwrap();
        (status.parse().unwrap(), text.to_owned())
    }

    pub(crate) async fn daemons(&mut self) {
        self.daemons.start_relay().unwrap();
        self.daemons.start_node().unwrap();
        self.daemons.ready().await.unwrap();
    }

    /// Starts a second node daemon, like a rolling update, with more arguments.
    pub(crate) fn second_daemon(&self, pod_uid: &str, more: &[&str]) -> Child {
        let config = self.daemons.config();
        let mut arguments = vec![
            OsStr::new("--config"),
            config.as_os_str(),
            OsStr::new("--cluster.pod-uid"),
            OsStr::new(pod_uid),
        ];
        arguments.extend(more.iter().map(OsStr::new));
        self.world.spawn(&binary("peerpod-node").unwrap(), &arguments, &self.daemons.log("node")).unwrap()
    }

    /// Starts a second relay, with another state-dir.
    pub(crate) fn second_relay(&self, state_dir: &Path, pod: &str) -> Child {
        let config = self.daemons.config();
        let arguments = [
            OsStr::new("--config"),
            config.as_os_str(),
            OsStr::new("--paths.state-dir"),
            state_dir.as_os_str(),
            OsStr::new("--relay.pod"),
            OsStr::new(pod),
        ];
        self.world.spawn(&binary("peerpod-relay").unwrap(), &arguments, &self.daemons.log("relay")).unwrap()
    }

    /// Runs `kubectl apply`.
    pub(crate) fn apply(&self, object: &Value) {
        let file = self.cluster.folder().join(format!("{}.json", fresh_id("object")));
        std::fs::write(&file, object.to_string()).unwrap();
        self.cluster.kubectl(&["apply", "-f", file.to_str().unwrap()]).unwrap();
    }

    /// Returns kubectl's output and prints it.
    pub(crate) fn show(&self, words: &[&str]) -> String {
        let seen = self.cluster.kubectl(words).unwrap();
        println!("$ kubectl {}\n{seen}", words.join(" "));
        seen
    }

    /// Makes a pod of the class on this node and returns its UID.
    pub(crate) fn pod(&self, name: &str) -> String {
        self.pod_on(NODE, name)
    }

    /// Makes a pod of the class on a node and returns its UID.
    pub(crate) fn pod_on(&self, node: &str, name: &str) -> String {
        self.apply(&json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "shop"},
            "spec": {
                "runtimeClassName": "kata-remote", "nodeName": node,
                "containers": [{
                    "name": "main", "image": "registry.example/main",
                    "resources": {"limits": {RESOURCE: "1"}, "requests": {RESOURCE: "1"}},
                }],
            },
        }));
        self.uid(name)
    }

    pub(crate) fn uid(&self, name: &str) -> String {
        self.cluster.kubectl(&["get", "pod", "-n", "shop", name, "-o", "jsonpath={.metadata.uid}"]).unwrap()
    }

    /// Deletes a pod with `--force`, because there is no kubelet to end its containers.
    pub(crate) fn delete_pod(&self, name: &str) {
        let words = ["delete", "pod", "-n", "shop", name, "--force", "--grace-period=0", "--wait=true"];
        self.cluster.kubectl(&words).unwrap();
    }

    pub(crate) async fn create(&self, name: &str) -> Running {
        let running = Running {
            id: fresh_id(name),
            shim: self.daemons.shim().await.unwrap(),
            network: self.world.pod().unwrap(),
        };
        self.create_again(&running, name).await.unwrap();
        running
    }

    /// Starts the collector's OTLP receiver on the node. Returns its process and the file of what it receives.
    pub(crate) fn otlp_receiver(&self) -> (Child, PathBuf) {
        let log = self.world.folder().join("otlp.log");
        let address = [OsStr::new("127.0.0.1:4318")];
        (self.world.spawn(&otlp_receiver().unwrap(), &address, &log).unwrap(), log)
    }

    pub(crate) async fn create_again(
        &self,
        running: &Running,
        name: &str,
    ) -> Result<PathBuf, peerpod_client::Error> {
        let netns = running.network.namespace().path();
        running.shim.create_vm(&running.id, Annotations::new("shop", name), &netns).await
    }

    pub(crate) async fn run(&self, name: &str) -> Running {
        let running = self.create(name).await;
        let started = tokio::time::timeout(LIMIT, running.shim.start_vm(&running.id)).await;
        started.unwrap_or_else(|_| panic!("{}", self.daemons.log_tails())).unwrap();
        running
    }

    pub(crate) async fn stop(&self, running: Running) {
        stop_in_time(&running.shim, &running.id).await.unwrap();
        self.daemons.gone(&running.id, LIMIT).await.unwrap();
    }

    pub(crate) async fn peerpods(&self) -> Vec<PeerPod> {
        let api: Api<PeerPod> = Api::namespaced(self.client.clone(), "shop");
        api.list(&ListParams::default()).await.unwrap().items
    }

    pub(crate) async fn peerpod(&self, pod: &str, sandbox: &str) -> Option<PeerPod> {
        let api: Api<PeerPod> = Api::namespaced(self.client.clone(), "shop");
        api.get_opt(&PeerPod::name_of(pod, sandbox)).await.unwrap()
    }

    /// Waits until there are exactly these PeerPods, by sandbox, each with its VM.
    pub(crate) async fn exactly(&self, expected: &[(&str, &Running)]) {
        let mut seen = Vec::new();
        let exact = wait_for("exactly the PeerPods of live sandboxes", LIMIT, async || {
            let objects = self.peerpods().await;
            let mut wanted = Vec::new();
            for (pod, running) in expected {
                let vm = vm_in(&self.daemons, &running.id);
                wanted.push((PeerPod::name_of(pod, &running.id), vm, Some("Running".to_owned())));
            }
            wanted.sort();
            seen = objects
                .into_iter()
                .map(|object| {
                    let phase =
                        object.status.and_then(|status| status.phase).map(|phase| format!("{phase:?}"));
                    (object.metadata.name.unwrap(), object.spec.instance_id, phase)
                })
                .collect();
            seen.sort();
            Ok((seen == wanted).then_some(()))
        })
        .await;
        exact.unwrap_or_else(|error| panic!("{error}: {seen:#?}\n{}", self.daemons.log_tails()));
    }

    pub(crate) async fn capacity(&self) -> Option<String> {
        let node = Api::<Node>::all(self.client.clone()).get_opt(NODE).await.unwrap()?;
        Some(node.status?.capacity?.get(RESOURCE)?.0.clone())
    }

    pub(crate) async fn owner(&self) -> Option<String> {
        let node = Api::<Node>::all(self.client.clone()).get_opt(NODE).await.unwrap()?;
        node.metadata.annotations?.get(OWNER).cloned()
    }

    pub(crate) async fn wait_capacity(&self, expected: Option<&str>) {
        let what = format!("capacity {expected:?}");
        let waited =
            wait_for(&what, LIMIT, async || Ok((self.capacity().await.as_deref() == expected).then_some(())));
        waited.await.unwrap_or_else(|error| panic!("{error}\n{}", self.daemons.log_tails()));
    }

    /// Waits for an Event of this reason for this pod UID, and returns its message and count.
    pub(crate) async fn event(&self, uid: &str, reason: &str) -> (String, u64) {
        let fields = format!("involvedObject.uid={uid},reason={reason}");
        let words = ["get", "events", "-n", "shop", "--field-selector", &fields, "-o", "json"];
        let what = format!("an Event {reason}");
        let waited = wait_for(&what, LIMIT, async || {
            let list: Value = serde_json::from_str(&self.cluster.kubectl(&words)?)?;
            let event = &list["items"][0];
            Ok(event["message"].as_str().map(|text| (text.to_owned(), event["count"].as_u64().unwrap_or(0))))
        });
        waited.await.unwrap_or_else(|error| panic!("{error}\n{}", self.daemons.log_tails()))
    }

    /// Returns `/readyz`.
    pub(crate) fn readyz(&self) -> Value {
        self.daemons.readyz().unwrap_or_default()
    }
}

/// Returns the VM of a sandbox in the ledger.
pub(crate) fn vm_in(daemons: &Daemons, id: &str) -> Option<String> {
    let entry = daemons.ledger().unwrap().into_iter().find(|entry| entry.id == id)?;
    entry.record["phase"]["vm"].as_str().map(str::to_owned)
}

/// Returns the VMs in the provider's folder.
pub(crate) fn vms(daemons: &Daemons) -> Vec<String> {
    let folder = std::fs::read_dir(daemons.state_dir().join("local/vms"));
    let names = folder.into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.map(|name| name.to_string_lossy().into_owned()).collect()
}

/// All changes of a namespace's PeerPods, in order.
pub(crate) struct History {
    seen: Arc<Mutex<Vec<PeerPod>>>,
    task: tokio::task::JoinHandle<()>,
}

impl History {
    pub(crate) async fn of(client: &Client) -> History {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let api: Api<PeerPod> = Api::namespaced(client.clone(), "shop");
        let (begun, is_begun) = tokio::sync::oneshot::channel();
        let task = tokio::spawn({
            let seen = seen.clone();
            async move {
                let mut begun = Some(begun);
                let mut events = watcher(api, watcher::Config::default()).default_backoff().boxed();
                while let Some(event) = events.next().await {
                    match event {
                        Ok(watcher::Event::Apply(object) | watcher::Event::InitApply(object)) => {
                            seen.lock().unwrap().push(object);
                        }
                        Ok(watcher::Event::InitDone) => drop(begun.take().map(|begun| begun.send(()))),
                        _ => {}
                    }
                }
            }
        });
        is_begun.await.unwrap();
        History { seen, task }
    }

    pub(crate) fn seen(&self) -> Vec<PeerPod> {
        self.seen.lock().unwrap().clone()
    }
}

impl Drop for History {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(crate) fn age(since: Instant) -> String {
    format!("{:.1} s", since.elapsed().as_secs_f64())
}
