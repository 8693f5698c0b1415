//! An HTTP server of the tests: it answers each request by a function and records all of them.

mod calls;
mod credentials;
mod transport;

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use reqwest::Url;
use serde_json::Value;
use tokio::io::AsyncReadExt;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

/// Request as the server got it.
#[derive(Debug, Clone, Default)]
struct Seen {
    /// Method and path with query, like `GET /vms?page=2`.
    line: String,
    /// Headers in lower case.
    headers: String,
    body: String,
}

impl Seen {
    fn token(&self) -> Option<&str> {
        self.headers.lines().find_map(|line| line.strip_prefix("authorization: bearer "))
    }
}

/// Whole answer, or `None`: the connection ends without one.
type Reply = Option<String>;

fn reply(status: u16, headers: &str, body: &Value) -> Reply {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    Some(raw(status, headers, &body))
}

fn raw(status: u16, headers: &str, body: &str) -> String {
    let length = body.len();
    format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\nconnection: close\r\n{headers}\r\n{body}")
}

struct Server {
    url: Url,
    seen: Arc<Mutex<Vec<Seen>>>,
}

impl Server {
    async fn start(answer: impl Fn(&Seen) -> Reply + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = Url::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
        let (seen, answer) = (Arc::<Mutex<Vec<Seen>>>::default(), Arc::new(answer));
        let record = Arc::clone(&seen);
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let (record, answer) = (Arc::clone(&record), Arc::clone(&answer));
                tokio::spawn(async move {
                    let Some(one) = read(&mut stream).await else { return };
                    record.lock().push(one.clone());
                    if let Some(text) = answer(&one) {
                        drop(stream.write_all(text.as_bytes()).await);
                        drop(stream.shutdown().await);
                    }
                });
            }
        });
        Server { url, seen }
    }

    fn at(&self, path: &str) -> Url {
        self.url.join(path).unwrap()
    }

    fn lines(&self) -> Vec<String> {
        self.seen.lock().iter().map(|seen| seen.line.clone()).collect()
    }
}

/// File of the test, deleted at its end.
struct File(PathBuf);

impl File {
    fn new(name: &str, text: &str) -> File {
        let path = std::env::temp_dir().join(format!("peerpod-rest-{}-{name}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        File(path)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.0));
    }
}

async fn read(stream: &mut (impl tokio::io::AsyncRead + Unpin)) -> Option<Seen> {
    let mut bytes = Vec::new();
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|part| part == b"\r\n\r\n") {
            break end;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let (line, headers) = head.split_once("\r\n").unwrap_or((&head, ""));
    let headers = headers.to_ascii_lowercase();
    let length = headers.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
    let whole = end + 4 + length.unwrap_or(0);
    while bytes.len() < whole {
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
    Some(Seen {
        line: line.trim_end_matches(" HTTP/1.1").to_owned(),
        headers,
        body: String::from_utf8_lossy(&bytes[end + 4..]).into_owned(),
    })
}
