//! Tests the chart's rights. Each role runs as the real program with its own service account and a token like a
//! kubelet's. It can do all its work, and nothing more.

mod volumes;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{Patch, PatchParams};
use peerpod_client::Annotations;
use peerpod_kube::crds::{PeerPod, Phase};
use peerpod_test_kube::{Cluster, Options, Process, program, wait_for};
use peerpod_tests::{fresh_id, stop_in_time};
use peerpod_world::proxy::Proxy;
use peerpod_world::{Daemons, Settings, World};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(120);
const OWN: &str = "peerpod-system";

fn apply(cluster: &Cluster, object: &Value) {
    let file = cluster.folder().join(format!("{}.json", fresh_id("object")));
    std::fs::write(&file, object.to_string()).unwrap();
    cluster.kubectl(&["apply", "-f", file.to_str().unwrap()]).unwrap();
}

fn pod(cluster: &Cluster, namespace: &str, name: &str, more: Value) {
    let mut spec = json!({"containers": [{"name": "c", "image": "x"}]});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    apply(
        cluster,
        &json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace}, "spec": spec}),
    );
}

/// Makes a PeerPod with the controller's finalizer, as the daemon on that node: the policy refuses any other writer.
async fn peerpod(cluster: &Cluster, name: &str, node: &str) {
    let who = cluster.kubeconfig_of(OWN, "peerpod-node", Some(&format!("node-{node}"))).await.unwrap();
    let file = cluster.folder().join(format!("{}.json", fresh_id("peerpod")));
    let object = json!({
        "apiVersion": "confidentialcontainers.org/v1alpha1", "kind": "PeerPod",
        "metadata": {"name": name, "namespace": "shop", "finalizers": ["peer.pod/finalizer"]},
        "spec": {"instanceID": format!("fake-{name}"), "nodeName": node},
    });
    std::fs::write(&file, object.to_string()).unwrap();
    as_who(cluster, &who, &["create", "-f", file.to_str().unwrap()]).unwrap();
}

/// Runs `kubectl` as that account.
fn as_who(cluster: &Cluster, who: &Path, words: &[&str]) -> anyhow::Result<String> {
    let flag = format!("--kubeconfig={}", who.display());
    cluster.kubectl(&[&[flag.as_str()][..], words].concat())
}

fn refused(cluster: &Cluster, who: &Path, words: &[&str], why: &str) {
    match as_who(cluster, who, words) {
        Ok(said) => panic!("{} was allowed: {said}", words.join(" ")),
        Err(error) => assert!(format!("{error:#}").contains(why), "{}: {error:#}", words.join(" ")),
    }
}

