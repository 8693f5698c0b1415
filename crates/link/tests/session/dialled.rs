//! Tests dialled streams, with a real server behind the guest and a real client before the relay.

use super::support;
use std::io;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use peerpod_link::endpoint::{DialError, Limits, Role, Target};
use peerpod_link::record::{Hello, RecordKind, SessionId, Welcome, plain};
use support::{DEADLINE, ECHO, Options, Pair, call, end, request, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::timeout;

fn pattern(at: usize, length: usize) -> Vec<u8> {
    (at..at + length).map(|at| (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0]).collect()
}

async fn server(v6: bool) -> (TcpListener, Target) {
    let listener = TcpListener::bind(if v6 { "[::1]:0" } else { "127.0.0.1:0" }).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, Target { v6, port })
}

/// Returns the two ends of a TCP connection: the client's, and the one that the relay accepted for it.
async fn accepted() -> (TcpStream, TcpStream) {
    let (listener, target) = server(false).await;
    let (near, far) = tokio::join!(TcpStream::connect(target.address()), listener.accept());
    (near.unwrap(), far.unwrap().0)
}

/// Returns a client's connection that is carried to `target`, and the server's end of it.
async fn carried(pair: &Pair, listener: &TcpListener, target: Target) -> (TcpStream, TcpStream) {
    let (connected, server) = tokio::join!(pair.relay.dial(target), listener.accept());
    let (client, local) = accepted().await;
    connected.unwrap().join(local);
    (client, server.unwrap().0)
}

async fn up(options: Options) -> Pair {
    let pair = Pair::start(options).await;
    until("up", || pair.relay.stats().up).await;
    pair
}

async fn send(mut to: impl tokio::io::AsyncWrite + Unpin, total: usize) {
    for at in (0..total).step_by(1 << 16) {
        to.write_all(&pattern(at, 1 << 16)).await.unwrap();
    }
    to.shutdown().await.unwrap();
}

async fn receive(mut from: impl tokio::io::AsyncRead + Unpin, total: usize) {
    let mut bytes = vec![0; 1 << 16];
    for at in (0..total).step_by(1 << 16) {
        from.read_exact(&mut bytes).await.unwrap();
        assert!(bytes == pattern(at, 1 << 16), "the bytes at {at} differ");
    }
    assert_eq!(from.read(&mut bytes).await.unwrap(), 0, "the end comes after the last byte");
}

