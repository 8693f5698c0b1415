//! Two real namespaces, the node's side of a pod and the VM's, with a real link between them; the relay's part runs on
//! a thread without any capability, as it does in the relay.

use std::{
    io::{ErrorKind, Read, Write},
    net::{TcpListener as Listener, TcpStream as Stream},
    process::Command,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use peerpod_link::{
    endpoint::{Endpoint, Filter, Handler, Limits, LinkEvent, Role, Target, Transport},
    net::{localhost, netns::Netns},
};
use prometheus_client::registry::Registry;
use tokio::net::{TcpSocket, UnixStream};

use super::*;

const DEADLINE: Duration = Duration::from_secs(30);
/// Before a client sends its SYN a second time.
const AT_ONCE: Duration = Duration::from_millis(900);

/// How often the guest was asked to connect, and whether it takes its time.
#[derive(Default)]
struct Dials {
    count: AtomicUsize,
    held: AtomicBool,
}

struct End(Option<Netns>, Arc<Dials>);

impl Handler for End {
    fn filter(&mut self) -> Box<dyn Filter> {
        unreachable!("there are no agent streams here")
    }

    fn dial(&mut self) -> BoxFuture<'static, io::Result<UnixStream>> {
        Box::pin(std::future::ready(Err(ErrorKind::Unsupported.into())))
    }

    fn dial_pod(&mut self, target: Target) -> BoxFuture<'static, io::Result<TcpStream>> {
        let (netns, dials) = (self.0.clone().unwrap(), self.1.clone());
        dials.count.fetch_add(1, SeqCst);
        Box::pin(async move {
            while dials.held.load(SeqCst) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let make = if target.v6 { TcpSocket::new_v6 } else { TcpSocket::new_v4 };
            // The socket alone, made by a thread in there; the reactor is ours.
            let runtime = tokio::runtime::Handle::current();
            let socket = netns.run(move || {
                let _entered = runtime.enter();
                make()
            })??;
            socket.connect(target.address()).await
        })
    }

    fn on_control(&mut self, _message: Bytes) {}

    fn on_link(&mut self, _event: LinkEvent) {}

    fn on_connections(&mut self, _open: usize) {}
}

fn namespace() -> Netns {
    let netns = Netns::scratch().expect("run the tests as root");
    let up = netns.run(|| Command::new("ip").args(["link", "set", "lo", "up"]).status());
    assert!(up.unwrap().unwrap().success());
    netns
}

fn ruleset(netns: &Netns) -> String {
    let listed = netns.run(|| Command::new("nft").args(["list", "ruleset"]).output()).unwrap().unwrap();
    String::from_utf8(listed.stdout).unwrap()
}

