//! Tests the deployed definitions of the custom resources on a real API server.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Patch, PatchParams, PostParams};
use kube::core::{DynamicObject, NamespaceResourceScope};
use kube::discovery::ApiResource;
use kube::{Api, Client, Resource};
use peerpod_kube::crds::{PeerPod, PeerPodConfig, PeerpodVolume};
use peerpod_test_kube::{Cluster, Options, Process, program, wait_for};
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(60);
const INSTALL: &str = "peerpod-cluster crds | kubectl apply --server-side -f -";

#[tokio::test(flavor = "multi_thread")]
async fn crds_are_accepted_and_keep_required_fields() {
    let cluster = Cluster::start(Options::default()).await.unwrap();
    let client = cluster.client().unwrap();
    let controller = without_them_the_command_is_named(&cluster).await;
    apply_all(&cluster, &client).await;
    wait_for("the controller to follow PeerPods", LIMIT, async || {
        Ok(readyz(&controller).contains(r#""ready":true"#).then_some(()))
    })
    .await
    .unwrap_or_else(|error| panic!("{error}: {}\n{}", readyz(&controller), controller.said()));
    old_objects_come_back_whole(&client).await;
    bad_objects_are_refused(&client).await;
    identities_cannot_change(&client).await;
    status_is_apart(&client).await;
    columns(&cluster);
}

/// Starts a controller without the custom resources.
async fn without_them_the_command_is_named(cluster: &Cluster) -> Process {
    let words = [
        "controller".to_owned(),
        format!("--kubernetes.kubeconfig={}", cluster.folder().join("admin.kubeconfig").display()),
        format!("--paths.state-dir={}", cluster.folder().join("state").display()),
        "--cluster.namespace=default".to_owned(),
        "--provider.kind=fake".to_owned(),
        "--controller.admin-listen=127.0.0.1:0".to_owned(),
        "--controller.sweep-every=1s".to_owned(),
        "--secrets.serve=false".to_owned(),
        "--log.format=json".to_owned(),
    ];
    let program = program("peerpod-cluster").unwrap();
    let mut controller = Process::start("controller", &program, &words, cluster.folder()).unwrap();
    for says in ["the PeerPods cannot be followed", "VMs and PeerPods could not be compared"] {
        wait_for(says, LIMIT, async || {
            controller.check()?;
            let said = controller.said();
            let line = said.lines().find(|line| line.contains(says));
            Ok(line.map(|line| assert!(line.contains(INSTALL) && line.contains("peerpodvolumes"), "{line}")))
        })
        .await
        .unwrap_or_else(|error| panic!("{error}\n{}", controller.said()));
    }
    assert!(readyz(&controller).contains(INSTALL), "{}", readyz(&controller));
    assert!(!controller.said().contains("Failed to parse error data"), "{}", controller.said());
    controller
}

/// Returns its `/readyz`.
fn readyz(controller: &Process) -> String {
    let said = controller.said();
    let line = said.lines().find(|line| line.contains("controller runs")).unwrap();
    let line: Value = serde_json::from_str(line).unwrap();
    let mut stream = TcpStream::connect(line["admin"].as_str().unwrap()).unwrap();
    stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

async fn apply_all(cluster: &Cluster, client: &Client) {
    // The program prints the deployed definitions.
    let printed = Command::new(program("peerpod-cluster").unwrap()).arg("crds").output().unwrap();
    let deployed = ["peerpods", "peerpodconfigs", "peerpodvolumes"].map(|plural| {
        let path = format!("{}/../../deploy/crds/{plural}.yaml", env!("CARGO_MANIFEST_DIR"));
        format!("---\n{}", std::fs::read_to_string(path).unwrap())
    });
    assert_eq!(String::from_utf8(printed.stdout).unwrap(), deployed.concat());
    let file = cluster.folder().join("crds.yaml");
    std::fs::write(&file, deployed.concat()).unwrap();
    cluster.kubectl(&["apply", "--server-side", "-f", file.to_str().unwrap()]).unwrap();
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    for plural in ["peerpods", "peerpodconfigs", "peerpodvolumes"] {
        let name = format!("{plural}.confidentialcontainers.org");
        let established = kube::runtime::conditions::is_crd_established();
        let wait = kube::runtime::wait::await_condition(crds.clone(), &name, established);
        let crd = tokio::time::timeout(LIMIT, wait).await.unwrap().unwrap().unwrap();
        let conditions = crd.status.unwrap().conditions.unwrap();
        let structural = conditions.iter().find(|condition| condition.type_ == "NonStructuralSchema");
        assert!(structural.is_none_or(|condition| condition.status != "True"), "{conditions:?}");
        assert_eq!(crd.spec.versions[0].subresources.as_ref().map(|sub| sub.status.is_some()), Some(true));
    }
}

fn api<K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>>(client: &Client) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), "default", &ApiResource::erase::<K>(&()))
}

