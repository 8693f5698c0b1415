//! Tests `webhook.certificates: self-managed` behind a real API server. Two replicas that start at once share one CA,
//! and the registration gets it. CAs and certificates change under load without a failed admission.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use k8s_openapi::api::admissionregistration::v1::MutatingWebhookConfiguration;
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::Api;
use kube::api::PostParams;
use peerpod_test_kube::{Cluster, Options, Process, Rule, program, registration, wait_for};
use serde_json::{Value, from_value, json};

const LIMIT: Duration = Duration::from_secs(60);
const NAMES: [&str; 2] = ["peerpod-webhook", "peerpod-webhook-2"];
/// Number of CA rotations under load.
const ROTATIONS: usize = 2;

fn rule(group: &str, resource: &str, verbs: &[&str], names: &[&str]) -> Rule {
    let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    Rule {
        api_groups: Some(vec![group.to_owned()]),
        resources: Some(vec![resource.to_owned()]),
        resource_names: (!names.is_empty()).then(|| owned(names)),
        verbs: owned(verbs),
        ..Rule::default()
    }
}

struct Replica {
    process: Process,
    address: SocketAddr,
}

/// Starts a replica that keeps the CA in this Secret; CAs live for 12 s.
async fn replica(cluster: &Cluster, registration: &str) -> Replica {
    let kubeconfig = cluster.folder().join("webhook.kubeconfig");
    let words: Vec<String> = [
        "webhook",
        "--webhook.listen=127.0.0.1:0",
        "--webhook.admin-listen=127.0.0.1:0",
        "--webhook.certificates=self-managed",
        "--webhook.names=127.0.0.1",
        "--webhook.ca-validity=12s",
        "--webhook.certificate-validity=3s",
        "--webhook.ca-settle=1s",
        "--webhook.runtime-classes=one,two",
        "--cluster.namespace=peerpod",
        "--log.format=json",
    ]
    .into_iter()
    .map(str::to_owned)
    .chain([
        format!("--webhook.registration={registration}"),
        format!("--kubernetes.kubeconfig={}", kubeconfig.display()),
    ])
    .collect();
    let program = program("peerpod-cluster").unwrap();
    let mut process = Process::start("peerpod-cluster", &program, &words, cluster.folder()).unwrap();
    let said = wait_for("the webhook to answer", LIMIT, async || {
        process.check()?;
        let said = process.said();
        let line = said.lines().find(|line| line.contains("webhook answers"));
        Ok(line.map(serde_json::from_str::<Value>).transpose()?)
    })
    .await
    .unwrap();
    Replica { address: said["address"].as_str().unwrap().parse().unwrap(), process }
}

fn pod(class: &str) -> Pod {
    from_value(json!({
        "metadata": {"generateName": "p-"},
        "spec": {
            "runtimeClassName": class,
            "containers": [{"name": "c", "image": "x", "resources": {"requests": {"cpu": "2"}}}],
        },
    }))
    .unwrap()
}

fn changed(pod: &Pod) -> bool {
    let key = "io.katacontainers.config.hypervisor.default_vcpus";
    pod.metadata.annotations.as_ref().is_some_and(|has| has.get(key).is_some_and(|value| value == "2"))
}