/// The pod's two sides and what carries between them.
struct Pod {
    node: Netns,
    vm: Netns,
    relay: EndpointHandle,
    runtime: tokio::runtime::Handle,
    metrics: Arc<Metrics>,
    dials: Arc<Dials>,
    /// Ends the thread without capabilities.
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Pod {
    fn new() -> Pod {
        let (node, vm) = (namespace(), namespace());
        let (tell, told) = std::sync::mpsc::channel();
        let (inside, stop) = (vm.clone(), Arc::new(AtomicBool::new(false)));
        let dials = Arc::<Dials>::default();
        // The guest has its rights.
        let guest = std::thread::spawn({
            let stop = stop.clone();
            let tell = tell.clone();
            let end = End(Some(inside), dials.clone());
            move || serve(Role::Guest, end, &tell, &stop)
        });
        let (guest_handle, _) = told.recv().unwrap();
        let thread = std::thread::spawn({
            let stop = stop.clone();
            move || {
                crate::harden::harden(15151);
                assert!(rustix::thread::capabilities(None).unwrap().effective.is_empty());
                serve(Role::Relay, End(None, Arc::default()), &tell, &stop);
                guest.join().unwrap();
            }
        });
        let (relay, runtime) = told.recv().unwrap();
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let far = Stream::connect(listener.local_addr().unwrap()).unwrap();
        for (stream, handle) in [(listener.accept().unwrap().0, &relay), (far, &guest_handle)] {
            stream.set_nonblocking(true).unwrap();
            let _entered = runtime.enter();
            let stream = TcpStream::from_std(stream).unwrap();
            peerpod_link::endpoint::tune(&stream).unwrap();
            handle.attach(Transport::from(stream));
        }
        std::mem::forget(guest_handle);
        let start = Instant::now();
        while !relay.stats().up {
            assert!(start.elapsed() < DEADLINE);
            std::thread::sleep(Duration::from_millis(1));
        }
        let metrics = Arc::new(Metrics::new(&mut Registry::default()));
        Pod { node, vm, relay, runtime, metrics, dials, stop, thread: Some(thread) }
    }

    /// What the node does.
    fn serve(&self) -> Serving {
        let relay = self.relay.clone();
        self.serve_on(&self.runtime, move || Some(relay.clone()))
    }

    fn serve_on(
        &self,
        runtime: &tokio::runtime::Handle,
        endpoint: impl Fn() -> Option<EndpointHandle> + Send + 'static,
    ) -> Serving {
        let (way, sockets) = localhost::open(&self.node).unwrap();
        let _entered = runtime.enter();
        let sockets = Sockets::take(&mut Handed::new(Value::Null, sockets)).unwrap();
        let id = SandboxId::parse("a").unwrap();
        let span = tracing::Span::none();
        let serving = Serving::start(id, way, sockets, endpoint, self.metrics.clone(), &span);
        localhost::redirect(&self.node, &way).unwrap();
        serving
    }

    fn listen(&self, address: &str) -> Listener {
        self.vm.run(|| Listener::bind(address)).unwrap().unwrap()
    }

    /// Connects in the node's side.
    fn connect(&self, host: &str, port: u16) -> io::Result<Stream> {
        let stream = self.node.run(|| Stream::connect((host, port))).unwrap()?;
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        Ok(stream)
    }

    /// Segments that the node's side of the pod sent again.
    fn sent_again(&self) -> usize {
        let read = || std::fs::read_to_string("/proc/thread-self/net/snmp").unwrap();
        let text = self.node.run(read).unwrap();
        let mut lines = text.lines().filter_map(|line| line.strip_prefix("Tcp: "));
        let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
        let at = names.split(' ').position(|name| name == "RetransSegs").unwrap();
        values.split(' ').nth(at).unwrap().parse().unwrap()
    }

    /// How long a refusal takes. A busy machine may be late now and then; who leaves SYNs unanswered always is.
    fn refused(&self, host: &str, port: u16) -> Duration {
        let mut least = Duration::MAX;
        for _ in 0..5 {
            let start = Instant::now();
            assert_eq!(self.connect(host, port).unwrap_err().kind(), ErrorKind::ConnectionRefused);
            least = least.min(start.elapsed());
            if least < AT_ONCE {
                break;
            }
        }
        least
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        self.stop.store(true, SeqCst);
        self.relay.close();
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking());
        }
    }
}

fn serve(
    role: Role,
    end: End,
    tell: &std::sync::mpsc::Sender<(EndpointHandle, tokio::runtime::Handle)>,
    stop: &AtomicBool,
) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (endpoint, handle) = Endpoint::new(role, end, Limits::default());
        let running = tokio::spawn(endpoint.run());
        tell.send((handle, tokio::runtime::Handle::current())).unwrap();
        while !stop.load(SeqCst) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        running.abort();
    });
}

/// Echoes everything of `count` connections, each to its end.
fn echo(listener: Listener, count: usize) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let served: Vec<_> = (0..count)
            .map(|_| {
                let (mut stream, _) = listener.accept().unwrap();
                std::thread::spawn(move || {
                    let mut all = Vec::new();
                    stream.read_to_end(&mut all).unwrap();
                    stream.write_all(&all).unwrap();
                })
            })
            .collect();
        served.into_iter().for_each(|thread| thread.join().unwrap());
    })
}