async fn create<K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>>(
    client: &Client,
    name: &str,
    spec: Value,
) -> Result<DynamicObject, String> {
    let object = DynamicObject::new(name, &ApiResource::erase::<K>(&())).data(json!({"spec": spec}));
    api::<K>(client).create(&PostParams::default(), &object).await.map_err(|why| why.to_string())
}

/// Checks that objects of the replaced system are stored unchanged, except for the old defaults.
async fn old_objects_come_back_whole(client: &Client) {
    let spec = json!({"cloudProvider": "libvirt", "instanceID": "17"});
    assert_eq!(
        create::<PeerPod>(client, "web-resource-x7k2p", spec.clone()).await.unwrap().data["spec"],
        spec
    );

    let spec = json!({"cloudSecretName": "s", "configMapName": "m", "instanceType": "t3.small", "limit": "10",
        "nodeSelector": {"node.kubernetes.io/worker": ""}});
    assert_eq!(create::<PeerPodConfig>(client, "full", spec.clone()).await.unwrap().data["spec"], spec);
    let empty = create::<PeerPodConfig>(client, "empty", json!({})).await.unwrap();
    assert_eq!(
        empty.data["spec"],
        json!({"cloudSecretName": "peer-pods-secret", "configMapName": "peer-pods-cm"})
    );

    let names = [
        "podName",
        "podNamespace",
        "podUid",
        "nodeID",
        "nodeName",
        "volumeID",
        "volumeName",
        "vmID",
        "vmName",
        "devicePath",
        "stagingTargetPath",
        "targetPath",
        "wrapperControllerPublishVolumeReq",
        "wrapperControllerPublishVolumeRes",
        "wrapperNodeStageVolumeReq",
        "wrapperNodePublishVolumeReq",
        "wrapperNodeUnpublishVolumeReq",
        "wrapperNodeUnstageVolumeReq",
    ];
    let spec: Value =
        Value::Object(names.iter().map(|name| ((*name).to_owned(), json!(format!("a {name}")))).collect());
    assert_eq!(create::<PeerpodVolume>(client, "vol", spec.clone()).await.unwrap().data["spec"], spec);
    // The typed API reads the same.
    let typed: Api<PeerpodVolume> = Api::namespaced(client.clone(), "default");
    let read = typed.get("vol").await.unwrap();
    assert_eq!(serde_json::to_value(read.spec).unwrap(), spec);
}

async fn bad_objects_are_refused(client: &Client) {
    let refused = create::<PeerPod>(client, "none", json!({"cloudProvider": "aws"})).await.unwrap_err();
    assert!(refused.contains("an instanceID or an idempotencyKey must name the VM"), "{refused}");
    let refused = create::<PeerPod>(client, "empty", json!({"instanceID": ""})).await.unwrap_err();
    assert!(refused.contains("instanceID"), "{refused}");
    for limit in ["ten", "1.5", "", "10 "] {
        let refused = create::<PeerPodConfig>(client, "limit", json!({"limit": limit})).await.unwrap_err();
        assert!(refused.contains("limit must be a whole number"), "{limit:?}: {refused}");
    }
    for limit in ["0", "-1"] {
        create::<PeerPodConfig>(client, &format!("limit{limit}"), json!({"limit": limit})).await.unwrap();
    }
}

