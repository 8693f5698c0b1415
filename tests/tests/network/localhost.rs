//! Tests the pod's localhost end to end: connections from the pod's netns on the node reach servers in its VM, across
//! kills and upgrades of the daemons. The relay resets a connection to a port without a listener. Nothing is left at
//! the end.

use super::network_common;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use network_common::Vm;
use peerpod_podnet::netns::Netns;
use peerpod_tests::{PATIENCE, nothing_beyond, sample, stop_in_time};
use peerpod_world::traffic::{self, ECHO_PORT, Echo};
use peerpod_world::{Daemons, Settings, Sight, World, eventually};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

const LOCALHOST: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];

async fn connect(from: &Netns, to: SocketAddr) -> std::io::Result<TcpStream> {
    let make = || if to.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() };
    from.run(make)??.connect(to).await
}

/// Checks that the kernel refuses a connection in both families: the relay has no listener.
async fn refused(from: &Netns, port: u16) {
    for address in LOCALHOST {
        let error = connect(from, SocketAddr::new(address, port)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{address} port {port}: {error}");
    }
}

/// Checks that the relay resets the connection in both families, because the VM has no listener. Returns the number of
/// attempts.
async fn reset(from: &Netns, port: u16) -> usize {
    for address in LOCALHOST {
        let outcome = match connect(from, SocketAddr::new(address, port)).await {
            Ok(mut stream) => stream.read(&mut [0]).await,
            Err(error) => Err(error),
        };
        let error = outcome.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{address} port {port}: {error}");
    }
    LOCALHOST.len()
}

async fn carried(from: &Netns, bytes: usize) -> anyhow::Result<()> {
    for address in LOCALHOST {
        traffic::tcp(from, SocketAddr::new(address, ECHO_PORT), bytes).await?;
    }
    Ok(())
}

async fn until_carried(from: &Netns, daemons: &Daemons) {
    let carried =
        eventually("the pod's localhost is carried", PATIENCE, async || carried(from, 1000).await.ok());
    carried.await.unwrap_or_else(|error| panic!("{error}\n{}", daemons.log_tails()));
}

/// Returns the number of listening and raw sockets in a namespace.
fn sockets(netns: &Netns) -> usize {
    let of = |file: &str| std::fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap();
    netns
        .run(|| {
            let listening = ["tcp", "tcp6"].map(of);
            let listening =
                listening.iter().flat_map(|text| text.lines()).filter(|line| line.contains(" 0A "));
            let raw = ["raw", "raw6"].map(|file| of(file).lines().count() - 1);
            listening.count() + raw.iter().sum::<usize>()
        })
        .unwrap()
}

/// Sends a message and reads its echo.
async fn speaks(stream: &mut TcpStream, what: &[u8; 8]) {
    stream.write_all(what).await.unwrap();
    let mut back = [0; 8];
    stream.read_exact(&mut back).await.unwrap();
    assert_eq!(&back, what);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_node_reaches_the_pods_localhost_in_its_vm_across_restarts_of_daemons() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let pod = world.pod().unwrap();
    let before = Sight::of(&world, &[pod.namespace()], &daemons).unwrap();
    let vm = Vm::start(&daemons, "localhost", &pod.namespace().path()).await.unwrap();
    let here = pod.namespace().netns();
    let _servers = Echo::start(&vm.inside, &LOCALHOST).unwrap();
    until_carried(here, &daemons).await;

    for address in LOCALHOST {
        let to = SocketAddr::new(address, ECHO_PORT);
        traffic::streams(here, to, 100, 100_000).await.unwrap();
    }
    carried(here, 64 << 20).await.unwrap();
    let tried = reset(here, ECHO_PORT + 1).await;
    // The address of the server is the one that the client dialled.
    let mut stays = connect(here, (Ipv4Addr::LOCALHOST, ECHO_PORT).into()).await.unwrap();
    assert_eq!(stays.peer_addr().unwrap(), (Ipv4Addr::LOCALHOST, ECHO_PORT).into());
    stays.read_exact(&mut [0; 64]).await.unwrap();
    let page = daemons.metrics("relay").unwrap();
    let counted = sample(&page, "peerpod_relay_localhost_connections_total{outcome=\"refused\"}").unwrap();
    assert_eq!(counted as usize, tried, "{page}");

    // Open and new connections do not depend on the node.
    daemons.kill_node().unwrap();
    speaks(&mut stays, b"no node.").await;
    carried(here, 100_000).await.unwrap();
    reset(here, ECHO_PORT + 1).await;
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
    speaks(&mut stays, b"new node").await;
    carried(here, 100_000).await.unwrap();

    // A new relay takes over connections and sockets, even with no node that could hand the sockets in.
    daemons.take_over().await.unwrap();
    speaks(&mut stays, b"next one").await;
    carried(here, 1 << 20).await.unwrap();
    daemons.kill_node().unwrap();
    daemons.take_over().await.unwrap();
    carried(here, 100_000).await.unwrap();
    reset(here, ECHO_PORT + 1).await;
    speaks(&mut stays, b"and next").await;
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();

    // Connections end with the relay that carries them, with a reset and without a wait.
    daemons.kill_relay().unwrap();
    refused(here, ECHO_PORT).await;
    let ended = tokio::time::timeout(PATIENCE, stays.read(&mut [0; 8])).await.unwrap();
    assert_eq!(ended.unwrap_err().kind(), ErrorKind::ConnectionReset);
    daemons.start_relay().unwrap();
    until_carried(here, &daemons).await;
    reset(here, ECHO_PORT + 1).await;

    let running = Sight::of(&world, &[pod.namespace()], &daemons).unwrap();
    assert_eq!(sockets(here), 2, "a listener of each family and no raw socket");
    assert!(!running.containing("peerpod-localhost").is_empty(), "the witness sees the rules");
    // The shim's own connection ended with the relay.
    let shim = daemons.shim().await.unwrap();
    stop_in_time(&shim, &vm.id).await.unwrap();
    daemons.gone(&vm.id, PATIENCE).await.unwrap();
    refused(here, ECHO_PORT).await;
    nothing_beyond(&world, &[pod.namespace()], &daemons, &before, &running).await.unwrap();
    assert_eq!(sockets(here), 0, "sockets keep a namespace alive that has no name any more");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_pods_localhost_can_be_disabled() {
    let world = World::new().unwrap();
    let settings = Settings::none().set("tunnel.localhost", false);
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let pod = world.pod().unwrap();
    let vm = Vm::start(&daemons, "alone", &pod.namespace().path()).await.unwrap();
    let _servers = Echo::start(&vm.inside, &LOCALHOST).unwrap();
    refused(pod.namespace().netns(), ECHO_PORT).await;
    let sight = Sight::of(&world, &[pod.namespace()], &daemons).unwrap();
    assert!(sight.containing("peerpod-localhost").is_empty());
    vm.stop(&daemons).await.unwrap();
}
