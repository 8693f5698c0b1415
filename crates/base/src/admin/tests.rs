//! Tests of the port with the requests of a scraper and a kubelet.

use std::sync::atomic::{AtomicBool, Ordering};

use prometheus_client::metrics::counter::Counter;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;

async fn ask(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

async fn get(address: SocketAddr, path: &str) -> String {
    ask(address, &format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).await
}

async fn served() -> (SocketAddr, Ready, Counter) {
    let mut registry = Registry::with_prefix("peerpod");
    let counter = Counter::default();
    registry.register("things", "Things that happened", counter.clone());
    let ready = Ready::default();
    let address = serve("127.0.0.1:0".parse().unwrap(), Arc::new(registry), ready.clone()).await.unwrap();
    (address, ready, counter)
}

#[tokio::test]
async fn a_scraper_gets_the_format_that_it_prefers() {
    let (address, _, counter) = served().await;
    counter.inc_by(3);
    const OPEN: &str = "content-type: application/openmetrics-text; version=1.0.0";
    const PLAIN: &str = "content-type: text/plain; version=0.0.4";
    for (accept, kind) in [
        ("*/*", PLAIN),
        ("text/plain;version=0.0.4;q=0.3,*/*;q=0.1", PLAIN),
        ("application/openmetrics-text;q=0,text/plain;q=0", PLAIN),
        ("application/openmetrics-text;version=1.0.0;q=0.2,text/plain;version=0.0.4;q=0.6", PLAIN),
        ("application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.1", OPEN),
        ("application/openmetrics-text", OPEN),
    ] {
        let request =
            format!("GET /metrics HTTP/1.1\r\nhost: x\r\naccept: {accept}\r\nconnection: close\r\n\r\n");
        let answer = ask(address, &request).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert!(answer.contains(kind), "{accept}: {answer}");
        assert!(answer.contains("peerpod_things_total 3\n"), "{answer}");
        let (typed, end) =
            if kind == OPEN { ("things counter", "# EOF\n") } else { ("things_total counter", " 3\n") };
        assert!(answer.contains(typed) && answer.ends_with(end), "{answer}");
    }
    assert!(get(address, "/metrics").await.contains(PLAIN));
}

#[tokio::test]
async fn a_start_that_waits_is_alive_and_frees_the_port() {
    // The port must be free again, so it cannot be any: an address of this process's own.
    let [.., high, low] = std::process::id().to_be_bytes();
    let (address, ready) = (SocketAddr::from(([127, 88, high, low], 18080)), Ready::default());
    let (asked, seen) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    let ask = || async {
        if !asked.swap(true, Ordering::Relaxed) {
            return Err("the API server is away");
        }
        for path in ["/healthz", "/readyz"] {
            let answer = get(address, path).await;
            seen.lock().push(answer);
        }
        Ok(7)
    };
    assert_eq!(wait_for("installation", (address, &ready), ask).await.unwrap(), 7);
    let seen = seen.into_inner();
    assert!(seen[0].starts_with("HTTP/1.1 200") && seen[1].starts_with("HTTP/1.1 503"), "{seen:?}");
    assert!(seen[1].contains(r#""installation":"the API server is away""#), "{seen:?}");
    assert!(ready.waiting().is_empty());
    serve(address, Arc::default(), ready).await.unwrap();
}

#[tokio::test]
async fn readiness_names_the_pending_components() {
    let (address, ready, _) = served().await;
    assert!(get(address, "/readyz").await.contains("{\"ready\":true,\"waiting\":{}}"));
    let block = ready.block("provider");
    block.because("preflight runs");
    ready.not_ready("relay", "not connected");
    let answer = get(address, "/readyz").await;
    assert!(answer.starts_with("HTTP/1.1 503"), "{answer}");
    assert!(
        answer.contains(
            "{\"ready\":false,\"waiting\":{\"provider\":\"preflight runs\",\"relay\":\"not connected\"}}"
        ),
        "{answer}"
    );
    drop(block);
    ready.ready("relay");
    assert!(ready.waiting().is_empty());
    assert!(get(address, "/readyz").await.starts_with("HTTP/1.1 200"));
    assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn other_paths_and_methods_are_refused() {
    let (address, ..) = served().await;
    assert!(get(address, "/etc/passwd").await.starts_with("HTTP/1.1 404"));
    let post = "POST /metrics HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    assert!(ask(address, post).await.starts_with("HTTP/1.1 405"));
    assert!(ask(address, "garbage\r\n\r\n").await.starts_with("HTTP/1.1 400"));
    let long = format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(100_000));
    let mut stream = TcpStream::connect(address).await.unwrap();
    // The other side may close during the write.
    let _written = stream.write_all(long.as_bytes()).await;
    assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn silent_connections_do_not_keep_others_out_for_ever() {
    let (address, ..) = served().await;
    let mut silent = Vec::new();
    for _ in 0..CONNECTIONS + 8 {
        silent.push(TcpStream::connect(address).await.unwrap());
    }
    let answer = tokio::time::timeout(HEADERS_WITHIN * 3, get(address, "/healthz")).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn a_taken_address_is_an_error_that_names_it() {
    let (address, ..) = served().await;
    let error = serve(address, Arc::new(Registry::default()), Ready::default()).await.unwrap_err();
    assert!(error.to_string().contains(&address.to_string()), "{error}");
}