fn exchange(mut stream: Stream, what: &[u8]) {
    stream.write_all(what).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut back = Vec::new();
    stream.read_to_end(&mut back).unwrap();
    assert!(back == what, "{} bytes of {} came back", back.len(), what.len());
}

#[test]
fn a_hundred_at_once_in_both_families_are_carried_and_the_addresses_are_the_clients_own() {
    let pod = Pod::new();
    let _serving = pod.serve();
    for (host, all) in [("127.0.0.1", "127.0.0.1:8080"), ("::1", "[::1]:8080")] {
        let server = echo(pod.listen(all), 100);
        std::thread::scope(|scope| {
            for n in 0..100u32 {
                let pod = &pod;
                scope.spawn(move || {
                    let start = Instant::now();
                    let stream = pod.connect(host, 8080).unwrap();
                    // A busy machine may be late for the first SYN of one of many, and for its second.
                    assert!(
                        start.elapsed() < Duration::from_secs(6),
                        "a SYN was sent again and again: {:?}",
                        start.elapsed()
                    );
                    assert_eq!(stream.peer_addr().unwrap(), all.parse().unwrap());
                    exchange(stream, &n.to_be_bytes().repeat(20_000));
                });
            }
        });
        server.join().unwrap();
    }
    assert!(!ruleset(&pod.node).contains("ct "), "nothing is tracked");
}

#[test]
fn refused_there_is_refused_here_and_neither_waits() {
    let pod = Pod::new();
    let _serving = pod.serve();
    let _listening = pod.listen("127.0.0.1:8080");
    let mut times = Vec::new();
    for host in ["127.0.0.1", "::1"] {
        for port in [1, 8081, 65535] {
            times.push(pod.refused(host, port));
        }
    }
    // The VM listens on the other family only.
    times.push(pod.refused("::1", 8080));
    // Connected the first time, refused the next: a server that wanted one connection got one.
    let once = pod.listen("127.0.0.1:8082");
    let server = std::thread::spawn(move || once.accept().unwrap().0);
    let stream = pod.connect("127.0.0.1", 8082).unwrap();
    let mut served = server.join().unwrap();
    times.push(pod.refused("127.0.0.1", 8082));
    served.write_all(b"still there").unwrap();
    drop(served);
    let mut said = String::new();
    (&stream).read_to_string(&mut said).unwrap();
    assert_eq!(said, "still there");
    let slowest = times.iter().max().unwrap();
    println!("refusals {times:?}");
    assert!(*slowest < AT_ONCE, "{times:?}");
    let connects: Vec<Duration> = (0..20)
        .map(|_| {
            let start = Instant::now();
            let _stream = pod.connect("127.0.0.1", 8080).unwrap();
            start.elapsed()
        })
        .collect();
    println!("connects {connects:?}");
}

#[test]
fn who_listens_in_the_nodes_side_is_left_alone() {
    let pod = Pod::new();
    let _serving = pod.serve();
    let _inside = [pod.listen("127.0.0.1:7000"), pod.listen("[::1]:7000")];
    for (address, host) in [
        ("127.0.0.1:7000", "127.0.0.1"),
        ("0.0.0.0:7000", "127.0.0.1"),
        ("[::]:7000", "127.0.0.1"),
        ("[::]:7000", "::1"),
        ("[::1]:7000", "::1"),
    ] {
        let own = pod.node.run(|| Listener::bind(address)).unwrap().unwrap();
        let mut client = pod.connect(host, 7000).unwrap();
        let (mut here, _) = own.accept().unwrap();
        here.write_all(b"own").unwrap();
        let mut said = [0; 3];
        client.read_exact(&mut said).unwrap();
        assert_eq!(&said, b"own");
    }
    // And gone again: the VM's.
    pod.connect("127.0.0.1", 7000).unwrap();
}