/// Starts a program with this kubeconfig and waits for this message in its log.
async fn start(cluster: &Cluster, role: &str, who: &Path, more: &[&str], says: &str) -> (Process, Value) {
    let mut words = vec![
        role.to_owned(),
        format!("--kubernetes.kubeconfig={}", who.display()),
        format!("--cluster.namespace={OWN}"),
        "--log.format=json".to_owned(),
    ];
    words.extend(more.iter().map(|word| (*word).to_owned()));
    let name = if role == "webhook" { "peerpod-webhook" } else { "peerpod-controller" };
    let mut process =
        Process::start(name, &program("peerpod-cluster").unwrap(), &words, cluster.folder()).unwrap();
    let said = wait_for(says, LIMIT, async || {
        process.check()?;
        let said = process.said();
        let line = said.lines().find(|line| line.contains(says));
        Ok(line.map(serde_json::from_str::<Value>).transpose()?)
    });
    let said = said.await.unwrap_or_else(|why| panic!("{why}\n{}", process.said()));
    (process, said)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_role_works_with_its_rights_and_has_no_others() {
    let cluster = Cluster::start(Options::default()).await.unwrap();
    let driver = "csi.drivers[0].namespace=shop,csi.drivers[0].nodeServiceAccount=driver-node,\
                  csi.drivers[0].controllerServiceAccount=driver-controller,csi.drivers[0].secretNamespaces={shop},\
                  csi.drivers[1].namespace=files,csi.drivers[1].nodeServiceAccount=driver-node,\
                  csi.drivers[1].controllerServiceAccount=shares-controller,csi.drivers[1].attaches=false";
    for namespace in ["shop", "files"] {
        cluster.namespace(namespace).await.unwrap();
    }
    cluster.install(OWN, &["--set", driver, "--set", "config.provider.kind=libvirt"]).unwrap();
    for node in ["worker-1", "worker-2"] {
        apply(&cluster, &json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}}));
        let status = r#"{"status":{"capacity":{"cpu":"4","memory":"8Gi","pods":"110"}}}"#;
        cluster
            .kubectl(&["patch", "node", node, "--subresource=status", "--type=merge", "-p", status])
            .unwrap();
    }
    for node in ["worker-1", "worker-2", "lost"] {
        pod(
            &cluster,
            OWN,
            &format!("node-{node}"),
            json!({"nodeName": node, "serviceAccountName": "peerpod-node"}),
        );
    }
    let of = async |account: &str, pod: Option<&str>| cluster.kubeconfig_of(OWN, account, pod).await.unwrap();
    let node = of("peerpod-node", Some("node-worker-1")).await;
    relay(&cluster, &of("peerpod-relay", None).await);
    let webhook = webhook(&cluster, &of("peerpod-webhook", None).await).await;
    let (controller, secrets) = controller(&cluster, &of("peerpod-controller", None).await).await;
    node_works(&cluster, &node, secrets, &controller).await;
    node_is_bounded(&cluster, &node).await;
    let unbound = of("peerpod-node", None).await;
    let words = ["annotate", "node", "worker-1", "a=b"];
    refused(&cluster, &unbound, &words, "must be bound to a pod on a node");
    drop((webhook, controller));
    volumes::works_and_is_bounded(&cluster).await;
}

/// Its pod has no token; even with a token the relay may do nothing.
fn relay(cluster: &Cluster, who: &Path) {
    for words in [
        &["get", "pods", "-A"][..],
        &["get", "secrets", "-n", OWN],
        &["get", "nodes"],
        &["get", "peerpods", "-A"],
        &["get", "configmaps", "-n", OWN],
    ] {
        refused(cluster, who, words, "forbidden");
    }
}

async fn webhook(cluster: &Cluster, who: &Path) -> Process {
    let more = [
        "--webhook.listen=127.0.0.1:0",
        "--webhook.admin-listen=127.0.0.1:0",
        "--webhook.certificates=self-managed",
        "--webhook.names=127.0.0.1",
    ];
    let (process, _) = start(cluster, "webhook", who, &more, "webhook answers").await;
    wait_for("the registration's caBundle", LIMIT, async || {
        let words = [
            "get",
            "mutatingwebhookconfiguration",
            "peerpod-webhook",
            "-o",
            "jsonpath={.webhooks[0].clientConfig.caBundle}",
        ];
        Ok((!cluster.kubectl(&words)?.is_empty()).then_some(()))
    })
    .await
    .unwrap_or_else(|why| panic!("{why}\n{}", process.said()));
    cluster.kubectl(&["get", "secret", "-n", OWN, "peerpod-webhook-ca"]).unwrap();
    cluster.kubectl(&["create", "secret", "generic", "-n", OWN, "another", "--from-literal=a=b"]).unwrap();
    for words in [
        &["get", "secrets", "-n", OWN][..],
        &["get", "secret", "-n", OWN, "another"],
        &["create", "secret", "generic", "-n", OWN, "one-more"],
        &["delete", "secret", "-n", OWN, "peerpod-webhook-ca"],
        &["get", "secrets", "-n", "shop"],
        &["get", "pods", "-A"],
        &["get", "mutatingwebhookconfigurations"],
        &["delete", "mutatingwebhookconfiguration", "peerpod-webhook"],
        &["get", "nodes"],
    ] {
        refused(cluster, who, words, "forbidden");
    }
    process
}

