//! A proxy before a machine, which ends the connection, and the machine if wished, at a chosen packet of the client.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;

/// Proxy of one machine.
pub struct Proxy {
    /// Address of the proxy.
    pub address: SocketAddr,
    state: Arc<State>,
    task: JoinHandle<()>,
}

struct State {
    machine: SocketAddr,
    /// Number of packets until the cut; `usize::MAX`: there is no cut.
    left: AtomicUsize,
    /// Whether the packet of the cut still arrives.
    delivers: bool,
    /// Whether the cut began, and whether it was made.
    is_cut: AtomicBool,
    is_made: AtomicBool,
    /// Whether connections are refused.
    refuses: AtomicBool,
    /// Acts at the cut.
    at_cut: Box<dyn Fn() + Send + Sync>,
}

impl Proxy {
    /// Starts a proxy, which cuts nothing until [`Proxy::arm`].
    pub async fn start(
        machine: SocketAddr,
        delivers: bool,
        at_cut: impl Fn() + Send + Sync + 'static,
    ) -> Proxy {
        let listener = TcpListener::bind((machine.ip(), 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State {
            machine,
            left: usize::MAX.into(),
            delivers,
            is_cut: false.into(),
            is_made: false.into(),
            refuses: false.into(),
            at_cut: Box::new(at_cut),
        });
        let task = tokio::spawn({
            let state = state.clone();
            async move {
                loop {
                    let (client, _) = listener.accept().await.unwrap();
                    if !state.refuses.load(Ordering::Relaxed) {
                        tokio::spawn(carry(state.clone(), client));
                    }
                }
            }
        });
        Proxy { address, state, task }
    }

    /// Cuts at the client's packet of this number, from now on.
    pub fn arm(&self, packet: usize) {
        self.state.left.store(packet, Ordering::Relaxed);
    }

    /// Whether the cut was made; waits for one that has begun.
    pub async fn is_cut(&self) -> bool {
        while self.state.is_cut.load(Ordering::Relaxed) != self.state.is_made.load(Ordering::Relaxed) {
            tokio::task::yield_now().await;
        }
        self.state.is_made.load(Ordering::Relaxed)
    }

    /// Accepts connections again.
    pub fn heal(&self) {
        self.state.refuses.store(false, Ordering::Relaxed);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Longest wait for the answer to the last packet: some packets have none.
const ANSWER: Duration = Duration::from_millis(200);

async fn carry(state: Arc<State>, client: TcpStream) {
    let Ok(machine) = TcpStream::connect(state.machine).await else { return };
    let (mut from_client, to_client) = client.into_split();
    let (from_machine, mut to_machine) = machine.into_split();
    let (lost, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(Notify::new()));
    let back = tokio::spawn(carry_back(from_machine, to_client, lost.clone(), answered.clone()));
    let mut packet = vec![0; 64 << 10];
    while let Ok(length @ 1..) = from_client.read(&mut packet).await {
        let is_last = state.left.fetch_sub(1, Ordering::Relaxed) == 1;
        state.is_cut.fetch_or(is_last, Ordering::Relaxed);
        lost.store(is_last, Ordering::Relaxed);
        if (!is_last || state.delivers) && to_machine.write_all(&packet[..length]).await.is_err() {
            break;
        }
        if is_last {
            if state.delivers {
                // The packet has had its effect when it is answered.
                drop(timeout(ANSWER, answered.notified()).await);
            }
            state.refuses.store(true, Ordering::Relaxed);
            (state.at_cut)();
            state.is_made.store(true, Ordering::Relaxed);
            break;
        }
    }
    back.abort();
}

/// Carries answers to the client, until they get lost.
async fn carry_back(
    mut machine: OwnedReadHalf,
    mut client: OwnedWriteHalf,
    lost: Arc<AtomicBool>,
    answered: Arc<Notify>,
) {
    let mut packet = vec![0; 64 << 10];
    while let Ok(length @ 1..) = machine.read(&mut packet).await {
        if lost.load(Ordering::Relaxed) {
            answered.notify_one();
        } else if client.write_all(&packet[..length]).await.is_err() {
            return;
        }
    }
}
