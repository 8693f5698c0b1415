use std::path::PathBuf;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rcgen::CertifiedKey;
use rustls::server::WebPkiClientVerifier;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::super::certificate::CertificateFiles;
use super::super::mutate::Totals;
use super::*;
use crate::serve::SMALL;

const LIMIT: Duration = Duration::from_secs(30);

/// A server with its own folder, until dropped.
struct Served {
    address: SocketAddr,
    admin: SocketAddr,
    rooms: Rooms,
    root: CertificateDer<'static>,
    shutdown: Shutdown,
    ended: tokio::task::JoinHandle<Result<()>>,
    folder: PathBuf,
}

impl Served {
    async fn start(name: &str) -> Served {
        Served::start_for(name, None).await
    }

    /// Starts a server that answers callers with this certificate alone.
    async fn start_for(name: &str, caller: Option<CertificateDer<'static>>) -> Served {
        let crypto = Arc::new(rustls::crypto::ring::default_provider());
        let callers = caller.map(|caller| {
            let mut roots = rustls::RootCertStore::empty();
            roots.add(caller).unwrap();
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), crypto.clone()).build().unwrap()
        });
        let folder = std::env::temp_dir().join(format!("peerpod-webhook-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let pair = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let pem = |label: &str, der: &[u8]| {
            format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", BASE64_STANDARD.encode(der))
        };
        std::fs::write(folder.join("tls.crt"), pem("CERTIFICATE", pair.cert.der())).unwrap();
        std::fs::write(folder.join("tls.key"), pem("PRIVATE KEY", pair.signing_key.serialized_der()))
            .unwrap();
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let profile = Profile {
            runtime_classes: vec!["kata-remote".to_owned()],
            resource: "kata.peerpods.io/vm".to_owned(),
            totals: Totals::Effective,
            gpus: Vec::new(),
        };
        let bound = build(WebhookConfig {
            listen: any,
            admin_listen: any,
            certificates: Certificates::Mounted(CertificateFiles {
                certificate: folder.join("tls.crt"),
                key: folder.join("tls.key"),
            }),
            versions: vec![&rustls::version::TLS13],
            crypto,
            callers,
            excluded: Vec::new(),
            profile,
        })
        .await
        .unwrap();
        let shutdown = Shutdown::default();
        let (address, admin, told) = (bound.address, bound.admin, shutdown.clone());
        let rooms = bound.shared.rooms.clone();
        let ended = tokio::spawn(async move { bound.run(&told).await });
        Served { address, admin, rooms, root: pair.cert.der().clone(), shutdown, ended, folder }
    }

    async fn connect(&self) -> tokio_rustls::client::TlsStream<TcpStream> {
        self.connect_as(None).await
    }

    async fn connect_as(
        &self,
        caller: Option<&CertifiedKey<rcgen::KeyPair>>,
    ) -> tokio_rustls::client::TlsStream<TcpStream> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(self.root.clone()).unwrap();
        let ring = Arc::new(rustls::crypto::ring::default_provider());
        let config =
            rustls::ClientConfig::builder_with_provider(ring).with_safe_default_protocol_versions().unwrap();
        let config = config.with_root_certificates(roots);
        let config = Arc::new(match caller {
            Some(CertifiedKey { cert, signing_key }) => {
                let key = PrivateKeyDer::Pkcs8(signing_key.serialized_der().to_vec().into());
                config.with_client_auth_cert(vec![cert.der().clone()], key).unwrap()
            }
            None => config.with_no_client_auth(),
        });
        let stream = TcpStream::connect(self.address).await.unwrap();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        tokio_rustls::TlsConnector::from(config).connect(name, stream).await.unwrap()
    }

    /// Returns the whole answer with its headers, on a new connection.
    async fn ask(&self, request: &str) -> String {
        answer(self.connect().await, request).await
    }

    async fn post(&self, body: &str) -> String {
        self.ask(&posted(body)).await
    }

    async fn admin(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(self.admin).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.ended.abort();
        std::fs::remove_dir_all(&self.folder).unwrap();
    }
}

fn posted(body: &str) -> String {
    let head = format!("POST {PATH}?timeout=5s HTTP/1.1\r\nHost: x\r\nConnection: close");
    format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// Returns all that the server sends.
async fn answer(mut stream: tokio_rustls::client::TlsStream<TcpStream>, request: &str) -> String {
    let mut answer = Vec::new();
    let asked = async {
        // A server that refuses the client's certificate closes while this is written.
        drop(stream.write_all(request.as_bytes()).await);
        // Some connections end without a TLS close_notify.
        drop(stream.read_to_end(&mut answer).await);
    };
    tokio::time::timeout(LIMIT, asked).await.expect("an answer in time");
    String::from_utf8(answer).unwrap()
}

fn review(name: &str) -> Value {
    json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {
        "uid": "u-1", "operation": "CREATE", "namespace": "shop", "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "object": {"metadata": {"name": name}, "spec": {
            "runtimeClassName": "kata-remote", "containers": [{"name": "c", "resources": {"requests": {"cpu": "2"}}}],
        }},
    }})
}

