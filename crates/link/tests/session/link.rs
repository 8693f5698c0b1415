//! Tests the relay's and the guest's endpoint together, over real sockets, as a shim and an agent see the link.

use super::support;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use bytes::Bytes;
use peerpod_link::endpoint::{Endpoint, Limits, LinkEvent, Role};
use peerpod_link::record::{self, Hello, RecordKind, SessionId};
use support::{
    AGAIN, DEADLINE, ECHO, LOST, OVER, Options, Pair, TestHandler, answer, call, end, request, until,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Starts a relay that listens and an agent; returns the relay, its address, and the agent's socket.
async fn relay_and_agent(dir: &support::Dir) -> (support::End, SocketAddr, PathBuf) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let to = listener.local_addr().unwrap();
    let relay = end(Role::Relay, None, Limits::default());
    support::accept(listener, relay.handle.clone(), None);
    let path = dir.join("agent.sock");
    tokio::spawn(support::agent(UnixListener::bind(&path).unwrap()));
    (relay, to, path)
}

/// Returns the bytes of a long transfer at a position.
fn pattern(at: usize, length: usize) -> Vec<u8> {
    (at..at + length).map(|at| (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0]).collect()
}

/// Sends `total` bytes through the echo agent in frames of `size`; compares the answers.
async fn transfer(client: UnixStream, total: usize, size: usize) {
    let (mut input, mut output) = client.into_split();
    let sender = tokio::spawn(async move {
        for (call, at) in (0..total).step_by(size).enumerate() {
            let mut frame = request(2 * call as u32 + 1, ECHO, 4);
            let body = pattern(at, size);
            frame[..4].copy_from_slice(&(4 + size as u32).to_be_bytes());
            frame.extend_from_slice(&body);
            output.write_all(&frame).await.unwrap();
        }
        output
    });
    for (call, at) in (0..total).step_by(size).enumerate() {
        let mut frame = vec![0; 14 + size];
        input.read_exact(&mut frame).await.unwrap();
        assert_eq!(frame[4..8], (2 * call as u32 + 1).to_be_bytes(), "call {call}");
        assert!(frame[14..] == pattern(at, size), "the bytes of call {call} differ");
    }
    drop(sender.await.unwrap());
}