/// It leads, ends a PeerPod, and keeps the CA that nodes trust. `rollout` tests the PeerPodConfig part.
async fn controller(cluster: &Cluster, who: &Path) -> (Process, SocketAddr) {
    let state = format!("--paths.state-dir={}", cluster.folder().join("state").display());
    let more = [
        "--controller.admin-listen=127.0.0.1:0",
        "--controller.identity=one",
        "--provider.kind=fake",
        &state,
        "--controller.settle=1s",
        "--controller.sweep-every=1s",
        "--controller.node-gone-grace=1s",
        "--secrets.listen=127.0.0.1:0",
        "--secrets.names=127.0.0.1",
    ];
    heartbeat_of_long_ago(cluster);
    let (process, said) = start(cluster, "controller", who, &more, "pull secrets are given to nodes").await;
    peerpod(cluster, "old", "worker-1").await;
    let words = ["delete", "peerpod", "-n", "shop", "old", "--wait=true", "--timeout=90s"];
    cluster.kubectl(&words).unwrap_or_else(|why| panic!("{why}\n{}", process.said()));
    sweeps(cluster, &process).await;
    for line in process.said().lines() {
        assert!(!line.contains("forbidden"), "{line}");
    }
    for words in [
        &["get", "secrets", "-A"][..],
        &["get", "secrets", "-n", OWN],
        &["get", "secrets", "-n", "shop"],
        &["create", "secret", "generic", "-n", OWN, "one-more"],
        &["create", "configmap", "-n", OWN, "one-more"],
        &["delete", "secret", "-n", OWN, "another"],
        &["label", "node", "worker-1", "a=b"],
        &["delete", "node", "worker-1"],
        &["delete", "pod", "-n", OWN, "node-worker-1"],
        &["create", "configmap", "-n", "shop", "x"],
        // With rollout.mode: chart it needs no such right.
        &["get", "daemonsets", "-n", OWN],
        &["create", "clusterrolebinding", "x", "--clusterrole=cluster-admin", "--user=x"],
    ] {
        refused(cluster, who, words, "forbidden");
    }
    (process, said["address"].as_str().unwrap().parse().unwrap())
}

fn heartbeat_of_long_ago(cluster: &Cluster) {
    apply(
        cluster,
        &json!({
            "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": "peerpod-node-long-gone", "namespace": OWN},
            "spec": {"holderIdentity": "x", "leaseDurationSeconds": 40, "renewTime": "2020-01-01T00:00:00.000000Z"},
        }),
    );
}

/// Removes the remains of lost nodes: a PeerPod, and a heartbeat.
async fn sweeps(cluster: &Cluster, process: &Process) {
    peerpod(cluster, "lost", "lost").await;
    for (kind, namespace, name) in [("peerpod", "shop", "lost"), ("lease", OWN, "peerpod-node-long-gone")] {
        wait_for(&format!("{kind} {name} to go"), LIMIT, async || {
            let words = ["get", kind, "-n", namespace, name, "-o", "name", "--ignore-not-found"];
            Ok(cluster.kubectl(&words)?.is_empty().then_some(()))
        })
        .await
        .unwrap_or_else(|why| panic!("{why}\n{}", process.said()));
    }
}