#[tokio::test]
async fn only_reviews_are_answered() {
    let served = Served::start("answers").await;
    let answer = served.post(&review("p").to_string()).await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"patchType\":\"JSONPatch\""), "{answer}");
    let other = "GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    assert!(served.ask(other).await.starts_with("HTTP/1.1 404"));
    let other = format!("GET {PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    assert!(served.ask(&other).await.starts_with("HTTP/1.1 405"));
    for body in ["", "{", "[]", "{\"apiVersion\":\"admission.k8s.io/v1\"}"] {
        assert!(served.post(body).await.starts_with("HTTP/1.1 400"), "{body}");
    }
    let metrics = served.admin("/metrics").await;
    assert!(metrics.contains("peerpod_webhook_reviews_total{outcome=\"Changed\"} 1"), "{metrics}");
    assert!(metrics.contains("peerpod_webhook_reviews_total{outcome=\"Malformed\"} 4"), "{metrics}");
    assert!(served.admin("/healthz").await.starts_with("HTTP/1.1 200"));
    assert!(served.admin("/readyz").await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn a_body_that_is_too_long_or_too_slow_is_refused() {
    let served = Served::start("bounds").await;
    let long = format!(
        "POST {PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        MOST_BODY + 1
    );
    let answer = served.ask(&long).await;
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    let slow =
        format!("POST {PATH} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 100\r\n\r\n{{");
    let answer = served.ask(&slow).await;
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    // The largest review of an API server is answered.
    let answer = served.post(&review(&"n".repeat(3 << 20)).to_string()).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn callers_need_the_api_servers_certificate_where_its_ca_is_set() {
    let made = || rcgen::generate_simple_self_signed(["caller".to_owned()]).unwrap();
    let (known, other) = (made(), made());
    let served = Served::start_for("callers", Some(known.cert.der().clone())).await;
    let request = posted(&review("p").to_string());
    let said = answer(served.connect_as(Some(&known)).await, &request).await;
    assert!(said.starts_with("HTTP/1.1 200"), "{said}");
    assert_eq!(answer(served.connect_as(Some(&other)).await, &request).await, "");
    assert_eq!(answer(served.connect().await, &request).await, "");
}

/// A long body takes room when it arrives, not when it is announced. A small one needs none.
#[tokio::test]
async fn long_reviews_share_room_and_small_ones_need_none() {
    let served = Served::start("room").await;
    let long = format!("POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {MOST_BODY}\r\n\r\n{{");
    let mut stalled = Vec::new();
    for _ in 0..8 {
        let mut stream = served.connect().await;
        stream.write_all(long.as_bytes()).await.unwrap();
        stalled.push(stream);
    }
    let (small, large) = (review("p").to_string(), review(&"n".repeat(3 << 20)).to_string());
    for body in [&small, &large] {
        let answer = served.post(body).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
    let mut all = Roomed::default();
    let of = |address: &str| served.rooms.of(address.parse().unwrap());
    of("127.0.0.2").add(&mut all, &vec![0; SMALL + ROOM / 2]).await.unwrap();
    let answer = served.post(&large).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "another address took its half: {answer}");
    let mut rest = Roomed::default();
    of("127.0.0.3").add(&mut rest, &vec![0; SMALL + ROOM / 2]).await.unwrap();
    let (answer, refused) = tokio::join!(served.post(&small), served.post(&large));
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(refused.starts_with("HTTP/1.1 503"), "{refused}");
    let metrics = served.admin("/metrics").await;
    assert!(metrics.contains("peerpod_webhook_reviews_total{outcome=\"Limited\"}"), "{metrics}");
    drop(all);
    let answer = served.post(&large).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn idle_connections_are_closed_and_active_ones_stay() {
    let served = Served::start("silent").await;
    let mut used = served.connect().await;
    let body = review("p").to_string();
    let request = format!("POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    used.write_all(request.as_bytes()).await.unwrap();
    let mut answer = [0; 15];
    used.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200 OK");
    // Half a request's head does not count as a request.
    let mut silent = served.connect().await;
    silent.write_all(b"POST /").await.unwrap();
    let mut rest = Vec::new();
    drop(tokio::time::timeout(LIMIT, silent.read_to_end(&mut rest)).await.expect("closed"));
    assert!(rest.is_empty(), "{rest:?}");
    // The older connection sent its first request in time, and is answered again.
    used.write_all(request.as_bytes()).await.unwrap();
    let mut answers = Vec::new();
    tokio::time::timeout(LIMIT, async {
        while !String::from_utf8_lossy(&answers).contains("HTTP/1.1 200 OK") {
            assert!(used.read_buf(&mut answers).await.unwrap() > 0, "closed");
        }
    })
    .await
    .expect("a second answer");
}

/// Requests during the shutdown delay are answered, requests in flight are finished, then the server ends.
#[tokio::test]
async fn leaves_without_a_review_lost() {
    let mut served = Served::start("leaves").await;
    let mut idle = served.connect().await;
    served.shutdown.trigger();
    let began = Instant::now();
    loop {
        if served.admin("/readyz").await.starts_with("HTTP/1.1 503") {
            break;
        }
        assert!(began.elapsed() < LIMIT, "it still reports ready");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let answer = served.post(&review("p").to_string()).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    tokio::time::timeout(LIMIT, &mut served.ended).await.expect("an end").unwrap().unwrap();
    // The unused connection was closed, not left open.
    let mut rest = Vec::new();
    drop(tokio::time::timeout(LIMIT, idle.read_to_end(&mut rest)).await.expect("closed"));
    assert!(rest.is_empty());
}
