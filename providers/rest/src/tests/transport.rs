use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use peerpod_base::config::Secret;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

use super::{File, Server, raw, read, reply};
use crate::{Hosts, Http, HttpAnswer, HttpSettings, Method, NoAnswer, Request, Url};

fn http() -> Http {
    Http::new(&HttpSettings { ca_file: None, call_timeout: Duration::from_secs(10) }).unwrap()
}

#[tokio::test]
async fn a_request_arrives_as_it_is_and_so_does_its_answer() {
    let server = Server::start(|_| reply(201, "x-note: here\r\n", &json!({"id": "a"}))).await;
    let request = Request::new(Method::PUT, server.at("/vms/a"))
        .query("api-version", "2024 07&01")
        .header("if-none-match".parse().unwrap(), "*")
        .json(&json!({"name": "a"}));
    let answer = http().send(&request, Some(&Secret::new("t0k3n".into()))).await.unwrap();
    assert_eq!((answer.status(), answer.is_success()), (201, true));
    assert_eq!((answer.header("X-Note"), answer.json()), (Some("here"), json!({"id": "a"})));
    let seen = server.seen.lock()[0].clone();
    assert_eq!(seen.line, "PUT /vms/a?api-version=2024+07%2601");
    assert_eq!((seen.token(), seen.body.as_str()), (Some("t0k3n"), r#"{"name":"a"}"#));
    for part in ["if-none-match: *", "content-type: application/json", "user-agent: peerpod/"] {
        assert!(seen.headers.contains(part), "{part} in {}", seen.headers);
    }
    let shown = format!("{request:?} {answer:?}");
    assert!(!shown.contains("2024") && !shown.contains("name"), "{shown}");
}

#[tokio::test]
async fn a_form_is_encoded() {
    let server = Server::start(|_| reply(200, "", &Value::Null)).await;
    let request = Request::new(Method::POST, server.at("/token?x=1")).form(&[("a", "b c&d"), ("e", "ü")]);
    http().send(&request, None).await.unwrap();
    let seen = server.seen.lock()[0].clone();
    assert_eq!((seen.line.as_str(), seen.body.as_str()), ("POST /token?x=1", "a=b+c%26d&e=%C3%BC"));
}

#[tokio::test]
async fn the_length_of_an_absent_body_is_sent_where_one_may_be() {
    let server = Server::start(|_| reply(200, "", &Value::Null)).await;
    for (method, has_length) in [(Method::POST, true), (Method::PUT, true), (Method::GET, false)] {
        http().send(&Request::new(method.clone(), server.at("/x")), None).await.unwrap();
        let headers = server.seen.lock().pop().unwrap().headers;
        assert_eq!(
            headers.matches("content-length: 0").count(),
            usize::from(has_length),
            "{method}: {headers}"
        );
    }
}

#[tokio::test]
async fn a_redirect_is_an_answer() {
    let server = Server::start(|_| reply(307, "location: /elsewhere\r\n", &Value::Null)).await;
    let answer = http().send(&Request::get(server.at("/vms")), None).await.unwrap();
    assert_eq!((answer.status(), server.lines()), (307, vec!["GET /vms".to_owned()]));
}

#[tokio::test]
async fn an_endless_answer_is_not_read() {
    let announced = Server::start(|_| Some(raw(200, "", "").replace("length: 0", "length: 99999999"))).await;
    let streamed = Server::start(|_| {
        let body = "x".repeat((16 << 20) + 1);
        Some(format!("HTTP/1.1 200 X\r\nconnection: close\r\n\r\n{body}"))
    })
    .await;
    for server in [announced, streamed] {
        let lost = http().send(&Request::get(server.at("/vms")), None).await.unwrap_err();
        assert!(matches!(&lost, NoAnswer::Lost(why) if why.contains("longer than 16 MiB")), "{lost:?}");
    }
}

#[tokio::test]
async fn a_lost_answer_and_an_unsent_request_differ_and_show_no_url() {
    let server = Server::start(|_| None).await;
    let request = Request::get(server.at("/vms?sig=hush"));
    let lost = http().send(&request, None).await.unwrap_err();
    assert!(matches!(lost, NoAnswer::Lost(_)) && !lost.why().contains("hush"), "{lost:?}");
    // Nothing listens on a port that was bound and closed.
    let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let request = request.to(Url::parse(&format!("http://{port}/?sig=hush")).unwrap());
    let unsent = http().send(&request, None).await.unwrap_err();
    assert!(matches!(unsent, NoAnswer::Unsent(_)) && !unsent.why().contains("hush"), "{unsent:?}");
    let unsent = http().send(&request, Some(&Secret::new("a\nb".into()))).await.unwrap_err();
    assert!(unsent.why().contains("control character"), "{unsent:?}");
}

fn pem(der: &[u8]) -> String {
    format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", STANDARD.encode(der))
}

#[tokio::test]
async fn the_ca_file_alone_is_trusted() {
    let key = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let pem = File::new("ca.pem", &pem(key.cert.der()));
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(ring)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![key.cert.der().clone()],
            rustls::pki_types::PrivatePkcs8KeyDer::from(key.signing_key.serialize_der()).into(),
        );
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config.unwrap()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            read(&mut stream).await;
            stream.write_all(raw(200, "", "{}").as_bytes()).await.unwrap();
            drop(stream.shutdown().await);
        }
    });
    let request = Request::get(Url::parse(&format!("https://localhost:{port}/")).unwrap());
    let settings = HttpSettings { ca_file: Some(pem.0.clone()), call_timeout: Duration::from_secs(10) };
    let answer = Http::new(&settings).unwrap().send(&request, None).await.unwrap();
    assert_eq!(answer.status(), 200);
    let refused = http().send(&request, None).await.unwrap_err();
    assert!(refused.why().contains("UnknownIssuer") || refused.why().contains("certificate"), "{refused:?}");
}