/// Runs one pod's whole life on that node, with its pull secrets.
async fn node_works(cluster: &Cluster, who: &Path, secrets: SocketAddr, controller: &Process) {
    let world = World::new().unwrap();
    let outside = |port: u16| SocketAddr::from(([127, 0, 0, 1], port));
    // The node's namespace has its own loopback; proxies make both servers reachable there.
    let _api = Proxy::to_outside(world.node(), cluster.port(), outside(cluster.port())).unwrap();
    let _service = Proxy::to_outside(world.node(), secrets.port(), secrets).unwrap();
    let (ca, token) = (cluster.folder().join("secrets-ca.crt"), cluster.folder().join("secrets-token"));
    let words = ["get", "configmap", "-n", OWN, "peerpod-secrets-ca", "-o", "jsonpath={.data.ca\\.crt}"];
    std::fs::write(&ca, cluster.kubectl(&words).unwrap()).unwrap();
    let uid = ["get", "pod", "-n", OWN, "node-worker-1", "-o", "jsonpath={.metadata.uid}"];
    let uid = cluster.kubectl(&uid).unwrap();
    let bound = cluster.token(OWN, "peerpod-node", &["peerpod-secrets"], Some(("node-worker-1", &uid))).await;
    std::fs::write(&token, bound.unwrap()).unwrap();
    let text = |path: &PathBuf| path.to_str().unwrap().to_owned();
    let settings = Settings::none()
        .with_volume(cluster.folder())
        .set("kubernetes.kubeconfig", who.to_str().unwrap())
        .set("cluster.node-name", "worker-1")
        .set("cluster.namespace", OWN)
        .set("cluster.pod-uid", uid)
        .set("cluster.capacity", 7)
        .set("secrets.address", format!("127.0.0.1:{}", secrets.port()))
        .set("secrets.ca-file", text(&ca))
        .set("secrets.token-file", text(&token));
    let login = json!({"auths": {"r.example": {"auth": "dTpw"}}}).to_string();
    let literal = format!("--from-literal=.dockerconfigjson={login}");
    let kind = "--type=kubernetes.io/dockerconfigjson";
    cluster.kubectl(&["create", "secret", "generic", "-n", "shop", "pull", kind, &literal]).unwrap();
    let more = json!({"nodeName": "worker-1", "runtimeClassName": "kata-remote", "imagePullSecrets": [{"name": "pull"}]});
    // The API server would add this with the RuntimeClass's admission; no webhook is reachable here.
    cluster.kubectl(&["delete", "mutatingwebhookconfiguration", "peerpod-webhook"]).unwrap();
    pod(cluster, "shop", "web", with_overhead(more));
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let tails = || daemons.log_tails();

    wait_for("the capacity", LIMIT, async || {
        let words = ["get", "node", "worker-1", "-o", "jsonpath={.status.capacity.kata\\.peerpods\\.io/vm}"];
        Ok((cluster.kubectl(&words)? == "7").then_some(()))
    })
    .await
    .unwrap_or_else(|why| panic!("{why}\n{}", tails()));
    wait_for("the Node's condition", LIMIT, async || {
        let path = "jsonpath={.status.conditions[?(@.type=='PeerPodsReady')].status}";
        Ok((cluster.kubectl(&["get", "node", "worker-1", "-o", path])? == "True").then_some(()))
    })
    .await
    .unwrap_or_else(|why| panic!("{why}\n{}", tails()));
    let (shim, network) = (daemons.shim().await.unwrap(), world.pod().unwrap());
    let wrong = Annotations::new("shop", "web").hypervisor("default_vcpus", "many");
    shim.create_vm(&fresh_id("wrong"), wrong, &network.namespace().path()).await.unwrap_err();
    let id = fresh_id("web");
    shim.create_vm(&id, Annotations::new("shop", "web"), &network.namespace().path()).await.unwrap();
    shim.start_vm(&id).await.unwrap_or_else(|why| panic!("{why}\n{}", tails()));
    let peerpods: Api<PeerPod> = Api::namespaced(cluster.client().unwrap(), "shop");
    let name = PeerPod::name_of("web", &id);
    wait_for("the PeerPod to run", LIMIT, async || {
        let found = peerpods.get_opt(&name).await?;
        Ok(found.filter(|one| one.status.as_ref().is_some_and(|status| status.phase == Some(Phase::Running))))
    })
    .await
    .unwrap_or_else(|why| panic!("{why}\n{}", tails()));
    for (what, words) in [
        (
            "the Event",
            &["get", "events", "-n", "shop", "--field-selector", "reason=CreateRefused", "-o", "name"][..],
        ),
        (
            "the heartbeat",
            &["get", "lease", "-n", OWN, "peerpod-node-worker-1", "-o", "name", "--ignore-not-found"],
        ),
    ] {
        wait_for(what, LIMIT, async || Ok((!cluster.kubectl(words)?.is_empty()).then_some(())))
            .await
            .unwrap_or_else(|why| panic!("{why}\n{}", tails()));
    }
    wait_for("its pull secrets", LIMIT, async || {
        let said = controller.said();
        let given = |line: &str| {
            line.contains("\"answered\"") && line.contains("shop/web") && line.contains("worker-1")
        };
        Ok(said.lines().any(given).then_some(()))
    })
    .await
    .unwrap_or_else(|why| panic!("{why}\n{}\n{}", tails(), controller.said()));
    stop_in_time(&shim, &id).await.unwrap();
    daemons.gone(&id, LIMIT).await.unwrap();
    wait_for("the PeerPod to go", LIMIT, async || Ok(peerpods.get_opt(&name).await?.is_none().then_some(())))
        .await
        .unwrap_or_else(|why| panic!("{why}\n{}", tails()));
    let log = std::fs::read_to_string(daemons.log("node")).unwrap();
    assert!(!log.to_lowercase().contains("forbidden"), "{log}");
}

