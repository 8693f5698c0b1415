//! Tests the service that gives nodes their pods' pull secrets, on a real API server with real bound tokens: the
//! permitted answers, and every refusal.

use super::secrets_common;
use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use hyper::StatusCode;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::Api;
use kube::api::DeleteParams;
use peerpod_test_kube::{Cluster, Options, wait_for};
use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, SigningKey};
use rustls_pki_types::PrivatePkcs8KeyDer;
use rustls_pki_types::pem::PemObject;
use secrets_common::*;
use serde_json::{Value, from_value, json};

const JSON: (&str, &str) = ("kubernetes.io/dockerconfigjson", ".dockerconfigjson");
const CFG: (&str, &str) = ("kubernetes.io/dockercfg", ".dockercfg");

/// Returns an entry with the Base64 of `user:password`.
fn entry(user: &str) -> Value {
    use base64::prelude::BASE64_STANDARD;
    json!({"auth": BASE64_STANDARD.encode(format!("{user}:geheim"))})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_gets_its_own_peer_pods_pull_secrets_and_nothing_else() {
    let cluster = Cluster::start(Options::default()).await.unwrap();
    furnish(&cluster).await;
    let service = Service::start(&cluster, &[]).await;
    let asker = Asker::of(&cluster, &service).await;
    given(&cluster, &asker).await;
    large(&cluster, &asker).await;
    bad_callers_are_refused(&cluster, &asker).await;
    what_for(&cluster, &asker).await;
    limited(&cluster, &asker).await;
    let said = service.process.said();
    for secret in ["geheim", "Z2VoZWlt", "BEGIN"] {
        assert!(!said.contains(secret), "{secret} is in the log");
    }
    let audited =
        |word: &str| said.lines().any(|line| line.contains("\"pod\":\"shop/web\"") && line.contains(word));
    assert!(audited("\"answered\"") && audited("\"node\":\"n1\"") && audited("\"secrets\":3"), "{said}");
    let refusals = said.lines().filter(|line| line.contains("not answered")).count();
    assert!(
        (1..100).contains(&refusals),
        "{refusals} lines about more than 500 refused calls of one address"
    );
    killed(&cluster, service).await;
}

async fn given(cluster: &Cluster, asker: &Asker) {
    make_secret(
        cluster,
        "one",
        JSON.0,
        JSON.1,
        &json!({"auths": {"r.example": entry("one"), "https://a.example/v1/": entry("one")}}).to_string(),
    )
    .await;
    make_secret(
        cluster,
        "two",
        CFG.0,
        CFG.1,
        &json!({"a.example": entry("two"), "b.example": entry("two")}).to_string(),
    )
    .await;
    make_secret(
        cluster,
        "three",
        JSON.0,
        JSON.1,
        &json!({"auths": {"b.example": entry("three"), "c.example": entry("three")}}).to_string(),
    )
    .await;
    make_secret(
        cluster,
        "opaque",
        "Opaque",
        JSON.1,
        &json!({"auths": {"d.example": entry("opaque")}}).to_string(),
    )
    .await;
    make_secret(cluster, "broken", CFG.0, CFG.1, r#"{"e.example":"geheim"}"#).await;
    make_account(cluster, "builder", &["three", "one", "broken"]).await;
    let names: Vec<Value> =
        ["one", "missing", "two", "opaque"].iter().map(|name| json!({"name": name})).collect();
    let spec = json!({
        "nodeName": "n1", "runtimeClassName": "kata-remote", "serviceAccountName": "builder", "imagePullSecrets": names,
    });
    let uid = make_pod(cluster, "shop", "web", spec).await;
    let token = node_token(cluster, "n1").await;
    let (status, answer) = asker.pull(&token, "shop", "web", &uid).await.unwrap();
    assert_eq!(status, StatusCode::OK, "{answer}");
    let config: Value = serde_json::from_str(answer["dockerconfigjson"].as_str().unwrap()).unwrap();
    let expected = json!({"auths": {
        "r.example": entry("one"), "https://a.example/v1/": entry("one"), "b.example": entry("two"), "c.example": entry("three"),
    }});
    assert_eq!(config, expected, "the pod's own first, each registry once");
    assert_eq!(answer["pod_uid"], json!(uid));
    let notes: Vec<&str> =
        answer["notes"].as_array().unwrap().iter().map(|note| note.as_str().unwrap()).collect();
    assert_eq!(notes.len(), 3, "{notes:?}");
    assert!(notes[0].contains("shop/missing: it does not exist"), "{notes:?}");
    assert!(notes[1].contains("shop/opaque: its type is \"Opaque\""), "{notes:?}");
    assert!(notes[2].contains("shop/broken: .dockercfg is not of its form"), "{notes:?}");

    // Without a uid the answer is for the present pod of this name.
    let (status, answer) = asker.pull(&token, "shop", "web", "").await.unwrap();
    assert!(status == StatusCode::OK && answer["pod_uid"] == json!(uid));

    // The default account, a pod without an account, and a pod without any secret.
    make_account(cluster, "default", &["three"]).await;
    let mut spec = json!({"nodeName": "n1", "runtimeClassName": "kata-remote"});
    make_pod(cluster, "shop", "nobodys", spec.clone()).await;
    let (status, answer) = asker.pull(&token, "shop", "nobodys", "").await.unwrap();
    assert_eq!(
        (status, &answer["dockerconfigjson"], &answer["notes"]),
        (StatusCode::OK, &json!(""), &json!([]))
    );
    spec["serviceAccountName"] = json!("default");
    make_pod(cluster, "shop", "plain", spec).await;
    let (_, answer) = asker.pull(&token, "shop", "plain", "").await.unwrap();
    assert!(answer["dockerconfigjson"].as_str().unwrap().contains("c.example"), "{answer}");
    make_account(cluster, "bare", &[]).await;
    let spec = json!({"nodeName": "n1", "runtimeClassName": "kata-remote", "serviceAccountName": "bare"});
    make_pod(cluster, "shop", "public", spec).await;
    let (status, answer) = asker.pull(&token, "shop", "public", "").await.unwrap();
    assert_eq!(
        (status, &answer["dockerconfigjson"], &answer["notes"]),
        (StatusCode::OK, &json!(""), &json!([]))
    );
}

/// Secrets of the largest size that the API server stores.
async fn large(cluster: &Cluster, asker: &Asker) {
    let mut names = Vec::new();
    for name in ["l1", "l2", "l3"] {
        let content = json!({"auths": {format!("{name}.example"): {"username": "u", "password": "p".repeat(1_000_000)}}});
        make_secret(cluster, name, JSON.0, JSON.1, &content.to_string()).await;
        names.push(json!({"name": name}));
    }
    let token = node_token(cluster, "n1").await;
    let spec = |names: &[Value]| {
        json!({
            "nodeName": "n1", "runtimeClassName": "kata-remote", "serviceAccountName": "bare", "imagePullSecrets": names,
        })
    };
    make_pod(cluster, "shop", "large", spec(&names[..2])).await;
    let (status, answer) = asker.pull(&token, "shop", "large", "").await.unwrap();
    assert_eq!(status, StatusCode::OK);
    assert!(answer["dockerconfigjson"].as_str().unwrap().len() > 2_000_000);
    make_pod(cluster, "shop", "too-large", spec(&names)).await;
    let (status, answer) = asker.pull(&token, "shop", "too-large", "").await.unwrap();
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert!(answer["error"].as_str().unwrap().contains("more than 2097152 bytes"), "{answer}");
}

async fn bad_callers_are_refused(cluster: &Cluster, asker: &Asker) {
    let good = node_token(cluster, "n1").await;
    let refused = async |token: &str, status: StatusCode, why: &str| {
        let (seen, answer) = asker.pull(token, "shop", "web", "").await.unwrap();
        let said = answer["error"].as_str().unwrap();
        assert!(seen == status && said.contains(why), "{seen} {said}, not {status} {why}");
    };
    let unauthorized = StatusCode::UNAUTHORIZED;
    refused("", unauthorized, "no bearer token").await;
    refused(&"x".repeat(20_000), unauthorized, "no bearer token").await;
    refused("none.of.ours", unauthorized, "no token of a service account").await;

    let pods: Api<Pod> = Api::namespaced(cluster.client().unwrap(), OURS);
    let uid = pods.get("node-n1").await.unwrap().metadata.uid.unwrap();
    let bound = Some(("node-n1", uid.as_str()));
    let token = cluster.token(OURS, "peerpod-node", &["somebody-else"], bound).await.unwrap();
    refused(&token, unauthorized, "not for the audience peerpod-secrets").await;
    let token = cluster.token(OURS, "peerpod-node", &[], bound).await.unwrap();
    refused(&token, unauthorized, "not for the audience peerpod-secrets").await;
    let token = cluster.token(OURS, "peerpod-node", &[AUDIENCE], None).await.unwrap();
    refused(&token, unauthorized, "the token names no pod and node").await;
    let uid = make_pod(cluster, OURS, "floating", json!({"serviceAccountName": "peerpod-node"})).await;
    let token = cluster.token(OURS, "peerpod-node", &[AUDIENCE], Some(("floating", &uid))).await.unwrap();
    refused(&token, unauthorized, "the token names no pod and node").await;
    let uid =
        make_pod(cluster, OURS, "other", json!({"nodeName": "n1", "serviceAccountName": "other"})).await;
    let token = cluster.token(OURS, "other", &[AUDIENCE], Some(("other", &uid))).await.unwrap();
    refused(&token, unauthorized, "only system:serviceaccount:peerpod:peerpod-node may ask").await;

    // A forged signature, an expired token, and one that expires while its review is cached.
    let mut parts: Vec<&str> = good.split('.').collect();
    let forged = BASE64_URL_SAFE_NO_PAD.encode([7; 64]);
    parts[2] = &forged;
    refused(&parts.join("."), unauthorized, "does not know the token").await;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    refused(&resigned(cluster, &good, now - 60), unauthorized, "the token has ended").await;
    let short = resigned(cluster, &good, now + 5);
    let (status, _) = asker.pull(&short, "shop", "web", "").await.unwrap();
    assert_eq!(status, StatusCode::OK, "our own signature counts as that of the API server");
    wait_for("the token to end", LIMIT, async || {
        let (status, _) = asker.pull(&short, "shop", "web", "").await.unwrap();
        Ok((status == StatusCode::UNAUTHORIZED).then_some(()))
    })
    .await
    .unwrap();
}

/// Returns the token with another expiry, signed with the API server's own key.
fn resigned(cluster: &Cluster, token: &str, end: u64) -> String {
    let parts: Vec<&str> = token.split('.').collect();
    let mut claims: Value =
        serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(parts[1]).unwrap()).unwrap();
    claims["exp"] = json!(end);
    claims["iat"] = json!(end - 600);
    claims["nbf"] = json!(end - 600);
    let text = format!("{}.{}", parts[0], BASE64_URL_SAFE_NO_PAD.encode(claims.to_string()));
    let key = PrivatePkcs8KeyDer::from_pem_file(cluster.folder().join("accounts.key")).unwrap();
    let key = KeyPair::from_pkcs8_der_and_sign_algo(&key, &PKCS_ECDSA_P256_SHA256).unwrap();
    let der = key.sign(text.as_bytes()).unwrap();
    // DER has two integers; a JWT has them as 32 bytes each.
    let mut raw = Vec::new();
    let mut rest = &der[2..];
    for _ in 0..2 {
        let length = usize::from(rest[1]);
        let number = &rest[2..2 + length];
        let number = &number[number.len().saturating_sub(32)..];
        raw.extend(std::iter::repeat_n(0, 32 - number.len()));
        raw.extend_from_slice(number);
        rest = &rest[2 + length..];
    }
    format!("{text}.{}", BASE64_URL_SAFE_NO_PAD.encode(raw))
}

async fn what_for(cluster: &Cluster, asker: &Asker) {
    let token = node_token(cluster, "n1").await;
    let refused = async |namespace: &str, name: &str, uid: &str, status: StatusCode, why: &str| {
        let (seen, answer) = asker.pull(&token, namespace, name, uid).await.unwrap();
        let said = answer["error"].as_str().unwrap().to_owned();
        assert!(seen == status && said.contains(why), "{name}: {seen} {said}, not {status} {why}");
        said
    };
    let named = json!([{"name": "one"}]);
    for (name, spec) in [
        (
            "elsewhere",
            json!({"nodeName": "n2", "runtimeClassName": "kata-remote", "imagePullSecrets": named}),
        ),
        ("waiting", json!({"runtimeClassName": "kata-remote", "imagePullSecrets": named})),
        ("other-class", json!({"nodeName": "n1", "runtimeClassName": "runc", "imagePullSecrets": named})),
        ("no-class", json!({"nodeName": "n1", "imagePullSecrets": named})),
        ("again", json!({"nodeName": "n1", "runtimeClassName": "kata-remote", "imagePullSecrets": named})),
    ] {
        make_pod(cluster, "shop", name, spec).await;
    }
    let forbidden = StatusCode::FORBIDDEN;
    let elsewhere = refused("shop", "elsewhere", "", forbidden, "no pod shop/elsewhere on node n1").await;
    let nowhere = refused("shop", "elsewhere2", "", forbidden, "no pod shop/elsewhere2 on node n1").await;
    assert_eq!(elsewhere.replace("elsewhere", "elsewhere2"), nowhere, "no answer tells of other nodes' pods");
    refused("shop", "waiting", "", forbidden, "no pod shop/waiting on node n1").await;
    refused("shop", "other-class", "", forbidden, "no peer pod: its RuntimeClass is \"runc\"").await;
    refused("shop", "no-class", "", forbidden, "no peer pod").await;
    let mirror: Pod = from_value(json!({
        "metadata": {"name": "mirror", "annotations": {"kubernetes.io/config.mirror": "x"}},
        "spec": {"nodeName": "n1", "runtimeClassName": "kata-remote", "imagePullSecrets": named,
            "serviceAccountName": "builder", "containers": [{"name": "c", "image": "x"}]},
    }))
    .unwrap();
    let pods: Api<Pod> = Api::namespaced(cluster.client().unwrap(), "shop");
    pods.create(&post(), &mirror).await.unwrap();
    refused("shop", "mirror", "", forbidden, "is a mirror pod").await;
    refused("kube-system", "web", "", forbidden, "no pod kube-system/web").await;
    for (namespace, name) in
        [("", "web"), ("shop", ""), ("../shop", "web"), ("shop", "web/log"), ("shop", "w?x=y")]
    {
        refused(namespace, name, "", StatusCode::BAD_REQUEST, "not a name of Kubernetes").await;
    }

    // Another pod of the same name, as a StatefulSet makes it.
    let old = pods.get("again").await.unwrap().metadata.uid.unwrap();
    let (status, _) = asker.pull(&token, "shop", "again", &old).await.unwrap();
    assert_eq!(status, StatusCode::OK);
    pods.delete("again", &DeleteParams::default().grace_period(0)).await.unwrap();
    let spec = json!({"nodeName": "n1", "runtimeClassName": "kata-remote"});
    let new = make_pod(cluster, "shop", "again", spec).await;
    refused("shop", "again", &old, StatusCode::CONFLICT, "was replaced").await;
    let (status, answer) = asker.pull(&token, "shop", "again", &new).await.unwrap();
    assert!(status == StatusCode::OK && !answer["dockerconfigjson"].as_str().unwrap().contains("r.example"));

    for (body, status) in [
        ("", StatusCode::BAD_REQUEST),
        ("[]", StatusCode::BAD_REQUEST),
        (r#"{"namespace":"shop","name":"web","secret":"one"}"#, StatusCode::BAD_REQUEST),
        (&"x".repeat(20_000), StatusCode::PAYLOAD_TOO_LARGE),
    ] {
        let (seen, _) = asker.post(&token, "/v1/pull-secrets", body).await.unwrap();
        assert_eq!(seen, status, "{body:.40}");
    }
    let (seen, _) = asker.post(&token, "/v1/secrets", "{}").await.unwrap();
    assert_eq!(seen, StatusCode::NOT_FOUND);
}

/// Checks that one node cannot use up the service.
async fn limited(cluster: &Cluster, asker: &Asker) {
    let token = node_token(cluster, "n2").await;
    let mut seen = BTreeSet::new();
    for _ in 0..40 {
        let asked = (0..32).map(|_| asker.post(&token, "/v1/pull-secrets", "{}"));
        for answer in futures_util::future::join_all(asked).await {
            seen.insert(answer.unwrap().0.as_u16());
        }
        if seen.contains(&StatusCode::TOO_MANY_REQUESTS.as_u16()) {
            break;
        }
    }
    assert_eq!(seen, BTreeSet::from([400, 429]));
    // Calls without a token of the cluster come from the same address and cost the API server nothing.
    for token in ["", "none.of.ours"] {
        for _ in 0..8 {
            let asked = (0..32).map(|_| asker.post(token, "/v1/pull-secrets", "{}"));
            for answer in futures_util::future::join_all(asked).await {
                assert_eq!(answer.unwrap().0, StatusCode::UNAUTHORIZED);
            }
        }
    }
    let other = node_token(cluster, "n1").await;
    let (status, _) = asker.pull(&other, "shop", "web", "").await.unwrap();
    assert_eq!(status, StatusCode::OK, "the other node does not notice");
}

/// Checks that a restarted process has the same CA, and that the running service restores a deleted Secret.
async fn killed(cluster: &Cluster, service: Service) {
    let asker = Asker::of(cluster, &service).await;
    let token = node_token(cluster, "n1").await;
    drop(service);
    asker.pull(&token, "shop", "web", "").await.unwrap_err();
    let (one, two) = tokio::join!(Service::start(cluster, &[]), Service::start(cluster, &[]));
    for service in [&one, &two] {
        let asker = Asker { address: service.address, ca: asker.ca.clone() };
        let (status, _) = asker.pull(&token, "shop", "web", "").await.unwrap();
        assert_eq!(status, StatusCode::OK);
    }
    let secrets: Api<Secret> = Api::namespaced(cluster.client().unwrap(), OURS);
    let before = secrets.get("peerpod-secrets-ca").await.unwrap();
    assert_eq!(before.type_.as_deref(), Some("Opaque"));
    secrets.delete("peerpod-secrets-ca", &DeleteParams::default()).await.unwrap();
    let after = wait_for("the Secret to come back", LIMIT, async || {
        Ok(secrets.get_opt("peerpod-secrets-ca").await?)
    })
    .await
    .unwrap();
    assert_eq!(before.data, after.data, "clients that trust the CA still do");
}
