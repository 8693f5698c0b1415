//! Serves a page in a namespace and fetches one, to check the source address that the server sees.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, ensure};

use crate::Namespace;

/// Time limit of one exchange. One end may be in an emulated machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// Serves, on both families, a page that names the client's address. Ends when dropped.
pub struct PageServer {
    port: u16,
    namespace: Namespace,
    peers: Arc<Mutex<Vec<IpAddr>>>,
    ending: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl PageServer {
    /// Starts the server on a free port.
    pub fn start(namespace: &Namespace) -> anyhow::Result<PageServer> {
        let listener = namespace.run(|| TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)))??;
        let port = listener.local_addr()?.port();
        let (peers, ending) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let thread = thread::spawn({
            let (peers, ending) = (peers.clone(), ending.clone());
            move || {
                for stream in listener.incoming() {
                    if ending.load(Ordering::SeqCst) {
                        return;
                    }
                    // A client may disconnect at any time.
                    drop(stream.and_then(|stream| answer(stream, &peers)));
                }
            }
        });
        Ok(PageServer { port, namespace: namespace.clone(), peers, ending, thread: Some(thread) })
    }

    /// Returns the port, which is open on every address of the namespace.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the clients that were sent a page so far. A client that has received its page is in the list.
    pub fn peers(&self) -> Vec<IpAddr> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for PageServer {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::SeqCst);
        // Wakes the accept loop. If that fails, the loop is not accepting either.
        let address = SocketAddr::new(Ipv6Addr::LOCALHOST.into(), self.port);
        let woken =
            self.namespace.run(|| TcpStream::connect_timeout(&address, PATIENCE).is_ok()).unwrap_or(false);
        if let (true, Some(thread)) = (woken, self.thread.take()) {
            thread.join().ok();
        }
    }
}

fn answer(mut stream: TcpStream, peers: &Mutex<Vec<IpAddr>>) -> std::io::Result<()> {
    let peer = stream.peer_addr()?.ip().to_canonical();
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut request = Vec::new();
    let mut piece = [0; 1024];
    while request.len() < 8192 && !request.windows(4).any(|window| window == b"\r\n\r\n") {
        match stream.read(&mut piece)? {
            0 => break,
            count => request.extend_from_slice(&piece[..count]),
        }
    }
    let page = page_for(peer);
    // Before the write: a test may call `peers` as soon as the client has the page.
    peers.lock().unwrap_or_else(PoisonError::into_inner).push(peer);
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{page}", page.len())
}

/// Returns the page for a client, as this server and the `page` tool of the test agent write it.
pub fn page_for(peer: IpAddr) -> String {
    format!("a page for {peer}\n")
}

/// Fetches a page from within a namespace and returns its body.
pub fn fetch(from: &Namespace, address: SocketAddr) -> anyhow::Result<String> {
    let attempt = || format!("fetch a page of {address} from {}", from.name());
    from.run(|| fetch_here(address)).with_context(attempt)?.with_context(attempt)
}

fn fetch_here(address: SocketAddr) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    write!(stream, "GET / HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.take(1 << 20).read_to_string(&mut answer)?;
    ensure!(answer.starts_with("HTTP/1.1 200 "), "the answer is {answer:?}");
    Ok(answer.split_once("\r\n\r\n").context("the answer has no body")?.1.to_owned())
}