async fn small_calls(tls: bool) {
    let pair = Pair::start(Options::tls(tls)).await;
    let mut client = pair.connect();
    for at in 0..1000 {
        let frame = request(2 * at + 1, ECHO, 40);
        let (header, body) = call(&mut client, &frame).await.unwrap();
        assert_eq!((header.stream, &body[..]), (2 * at + 1, &frame[10..]));
    }
    let stats = pair.relay.stats();
    assert_eq!((stats.bytes_to_peer, stats.bytes_from_peer), (50_000, 50_000));
    assert_eq!((stats.links, stats.connections, stats.replayed), (1, 1, 0));
    assert!(stats.up && stats.buffered < 200, "{stats:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_small_calls_go_round() {
    timeout(DEADLINE, small_calls(false)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_small_calls_go_round_inside_tls() {
    timeout(DEADLINE, small_calls(true)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_mebibytes_come_back_as_they_were() {
    for tls in [false, true] {
        let pair = Pair::start(Options::tls(tls)).await;
        timeout(DEADLINE, transfer(pair.connect(), 64 << 20, 1 << 20)).await.unwrap();
    }
}

async fn cuts(tls: bool, total: usize) {
    let mut state = 0x1234_5678_9abc_def1_u64;
    // Long enough for a handshake, short enough for a hundred of them; in time, every position of a record is hit.
    let mut budgets = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        4_000 + state as usize % 900_000
    };
    let mut left = 100;
    let options = Options::tls(tls).cut(move || {
        left = usize::max(left, 1) - 1;
        if left > 0 { budgets() } else { usize::MAX }
    });
    let pair = Pair::start(options).await;
    let other = pair.connect();
    let small = tokio::spawn(async move {
        let mut other = other;
        for at in 0..200u32 {
            let frame = request(2 * at + 1, ECHO, 100);
            let (header, body) = call(&mut other, &frame).await.unwrap();
            assert_eq!((header.stream, &body[..]), (2 * at + 1, &frame[10..]));
        }
    });
    transfer(pair.connect(), total, 1 << 18).await;
    small.await.unwrap();
    let (relay, guest) = (pair.relay.stats(), pair.guest.stats());
    assert!(pair.proxy.as_ref().unwrap().cuts.load(SeqCst) >= 90, "{relay:?}");
    assert_eq!((relay.sessions_lost, guest.sessions_lost), (0, 0));
    assert!(relay.replayed + guest.replayed > 0);
    let resumed = pair.relay_seen.count(|event| matches!(event, LinkEvent::Up { resumed: true, .. }));
    assert!(resumed >= 80, "{resumed} resumed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_cut_a_hundred_times_loses_and_doubles_nothing() {
    timeout(DEADLINE, cuts(false, 96 << 20)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_cut_a_hundred_times_inside_tls_loses_and_doubles_nothing() {
    timeout(DEADLINE, cuts(true, 96 << 20)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_stands_still_does_not_slow_another() {
    let pair = Pair::start(Options::tls(true)).await;
    let mut still = pair.connect();
    let mut client = pair.connect();
    // 64 answers of 1 MiB that stay unread.
    for at in 0..64 {
        still.write_all(&request(2 * at + 1, 1 << 20, 4)).await.unwrap();
    }
    until("the flood stands", || pair.relay.stats().bytes_from_peer > 200_000).await;
    let mut times = Vec::new();
    for at in 0..500 {
        let start = Instant::now();
        let answered = timeout(DEADLINE, call(&mut client, &request(2 * at + 1, ECHO, 40))).await;
        answered.expect("a stalled reader does not delay other calls").unwrap();
        times.push(start.elapsed());
    }
    times.sort_unstable();
    println!("p50 {:?}, p99 {:?}", times[250], times[494]);
    assert!(times[494] < Duration::from_secs(1), "p99 {:?}", times[494]);
    let (relay, guest) = (pair.relay.stats(), pair.guest.stats());
    assert!(relay.buffered < 2 << 20 && guest.buffered < 2 << 20, "{relay:?} {guest:?}");
    // All of them arrive once they are read at last.
    for at in 0..64 {
        let (header, body) = timeout(DEADLINE, answer(&mut still)).await.unwrap().unwrap();
        assert_eq!((header.stream, body.len()), (2 * at + 1, 1 << 20));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_that_is_read_leaves_small_calls_their_turn() {
    let pair = Pair::start(Options::tls(true)).await;
    let flood = tokio::spawn(transfer(pair.connect(), 256 << 20, 1 << 20));
    let mut client = pair.connect();
    // Measured in bytes of the flood that arrive while a call waits: a slow machine is slow for both.
    let come = || pair.relay.stats().bytes_from_peer;
    let (mut ahead, start) = (Vec::new(), Instant::now());
    while !flood.is_finished() && ahead.len() < 2000 {
        let before = come();
        call(&mut client, &request(2 * ahead.len() as u32 + 1, ECHO, 40)).await.unwrap();
        ahead.push(come() - before);
    }
    flood.abort();
    ahead.sort_unstable();
    let (p50, p99) = (ahead[ahead.len() / 2], ahead[ahead.len() * 99 / 100]);
    println!("{} calls in {:?}, behind p50 {p50}, p99 {p99} bytes", ahead.len(), start.elapsed());
    assert!(p99 < 16 << 20, "p99 {p99} bytes of {} calls", ahead.len());
    // Without turns, as much as a link has in flight would come before each call.
    assert!(p50 < 1 << 20, "p50 {p50} bytes of {} calls", ahead.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_connection_is_not_seen_by_the_agent() {
    let pair = Pair::start(Options::tls(false)).await;
    let (silent, mut client) = (pair.connect(), pair.connect());
    call(&mut client, &request(1, ECHO, 4)).await.unwrap();
    until("two connections", || pair.relay_seen.connections.load(SeqCst) == 2).await;
    assert_eq!(pair.guest_seen.dials.load(SeqCst), 1);
    drop(silent);
    until("one connection", || pair.relay_seen.connections.load(SeqCst) == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn closing_a_connection_closes_the_agents() {
    let dir = support::Dir::new();
    let path = dir.join("agent.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let pair = Pair::with_agent(Options::tls(false), dir, &path).await;
    let mut client = pair.connect();
    client.write_all(b"the final bytes").await.unwrap();
    drop(client);
    let (mut agent, _) = timeout(DEADLINE, listener.accept()).await.unwrap().unwrap();
    let mut heard = Vec::new();
    timeout(DEADLINE, agent.read_to_end(&mut heard)).await.unwrap().unwrap();
    assert_eq!(heard, b"the final bytes");
    until("no connection", || pair.guest.stats().connections + pair.relay.stats().connections == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_closes_loses_the_stream_and_the_next_byte_opens_another() {
    let dir = support::Dir::new();
    let path = dir.join("agent.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let pair = Pair::with_agent(Options::tls(false), dir, &path).await;
    let mut client = pair.connect();
    for _ in 0..3 {
        client.write_all(b"hello").await.unwrap();
        let (mut agent, _) = timeout(DEADLINE, listener.accept()).await.unwrap().unwrap();
        let mut heard = [0; 5];
        agent.read_exact(&mut heard).await.unwrap();
        agent.write_all(b"bye").await.unwrap();
        drop(agent);
        let mut said = [0; 9];
        timeout(DEADLINE, client.read_exact(&mut said)).await.unwrap().unwrap();
        assert_eq!(said, [b"bye", LOST].concat()[..]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_that_cannot_be_reached_loses_the_stream() {
    let dir = support::Dir::new();
    let path = dir.join("nobody.sock");
    let pair = Pair::with_agent(Options::tls(false), dir, &path).await;
    let mut client = pair.connect();
    client.write_all(b"hello").await.unwrap();
    let mut said = [0; 6];
    timeout(DEADLINE, client.read_exact(&mut said)).await.unwrap().unwrap();
    assert_eq!(said, LOST);
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_link_is_away_a_connection_waits() {
    let pair = Pair::start(Options::tls(true).cut(|| usize::MAX)).await;
    let mut client = pair.connect();
    call(&mut client, &request(1, ECHO, 40)).await.unwrap();
    let proxy = pair.proxy.as_ref().unwrap();
    for at in 1..20 {
        proxy.cut();
        let frame = request(2 * at + 1, ECHO, 200_000);
        let (header, body) = timeout(DEADLINE, call(&mut client, &frame)).await.unwrap().unwrap();
        assert_eq!((header.stream, body == frame[10..]), (2 * at + 1, true));
    }
    assert_eq!(pair.relay.stats().sessions_lost, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_link_is_away_the_end_of_a_connection_is_noticed() {
    let dir = support::Dir::new();
    let (relay, to, path) = relay_and_agent(&dir).await;
    let guest = end(Role::Guest, Some(path), Limits::default());
    support::dial(to, guest.handle.clone(), guest.down, None);
    let connect = || {
        let (ours, theirs) = UnixStream::pair().unwrap();
        relay.handle.adopt(theirs);
        ours
    };
    let (mut used, mut waits) = (connect(), connect());
    timeout(DEADLINE, call(&mut used, &request(1, ECHO, 40))).await.unwrap().unwrap();
    guest.task.abort();
    until("the relay noticed", || !relay.handle.stats().up).await;
    until("two connections", || relay.seen.connections.load(SeqCst) == 2).await;
    waits.write_all(&request(1, ECHO, 40)).await.unwrap();
    drop(used);
    until("the used connection ended", || relay.seen.connections.load(SeqCst) == 1).await;
    drop(waits);
    until("the connection with an unread call ended", || relay.seen.connections.load(SeqCst) == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_ends_during_a_handover_is_reported_as_ended() {
    let relay = end(Role::Relay, None, Limits::default());
    let (client, theirs) = UnixStream::pair().unwrap();
    relay.handle.adopt(theirs);
    until("one connection", || relay.seen.connections.load(SeqCst) == 1).await;
    let frozen = relay.handle.freeze().await.unwrap();
    drop(client);
    let (down, _down) = mpsc::unbounded_channel();
    // The next process continues from the reports of this one.
    let handler = TestHandler { agent: None, seen: relay.seen.clone(), stay: true, straight: None, down };
    let (endpoint, _handle) = Endpoint::restore(handler, Limits::default(), frozen).unwrap();
    tokio::spawn(endpoint.run());
    until("no connection", || relay.seen.connections.load(SeqCst) == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_drops_everything_is_noticed_and_replaced() {
    let limits = Limits {
        heartbeat: Duration::from_millis(100),
        silence: Duration::from_secs(1),
        handshake: Duration::from_secs(2),
        ..Limits::default()
    };
    let pair = Pair::start(Options { limits, ..Options::tls(true).cut(|| usize::MAX) }).await;
    let mut client = pair.connect();
    call(&mut client, &request(1, ECHO, 40)).await.unwrap();
    let proxy = pair.proxy.as_ref().unwrap();
    let ups = pair.guest_seen.ups();
    proxy.stall(true);
    client.write_all(&request(3, ECHO, 40)).await.unwrap();
    let downs = || pair.guest_seen.count(|event| matches!(event, LinkEvent::Down { .. }));
    until("the guest noticed", || downs() >= 1).await;
    proxy.stall(false);
    proxy.cut();
    let (header, _) = timeout(DEADLINE, answer(&mut client)).await.unwrap().unwrap();
    assert_eq!(header.stream, 3);
    assert!(pair.guest_seen.ups() > ups);
    assert_eq!(pair.guest.stats().sessions_lost, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_link_is_kept_by_heartbeats() {
    // Far longer than other processes delay a heartbeat.
    let silence = Duration::from_secs(5);
    let limits = Limits { heartbeat: Duration::from_millis(50), silence, ..Limits::default() };
    let pair = Pair::start(Options { limits, ..Options::tls(true) }).await;
    let mut client = pair.connect();
    call(&mut client, &request(1, ECHO, 40)).await.unwrap();
    tokio::time::sleep(2 * silence).await;
    assert_eq!((pair.relay.stats().links, pair.guest.stats().links), (1, 1));
    until("all acknowledged", || pair.relay.stats().buffered + pair.guest.stats().buffered == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_guest_program_means_a_new_session() {
    let dir = support::Dir::new();
    let (relay, to, path) = relay_and_agent(&dir).await;
    let (mut client, theirs) = UnixStream::pair().unwrap();
    relay.handle.adopt(theirs);
    for round in 0..3 {
        let guest = end(Role::Guest, Some(path.clone()), Limits::default());
        support::dial(to, guest.handle.clone(), guest.down, None);
        if round > 0 {
            // The call that was pending when the previous guest was killed.
            let mut said = [0; 6];
            timeout(DEADLINE, client.read_exact(&mut said)).await.unwrap().unwrap();
            assert_eq!(said, LOST);
            let (header, _) = timeout(DEADLINE, answer(&mut client)).await.unwrap().unwrap();
            assert_eq!(header.stream, AGAIN, "the filter's calls reach the next guest");
        }
        assert_eq!(relay.handle.stats().sessions_lost, round);
        let (header, _) = timeout(DEADLINE, call(&mut client, &request(1, ECHO, 40))).await.unwrap().unwrap();
        assert_eq!(header.stream, 1);
        let before = guest.handle.stats().bytes_from_peer;
        client.write_all(&request(3, ECHO, 1000)[..500]).await.unwrap();
        until("half a call arrived", || guest.handle.stats().bytes_from_peer >= before + 500).await;
        guest.task.abort();
        until("the relay noticed", || !relay.handle.stats().up).await;
        assert_eq!(relay.seen.streams_lost.load(SeqCst), round as usize, "not before another guest is there");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn control_messages_keep_their_order_over_cuts() {
    let pair = Pair::start(Options::tls(true).cut(|| usize::MAX)).await;
    // The first ones are queued before there is a link.
    for at in 0..200u32 {
        let mut message = at.to_be_bytes().to_vec();
        message.resize(4 + at as usize * 100, 7);
        pair.relay.control(message.clone().into()).unwrap();
        pair.guest.control(message.into()).unwrap();
        if at % 20 == 0 {
            tokio::time::sleep(Duration::from_millis(3)).await;
            pair.proxy.as_ref().unwrap().cut();
        }
    }
    for seen in [&pair.relay_seen, &pair.guest_seen] {
        until("all control messages", || seen.control.lock().unwrap().len() == 200).await;
        for (at, message) in seen.control.lock().unwrap().iter().enumerate() {
            assert_eq!(
                (message[..4].to_vec(), message.len()),
                ((at as u32).to_be_bytes().to_vec(), 4 + at * 100)
            );
        }
    }
}

#[tokio::test]
async fn control_messages_for_a_guest_that_is_away_do_not_pile_up() {
    let relay = end(Role::Relay, None, Limits { control_queue: 10_000, ..Limits::default() });
    let mut queued = 0;
    while relay.handle.control(Bytes::from_static(&[0; 1000])).is_ok() {
        queued += 1;
    }
    assert!((9..=9).contains(&queued), "{queued}");
    until("the session took the queued bytes", || {
        relay.handle.control(Bytes::from_static(&[0; 1000])).is_ok()
    })
    .await;
    // Messages that are in records already belong to the session, which is bounded too; then the queue is full again.
    while relay.handle.control(Bytes::new()).is_ok() {
        queued += 1;
        assert!(queued < 10_000);
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_guest_loses_only_its_own_session() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let to = listener.local_addr().unwrap();
    let relay = end(Role::Relay, None, Limits { handshake: Duration::from_millis(200), ..Limits::default() });
    support::accept(listener, relay.handle.clone(), None);
    let hello = |recv: u64| {
        let session = SessionId([9; 16]);
        let hello = Hello { versions: (1, 1), session, epoch: 0, recv, program: "x".into() };
        record::plain(RecordKind::Hello, &hello.encode()).unwrap()
    };
    let garbage = vec![0xff; 5000];
    let data =
        record::RecordHeader { seq: 1, stream: 1, ..record::RecordHeader::new(RecordKind::Data, 3) }.encode();
    let cases: [Vec<u8>; 6] = [
        garbage.clone(),
        vec![],
        hello(0)[..20].to_vec(),
        [hello(0), garbage].concat(),
        [&hello(0)[..], &data, b"abc"].concat(),
        [hello(77), hello(0)].concat(),
    ];
    for bytes in cases {
        let mut tcp = TcpStream::connect(to).await.unwrap();
        let _broken = tcp.write_all(&bytes).await;
        // The relay closes, at once or when the time for the handshake is over.
        let mut rest = Vec::new();
        let _reset = timeout(DEADLINE, tcp.read_to_end(&mut rest)).await.unwrap();
    }
    let dir = support::Dir::new();
    let path = dir.join("agent.sock");
    tokio::spawn(support::agent(UnixListener::bind(&path).unwrap()));
    let guest = end(Role::Guest, Some(path), Limits::default());
    support::dial(to, guest.handle.clone(), guest.down, None);
    let (mut client, theirs) = UnixStream::pair().unwrap();
    relay.handle.adopt(theirs);
    timeout(DEADLINE, call(&mut client, &request(1, ECHO, 40))).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_newcomer_does_not_disturb_the_link() {
    let pair = Pair::start(Options {
        limits: Limits { handshake: Duration::from_millis(100), ..Limits::default() },
        ..Options::tls(false)
    })
    .await;
    let mut client = pair.connect();
    call(&mut client, &request(1, ECHO, 40)).await.unwrap();
    let (mut newcomer, theirs) = tokio::io::duplex(100);
    pair.relay.attach(peerpod_link::endpoint::Transport::new(theirs, ([127, 0, 0, 1], 1).into()));
    call(&mut client, &request(3, ECHO, 40)).await.unwrap();
    let mut rest = Vec::new();
    timeout(DEADLINE, newcomer.read_to_end(&mut rest)).await.unwrap().unwrap();
    call(&mut client, &request(5, ECHO, 40)).await.unwrap();
    assert_eq!(pair.relay_seen.count(|event| matches!(event, LinkEvent::Down { .. })), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn closing_the_endpoint_answers_pending_calls_and_ends() {
    let pair = Pair::start(Options::tls(true)).await;
    let mut client = pair.connect();
    call(&mut client, &request(1, ECHO, 40)).await.unwrap();
    pair.relay.close();
    let mut rest = Vec::new();
    timeout(DEADLINE, client.read_to_end(&mut rest)).await.unwrap().unwrap();
    assert_eq!(rest, OVER);
    let handler = timeout(DEADLINE, pair.relay_task).await.unwrap().unwrap();
    assert_eq!(handler.seen.connections.load(SeqCst), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_handle_takes_the_endpoint_with_it() {
    let relay = end(Role::Relay, None, Limits::default());
    let clone = relay.handle.clone();
    drop(relay.handle);
    clone.stats();
    drop(clone);
    timeout(DEADLINE, relay.task).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_for_an_ended_endpoint_is_closed() {
    for abort in [false, true] {
        let relay = end(Role::Relay, None, Limits::default());
        if abort {
            relay.task.abort()
        } else {
            relay.handle.close()
        }
        until("it ended", || relay.task.is_finished()).await;
        let (mut client, theirs) = UnixStream::pair().unwrap();
        relay.handle.adopt(theirs);
        assert_eq!(timeout(DEADLINE, client.read(&mut [0; 1])).await.unwrap().unwrap(), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn more_connections_than_allowed_are_closed() {
    let limits = Limits { connections: 3, ..Limits::default() };
    let pair = Pair::start(Options { limits, ..Options::tls(false) }).await;
    let mut clients: Vec<UnixStream> = (0..4).map(|_| pair.connect()).collect();
    let mut last = clients.pop().unwrap();
    assert_eq!(timeout(DEADLINE, last.read(&mut [0; 1])).await.unwrap().unwrap(), 0);
    for round in 0..100u32 {
        // Streams that end make room for others.
        for client in &mut clients {
            timeout(DEADLINE, call(client, &request(1, ECHO, 40))).await.unwrap().unwrap();
        }
        let at = round as usize % 3;
        let gone = clients.swap_remove(at);
        drop(gone);
        until("it is gone", || pair.relay.stats().connections == 2).await;
        clients.push(pair.connect());
    }
}