#[test]
fn another_node_hands_in_again_and_a_relay_that_is_gone_is_a_refusal_at_once() {
    let pod = Pod::new();
    let first = pod.serve();
    let listener = pod.listen("127.0.0.1:8080");
    let before = pod.connect("127.0.0.1", 8080).unwrap();
    let (mut served, _) = listener.accept().unwrap();
    let second = pod.serve();
    assert_ne!(first.way, second.way);
    pod.runtime.block_on_elsewhere(first.stop());
    // What was carried goes on, what is new is carried.
    served.write_all(b"on").unwrap();
    let mut said = [0; 2];
    (&before).read_exact(&mut said).unwrap();
    pod.connect("127.0.0.1", 8080).unwrap();
    pod.runtime.block_on_elsewhere(second.stop());
    for host in ["127.0.0.1", "::1"] {
        assert!(pod.refused(host, 8080) < AT_ONCE);
    }
    localhost::remove(&pod.node).unwrap();
    localhost::remove(&pod.node).unwrap();
    assert_eq!(ruleset(&pod.node), "");
    assert!(pod.refused("127.0.0.1", 8080) < AT_ONCE);
}

#[test]
fn a_panic_of_ours_is_got_over_without_the_node_and_the_client_that_met_it_gets_through() {
    let pod = Pod::new();
    let server = echo(pod.listen("127.0.0.1:8080"), 2);
    let (relay, sound) = (pod.relay.clone(), AtomicBool::new(false));
    let serving = pod.serve_on(&pod.runtime, move || {
        assert!(sound.swap(true, SeqCst), "what a bug of ours would say");
        Some(relay.clone())
    });
    // The SYN that met it is lost, and sent again by the client's kernel.
    exchange(pod.connect("127.0.0.1", 8080).unwrap(), b"once more");
    exchange(pod.connect("127.0.0.1", 8080).unwrap(), b"as before");
    server.join().unwrap();
    assert_eq!(pod.metrics.panics.get(), 1);
    assert!(serving.is_running());
}

#[test]
fn a_syn_that_was_sent_again_while_the_guest_took_its_time_does_not_dial_the_server_twice() {
    const CLIENTS: usize = 16;
    let pod = Pod::new();
    let server = echo(pod.listen("127.0.0.1:8080"), CLIENTS + 1);
    // On a thread of its own that can be kept busy: what comes meanwhile is all met at once.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let relay = pod.relay.clone();
    let serving = pod.serve_on(runtime.handle(), move || Some(relay.clone()));
    let until = |what: &str, done: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < DEADLINE, "never {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    pod.dials.held.store(true, SeqCst);
    std::thread::scope(|scope| {
        for n in 0..CLIENTS as u32 {
            let pod = &pod;
            scope.spawn(move || exchange(pod.connect("127.0.0.1", 8080).unwrap(), &n.to_be_bytes()));
        }
        until("asked", &|| pod.dials.count.load(SeqCst) == CLIENTS);
        let (go_on, waits) = std::sync::mpsc::channel::<()>();
        runtime.spawn(async move { waits.recv().unwrap() });
        until("sent again", &|| pod.sent_again() >= CLIENTS);
        pod.dials.held.store(false, SeqCst);
        // The guest's answers come to the relay's end of the link, where nothing shows them.
        std::thread::sleep(Duration::from_millis(300));
        go_on.send(()).unwrap();
    });
    // Behind whatever was logged before.
    exchange(pod.connect("127.0.0.1", 8080).unwrap(), b"another");
    server.join().unwrap();
    assert_eq!(pod.dials.count.load(SeqCst), CLIENTS + 1);
    runtime.block_on(serving.stop());
}

/// Waits for a future that belongs to another thread's runtime.
trait Elsewhere {
    fn block_on_elsewhere(&self, future: impl Future<Output = ()> + Send + 'static);
}

impl Elsewhere for tokio::runtime::Handle {
    fn block_on_elsewhere(&self, future: impl Future<Output = ()> + Send + 'static) {
        let (done, waited) = std::sync::mpsc::channel();
        self.spawn(async move {
            future.await;
            done.send(()).unwrap();
        });
        waited.recv_timeout(DEADLINE).unwrap();
    }
}
