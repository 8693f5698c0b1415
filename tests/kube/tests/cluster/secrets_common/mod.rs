//! Runs the secrets service as a process in a cluster, and a client that can send any request to it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod, Secret, ServiceAccount};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::Api;
use kube::api::PostParams;
use peerpod_test_kube::{Cluster, Process, Rule, program, wait_for};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName};
use serde_json::{Value, from_value, json};

pub(crate) const LIMIT: Duration = Duration::from_secs(60);
/// Namespace of Peerpod's programs.
pub(crate) const OURS: &str = "peerpod";
pub(crate) const AUDIENCE: &str = "peerpod-secrets";

pub(crate) fn post() -> PostParams {
    PostParams::default()
}

/// Makes the namespaces, nodes, classes and accounts of the tests. `peerpod:controller` has exactly the rights of the
/// service.
pub(crate) async fn furnish(cluster: &Cluster) {
    let client = cluster.client().unwrap();
    for namespace in [OURS, "shop"] {
        cluster.namespace(namespace).await.unwrap();
    }
    for class in ["kata-remote", "runc"] {
        let class: RuntimeClass = from_value(json!({"metadata": {"name": class}, "handler": class})).unwrap();
        Api::all(client.clone()).create(&post(), &class).await.unwrap();
    }
    for node in ["n1", "n2"] {
        let node: Node = from_value(json!({"metadata": {"name": node}})).unwrap();
        Api::all(client.clone()).create(&post(), &node).await.unwrap();
    }
    controller_account(cluster, OURS).await;
    cluster.service_account(OURS, "peerpod-node", Vec::new()).await.unwrap();
    cluster.service_account(OURS, "other", Vec::new()).await.unwrap();
    for (name, node) in [("node-n1", "n1"), ("node-n2", "n2")] {
        let pod = json!({"nodeName": node, "serviceAccountName": "peerpod-node"});
        make_pod(cluster, OURS, name, pod).await;
    }
}

/// Makes the account `controller` with exactly the rights of the service.
pub(crate) async fn controller_account(cluster: &Cluster, namespace: &str) {
    let rule = |group: &str, resource: &str, verbs: &[&str]| Rule {
        api_groups: Some(vec![group.to_owned()]),
        resources: Some(vec![resource.to_owned()]),
        verbs: verbs.iter().map(|verb| (*verb).to_owned()).collect(),
        ..Rule::default()
    };
    let rules = vec![
        peerpod_test_kube::cluster_uid(),
        rule("authentication.k8s.io", "tokenreviews", &["create"]),
        rule("", "pods", &["get"]),
        rule("", "serviceaccounts", &["get"]),
        rule("", "secrets", &["get", "create", "update"]),
        rule("", "configmaps", &["get", "create", "patch"]),
        rule("coordination.k8s.io", "leases", &["get", "create", "update", "patch"]),
    ];
    cluster.service_account(namespace, "controller", rules).await.unwrap();
}

/// Makes a pod of one container and returns its uid.
pub(crate) async fn make_pod(cluster: &Cluster, namespace: &str, name: &str, mut spec: Value) -> String {
    spec["containers"] = json!([{"name": "c", "image": "x"}]);
    let pod: Pod = from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap();
    let pods: Api<Pod> = Api::namespaced(cluster.client().unwrap(), namespace);
    pods.create(&post(), &pod).await.unwrap().metadata.uid.unwrap()
}

pub(crate) async fn make_secret(cluster: &Cluster, name: &str, kind: &str, key: &str, content: &str) {
    let secret: Secret = from_value(json!({
        "metadata": {"name": name}, "type": kind, "data": {key: BASE64_STANDARD.encode(content)},
    }))
    .unwrap();
    Api::<Secret>::namespaced(cluster.client().unwrap(), "shop").create(&post(), &secret).await.unwrap();
}

pub(crate) async fn make_account(cluster: &Cluster, name: &str, secrets: &[&str]) {
    let secrets: Vec<Value> = secrets.iter().map(|name| json!({"name": name})).collect();
    let account: ServiceAccount =
        from_value(json!({"metadata": {"name": name}, "imagePullSecrets": secrets})).unwrap();
    Api::<ServiceAccount>::namespaced(cluster.client().unwrap(), "shop")
        .create(&post(), &account)
        .await
        .unwrap();
}

/// Returns a token like that of a kubelet for the node's pod.
pub(crate) async fn node_token(cluster: &Cluster, node: &str) -> String {
    let pods: Api<Pod> = Api::namespaced(cluster.client().unwrap(), OURS);
    let name = format!("node-{node}");
    let uid = pods.get(&name).await.unwrap().metadata.uid.unwrap();
    cluster.token(OURS, "peerpod-node", &[AUDIENCE], Some((&name, &uid))).await.unwrap()
}

