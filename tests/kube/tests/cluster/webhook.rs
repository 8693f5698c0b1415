//! Tests `peerpod-cluster webhook` behind a real API server, registered as in `deploy/webhook/registration.yaml`.
//!
//! With `PEERPOD_TEST_BENCH=<file>` the figures are added to that file.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::{LimitRange, Pod};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::Api;
use kube::api::{DeleteParams, PostParams};
use peerpod_test_kube::{
    Authority, Cluster, Hook, Options, Process, program, project, registration, report, wait_for,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName};
use serde_json::{Value, from_value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::client::TlsStream;

const LIMIT: Duration = Duration::from_secs(60);
const ADMISSIONS: usize = 2000;
/// Number of concurrent requests.
const AT_ONCE: usize = 8;
/// Number of callers that never finish their bodies.
const UNFINISHED: usize = 256;
const VCPUS: &str = "io.katacontainers.config.hypervisor.default_vcpus";
const MEMORY: &str = "io.katacontainers.config.hypervisor.default_memory";
const GPUS: &str = "io.katacontainers.config.hypervisor.default_gpus";

/// The webhook's process and the files of its certificate.
struct Webhook {
    process: Process,
    address: SocketAddr,
    admin: SocketAddr,
    files: (PathBuf, PathBuf),
}

impl Webhook {
    /// Starts the webhook with the memory of the chart's container.
    async fn start(cluster: &Cluster, authority: &Authority, name: &str, more: &[String]) -> Webhook {
        let file = |end| cluster.folder().join(format!("{name}.{end}"));
        let files = (file("crt"), file("key"));
        put(&files, authority);
        let mut words = vec!["webhook".to_owned()];
        for (key, value) in [
            ("listen", "127.0.0.1:0"),
            ("admin-listen", "127.0.0.1:0"),
            ("certificate-file", files.0.to_str().unwrap()),
            ("key-file", files.1.to_str().unwrap()),
            ("runtime-classes", "kata-remote,kata-second"),
        ] {
            words.push(format!("--webhook.{key}={value}"));
        }
        words.push("--log.format=json".to_owned());
        words.extend_from_slice(more);
        let program = program("peerpod-cluster").unwrap();
        let started = Process::start_limited(chart_memory(), name, &program, &words, cluster.folder());
        let mut process = started.unwrap();
        let said = wait_for("the webhook to answer", LIMIT, async || {
            process.check()?;
            let said = process.said();
            let line = said.lines().find(|line| line.contains("webhook answers"));
            Ok(line.map(serde_json::from_str::<Value>).transpose()?)
        })
        .await
        .unwrap();
        let address = |key: &str| said[key].as_str().unwrap().parse().unwrap();
        Webhook { address: address("address"), admin: address("admin"), process, files }
    }

    /// Returns the deployed registration, with a URL in place of the service, and for the test's second class, too.
    fn registration(&self, authority: &Authority) -> MutatingWebhookConfiguration {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/webhook/registration.yaml");
        let text =
            fs::read_to_string(path).unwrap().replace("['kata-remote']", "['kata-remote', 'kata-second']");
        let mut deployed: Value = serde_yaml::from_str(&text).unwrap();
        let path = deployed["webhooks"][0]["clientConfig"]["service"]["path"].as_str().unwrap().to_owned();
        let ours = registration("x", self.address, &path, &authority.pem(), json!({}));
        deployed["webhooks"][0]["clientConfig"] = ours["webhooks"][0]["clientConfig"].clone();
        from_value(deployed).unwrap()
    }

    async fn metrics(&self) -> String {
        let mut stream = TcpStream::connect(self.admin).await.unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
    }

    async fn metric(&self, name: &str) -> f64 {
        let text = self.metrics().await;
        let values =
            text.lines().filter(|line| line.starts_with(name)).filter_map(|line| line.rsplit_once(' '));
        values.map(|(_, value)| value.parse::<f64>().unwrap()).sum()
    }
}

/// Returns the limit of the webhook's memory in the chart, in bytes.
fn chart_memory() -> u64 {
    let values = fs::read_to_string(project("deploy/chart/values.yaml")).unwrap();
    let values: Value = serde_yaml::from_str(&values).unwrap();
    let limit = values["webhook"]["resources"]["limits"]["memory"].as_str().unwrap();
    limit.strip_suffix("Mi").unwrap().parse::<u64>().unwrap() << 20
}

fn put((certificate, key): &(PathBuf, PathBuf), authority: &Authority) {
    let (first, second) = authority.issue().unwrap();
    fs::write(certificate, first).unwrap();
    fs::write(key, second).unwrap();
}

/// Returns `"cpu=2,memory=4Gi"` as a list of resources.
fn list(text: &str) -> Value {
    let pairs = text.split(',').filter_map(|pair| pair.split_once('='));
    Value::Object(pairs.map(|(name, value)| (name.to_owned(), json!(value))).collect())
}

fn container(name: &str, requests: &str, limits: &str) -> Value {
    json!({"name": name, "image": "x", "resources": {"requests": list(requests), "limits": list(limits)}})
}

fn pod(class: &str, init: Vec<Value>, containers: Vec<Value>) -> Pod {
    let spec = json!({"initContainers": init, "containers": containers});
    let mut pod = json!({"metadata": {"generateName": "p-"}, "spec": spec});
    if !class.is_empty() {
        pod["spec"]["runtimeClassName"] = json!(class);
    }
    from_value(pod).unwrap()
}

fn dry() -> PostParams {
    PostParams { dry_run: true, ..PostParams::default() }
}

fn sizes(pod: &Pod) -> [Option<String>; 3] {
    let annotations = pod.metadata.annotations.clone().unwrap_or_default();
    [VCPUS, MEMORY, GPUS].map(|key| annotations.get(key).cloned())
}

fn expected(words: [&str; 3]) -> [Option<String>; 3] {
    words.map(|word| (!word.is_empty()).then(|| word.to_owned()))
}

fn assert_one_vm(pod: &Pod) {
    let spec = serde_json::to_value(pod.spec.as_ref().unwrap()).unwrap();
    let one = json!({"kata.peerpods.io/vm": "1"});
    assert_eq!(spec["containers"][0]["resources"], json!({"requests": one, "limits": one}));
    let init = spec["initContainers"].as_array().into_iter().flatten();
    for container in init.chain(spec["containers"].as_array().unwrap().iter().skip(1)) {
        assert!(container.get("resources").is_none_or(|has| has == &json!({})), "{container}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keeps_its_promises_behind_a_real_api_server() {
    let callers = Callers::new();
    let options = Options { api_server: vec![callers.flag()], ..Options::default() };
    let cluster = Cluster::start(options).await.unwrap();
    let client = cluster.client().unwrap();
    for namespace in ["shop", "limited"] {
        cluster.namespace(namespace).await.unwrap();
    }
    for class in ["kata-remote", "kata-second", "noop", "runc"] {
        let overhead = json!({"podFixed": {"cpu": "250m", "memory": "120Mi"}});
        let class = json!({"metadata": {"name": class}, "handler": class, "overhead": overhead});
        Api::<RuntimeClass>::all(client.clone())
            .create(&PostParams::default(), &from_value(class).unwrap())
            .await
            .unwrap();
    }
    let authority = Authority::new().unwrap();
    let webhook = Webhook::start(&cluster, &authority, "webhook", &[]).await;
    let registrations: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    registrations.create(&PostParams::default(), &webhook.registration(&authority)).await.unwrap();
    let pods: Api<Pod> = Api::namespaced(client.clone(), "shop");
    wait_for("the webhook to be called", LIMIT, async || {
        let made =
            pods.create(&dry(), &pod("kata-remote", vec![], vec![container("c", "cpu=1", "")])).await?;
        Ok(sizes(&made)[0].clone())
    })
    .await
    .unwrap();

    rows(&pods).await;
    others_never_wait(&cluster, &webhook, &pods).await;
    limits_of_the_namespace(&cluster).await;
    reinvoked(&registrations, &pods).await;
    admissions(&webhook, &registrations, &pods).await;
    rotated(&webhook, &authority, &pods).await;
    let webhook = hostile_bodies(webhook, &authority, &pods).await;
    gone(webhook, &pods).await;
    for_the_api_server_alone(&cluster, &authority, &callers, &pods).await;
}

/// Client certificate with which the API server calls webhooks.
struct Callers {
    authority: Authority,
    folder: Home,
}

struct Home(PathBuf);

impl Drop for Home {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

impl Callers {
    fn new() -> Callers {
        let folder = Home(std::env::temp_dir().join(format!("peerpod-callers-{}", std::process::id())));
        fs::create_dir_all(&folder.0).unwrap();
        let authority = Authority::new().unwrap();
        let (certificate, key) = authority.issue().unwrap();
        let user = json!({
            "client-certificate-data": BASE64_STANDARD.encode(certificate),
            "client-key-data": BASE64_STANDARD.encode(key),
        });
        let kubeconfig =
            json!({"apiVersion": "v1", "kind": "Config", "users": [{"name": "*", "user": user}]});
        let file = folder.0.join("kubeconfig");
        fs::write(&file, kubeconfig.to_string()).unwrap();
        let version = "apiserver.config.k8s.io/v1";
        let configuration =
            json!({"apiVersion": version, "kind": "WebhookAdmissionConfiguration", "kubeConfigFile": file});
        let plugins = json!([{"name": "MutatingAdmissionWebhook", "configuration": configuration}]);
        let admission = json!({"apiVersion": version, "kind": "AdmissionConfiguration", "plugins": plugins});
        fs::write(folder.0.join("admission"), admission.to_string()).unwrap();
        Callers { authority, folder }
    }

    /// Returns the API server's flag.
    fn flag(&self) -> String {
        format!("--admission-control-config-file={}", self.folder.0.join("admission").display())
    }
}

/// Opens a connection that trusts the CA, without a client certificate, from another address than the API server's.
async fn connect(address: SocketAddr, ca: &str) -> std::io::Result<TlsStream<TcpStream>> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca.as_bytes()).unwrap()).unwrap();
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let config =
        rustls::ClientConfig::builder_with_provider(ring).with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots).with_no_client_auth();
    let socket = TcpSocket::new_v4()?;
    socket.bind("127.0.0.2:0".parse().unwrap())?;
    let stream = socket.connect(address).await?;
    let name = ServerName::try_from("127.0.0.1").unwrap();
    tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

/// Posts a body, and returns the first line of the answer; an error without an answer.
async fn post(address: SocketAddr, ca: &str, announced: usize, body: &[u8]) -> std::io::Result<String> {
    let mut stream = connect(address, ca).await?;
    let head = format!("POST /mutate-v1-pod HTTP/1.1\r\nHost: x\r\nContent-Length: {announced}\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body).await?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).await?;
    if line.is_empty() { Err(std::io::ErrorKind::UnexpectedEof.into()) } else { Ok(line) }
}

/// Returns the 90th percentile of the times of 20 creations of a pod of usual size. The webhook must answer each.
async fn p90_of_creations(pods: &Api<Pod>) -> Duration {
    let mut usual = pod("kata-remote", vec![], vec![container("c", "cpu=2", "")]);
    usual.spec.as_mut().unwrap().containers[0].args = Some(vec!["a".repeat(1000); 10]);
    let mut times = Vec::new();
    for _ in 0..20 {
        let start = Instant::now();
        let made = pods.create(&dry(), &usual).await.unwrap();
        times.push(start.elapsed());
        assert_eq!(sizes(&made)[0].as_deref(), Some("2"));
    }
    times.sort_unstable();
    times[17]
}

/// Bodies from an unknown caller do not end the webhook. Meanwhile it answers usual pods in time, and the largest pod of
/// the API server, which has room of its own.
async fn hostile_bodies(mut webhook: Webhook, authority: &Authority, pods: &Api<Pod>) -> Webhook {
    let review = |spec: &str, objects: &str| {
        let many = objects.repeat(((4 << 20) - 512) / objects.len());
        format!(
            r#"{{"apiVersion":"admission.k8s.io/v1","request":{{"uid":"u","operation":"CREATE","kind":{{"kind":"Pod"}},
            "object":{{"spec":{{"runtimeClassName":"kata-remote","{spec}":[{many}0]}}}}}}}}"#
        )
    };
    let bodies = [
        review("x", r#"{"":0},"#),
        review("containers", r#"{"name":0},"#),
        review("containers", r#"{"resources":{"limits":{"":"1"}}},"#),
    ];
    let bodies = Arc::new(bodies.map(String::into_bytes));
    let (address, ca) = (webhook.address, Arc::new(authority.pem()));
    // Unfinished bodies of the size that needs no room.
    let mut unfinished = JoinSet::new();
    for _ in 0..UNFINISHED {
        let (bodies, ca) = (bodies.clone(), ca.clone());
        unfinished
            .spawn(async move { post(address, &ca, 32 << 10, &bodies[0][..(32 << 10) - 1]).await.is_ok() });
    }
    let calm = p90_of_creations(pods).await;
    let (mut whole, answered) = (JoinSet::new(), Arc::new(AtomicUsize::new(0)));
    let callers = 4 * bodies.len();
    for n in 0..callers {
        let (bodies, ca, answered) = (bodies.clone(), ca.clone(), answered.clone());
        whole.spawn(async move {
            let body = &bodies[n % bodies.len()];
            loop {
                if let Ok(line) = post(address, &ca, body.len(), body).await {
                    assert!(["200", "408", "503"].iter().any(|status| line.contains(status)), "{line}");
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    }
    wait_for("answers to as many bodies as callers", LIMIT, async || {
        webhook.process.check()?;
        Ok((answered.load(Ordering::Relaxed) >= callers).then_some(()))
    })
    .await
    .unwrap();
    let p90 = p90_of_creations(pods).await;
    println!("p90 of a usual pod {p90:?}, without hostile bodies {calm:?}");
    assert!(p90 < Duration::from_secs(1).max(20 * calm), "p90 {p90:?}, without hostile bodies {calm:?}");
    // The API server accepts 3 MiB, and adds its defaults.
    let mut large = pod("kata-remote", vec![], vec![container("c", "cpu=2", "")]);
    large.spec.as_mut().unwrap().containers[0].args = Some(vec!["a".repeat(1000); 2900]);
    let start = Instant::now();
    let made = pods.create(&dry(), &large).await.unwrap();
    assert_eq!(sizes(&made)[0].as_deref(), Some("2"));
    println!("the largest pod after {:?}", start.elapsed());
    assert!(whole.try_join_next().is_none(), "the hostile bodies go on");
    whole.shutdown().await;
    unfinished.shutdown().await;
    webhook.process.check().unwrap();
    webhook
}

/// With the CA of the API server's client certificate, the webhook answers the API server and no other caller.
async fn for_the_api_server_alone(
    cluster: &Cluster,
    authority: &Authority,
    callers: &Callers,
    pods: &Api<Pod>,
) {
    let ca = format!("--webhook.client-ca={}", callers.authority.pem());
    let webhook = Webhook::start(cluster, authority, "callers", &[ca]).await;
    let body = json!({"apiVersion": "admission.k8s.io/v1"}).to_string();
    post(webhook.address, &authority.pem(), body.len(), body.as_bytes()).await.unwrap_err();
    let registrations: Api<MutatingWebhookConfiguration> = Api::all(cluster.client().unwrap());
    let name = "peerpod-webhook";
    registrations.delete(name, &DeleteParams::default()).await.unwrap();
    registrations.create(&PostParams::default(), &webhook.registration(authority)).await.unwrap();
    wait_for("the webhook that knows its callers", LIMIT, async || {
        let one = pod("kata-remote", vec![], vec![container("c", "cpu=3", "")]);
        let Ok(made) = pods.create(&dry(), &one).await else { return Ok(None) };
        Ok(sizes(&made)[0].clone())
    })
    .await
    .unwrap();
    assert!(webhook.metric("peerpod_webhook_handshakes_failed_total").await >= 1.0);
}

/// Requests and limits of init containers, and of containers; expected sizes by Kubernetes' rule.
type Row = (&'static [[&'static str; 2]], &'static [[&'static str; 2]], [&'static str; 3]);

const ROWS: [Row; 10] = [
    (&[], &[["cpu=2,memory=4Gi", "cpu=3,memory=5Gi"]], ["3", "5120", ""]),
    (&[], &[["cpu=2", ""]], ["2", "", ""]),
    (&[], &[["memory=4Gi", ""]], ["", "4096", ""]),
    (&[], &[["nvidia.com/gpu=1", "nvidia.com/gpu=1"]], ["", "", "1"]),
    (&[], &[["", ""]], ["", "", ""]),
    (&[], &[["cpu=2,memory=4Gi", "cpu=2,memory=4Gi"]], ["2", "4096", ""]),
    (
        &[["cpu=1,memory=2Gi", "cpu=1,memory=2Gi"]],
        &[
            ["cpu=2,memory=4Gi", "cpu=3,memory=5Gi"],
            ["cpu=1,memory=1Gi", "cpu=1,memory=1Gi"],
            ["cpu=1,nvidia.com/gpu=1", "cpu=1,nvidia.com/gpu=1"],
        ],
        ["5", "6144", "1"],
    ),
    (&[], &[["cpu=200m,memory=4Gi", "cpu=500m,memory=4Gi"]], ["1", "4096", ""]),
    (&[], &[["cpu=200m,memory=4Gi", "cpu=1500m,memory=4Gi"]], ["2", "4096", ""]),
    (
        &[["cpu=200m,memory=4Gi", "cpu=0.7,memory=4Gi"]],
        &[["cpu=200m,memory=4Gi", "cpu=0.5,memory=4Gi"]],
        ["1", "4096", ""],
    ),
];

async fn rows(pods: &Api<Pod>) {
    let named = |prefix: &str, list: &[[&str; 2]]| {
        let each = list.iter().enumerate();
        each.map(|(i, [requests, limits])| container(&format!("{prefix}{i}"), requests, limits))
            .collect::<Vec<_>>()
    };
    for (init, containers, sizes_wanted) in ROWS {
        for class in ["kata-remote", "kata-second"] {
            let made =
                pods.create(&dry(), &pod(class, named("i", init), named("c", containers))).await.unwrap();
            assert_eq!(sizes(&made), expected(sizes_wanted), "{class} {init:?} {containers:?}");
            assert_one_vm(&made);
            let overhead = made.spec.unwrap().overhead.unwrap();
            assert_eq!(overhead["cpu"].0, "250m", "the class's overhead stays");
        }
    }
    let wrong = pod("kata-remote", vec![], vec![container("web", "cpu=4", "cpu=1")]);
    let refused = pods.create(&dry(), &wrong).await.unwrap_err().to_string();
    assert!(refused.contains("container web, cpu: the limit 1 is below the request 4"), "{refused}");
    for key in ["hostNetwork", "hostPID", "hostIPC"] {
        let mut shares = pod("kata-remote", vec![], vec![container("web", "cpu=1", "")]);
        let spec = shares.spec.as_mut().unwrap();
        match key {
            "hostNetwork" => spec.host_network = Some(true),
            "hostPID" => spec.host_pid = Some(true),
            _ => spec.host_ipc = Some(true),
        }
        let refused = pods.create(&dry(), &shares).await.unwrap_err().to_string();
        assert!(refused.contains(&format!("spec.{key}: true: a peer pod runs in a VM")), "{refused}");
    }
}

async fn others_never_wait(cluster: &Cluster, webhook: &Webhook, pods: &Api<Pod>) {
    let before = webhook.metric("peerpod_webhook_reviews_total").await;
    for class in ["", "runc"] {
        let made =
            pods.create(&dry(), &pod(class, vec![], vec![container("c", "cpu=2", "cpu=3")])).await.unwrap();
        assert_eq!(sizes(&made), expected(["", "", ""]));
        assert!(made.spec.unwrap().containers[0].resources.as_ref().unwrap().requests.is_some());
    }
    let system: Api<Pod> = Api::namespaced(cluster.client().unwrap(), "kube-system");
    let made =
        system.create(&dry(), &pod("kata-remote", vec![], vec![container("c", "cpu=2", "")])).await.unwrap();
    assert_eq!(sizes(&made), expected(["", "", ""]));
    assert_eq!(webhook.metric("peerpod_webhook_reviews_total").await, before);
}

/// The API server adds a namespace's defaults again after the webhook has cleared the containers. Checks that the pod
/// still counts as one VM, with the defaults in its size.
async fn limits_of_the_namespace(cluster: &Cluster) {
    let client = cluster.client().unwrap();
    let defaults =
        json!({"type": "Container", "default": {"cpu": "700m"}, "defaultRequest": {"cpu": "300m"}});
    let range: LimitRange =
        from_value(json!({"metadata": {"name": "defaults"}, "spec": {"limits": [defaults]}})).unwrap();
    Api::namespaced(client.clone(), "limited").create(&PostParams::default(), &range).await.unwrap();
    let pods: Api<Pod> = Api::namespaced(client, "limited");
    let two = || vec![container("a", "cpu=4", "cpu=4"), container("b", "", "")];
    wait_for("the limits to hold", LIMIT, async || {
        let made = pods.create(&dry(), &pod("runc", vec![], two())).await?;
        Ok(made.spec.unwrap().containers[1].resources.as_ref().and_then(|has| has.limits.clone()))
    })
    .await
    .unwrap();
    let made = pods.create(&dry(), &pod("kata-remote", vec![], two())).await.unwrap();
    assert_eq!(sizes(&made)[0].as_deref(), Some("5"), "4 and 700m");
    assert_one_vm(&made);
}

async fn reinvoked(registrations: &Api<MutatingWebhookConfiguration>, pods: &Api<Pod>) {
    let mesh = container("mesh", "cpu=100m,memory=64Mi", "");
    let hook = Hook::start(move |pod| {
        let has =
            pod["spec"]["containers"].as_array().unwrap().iter().any(|container| container["name"] == "mesh");
        (!has).then(|| json!([{"op": "add", "path": "/spec/containers/-", "value": mesh}]))
    })
    .await
    .unwrap();
    // Its name sorts after Peerpod's webhook, so it is called later.
    let injecting = hook.registration(
        "zz-mesh.example.org",
        json!({
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
            "reinvocationPolicy": "IfNeeded",
        }),
    );
    registrations.create(&PostParams::default(), &from_value(injecting).unwrap()).await.unwrap();
    let made = wait_for("the sidecar", LIMIT, async || {
        let made = pods
            .create(&dry(), &pod("kata-remote", vec![], vec![container("c", "cpu=3,memory=1Gi", "")]))
            .await?;
        Ok((made.spec.as_ref().unwrap().containers.len() == 2).then_some(made))
    })
    .await
    .unwrap();
    assert_eq!(sizes(&made), expected(["4", "1088", ""]), "3 and 100m, 1024 and 64 MiB");
    assert_one_vm(&made);
    registrations.delete("zz-mesh.example.org", &DeleteParams::default()).await.unwrap();
    wait_for("the sidecar to stay away", LIMIT, async || {
        let made = pods.create(&dry(), &pod("runc", vec![], vec![container("c", "", "")])).await?;
        Ok((made.spec.unwrap().containers.len() == 1).then_some(()))
    })
    .await
    .unwrap();
}

/// Measures the same number of admissions with Peerpod's webhook and with an idle webhook, in turns.
async fn admissions(webhook: &Webhook, registrations: &Api<MutatingWebhookConfiguration>, pods: &Api<Pod>) {
    let hook = Hook::start(|_| None).await.unwrap();
    let rules =
        json!([{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}]);
    let only = json!([{"name": "noop", "expression": "has(object.spec.runtimeClassName) && object.spec.runtimeClassName == 'noop'"}]);
    let idle = hook.registration("noop.example.org", json!({"rules": rules, "matchConditions": only}));
    registrations.create(&PostParams::default(), &from_value(idle).unwrap()).await.unwrap();
    let of = |class| {
        pod(
            class,
            vec![container("i", "cpu=1,memory=2Gi", "cpu=1")],
            vec![container("c", "cpu=2", "cpu=3,memory=5Gi")],
        )
    };
    wait_for("the webhook that does nothing", LIMIT, async || {
        pods.create(&dry(), &of("noop")).await?;
        Ok((hook.calls() > 0).then_some(()))
    })
    .await
    .unwrap();
    let (before, calls) = (webhook.metric("peerpod_webhook_review_seconds_count").await, hook.calls());
    let turn = Arc::new(AtomicUsize::new(0));
    let workers = (0..AT_ONCE).map(|_| {
        let (pods, turn) = (pods.clone(), turn.clone());
        let [ours, noop] = ["kata-remote", "noop"].map(of);
        tokio::spawn(async move {
            let mut took = [Vec::new(), Vec::new()];
            while turn.fetch_add(1, Ordering::Relaxed) < ADMISSIONS {
                for (pod, took) in [&ours, &noop].into_iter().zip(&mut took) {
                    let began = Instant::now();
                    pods.create(&dry(), pod).await.unwrap();
                    took.push(began.elapsed());
                }
            }
            took
        })
    });
    let mut took = [Vec::new(), Vec::new()];
    for worker in workers.collect::<Vec<_>>() {
        for (all, some) in took.iter_mut().zip(worker.await.unwrap()) {
            all.extend(some);
        }
    }
    let after = webhook.metric("peerpod_webhook_review_seconds_count").await;
    assert_eq!(after - before, ADMISSIONS as f64);
    assert_eq!(hook.calls() - calls, ADMISSIONS);
    let [ours, noop] = took.map(|mut took| {
        took.sort();
        took[took.len() * 99 / 100].as_secs_f64()
    });
    println!(
        "{ADMISSIONS} creations each, p99 seen by the client: {:.1} ms, with a no-op webhook {:.1} ms",
        ours * 1e3,
        noop * 1e3
    );
    report("webhook_p99_ms", p99(&webhook.metrics().await) * 1e3).unwrap();
    report("webhook_p99_vs_noop", ours / noop).unwrap();
}

/// Returns the upper bound of the bucket with the 99th percentile.
fn p99(metrics: &str) -> f64 {
    let buckets: Vec<(f64, f64)> = metrics
        .lines()
        .filter_map(|line| {
            line.strip_prefix("peerpod_webhook_review_seconds_bucket{le=\"")?.split_once("\"} ")
        })
        .map(|(bound, count)| (bound.parse().unwrap_or(f64::INFINITY), count.parse().unwrap()))
        .collect();
    let all = buckets.last().unwrap().1;
    buckets.iter().find(|(_, count)| *count >= all * 0.99).unwrap().0
}

/// Replaces certificates under load: all requests of the API server and all new connections succeed.
async fn rotated(webhook: &Webhook, authority: &Authority, pods: &Api<Pod>) {
    let stop = Arc::new(AtomicBool::new(false));
    let load = (0..AT_ONCE).map(|_| {
        let (pods, stop) = (pods.clone(), stop.clone());
        tokio::spawn(async move {
            let mut done = 0_usize;
            while !stop.load(Ordering::Relaxed) {
                let made =
                    pods.create(&dry(), &pod("kata-remote", vec![], vec![container("c", "cpu=2", "")])).await;
                assert_eq!(sizes(&made.unwrap())[0].as_deref(), Some("2"));
                done += 1;
            }
            done
        })
    });
    let load: Vec<_> = load.collect();
    let certificates = Arc::new(AtomicUsize::new(0));
    let fresh = {
        let (address, ca, stop) = (webhook.address, authority.pem(), stop.clone());
        let certificates = certificates.clone();
        tokio::spawn(async move {
            let mut seen = std::collections::BTreeSet::new();
            while !stop.load(Ordering::Relaxed) {
                seen.insert(handshake(address, &ca).await);
                certificates.store(seen.len(), Ordering::Relaxed);
                // The pause leaves time to the load.
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
    };
    wait_for("a connection with the first certificate", LIMIT, async || {
        Ok((certificates.load(Ordering::Relaxed) > 0 || fresh.is_finished()).then_some(()))
    })
    .await
    .unwrap();
    const ROTATIONS: usize = 5;
    for rotation in 1..=ROTATIONS {
        let before = webhook.metric("peerpod_webhook_certificate_reloads_total").await;
        put(&webhook.files, authority);
        wait_for("the new certificate, and a connection with it", LIMIT, async || {
            let now = webhook.metric("peerpod_webhook_certificate_reloads_total").await;
            let seen = certificates.load(Ordering::Relaxed) > rotation || fresh.is_finished();
            Ok((now > before && seen).then_some(()))
        })
        .await
        .unwrap();
    }
    stop.store(true, Ordering::Relaxed);
    let mut done = 0;
    for worker in load {
        done += worker.await.unwrap();
    }
    fresh.await.unwrap();
    let certificates = certificates.load(Ordering::Relaxed);
    println!(
        "{done} admissions over {ROTATIONS} new certificates, none failed; {certificates} certificates seen"
    );
    assert!(certificates > ROTATIONS, "{certificates} certificates seen");
}

/// Returns the server's certificate on a new connection.
async fn handshake(address: SocketAddr, ca: &str) -> Vec<u8> {
    connect(address, ca).await.unwrap().get_ref().1.peer_certificates().unwrap()[0].to_vec()
}

/// Checks that peer pods are refused while the webhook is down, and that other pods are not affected.
async fn gone(webhook: Webhook, pods: &Api<Pod>) {
    drop(webhook.process);
    let refused =
        pods.create(&dry(), &pod("kata-remote", vec![], vec![container("c", "", "")])).await.unwrap_err();
    assert!(refused.to_string().contains("failed calling webhook \"mwebhook.peerpods.io\""), "{refused}");
    for class in ["", "runc"] {
        pods.create(&dry(), &pod(class, vec![], vec![container("c", "cpu=2", "")])).await.unwrap();
    }
}