/// Checks that an intent gets its instance once, and that the VM's identifying fields cannot change after that.
async fn identities_cannot_change(client: &Client) {
    let intent =
        json!({"cloudProvider": "aws", "idempotencyKey": "k1", "sandboxID": "s", "nodeName": "worker-1"});
    create::<PeerPod>(client, "intent", intent).await.unwrap();
    let pods = api::<PeerPod>(client);
    let merge = async |spec: Value| {
        let patch = Patch::Merge(json!({"spec": spec}));
        pods.patch("intent", &PatchParams::default(), &patch).await.map_err(|why| why.to_string())
    };
    assert!(
        merge(json!({"idempotencyKey": "k2"})).await.unwrap_err().contains("idempotencyKey cannot change")
    );
    // A second attempt with another key made the VM.
    merge(json!({"idempotencyKey": "k2", "instanceID": "i-1"})).await.unwrap();
    for (spec, why) in [
        (json!({"instanceID": "i-2"}), "instanceID cannot change"),
        (json!({"instanceID": null}), "instanceID cannot change"),
        (json!({"idempotencyKey": "k3"}), "idempotencyKey cannot change"),
        (json!({"cloudProvider": "azure"}), "cloudProvider cannot change"),
        (json!({"nodeName": "worker-2"}), "nodeName cannot change"),
        (json!({"sandboxID": null}), "sandboxID cannot change"),
    ] {
        let refused = merge(spec.clone()).await.unwrap_err();
        assert!(refused.contains(why), "{spec}: {refused}");
    }
    create::<PeerpodVolume>(client, "fixed", json!({"volumeID": "v1"})).await.unwrap();
    let patch = Patch::Merge(json!({"spec": {"volumeID": "v2"}}));
    let refused =
        api::<PeerpodVolume>(client).patch("fixed", &PatchParams::default(), &patch).await.unwrap_err();
    assert!(refused.to_string().contains("volumeID cannot change"), "{refused}");
}

async fn status_is_apart(client: &Client) {
    let pods = api::<PeerPod>(client);
    let status = json!({"status": {
        "instanceType": "m6a.large", "zone": "eu-1a", "market": "on_demand", "image": "ami-1",
        "phase": "Running", "addresses": ["10.0.0.9"], "cleand": false, "observedGeneration": 1,
        "stages": [{"name": "create", "at": "2026-01-02T03:04:05Z", "tookMilliseconds": 812}],
        "conditions": [{"type": "Ready", "status": "True", "reason": "AgentAnswers", "message": "",
            "lastTransitionTime": "2026-01-02T03:04:05Z"}],
    }});
    let object = DynamicObject::new("apart", &ApiResource::erase::<PeerPod>(&()));
    let mut data = status.clone();
    data["spec"] = json!({"instanceID": "i-9", "cloudProvider": "local", "nodeName": "worker-1"});
    let made = pods.create(&PostParams::default(), &object.data(data)).await.unwrap();
    assert!(made.data.get("status").is_none(), "status is no part of a creation");
    let patched = pods.patch_status("apart", &PatchParams::default(), &Patch::Merge(&status)).await.unwrap();
    assert_eq!(patched.data["status"], status["status"]);
    let wrong = json!({"status": {"phase": "Flying"}});
    let refused =
        pods.patch_status("apart", &PatchParams::default(), &Patch::Merge(&wrong)).await.unwrap_err();
    assert!(refused.to_string().contains("Unsupported value: \"Flying\""), "{refused}");
}

fn columns(cluster: &Cluster) {
    let table = |words: &[&str]| {
        let text = cluster.kubectl(words).unwrap();
        text.lines()
            .map(|line| line.split_whitespace().map(str::to_owned).collect())
            .collect::<Vec<Vec<String>>>()
    };
    // By the short name.
    let rows = table(&["get", "pp", "apart"]);
    let shown = ["NAME", "PROVIDER", "INSTANCE", "NODE", "PHASE", "READY", "TYPE", "ZONE", "MARKET", "AGE"];
    assert_eq!(rows[0], shown);
    let row = ["apart", "local", "i-9", "worker-1", "Running", "True", "m6a.large", "eu-1a", "on_demand"];
    assert_eq!(rows[1][..9], row);
    assert!(cluster.kubectl(&["get", "pp", "apart", "-o", "wide"]).unwrap().contains("ami-1"));
    let selected = table(&["get", "peerpods", "--field-selector", "spec.nodeName=worker-1", "-o", "name"]);
    assert_eq!(selected.len(), 2, "{selected:?}");
    let rows = table(&["get", "peerpodconfigs", "full"]);
    assert_eq!(rows[0], ["NAME", "LIMIT", "INSTANCE", "TYPE", "READY", "AGE"]);
    assert_eq!(rows[1][..3], ["full", "10", "t3.small"]);
    let rows = table(&["get", "peerpodvolumes", "fixed"]);
    assert_eq!(rows[0], ["NAME", "VOLUME", "POD", "NODE", "VM", "STATE", "AGE"]);
}