/// `peerpod-cluster controller`, for its secrets service.
pub(crate) struct Service {
    pub(crate) process: Process,
    pub(crate) address: SocketAddr,
}

impl Service {
    pub(crate) async fn start(cluster: &Cluster, more: &[&str]) -> Service {
        Service::start_as(cluster, OURS, more).await
    }

    /// Starts it as `controller` of this namespace.
    pub(crate) async fn start_as(cluster: &Cluster, namespace: &str, more: &[&str]) -> Service {
        static STARTED: AtomicUsize = AtomicUsize::new(0);
        let name = format!("controller-{}", STARTED.fetch_add(1, Ordering::Relaxed));
        let path = cluster.folder().join(format!("{name}.kubeconfig"));
        let token = cluster.token(namespace, "controller", &[], None).await.unwrap();
        std::fs::write(&path, cluster.kubeconfig(&token)).unwrap();
        let state = cluster.folder().join(format!("{name}-state"));
        let words = [
            "controller".to_owned(),
            format!("--kubernetes.kubeconfig={}", path.display()),
            format!("--cluster.namespace={namespace}"),
            "--controller.admin-listen=127.0.0.1:0".to_owned(),
            format!("--controller.identity={name}"),
            format!("--paths.state-dir={}", state.display()),
            "--secrets.listen=127.0.0.1:0".to_owned(),
            "--secrets.names=127.0.0.1".to_owned(),
            "--log.format=json".to_owned(),
        ];
        let words: Vec<String> =
            words.into_iter().chain(more.iter().map(|word| (*word).to_owned())).collect();
        let program = program("peerpod-cluster").unwrap();
        let mut process = Process::start(&name, &program, &words, cluster.folder()).unwrap();
        let said = wait_for("the service to answer", LIMIT, async || {
            process.check()?;
            let said = process.said();
            let line = said.lines().find(|line| line.contains("pull secrets are given to nodes"));
            Ok(line.map(serde_json::from_str::<Value>).transpose()?)
        })
        .await
        .unwrap();
        Service { address: said["address"].as_str().unwrap().parse().unwrap(), process }
    }
}

/// Returns the CAs as a node's mount shows them.
pub(crate) async fn bundle(cluster: &Cluster, namespace: &str, map: &str) -> Option<String> {
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client().unwrap(), namespace);
    maps.get_opt(map).await.unwrap()?.data?.remove("ca.crt")
}

/// Client that can send any request.
pub(crate) struct Asker {
    pub(crate) address: SocketAddr,
    pub(crate) ca: String,
}

impl Asker {
    pub(crate) async fn of(cluster: &Cluster, service: &Service) -> Asker {
        let ca = wait_for("the CA's ConfigMap", LIMIT, async || {
            Ok(bundle(cluster, OURS, "peerpod-secrets-ca").await)
        });
        Asker { address: service.address, ca: ca.await.unwrap() }
    }

    /// Returns status and body of the answer, or the reason for a missing one.
    pub(crate) async fn post(
        &self,
        token: &str,
        path: &str,
        body: &str,
    ) -> Result<(StatusCode, Value), String> {
        let mut roots = rustls::RootCertStore::empty();
        for root in CertificateDer::pem_slice_iter(self.ca.as_bytes()) {
            roots.add(root.unwrap()).unwrap();
        }
        let ring = Arc::new(rustls::crypto::ring::default_provider());
        let tls =
            rustls::ClientConfig::builder_with_provider(ring).with_safe_default_protocol_versions().unwrap();
        let tls = tls.with_root_certificates(roots);
        let tls = tls.with_no_client_auth();
        let text = |why: &dyn std::fmt::Display| why.to_string();
        let stream = tokio::net::TcpStream::connect(self.address).await.map_err(|why| text(&why))?;
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let stream = tokio_rustls::TlsConnector::from(Arc::new(tls)).connect(name, stream).await;
        let stream = TokioIo::new(stream.map_err(|why| text(&why))?);
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(stream).await.map_err(|why| text(&why))?;
        let connection = tokio::spawn(connection);
        let mut request = Request::post(path).header("host", "x");
        if !token.is_empty() {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let request = request.body(Full::new(Bytes::from(body.to_owned()))).unwrap();
        let answer = sender.send_request(request).await.map_err(|why| format!("{why:?}"))?;
        let status = answer.status();
        let body = answer.into_body().collect().await.map_err(|why| format!("{why:?}"))?.to_bytes();
        connection.abort();
        Ok((status, serde_json::from_slice(&body).map_err(|why| text(&why))?))
    }

    pub(crate) async fn pull(
        &self,
        token: &str,
        namespace: &str,
        name: &str,
        uid: &str,
    ) -> Result<(StatusCode, Value), String> {
        let body = json!({"namespace": namespace, "name": name, "uid": uid}).to_string();
        self.post(token, "/v1/pull-secrets", &body).await
    }
}
