//! Tests with two real namespaces, the node's side of a pod and the VM, and a real link between them. The relay's part
//! runs on a thread without any capability, as in the relay. The node's part has the capabilities that the chart
//! grants.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener as Listener, TcpStream as Stream};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use peerpod_link::endpoint::{Endpoint, Filter, Handler, Limits, LinkEvent, Role, Target, Transport};
use peerpod_podnet::localhost;
use peerpod_podnet::netns::Netns;
use prometheus_client::registry::Registry;
use tokio::net::{TcpSocket, UnixStream};

use super::*;

const DEADLINE: Duration = Duration::from_secs(30);

struct End(Option<Netns>);

impl Handler for End {
    fn filter(&mut self) -> Box<dyn Filter> {
        unreachable!("there are no agent streams here")
    }

    fn dial(&mut self) -> BoxFuture<'static, io::Result<UnixStream>> {
        Box::pin(std::future::ready(Err(ErrorKind::Unsupported.into())))
    }

    fn dial_pod(&mut self, target: Target) -> BoxFuture<'static, io::Result<TcpStream>> {
        let netns = self.0.clone().unwrap();
        Box::pin(async move {
            let make = if target.v6 { TcpSocket::new_v6 } else { TcpSocket::new_v4 };
            // Only the socket is made in the namespace, by a thread there; it belongs to this thread's reactor.
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

/// The two sides of a pod and the link between them.
struct Pod {
    node: Netns,
    vm: Netns,
    relay: EndpointHandle,
    runtime: tokio::runtime::Handle,
    metrics: Arc<Metrics>,
    /// Stops the thread without capabilities.
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Pod {
    fn new() -> Pod {
        let (node, vm) = (namespace(), namespace());
        let (tell, told) = std::sync::mpsc::channel();
        let (inside, stop) = (vm.clone(), Arc::new(AtomicBool::new(false)));
        // The guest keeps its privileges.
        let guest = std::thread::spawn({
            let stop = stop.clone();
            let tell = tell.clone();
            let end = End(Some(inside));
            move || serve(Role::Guest, end, &tell, &stop)
        });
        let (guest_handle, _) = told.recv().unwrap();
        let thread = std::thread::spawn({
            let stop = stop.clone();
            move || {
                crate::harden::harden(15151, &crate::harden::PermittedFolders::default()).unwrap();
                assert!(rustix::thread::capabilities(None).unwrap().effective.is_empty());
                serve(Role::Relay, End(None), &tell, &stop);
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
        Pod { node, vm, relay, runtime, metrics, stop, thread: Some(thread) }
    }

    /// Does the node's part.
    fn serve(&self) -> Serving {
        let relay = self.relay.clone();
        let endpoint = move || Some(relay.clone());
        let (ports, listeners) = localhost::open(&self.node).unwrap();
        let _entered = self.runtime.enter();
        let named = LISTEN.into_iter().zip(listeners);
        let listeners = named.filter_map(|(name, listener)| Some((name.to_owned(), listener?))).collect();
        let mut passed = Passed { detail: Value::Null, descriptors: listeners };
        let listeners = Listeners::take(&mut passed).unwrap();
        let id = SandboxId::new("a").unwrap();
        let span = tracing::Span::none();
        let serving = Serving::start(id, ports, listeners, endpoint, self.metrics.clone(), &span);
        localhost::redirect(&self.node, ports).unwrap();
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

    /// Asserts that a connection is reset after the relay's listener accepted it, because no program in the VM takes
    /// it.
    fn reset(&self, host: &str, port: u16) {
        let error = self.connect(host, port).and_then(|mut stream| stream.read(&mut [0])).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{host} port {port}");
    }

    /// Asserts that the kernel refuses a connection, because the relay has no listener.
    fn refused(&self, host: &str, port: u16) {
        let began = Instant::now();
        // A process that another test starts has a copy of each listener until its exec.
        while self.connect(host, port).is_ok() {
            assert!(began.elapsed() < DEADLINE, "{host} port {port} has a listener");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(self.connect(host, port).unwrap_err().kind(), ErrorKind::ConnectionRefused);
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

/// Echoes everything on `count` connections, each until its end.
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
fn a_hundred_connections_in_both_families_reach_the_vm_with_the_clients_addresses() {
    let pod = Pod::new();
    let _serving = pod.serve();
    for (host, all) in [("127.0.0.1", "127.0.0.1:8080"), ("::1", "[::1]:8080")] {
        let server = echo(pod.listen(all), 100);
        std::thread::scope(|scope| {
            for n in 0..100u32 {
                let pod = &pod;
                scope.spawn(move || {
                    let stream = pod.connect(host, 8080).unwrap();
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
fn a_port_without_a_listener_in_the_vm_resets_the_client() {
    let pod = Pod::new();
    let _serving = pod.serve();
    for host in ["127.0.0.1", "::1"] {
        for port in [1, 8081, 65535] {
            pod.reset(host, port);
        }
    }
    // A server that takes one connection got exactly one.
    let once = pod.listen("127.0.0.1:8082");
    let server = std::thread::spawn(move || once.accept().unwrap().0);
    let stream = pod.connect("127.0.0.1", 8082).unwrap();
    let mut served = server.join().unwrap();
    pod.reset("127.0.0.1", 8082);
    served.write_all(b"still there").unwrap();
    drop(served);
    let mut received = String::new();
    (&stream).read_to_string(&mut received).unwrap();
    assert_eq!(received, "still there");
}

/// `kubectl port-forward` dials ::1 only if 127.0.0.1 refuses, which the relay's listener never does.
#[test]
fn a_server_on_one_family_of_localhost_is_reached_by_the_other() {
    let pod = Pod::new();
    let _serving = pod.serve();
    for (listens, dialled) in [("[::1]:8083", "127.0.0.1"), ("127.0.0.1:8084", "::1")] {
        let server = echo(pod.listen(listens), 1);
        let port = listens.rsplit(':').next().unwrap().parse().unwrap();
        exchange(pod.connect(dialled, port).unwrap(), b"either");
        server.join().unwrap();
    }
}

#[test]
fn the_charts_capabilities_of_the_node_are_enough_to_redirect() {
    std::thread::scope(|scope| {
        let node = scope.spawn(|| {
            use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
            let chart = CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN;
            let sets =
                CapabilitySets { effective: chart, permitted: chart, inheritable: CapabilitySet::empty() };
            set_capabilities(None, sets).unwrap();
            localhost::probe()
        });
        node.join().unwrap().unwrap();
    });
}

#[test]
fn a_listener_in_the_pods_netns_on_the_node_keeps_its_connections() {
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
        // Another test's child has a copy of the listener before until its `exec`.
        let since = Instant::now();
        let own = loop {
            match pod.node.run(|| Listener::bind(address)).unwrap() {
                Ok(own) => break own,
                Err(error) => assert!(since.elapsed() < DEADLINE, "{address}: {error}"),
            }
            std::thread::yield_now();
        };
        let mut client = pod.connect(host, 7000).unwrap();
        let (mut here, _) = own.accept().unwrap();
        here.write_all(b"own").unwrap();
        let mut said = [0; 3];
        client.read_exact(&mut said).unwrap();
        assert_eq!(&said, b"own");
    }
    // After the local listener is gone, connections reach the VM again.
    pod.connect("127.0.0.1", 7000).unwrap();
}

#[test]
fn a_new_node_passes_listeners_again_and_the_kernel_refuses_without_the_relay() {
    let pod = Pod::new();
    let first = pod.serve();
    let listener = pod.listen("127.0.0.1:8080");
    let before = pod.connect("127.0.0.1", 8080).unwrap();
    let (mut served, _) = listener.accept().unwrap();
    let second = pod.serve();
    assert_ne!(first.ports, second.ports);
    pod.runtime.block_on_elsewhere(first.stop());
    // Existing connections continue, and new ones are carried.
    served.write_all(b"on").unwrap();
    let mut said = [0; 2];
    (&before).read_exact(&mut said).unwrap();
    pod.connect("127.0.0.1", 8080).unwrap();
    pod.runtime.block_on_elsewhere(second.stop());
    for host in ["127.0.0.1", "::1"] {
        pod.refused(host, 8080);
    }
    localhost::remove(&pod.node).unwrap();
    localhost::remove(&pod.node).unwrap();
    assert_eq!(ruleset(&pod.node), "");
    pod.refused("127.0.0.1", 8080);
}

/// Waits for a future that runs on another thread's runtime.
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