#[test]
fn a_ca_file_without_certificates_is_refused() {
    let file = File::new("none.pem", "no certificate\n");
    for path in [file.0.clone(), PathBuf::from("/nonexistent/ca.pem")] {
        let settings = HttpSettings { ca_file: Some(path.clone()), call_timeout: Duration::from_secs(1) };
        let error = Http::new(&settings).unwrap_err();
        let text = error.to_string();
        assert!(error.class() == "invalid" && text.contains(path.to_str().unwrap()), "{text}");
        assert!(text.contains("correct ca-file"), "{text}");
    }
}

#[test]
fn a_pause_is_seconds_or_a_date() {
    let at = |text: &str| {
        let mut answer = HttpAnswer::of(429, &Value::Null);
        answer.headers.insert("retry-after", text.parse().unwrap());
        answer.retry_after(SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777))
    };
    assert_eq!(at("7"), Some(Duration::from_secs(7)));
    assert_eq!(at("Sun, 06 Nov 1994 08:49:40 GMT"), Some(Duration::from_secs(3)));
    assert_eq!(at("Sun, 06 Nov 1994 08:49:30 GMT"), Some(Duration::ZERO), "a date in the past");
    assert_eq!(at("99999999"), Some(Duration::from_secs(600)));
    assert_eq!(at("soon"), None);
    assert_eq!(HttpAnswer::of(429, &Value::Null).retry_after(SystemTime::now()), None);
}

#[test]
fn the_token_goes_to_the_endpoint_and_the_listed_hosts_only() {
    let hosts = Hosts::parse("https://management.azure.com", &[".management.azure.com"]).unwrap();
    for good in [
        "https://management.azure.com/subscriptions/a?x=1",
        "https://management.azure.com:443/a",
        "https://westeurope.management.azure.com/a",
        "/subscriptions/a",
        "//management.azure.com/a",
    ] {
        assert!(hosts.follow(good).is_ok(), "{good}");
    }
    for bad in [
        "http://management.azure.com/a",
        "https://management.azure.com:8443/a",
        "https://management.azure.com.evil.example/a",
        "https://evilmanagement.azure.com/a",
        "https://.management.azure.com/a",
        "https://user@management.azure.com/a",
        "https://user:hush@x.management.azure.com/a",
        "https://x.management.azure.com:8443/a",
        "http://x.management.azure.com/a",
        "//evil.example/a?sig=hush",
        "https://[",
        "file:///etc/passwd",
    ] {
        let error = hosts.follow(bad).unwrap_err();
        assert_eq!(error.class(), "invalid", "{bad}");
        assert!(!error.to_string().contains("sig="), "{error}");
    }
    for bad in ["management.azure.com", "ftp://a", "https://", "https://user:hush@a/", "unix:/a"] {
        assert!(Hosts::parse(bad, &[]).is_err(), "{bad}");
    }
}

#[test]
fn a_path_is_encoded_below_that_of_the_endpoint() {
    let hosts = Hosts::parse("http://127.0.0.1:80/compute/v1/", &[]).unwrap();
    let url = hosts.path(["projects", "a/b", "..", "c d?"]);
    assert_eq!(url.as_str(), "http://127.0.0.1/compute/v1/projects/a%2Fb/c%20d%3F");
}
