//! Tests a pull secret's whole path: from the API server by the service, the node and the link into a VM, which pulls a
//! private image with it. The service is also unavailable while a pod starts.

use super::images_common;
use super::node_common;
use super::secrets_common;
use std::fs;
use std::net::SocketAddr;

use images_common::{Image, PORT as REGISTRY_PORT, Registry, Serving, ordinary};
use node_common::{LIMIT, NODE, OWN, Rig, Running};
use peerpod_client::AgentClient;
use peerpod_proto::agent::{CreateContainerRequest, CreateSandboxRequest};
use peerpod_test_kube::wait_for;
use peerpod_tests::of_image;
use peerpod_world::Settings;
use peerpod_world::proxy::Proxy;
use secrets_common::{AUDIENCE, Service, bundle, controller_account, make_pod};
use serde_json::json;

/// Port of the service in the node's namespace.
const PORT: u16 = 19_444;

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_pulls_a_private_image_with_a_secret_of_the_cluster() {
    let folder = std::env::temp_dir().join(format!("peerpod-secrets-e2e-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let (token_file, ca_file) = (folder.join("token"), folder.join("ca.crt"));
    let registry = SocketAddr::from(([10, 99, 0, 1], REGISTRY_PORT));
    let settings = Settings::none()
        .with_volume(&folder)
        .set("node.plain-http-registries", registry.to_string())
        .set("secrets.address", format!("127.0.0.1:{PORT}"))
        .set("secrets.token-file", token_file.to_str().unwrap())
        .set("secrets.ca-file", ca_file.to_str().unwrap())
        .set("secrets.deadline", "2s");
    let mut rig = Rig::start(settings).await;
    controller_account(&rig.cluster, OWN).await;
    let of_node = json!({"nodeName": NODE, "serviceAccountName": "peerpod-node"});
    let uid = make_pod(&rig.cluster, OWN, "node-daemon", of_node).await;
    let token =
        rig.cluster.token(OWN, "peerpod-node", &[AUDIENCE], Some(("node-daemon", &uid))).await.unwrap();
    fs::write(&token_file, token).unwrap();
    let auths =
        json!({"auths": {registry.to_string(): {"username": "pod", "password": "geheim"}}}).to_string();
    rig.apply(&json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "private", "namespace": "shop"},
        "type": "kubernetes.io/dockerconfigjson", "stringData": {".dockerconfigjson": auths},
    }));
    rig.daemons().await;
    // The first VM makes the VMs' network; the registry needs its address earlier.
    rig.world.node().ip("address add 10.99.0.1/32 dev lo\n").unwrap();
    let (at, netns) = (Some(registry), Some(rig.world.node().name()));
    let serving = Serving { secret: Some(("pod", "geheim")), at, netns, ..Serving::default() };
    let image: Image = ordinary();
    let _registry = tokio::task::block_in_place(|| Registry::start(&[("team/app:v1", &image)], &serving));
    let name = format!("{registry}/team/app:v1");

    // The service does not run yet. The node makes no request for a pod without secrets.
    rig.pod("plain");
    let plain = rig.run("plain").await;
    let missed = rig.daemons.metrics("node").unwrap();
    assert!(missed.contains("peerpod_node_pull_secrets_missed_total 0"), "{missed}");
    rig.stop(plain).await;

    // A pod with secrets starts anyway, with an Event that explains the missing ones.
    let uid = pod(&rig, "early");
    let early = rig.run("early").await;
    let (said, _) = rig.event(&uid, "PullSecretsMissing").await;
    assert!(said.contains("pull secrets of pod shop/early") && said.contains("goes on without"), "{said}");
    let agent = sandbox(&rig, &early, "early").await;
    let refused = agent.create_container(&container(&name, "main")).await.unwrap_err().to_string();
    assert!(refused.contains("team/app:v1"), "{refused}");

    let service = Service::start_as(&rig.cluster, OWN, &[]).await;
    let ca = wait_for("the CA", LIMIT, async || Ok(bundle(&rig.cluster, OWN, "peerpod-secrets-ca").await));
    fs::write(&ca_file, ca.await.unwrap()).unwrap();
    let _proxy = Proxy::to_outside(rig.world.node(), PORT, service.address).unwrap();
    wait_for("the image to be had", LIMIT, async || {
        // Like a kubelet's retry.
        drop(agent.remove_container("main").await);
        Ok(agent.create_container(&container(&name, "main")).await.ok())
    })
    .await
    .unwrap_or_else(|error| panic!("{error}\n{}\n{}", service.process.said(), rig.daemons.log_tails()));
    runs(&agent).await;

    // With the service available, the first message to the guest has the secrets.
    let uid = pod(&rig, "late");
    let late = rig.run("late").await;
    let agent = sandbox(&rig, &late, "late").await;
    agent.create_container(&container(&name, "main")).await.unwrap();
    runs(&agent).await;
    // An Event reports unusable secrets to the pod's owner, too.
    let (said, _) = rig.event(&uid, "PullSecretUnusable").await;
    assert!(said.contains("shop/not-there: it does not exist"), "{said}");

    for daemon in ["node", "relay"] {
        let log = fs::read_to_string(rig.daemons.log(daemon)).unwrap();
        assert!(!log.contains("geheim"), "{daemon}");
    }
    assert!(!service.process.said().contains("geheim"));
    for entry in rig.daemons.ledger().unwrap() {
        assert!(!entry.record.to_string().contains("geheim"), "the ledger");
    }
    rig.stop(early).await;
    rig.stop(late).await;
    fs::remove_dir_all(&folder).unwrap();
}

fn pod(rig: &Rig, name: &str) -> String {
    rig.apply(&json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "shop"},
        "spec": {
            "runtimeClassName": "kata-remote", "nodeName": NODE, "imagePullSecrets": [{"name": "private"}, {"name": "not-there"}],
            "containers": [{"name": "main", "image": "registry.example/main"}],
        },
    }));
    rig.uid(name)
}

async fn sandbox(rig: &Rig, running: &Running, name: &str) -> AgentClient {
    let agent = AgentClient::connect(&rig.create_again(running, name).await.unwrap()).await.unwrap();
    let mut sandbox = CreateSandboxRequest::new();
    sandbox.sandbox_id = running.id.clone();
    agent.create_sandbox(&sandbox).await.unwrap();
    agent
}

fn container(image: &str, id: &str) -> CreateContainerRequest {
    of_image(image, id, &["/bin/sh", "-c", "busybox cat /old/one"])
}

async fn runs(agent: &AgentClient) {
    agent.start_container("main").await.unwrap();
    let output = agent.output("main", "").await.unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "one", "{}", String::from_utf8_lossy(&output.stderr));
}