#[tokio::test(flavor = "multi_thread")]
async fn its_own_certificates_change_under_load_and_no_admission_fails() {
    let cluster = Cluster::start(Options::default()).await.unwrap();
    let client = cluster.client().unwrap();
    for namespace in ["peerpod", "shop"] {
        cluster.namespace(namespace).await.unwrap();
    }
    for class in ["one", "two"] {
        let class: RuntimeClass = from_value(json!({"metadata": {"name": class}, "handler": class})).unwrap();
        Api::all(client.clone()).create(&PostParams::default(), &class).await.unwrap();
    }
    // Exactly the rights that it needs.
    let rules = vec![
        rule("", "secrets", &["create"], &[]),
        rule("", "secrets", &["get", "update"], &["peerpod-webhook-ca"]),
        rule("admissionregistration.k8s.io", "mutatingwebhookconfigurations", &["get", "patch"], &NAMES),
    ];
    cluster.service_account("peerpod", "webhook", rules).await.unwrap();
    let token = cluster.token("peerpod", "webhook", &[], None).await.unwrap();
    std::fs::write(cluster.folder().join("webhook.kubeconfig"), cluster.kubeconfig(&token)).unwrap();
    // The API server calls a service's replicas in turn. Here each has its own registration, and both share one CA.
    let replicas = tokio::join!(replica(&cluster, NAMES[0]), replica(&cluster, NAMES[1]));
    let mut replicas = [replicas.0, replicas.1];
    let registrations: Api<MutatingWebhookConfiguration> = Api::all(client.clone());
    let rules =
        json!([{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}]);
    for ((replica, name), class) in replicas.iter().zip(NAMES).zip(["one", "two"]) {
        let only =
            json!([{"name": "class", "expression": format!("object.spec.runtimeClassName == '{class}'")}]);
        let more = json!({"rules": rules, "matchConditions": only});
        // As deployed, without a CA.
        let mut made =
            registration(&format!("{name}.example.org"), replica.address, "/mutate-v1-pod", "", more);
        made["metadata"]["name"] = json!(name);
        made["webhooks"][0]["clientConfig"].as_object_mut().unwrap().remove("caBundle");
        registrations.create(&PostParams::default(), &from_value(made).unwrap()).await.unwrap();
    }
    let pods: Api<Pod> = Api::namespaced(client.clone(), "shop");
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    for class in ["one", "two"] {
        wait_for("the registration to have the CA", LIMIT, async || {
            Ok(pods.create(&dry, &pod(class)).await.ok())
        })
        .await
        .unwrap();
    }
    let secrets: Api<Secret> = Api::namespaced(client.clone(), "peerpod");
    let stop = Arc::new(AtomicBool::new(false));
    let load: Vec<_> = ["one", "two", "one", "two"]
        .map(|class| {
            let (pods, stop, dry) = (pods.clone(), stop.clone(), dry.clone());
            tokio::spawn(async move {
                let mut done = 0_usize;
                while !stop.load(Ordering::Relaxed) {
                    assert!(changed(&pods.create(&dry, &pod(class)).await.unwrap()));
                    done += 1;
                }
                done
            })
        })
        .into();
    // The API server's kept connections would hide a failure. Each connection here is new and trusts the registration's
    // bundle.
    let fresh = {
        let (registrations, stop) = (registrations.clone(), stop.clone());
        let address = replicas[0].address;
        tokio::spawn(async move {
            let mut seen = BTreeSet::new();
            while !stop.load(Ordering::Relaxed) {
                let found = registrations.get(NAMES[0]).await.unwrap();
                let bundle = found.webhooks.unwrap()[0].client_config.ca_bundle.clone().unwrap().0;
                seen.insert(handshake(address, &bundle).await);
            }
            seen.len()
        })
    };
    let mut cas = BTreeSet::new();
    wait_for("CAs to come and go", 3 * LIMIT, async || {
        for replica in &mut replicas {
            replica.process.check()?;
        }
        let found = registrations.get(NAMES[0]).await?;
        let bundle = found.webhooks.unwrap()[0].client_config.ca_bundle.clone().unwrap().0;
        cas.insert(String::from_utf8(bundle)?);
        // Each rotation has bundles of one CA, and of two CAs with the new one first.
        Ok((cas.len() > 3 * ROTATIONS || fresh.is_finished()).then_some(()))
    })
    .await
    .unwrap();
    stop.store(true, Ordering::Relaxed);
    let mut done = 0;
    for worker in load {
        done += worker.await.unwrap();
    }
    let certificates = fresh.await.unwrap();
    println!(
        "{done} admissions over {} bundles and {certificates} certificates of one replica, none failed",
        cas.len()
    );
    assert!(certificates > 2 * ROTATIONS, "{certificates} certificates seen");
    let secret = secrets.get("peerpod-webhook-ca").await.unwrap();
    assert_eq!(secret.type_.as_deref(), Some("Opaque"));
    for replica in &replicas {
        let said = replica.process.said();
        assert!(!said.contains("PRIVATE KEY") && said.contains("certificate made"), "{said}");
    }
    // The two registrations have the same CAs, independent of the replica that wrote them.
    let bundle = async |name: &str| {
        registrations.get(name).await.unwrap().webhooks.unwrap()[0].client_config.ca_bundle.clone()
    };
    wait_for("the same CAs in both", LIMIT, async || {
        Ok((bundle(NAMES[0]).await == bundle(NAMES[1]).await).then_some(()))
    })
    .await
    .unwrap();
}

/// Opens a new connection that trusts the bundle, and returns the server's certificate.
async fn handshake(address: SocketAddr, bundle: &[u8]) -> Vec<u8> {
    use rustls_pki_types::pem::PemObject;
    use rustls_pki_types::{CertificateDer, ServerName};
    let mut roots = rustls::RootCertStore::empty();
    for root in CertificateDer::pem_slice_iter(bundle) {
        roots.add(root.unwrap()).unwrap();
    }
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let config =
        rustls::ClientConfig::builder_with_provider(ring).with_safe_default_protocol_versions().unwrap();
    let config = config.with_root_certificates(roots).with_no_client_auth();
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let name = ServerName::try_from("127.0.0.1").unwrap();
    let stream = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
    stream.get_ref().1.peer_certificates().unwrap()[0].to_vec()
}