fn with_overhead(mut spec: Value) -> Value {
    spec["overhead"] = json!({"cpu": "250m", "memory": "120Mi"});
    spec
}

/// Checks that all objects of others are refused: by RBAC, or by the policy that compares the node's name.
async fn node_is_bounded(cluster: &Cluster, who: &Path) {
    for words in [
        &["get", "secrets", "-A"][..],
        &["get", "secret", "-n", "shop", "pull"],
        &["get", "secrets", "-n", OWN],
        &["get", "configmaps", "-n", OWN],
        &["delete", "pod", "-n", "shop", "web"],
        &["delete", "node", "worker-1"],
        &["create", "token", "-n", OWN, "peerpod-controller"],
        &["get", "peerpodconfigs", "-n", OWN],
    ] {
        refused(cluster, who, words, "forbidden");
    }
    let uid = cluster
        .kubectl(&["get", "pod", "-n", OWN, "node-worker-1", "-o", "jsonpath={.metadata.uid}"])
        .unwrap();
    let token = cluster.token(OWN, "peerpod-node", &[], Some(("node-worker-1", &uid))).await.unwrap();
    let client = cluster.client_with(&token).unwrap();
    let nodes: Api<Node> = Api::all(client.clone());
    let status = async |node: &str, change: Value| {
        let patched = nodes.patch_status(node, &PatchParams::default(), &Patch::Merge(change)).await;
        patched.map(drop).map_err(|why| why.to_string())
    };
    let capacity = json!({"status": {"capacity": {"kata.peerpods.io/vm": "99"},
        "conditions": [{"type": "PeerPodsReady", "status": "False"}]}});
    status("worker-1", capacity.clone()).await.unwrap();
    let why = status("worker-2", capacity).await.unwrap_err();
    assert!(why.contains("a daemon on node worker-1 may not change node worker-2"), "{why}");
    let time = "2026-01-01T00:00:00Z";
    for change in [
        json!({"capacity": {"cpu": "400"}}),
        json!({"capacity": {"cpu": null}}),
        json!({"capacity": {"example.org/gpu": "1"}}),
        json!({"allocatable": {"memory": "1Ti"}}),
        json!({"addresses": [{"type": "InternalIP", "address": "10.0.0.66"}]}),
        json!({"conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": time, "lastTransitionTime": time}]}),
        json!({"nodeInfo": {"kubeletVersion": "v9"}}),
        json!({"volumesAttached": [{"name": "x", "devicePath": "/dev/sda"}]}),
    ] {
        let why = status("worker-1", json!({"status": change})).await.unwrap_err();
        assert!(why.contains("no status of a Node but its kata.peerpods.io/vm"), "{change}: {why}");
    }
    let other = "may change no metadata of a Node but the annotation kata.peerpods.io/caa-owner";
    let change = json!({"metadata": {"annotations": {"csi.volume.kubernetes.io/nodeid": "{}"}}});
    let why = status("worker-1", change).await.unwrap_err();
    assert!(why.contains(other), "{why}");
    refused(cluster, who, &["annotate", "node", "worker-1", "a=b"], other);
    as_who(cluster, who, &["annotate", "node", "worker-1", "kata.peerpods.io/caa-owner=me", "--overwrite"])
        .unwrap();
    let words = ["annotate", "node", "worker-2", "kata.peerpods.io/caa-owner=me"];
    refused(cluster, who, &words, "may not change node worker-2");
    refused(
        cluster,
        who,
        &["label", "node", "worker-1", "pool=gold"],
        "may not change a Node's spec or labels",
    );
    refused(
        cluster,
        who,
        &["taint", "node", "worker-1", "a=b:NoSchedule"],
        "may not change a Node's spec or labels",
    );

    let object = |name: &str, node: &str| {
        json!({"apiVersion": "confidentialcontainers.org/v1alpha1", "kind": "PeerPod",
            "metadata": {"name": name, "namespace": "shop"}, "spec": {"instanceID": "i", "nodeName": node}})
    };
    let create = |object: Value| {
        let file = cluster.folder().join(format!("{}.json", fresh_id("theirs")));
        std::fs::write(&file, object.to_string()).unwrap();
        file
    };
    let (own, theirs) = (create(object("own", "worker-1")), create(object("theirs", "worker-2")));
    as_who(cluster, who, &["create", "-f", own.to_str().unwrap()]).unwrap();
    let why = "a daemon on node worker-1 may not change a PeerPod of another node";
    refused(cluster, who, &["create", "-f", theirs.to_str().unwrap()], why);
    // Any other writer, even an administrator, could have a VM deleted by its name.
    let (admin, only) = (cluster.folder().join("admin.kubeconfig"), "only a node's daemon makes a PeerPod");
    refused(cluster, &admin, &["create", "-f", theirs.to_str().unwrap()], only);
    peerpod(cluster, "theirs", "worker-2").await;
    let spec = r#"{"spec":{"sandboxID":"another"}}"#;
    refused(cluster, &admin, &["patch", "peerpod", "-n", "shop", "theirs", "--type=merge", "-p", spec], only);
    let finalizers = r#"{"metadata":{"finalizers":null}}"#;
    let words = ["patch", "peerpod", "-n", "shop", "theirs", "--type=merge", "-p", finalizers];
    as_who(cluster, &admin, &words).unwrap();
    let peerpods: Api<PeerPod> = Api::namespaced(client, "shop");
    let gone = Patch::Merge(json!({"status": {"phase": "Gone"}}));
    let status = async |name: &str| {
        peerpods
            .patch_status(name, &PatchParams::default(), &gone)
            .await
            .map(drop)
            .map_err(|why| why.to_string())
    };
    status("own").await.unwrap();
    assert!(status("theirs").await.unwrap_err().contains(why));
    refused(cluster, who, &["delete", "peerpod", "-n", "shop", "theirs"], why);
    as_who(cluster, who, &["delete", "peerpod", "-n", "shop", "own"]).unwrap();

    let lease = |name: &str| {
        create(json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": name, "namespace": OWN}, "spec": {"holderIdentity": "x"}}))
    };
    for name in ["peerpod-node-worker-2", "peerpod-controller"] {
        let file = lease(name);
        refused(
            cluster,
            who,
            &["create", "-f", file.to_str().unwrap()],
            &format!("may not change lease {name}"),
        );
    }
}