async fn both_ways(pair: &Pair, v6: bool, total: usize) {
    let (listener, target) = server(v6).await;
    let (client, served) = carried(pair, &listener, target).await;
    let (client_in, client_out) = client.into_split();
    let (server_in, server_out) = served.into_split();
    tokio::join!(
        send(client_out, total),
        receive(server_in, total),
        send(server_out, total),
        receive(client_in, total)
    );
    until("nothing is left", || pair.relay.stats().dialled + pair.guest.stats().dialled == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_mebibytes_each_way_arrive_as_they_were() {
    for v6 in [false, true] {
        let pair = up(Options::tls(true)).await;
        timeout(DEADLINE, both_ways(&pair, v6, 64 << 20)).await.unwrap();
        assert_eq!((pair.relay.stats().connections, pair.guest.stats().connections), (0, 0), "no agent's");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_is_cut_all_the_time_loses_and_doubles_nothing_of_a_dialled_stream() {
    let mut left = 60;
    let options = Options::tls(false).cut(move || {
        left = usize::max(left, 1) - 1;
        if left > 0 { 20_000 + left * 7_919 % 600_000 } else { usize::MAX }
    });
    let pair = up(options).await;
    timeout(DEADLINE, both_ways(&pair, false, 32 << 20)).await.unwrap();
    assert!(pair.proxy.as_ref().unwrap().cuts.load(SeqCst) >= 50);
    assert_eq!((pair.relay.stats().sessions_lost, pair.guest.stats().sessions_lost), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn each_side_may_end_first_and_the_other_goes_on() {
    let pair = up(Options::tls(true)).await;
    let (listener, target) = server(false).await;
    for client_first in [true, false] {
        let (client, served) = carried(&pair, &listener, target).await;
        let (mut first, mut second) = if client_first { (client, served) } else { (served, client) };
        first.write_all(b"question").await.unwrap();
        first.shutdown().await.unwrap();
        let mut all = Vec::new();
        second.read_to_end(&mut all).await.unwrap();
        assert_eq!(all, b"question");
        // Well after the end of the other direction.
        for part in [&b"an "[..], b"answer"] {
            tokio::time::sleep(Duration::from_millis(100)).await;
            second.write_all(part).await.unwrap();
        }
        drop(second);
        all.clear();
        first.read_to_end(&mut all).await.unwrap();
        assert_eq!(all, b"an answer");
    }
    until("nothing is left", || pair.relay.stats().dialled + pair.guest.stats().dialled == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_without_a_listener_is_refused_and_a_broken_connection_is_reset() {
    let pair = up(Options::tls(false)).await;
    let (listener, target) = server(false).await;
    let held = TcpSocket::new_v4().unwrap();
    held.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let nobody = Target { v6: false, port: held.local_addr().unwrap().port() };
    assert_eq!(pair.relay.dial(nobody).await.unwrap_err(), DialError::Refused);
    for server_breaks in [true, false] {
        let (client, served) = carried(&pair, &listener, target).await;
        let (broken, mut other) = if server_breaks { (served, client) } else { (client, served) };
        socket2::SockRef::from(&broken).set_linger(Some(Duration::ZERO)).unwrap();
        drop(broken);
        let error = timeout(DEADLINE, other.read(&mut [0; 8])).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    }
    until("nothing is left", || pair.relay.stats().dialled + pair.guest.stats().dialled == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_stands_still_holds_back_its_own_stream_only() {
    let pair = up(Options::tls(false)).await;
    let (listener, target) = server(false).await;
    let (client, served) = carried(&pair, &listener, target).await;
    let total = 32 << 20;
    let sending = tokio::spawn(send(served, total));
    let last = std::sync::atomic::AtomicU64::new(0);
    // The stream stands when no more bytes arrive.
    until("it stands", || {
        let now = pair.relay.stats().bytes_from_peer;
        std::thread::sleep(Duration::from_millis(100));
        last.swap(now, SeqCst) == now && now > 0
    })
    .await;
    assert!(pair.relay.stats().buffered <= 2 << 18, "{:?}", pair.relay.stats());
    let mut agent = pair.connect();
    for at in 0..100 {
        timeout(DEADLINE, call(&mut agent, &request(2 * at + 1, ECHO, 40))).await.unwrap().unwrap();
    }
    timeout(DEADLINE, receive(client, total)).await.unwrap();
    sending.await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_abandoned_dial_is_closed() {
    let limits = Limits { park: Duration::from_millis(300), ..Limits::default() };
    let pair = up(Options { limits, ..Options::tls(false) }).await;
    let (listener, target) = server(false).await;
    let is_reset = async |mut served: TcpStream| {
        let error = timeout(DEADLINE, served.read(&mut [0; 8])).await.unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    };
    // Dropped before the join.
    let (connected, served) = tokio::join!(pair.relay.dial(target), listener.accept());
    drop(connected.unwrap());
    is_reset(served.unwrap().0).await;
    // Joined too late: the client's end is reset as well.
    let (connected, served) = tokio::join!(pair.relay.dial(target), listener.accept());
    is_reset(served.unwrap().0).await;
    let (client, local) = accepted().await;
    connected.unwrap().join(local);
    is_reset(client).await;
    // The caller left before the answer.
    drop(tokio::time::timeout(Duration::ZERO, pair.relay.dial(target)).await);
    if let Ok(Ok((served, _))) = timeout(Duration::from_millis(500), listener.accept()).await {
        is_reset(served).await;
    }
    until("nothing is left", || pair.relay.stats().dialled + pair.guest.stats().dialled == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dial_above_the_limit_is_refused() {
    let limits = Limits { dialled: 4, ..Limits::default() };
    let pair = up(Options { limits, ..Options::tls(false) }).await;
    let (listener, target) = server(false).await;
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(carried(&pair, &listener, target).await);
    }
    assert_eq!(pair.relay.dial(target).await.unwrap_err(), DialError::TooMany);
    held.clear();
    until("nothing is left", || pair.relay.stats().dialled == 0).await;
    pair.relay.dial(target).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_or_new_guest_fails_the_call_quickly() {
    let calls_end_after = |seconds| Limits { call: Duration::from_secs(seconds), ..Limits::default() };
    let limits = calls_end_after(3);
    let lonely = end(Role::Relay, None, limits.clone());
    let target = Target { v6: false, port: 1 };
    assert_eq!(lonely.handle.dial(target).await.unwrap_err(), DialError::Away);

    let pair = up(Options { limits, ..Options::tls(false).cut(|| usize::MAX) }).await;
    let (listener, target) = server(false).await;
    let (mut client, _served) = carried(&pair, &listener, target).await;
    pair.proxy.as_ref().unwrap().stall(true);
    // The limit decides: a call that began earlier with a longer one still waits.
    let patient =
        up(Options { limits: calls_end_after(3600), ..Options::tls(false).cut(|| usize::MAX) }).await;
    patient.proxy.as_ref().unwrap().stall(true);
    let handle = patient.relay.clone();
    let waiting = tokio::spawn(async move { handle.dial(target).await.map(drop) });
    let late = timeout(DEADLINE, pair.relay.dial(target)).await.unwrap();
    assert_eq!(late.unwrap_err(), DialError::Late);
    assert!(!waiting.is_finished());
    // The relay ends: a stream that was not sent to its end is reset.
    pair.relay.close();
    let error = timeout(DEADLINE, client.read(&mut [0; 8])).await.unwrap().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
    assert_eq!(pair.relay.dial(target).await.unwrap_err(), DialError::Away);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_older_guest_is_never_dialled() {
    let relay = end(Role::Relay, None, Limits::default());
    let (mut guest, link) = accepted().await;
    relay.handle.attach(link.into());
    let hello =
        Hello { versions: (1, 1), session: SessionId([7; 16]), epoch: 0, recv: 0, program: "old".into() };
    guest.write_all(&plain(RecordKind::Hello, &hello.encode()).unwrap()).await.unwrap();
    let mut welcome = vec![0; 28];
    guest.read_exact(&mut welcome).await.unwrap();
    let mut payload = vec![0; u32::from_be_bytes([welcome[0], welcome[1], welcome[2], welcome[3]]) as usize];
    guest.read_exact(&mut payload).await.unwrap();
    assert_eq!(Welcome::decode(&payload).unwrap().version, 1);
    until("up", || relay.handle.stats().up).await;
    let refused = relay.handle.dial(Target { v6: false, port: 80 }).await.unwrap_err();
    assert_eq!(refused, DialError::Unknown);
}
