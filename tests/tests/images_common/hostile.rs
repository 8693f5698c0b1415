//! Registry that returns wrong responses. Runs one thread per connection, with one request each.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::{Image, digest};

/// Response of the registry to a request; `None` for the correct response.
pub type Lie = dyn Fn(&Request, &mut TcpStream) -> Option<()> + Send + Sync;

/// The fields of a request that the tests need.
pub struct Request {
    pub path: String,
    pub authorization: String,
    pub host: String,
    /// Offset of a request for the rest of a blob.
    pub offset: Option<usize>,
}

/// Serves the image under any name until the test ends, and counts the requested blobs.
pub struct Hostile {
    pub address: SocketAddr,
    pub blobs: Arc<AtomicUsize>,
}

impl Hostile {
    pub fn start(
        image: Image,
        lie: impl Fn(&Request, &mut TcpStream) -> Option<()> + Send + Sync + 'static,
    ) -> Hostile {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (image, lie): (_, Arc<Lie>) = (Arc::new(image), Arc::new(lie));
        let blobs = Arc::new(AtomicUsize::new(0));
        let counter = blobs.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (image, lie, counter) = (image.clone(), lie.clone(), counter.clone());
                thread::spawn(move || serve(stream, &image, &*lie, &counter));
            }
        });
        Hostile { address, blobs }
    }

    pub fn name(&self) -> String {
        format!("{}/lying/app:v1", self.address)
    }
}

fn serve(mut stream: TcpStream, image: &Image, lie: &Lie, blobs: &AtomicUsize) {
    let Some(request) = read(&stream) else { return };
    if request.path.contains("/blobs/") {
        blobs.fetch_add(1, Ordering::SeqCst);
    }
    if lie(&request, &mut stream).is_some() {
        return;
    }
    let asked = request.path.rsplit('/').next().unwrap_or_default();
    let all = image.blobs.iter().chain([&image.manifest]);
    match request.path.as_str() {
        "/v2/" => answer(&mut stream, "200 OK", "application/json", b"{}"),
        path if path.contains("/manifests/") => {
            let by_digest = all.clone().find(|bytes| digest(bytes) == asked);
            let kind = if by_digest.is_some() {
                "application/vnd.oci.image.manifest.v1+json"
            } else {
                image.media_type
            };
            answer(&mut stream, "200 OK", kind, by_digest.unwrap_or(&image.manifest));
        }
        _ => match all.clone().find(|bytes| digest(bytes) == asked) {
            Some(bytes) => answer(&mut stream, "200 OK", "application/octet-stream", bytes),
            None => answer(
                &mut stream,
                "404 Not Found",
                "application/json",
                b"{\"errors\":[{\"code\":\"BLOB_UNKNOWN\",\"message\":\"no\"}]}",
            ),
        },
    }
}

fn read(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next()?.ok()?;
    let mut request = Request {
        path: first.split(' ').nth(1)?.to_owned(),
        authorization: String::new(),
        host: String::new(),
        offset: None,
    };
    for line in lines {
        let line = line.ok()?;
        if line.is_empty() {
            return Some(request);
        }
        let (name, value) = line.split_once(": ")?;
        match name.to_ascii_lowercase().as_str() {
            "authorization" => request.authorization = value.to_owned(),
            "host" => request.host = value.to_owned(),
            "range" => {
                let offset = value.trim_start_matches("bytes=").trim_end_matches('-');
                request.offset = offset.parse().ok();
            }
            _ => {}
        }
    }
    None
}

/// Writes a complete response. The client may be gone.
pub fn answer(stream: &mut TcpStream, status: &str, kind: &str, body: &[u8]) {
    head(stream, status, &format!("Content-Type: {kind}\r\nContent-Length: {}\r\n", body.len()));
    stream.write_all(body).ok();
}

/// Writes the head of a response.
pub fn head(stream: &mut TcpStream, status: &str, headers: &str) {
    let text = format!("HTTP/1.1 {status}\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(text.as_bytes()).ok();
}

/// Writes `piece` until the client closes the connection, with `pause` after each.
pub fn for_ever(stream: &mut TcpStream, piece: &[u8], pause: Duration) {
    while stream.write_all(piece).is_ok() {
        if !pause.is_zero() {
            thread::sleep(pause);
        }
    }
}

/// Adds a token service: `/token` requires user and password, every other path requires the token. A client that sends
/// the token elsewhere is at fault.
pub fn with_tokens(
    address_of: Arc<std::sync::OnceLock<SocketAddr>>,
) -> impl Fn(&Request, &mut TcpStream) -> Option<()> {
    move |request, stream| {
        let address = address_of.get()?;
        if request.path.starts_with("/token") {
            let good = request.authorization == format!("Basic {}", STANDARD.encode("pod:secret"));
            match good && request.path.contains("repository%3Alying%2Fapp%3Apull") {
                true => answer(stream, "200 OK", "application/json", b"{\"token\":\"abc123\"}"),
                false => answer(stream, "401 Unauthorized", "text/plain", b"who are you?"),
            }
            return Some(());
        }
        if request.authorization == "Bearer abc123" {
            return None;
        }
        let challenge = format!(
            "WWW-Authenticate: Bearer realm=\"http://{address}/token\",service=\"test\"\r\nContent-Length: 0\r\n"
        );
        head(stream, "401 Unauthorized", &challenge);
        Some(())
    }
}
