//! Tests a hostile guest with a valid certificate: everything it sends, on its link or as its agent, is an error of its
//! own sandbox and affects no other.

use super::guest_common;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use std::{fs, io};

use guest_common::{Identity, claims, csr, identity, secure, user_data_of};
use peerpod_client::Annotations;
use peerpod_link::endpoint::{Endpoint, EndpointHandle, Filter, Handler, Limits, LinkEvent, Role};
use peerpod_link::frame::{DATA, HEADER_LEN, Header, REQUEST, RESPONSE};
use peerpod_link::record::{self, Hello, Level, Line, RecordKind, SessionId};
use peerpod_link::user_data::UserData;
use peerpod_proto::ttrpc_frame;
use peerpod_tests::{CONTAINER, PATIENCE, Sandbox, fresh_id, resident, sample};
use peerpod_world::{Daemons, Settings, World, eventually};
use protobuf::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;
use ttrpc::Code;

/// Largest ttrpc message, in bytes.
const MOST: u32 = 4 << 20;

/// Delays the boot of later VMs beyond their tests: the tests act as their guests.
async fn let_vms_sleep(daemons: &mut Daemons) {
    daemons.set_of_cloud("boot-delay", "60s").unwrap();
    daemons.kill_node().unwrap();
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
}

/// Sandbox with the test as its guest.
struct Ours {
    id: String,
    user_data: UserData,
    chain: Vec<Vec<u8>>,
    key: rcgen::KeyPair,
}

impl Ours {
    async fn join(world: &World, daemons: &Daemons, netns: &Path) -> Ours {
        let (id, shim) = (fresh_id("liar"), daemons.shim().await.unwrap());
        shim.create_vm(&id, Annotations::new("default", &id), netns).await.unwrap();
        let user_data = user_data_of(daemons, &id).await;
        let (key, csr) = csr();
        let granted =
            claims(world, &user_data, &user_data.ticket.id, *user_data.ticket.secret.expose(), csr).await;
        assert_eq!((granted.error.as_str(), granted.sandbox_id.as_str()), ("", id.as_str()));
        Ours { id, user_data, chain: granted.certificates, key }
    }

    fn identity(&self) -> Identity {
        identity(&self.key, &self.chain)
    }

    async fn dial(&self, world: &World) -> TlsStream<TcpStream> {
        secure(world, &self.user_data.node.ca_sha256, Some(self.identity())).await.unwrap()
    }

    /// Opens a link in a new session, and reads exactly up to the end of the Welcome.
    async fn linked(&self, world: &World, session: u8) -> TlsStream<TcpStream> {
        let mut stream = self.dial(world).await;
        stream.write_all(&hello([session; 16])).await.unwrap();
        let mut head = [0; record::HEADER_LEN];
        timeout(PATIENCE, stream.read_exact(&mut head)).await.unwrap().unwrap();
        let head = record::RecordHeader::decode(&head).unwrap();
        assert_eq!(head.kind, RecordKind::Welcome);
        timeout(PATIENCE, stream.read_exact(&mut vec![0; head.length as usize])).await.unwrap().unwrap();
        stream
    }
}

/// Returns the first record of a link in a new session.
fn hello(session: [u8; 16]) -> Vec<u8> {
    let hello = Hello {
        versions: (1, record::VERSION),
        session: SessionId(session),
        epoch: 0,
        recv: 0,
        program: "liar".into(),
    };
    record::plain(RecordKind::Hello, &hello.encode()).unwrap()
}

/// Checks that the relay closes the link, with or without data before.
async fn ends(mut stream: TlsStream<TcpStream>, case: &str) {
    let mut room = vec![0; 64 << 10];
    let end = async { while !matches!(stream.read(&mut room).await, Ok(0) | Err(_)) {} };
    timeout(Duration::from_secs(8), end).await.unwrap_or_else(|_| panic!("{case}: the link stays up"));
}

fn line(text: &str) -> Vec<u8> {
    Line { level: Level::Warn, lost: 0, uptime_ms: 7, target: "liar", text }.encode()
}

/// Returns records that break one rule each, after a valid handshake.
fn bad_records() -> Vec<(&'static str, Vec<u8>)> {
    let raw = |length: u32, kind: u8| {
        let mut bytes = record::RecordHeader::new(RecordKind::Data, 0).encode().to_vec();
        bytes[..4].copy_from_slice(&length.to_be_bytes());
        bytes[4] = kind;
        bytes.resize(bytes.len() + 4096, 0xa5);
        bytes
    };
    let made = |kind, stream, seq, ack, payload: &[u8]| {
        let header = record::RecordHeader { length: payload.len() as u32, kind, flags: 0, stream, seq, ack };
        [&header.encode()[..], payload].concat()
    };
    vec![
        ("4 GiB announced", raw(u32::MAX, RecordKind::Data as u8)),
        ("a byte too much announced", raw(record::MAX_PAYLOAD as u32 + 1, RecordKind::Control as u8)),
        ("a kind that is none", raw(16, 255)),
        ("a number left out", made(RecordKind::Control, 0, 2, 0, b"x")),
        ("an acknowledgement of records never sent", made(RecordKind::Control, 0, 1, u64::MAX, b"x")),
        ("data of a stream never opened", made(RecordKind::Data, 77, 1, 0, b"x")),
        ("data without bytes", made(RecordKind::Data, 1, 1, 0, b"")),
        ("too much credit", made(RecordKind::Credit, 1, 1, 0, &[0xff; 4])),
        ("a stream of the relay's own numbers", made(RecordKind::Open, 3, 1, 0, &[1])),
        ("a second handshake", made(RecordKind::Hello, 0, 0, 0, &[0; 36])),
        ("a ticket in the middle", made(RecordKind::Claim, 0, 0, 0, &[0xff; 64])),
        ("a line of the log that is none", made(RecordKind::Line, 0, 1, 0, &[9; 30])),
        ("a line of a stream", made(RecordKind::Line, 1, 1, 0, &line("x"))),
        ("half a line", made(RecordKind::Line, 0, 1, 0, &line("x")[..10])),
        ("a line of 60 KiB", made(RecordKind::Line, 0, 1, 0, &[&line("")[..], &[b'x'; 60_000]].concat())),
        ("a question with a load", made(RecordKind::Ping, 0, 0, 0, b"load")),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_records_behind_a_good_certificate_end_only_their_own_link() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let other = Sandbox::start(&world, &daemons, "other").await.unwrap();
    let waiting = tokio::spawn({
        let agent = other.agent.clone();
        async move { agent.wait_process(CONTAINER, "").await }
    });
    other.lives().await.unwrap();
    let_vms_sleep(&mut daemons).await;
    let pod = world.pod().unwrap();
    let ours = Ours::join(&world, &daemons, &pod.namespace().path()).await;
    let (relay, idle) = (daemons.relay_pid().unwrap(), resident(daemons.relay_pid().unwrap()).unwrap());

    let cases = bad_records();
    for (session, (case, bytes)) in (1..).zip(&cases) {
        let mut stream = ours.linked(&world, session).await;
        // The relay may close the link before all of it is written.
        drop(stream.write_all(bytes).await);
        ends(stream, case).await;
    }
    // The same instead of a handshake.
    for (case, bytes) in &cases[..3] {
        let mut stream = ours.dial(&world).await;
        drop(stream.write_all(bytes).await);
        ends(stream, case).await;
    }
    // A control message that never ends: the relay keeps at most 1 MiB of it.
    let mut stream = ours.linked(&world, 200).await;
    let part = vec![0x5a; record::MAX_PAYLOAD];
    let endless = async {
        for seq in 1.. {
            let header = record::RecordHeader {
                flags: record::MORE,
                seq,
                ..record::RecordHeader::new(RecordKind::Control, part.len() as u32)
            };
            if stream.write_all(&[&header.encode()[..], &part].concat()).await.is_err() {
                return seq;
            }
        }
        unreachable!("numbers do not end")
    };
    timeout(PATIENCE, endless).await.expect("the link ends");

    // A valid record still works at the end.
    let mut stream = ours.linked(&world, 201).await;
    let ping = record::RecordHeader::new(RecordKind::Ping, 0).encode();
    stream.write_all(&ping).await.unwrap();
    let mut pong = false;
    while !pong {
        let mut head = [0; record::HEADER_LEN];
        timeout(PATIENCE, stream.read_exact(&mut head)).await.unwrap().unwrap();
        let head = record::RecordHeader::decode(&head).unwrap();
        stream.read_exact(&mut vec![0; head.length as usize]).await.unwrap();
        pong = head.kind == RecordKind::Pong;
    }
    unharmed(&daemons, relay, idle);
    let log = fs::read_to_string(daemons.log("relay")).unwrap();
    let violations = log.lines().filter(|line| line.contains("it broke the protocol"));
    let (named, of) = (format!("default/{}", ours.id), format!("sandbox={} ", ours.id));
    let (whole, bare): (Vec<_>, Vec<_>) =
        violations.partition(|line| line.contains(&named) && line.contains(&of));
    assert!(whole.len() >= cases.len() && bare.is_empty(), "{} whole lines, {bare:?}", whole.len());
    other.lives().await.unwrap();
    assert!(!waiting.is_finished(), "what waited before still waits");
    drop(stream);
    let shim = daemons.shim().await.unwrap();
    shim.stop_vm(&ours.id).await.unwrap();
    daemons.gone(&ours.id, PATIENCE).await.unwrap();
    other.stop(&daemons).await.unwrap();
}

/// Checks that the relay is the same process, has not grown, and that no daemon has panicked.
fn unharmed(daemons: &Daemons, relay: u32, idle: u64) {
    assert_eq!(daemons.relay_pid(), Some(relay));
    for daemon in ["relay", "node"] {
        let metrics = daemons.metrics(daemon).unwrap();
        assert_eq!(sample(&metrics, &format!("peerpod_{daemon}_panics_total")).unwrap(), 0.0, "{daemon}");
    }
    let now = resident(relay).unwrap();
    assert!(now < 2 * idle + (8 << 20), "{now} bytes, {idle} before");
}

/// Each connection is a session of its own, as of a guest program that is restarted without end.
#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_connects_in_a_loop_causes_few_lines_and_writes() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none().set("log.level", "info")).await.unwrap();
    let_vms_sleep(&mut daemons).await;
    let pod = world.pod().unwrap();
    let ours = Ours::join(&world, &daemons, &pod.namespace().path()).await;
    let record = daemons.state_dir().join("sandboxes").join(format!("{}.json", ours.id));
    let logged =
        || ["node", "relay"].map(|name| fs::metadata(daemons.log(name)).unwrap().len()).iter().sum::<u64>();
    let refused = || {
        let metrics = daemons.metrics("relay").unwrap();
        sample(&metrics, "peerpod_relay_guests_refused_total{reason=\"too_often\"}").unwrap_or(0.0)
    };
    let (start, mut writes) = (Instant::now(), BTreeSet::new());
    // Loops until the relay has closed one connection, and then this many.
    let mut measured: Option<(u128, Instant, u64)> = None;
    for session in 1u128.. {
        let mut stream = ours.dial(&world).await;
        // The relay may have closed the connection.
        drop(stream.write_all(&hello(session.to_be_bytes())).await);
        drop(timeout(PATIENCE, stream.read(&mut [0; 64])).await.unwrap());
        writes.extend(fs::metadata(&record).and_then(|file| file.modified()).ok());
        match measured {
            None if session % 10 == 0 && refused() > 0.0 => {
                measured = Some((session, Instant::now(), logged()))
            }
            Some((first, ..)) if session - first >= 1000 => break,
            _ => assert!(session < 5000, "the relay closes none of {session} connections"),
        }
    }
    let (_, since, before) = measured.unwrap();
    let (seconds, bytes) = (since.elapsed().as_secs(), logged() - before);
    let writes = writes.len() as u64;
    println!("1000 connections in {seconds} s: {bytes} bytes of log; {writes} versions of the record");
    // Two links a second, with all that both daemons log of them.
    assert!(bytes < (8 << 10) + seconds * (4 << 10), "{bytes} bytes of log in {seconds} s");
    assert!(writes < 5 + start.elapsed().as_secs(), "{writes} versions in {:?}", start.elapsed());
    daemons.shim().await.unwrap().stop_vm(&ours.id).await.unwrap();
    daemons.gone(&ours.id, PATIENCE).await.unwrap();
}

/// Handler of a hostile guest: its link is correct, its agent writes the bytes that the request contains, and it
/// answers every message of the node with invalid data.
///
/// If the second field is set, it logs without end.
struct Liar(Arc<OnceLock<EndpointHandle>>, bool);

struct Through;

impl Filter for Through {
    fn from_local(&mut self, input: &[u8], peer: &mut bytes::BytesMut, _: &mut bytes::BytesMut) {
        peer.extend_from_slice(input);
    }
    fn from_peer(&mut self, input: &[u8], _: &mut bytes::BytesMut, local: &mut bytes::BytesMut) {
        local.extend_from_slice(input);
    }
    fn stream_lost(&mut self, _: Option<&mut bytes::BytesMut>, _: &mut bytes::BytesMut) -> bool {
        false
    }
}

impl Handler for Liar {
    fn filter(&mut self) -> Box<dyn Filter> {
        Box::new(Through)
    }
    fn dial(&mut self) -> futures_util::future::BoxFuture<'static, io::Result<UnixStream>> {
        Box::pin(async {
            let (ours, theirs) = UnixStream::pair()?;
            tokio::spawn(lying_agent(theirs));
            Ok(ours)
        })
    }
    fn on_control(&mut self, _: bytes::Bytes) {
        let Some(handle) = self.0.get() else { return };
        for nonsense in [vec![0xff; 4096], Vec::new(), vec![0x08; 100_000]] {
            handle.control(nonsense.into()).ok();
        }
    }
    fn poll_line(&mut self, _: &mut Context<'_>) -> Poll<Vec<u8>> {
        if !self.1 {
            return Poll::Pending;
        }
        let text = "x\n\u{1b}[31m".repeat(1000);
        Poll::Ready(
            Line { level: Level::Error, lost: u32::MAX, uptime_ms: 0, target: "\u{1b}", text: &text }
                .encode(),
        )
    }
    fn on_link(&mut self, _: LinkEvent) {}
    fn on_connections(&mut self, _: usize) {}
}

/// Answers `Check` correctly. For any other request it writes the payload to its socket unchanged, and after `Die` it
/// closes the socket.
async fn lying_agent(mut stream: UnixStream) {
    loop {
        let mut head = [0; HEADER_LEN];
        if stream.read_exact(&mut head).await.is_err() {
            return;
        }
        let head = Header::decode(&head);
        let mut body = vec![0; head.length as usize];
        stream.read_exact(&mut body).await.unwrap();
        let request = ttrpc_frame::Request::parse_from_bytes(&body).unwrap();
        let bytes = match request.method.as_str() {
            "Check" => answer(head.stream, 0),
            _ => request.payload,
        };
        stream.write_all(&bytes).await.unwrap();
        if request.method == "Die" {
            return;
        }
    }
}

fn frame(length: u32, stream: u32, kind: u8, body: &[u8]) -> Vec<u8> {
    [&Header { length, stream, kind, flags: 0 }.encode()[..], body].concat()
}

/// Encodes a valid response with a payload of this many bytes.
fn answer(stream: u32, bytes: usize) -> Vec<u8> {
    let response = ttrpc_frame::Response { payload: vec![7; bytes], ..Default::default() };
    let body = response.write_to_bytes().unwrap();
    frame(body.len() as u32, stream, RESPONSE, &body)
}

/// Connection of a shim that sends exactly the given bytes.
struct Shim(UnixStream);

impl Shim {
    async fn connect(socket: &Path) -> Shim {
        Shim(UnixStream::connect(socket).await.unwrap())
    }

    async fn ask(&mut self, stream: u32, method: &str, payload: Vec<u8>) {
        let request = ttrpc_frame::Request {
            service: "grpc.AgentService".into(),
            method: method.into(),
            payload,
            ..Default::default()
        };
        let body = request.write_to_bytes().unwrap();
        self.0.write_all(&frame(body.len() as u32, stream, REQUEST, &body)).await.unwrap();
    }

    /// Returns stream and code of the next response; `None` if the connection is closed instead.
    async fn answered(&mut self) -> Option<(u32, i32)> {
        let next = async {
            let mut head = [0; HEADER_LEN];
            self.0.read_exact(&mut head).await.ok()?;
            let head = Header::decode(&head);
            assert!(head.kind == RESPONSE && head.length <= MOST, "{head:?}");
            let mut body = vec![0; head.length as usize];
            self.0.read_exact(&mut body).await.ok()?;
            Some((head.stream, ttrpc_frame::Response::parse_from_bytes(&body).unwrap().status.code))
        };
        timeout(PATIENCE, next).await.expect("an answer or the end")
    }

    /// Checks that the connection works.
    async fn goes_on(&mut self, stream: u32, case: &str) {
        self.ask(stream, "Check", Vec::new()).await;
        assert_eq!(self.answered().await, Some((stream, 0)), "{case}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_answers_of_an_agent_fail_only_their_own_calls() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let other = Sandbox::start(&world, &daemons, "other").await.unwrap();
    let_vms_sleep(&mut daemons).await;
    let pod = world.pod().unwrap();
    let ours = Ours::join(&world, &daemons, &pod.namespace().path()).await;
    let own_handle = Arc::new(OnceLock::new());
    let (endpoint, handle) = Endpoint::new(Role::Guest, Liar(own_handle.clone(), false), Limits::default());
    assert!(own_handle.set(handle.clone()).is_ok());
    tokio::spawn(endpoint.run());
    handle.attach(ours.dial(&world).await.into());
    let socket = daemons.run_dir().join("pods").join(&ours.id).join("agent.ttrpc");
    let mut beside = Shim::connect(&socket).await;
    beside.goes_on(1, "the guest is there").await;
    let (relay, idle) = (daemons.relay_pid().unwrap(), resident(daemons.relay_pid().unwrap()).unwrap());
    let (internal, unavailable) = (Code::INTERNAL as i32, Code::UNAVAILABLE as i32);

    // One byte too long and sent completely: an error of the call, and the connection continues.
    let mut shim = Shim::connect(&socket).await;
    for length in [MOST + 1, u32::MAX] {
        shim.ask(1, "Lie", frame(length, 1, RESPONSE, &[9; 1000])).await;
        assert_eq!(shim.answered().await, Some((1, internal)), "{length} bytes announced");
        if length == MOST + 1 {
            let mut rest = length as usize - 1000;
            while rest > 0 {
                let part = rest.min(1 << 20);
                shim.ask(3, "Lie", vec![9; part]).await;
                rest -= part;
            }
            shim.ask(3, "Lie", answer(3, 10)).await;
            assert_eq!(shim.answered().await, Some((3, 0)), "behind {length} bytes");
        }
    }
    // That connection still waits for 4 GiB, which affects no other connection.
    beside.goes_on(3, "beside one that waits for 4 GiB").await;

    // Responses without a request, a duplicate one, and data and types without a meaning: all are ignored.
    let mut shim = Shim::connect(&socket).await;
    let nobodys =
        [answer(99, 10), frame(4, 3, DATA, b"data"), frame(4, 1, 77, b"kind"), answer(1, 10), answer(1, 10)];
    shim.ask(1, "Lie", nobodys.concat()).await;
    assert_eq!(shim.answered().await, Some((1, 0)));
    shim.goes_on(3, "behind answers that nobody asked for").await;

    // Half a response and then nothing: its call waits, the others do not.
    let mut half = Shim::connect(&socket).await;
    half.ask(1, "Lie", answer(1, 1000)[..500].to_vec()).await;
    beside.goes_on(5, "beside half an answer").await;
    assert!(timeout(Duration::from_millis(50), half.0.readable()).await.is_err(), "a half is not handed on");

    // Half a response and then the end: a small one fails the call; a large one closes the connection, which cannot be
    // repaired.
    for (bytes, sent, outcome) in [(1000, 500, Some((1, unavailable))), (100_000, 50_000, None)] {
        let mut shim = Shim::connect(&socket).await;
        shim.ask(1, "Die", answer(1, bytes)[..sent].to_vec()).await;
        assert_eq!(shim.answered().await, outcome, "{sent} of {bytes} bytes");
        if outcome.is_some() {
            shim.goes_on(3, "with another connection to the agent behind it").await;
        }
    }

    // Noise that announces an arbitrary length.
    for seed in 0..8u8 {
        let mut shim = Shim::connect(&socket).await;
        let noise = (0..4096u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8 ^ seed).collect();
        shim.ask(1, "Lie", noise).await;
        beside.goes_on(7 + 2 * u32::from(seed), "beside noise").await;
    }

    unharmed(&daemons, relay, idle);
    other.lives().await.unwrap();
    let shim = daemons.shim().await.unwrap();
    shim.stop_vm(&ours.id).await.unwrap();
    handle.close();
    daemons.gone(&ours.id, PATIENCE).await.unwrap();
    eventually("its socket is gone", PATIENCE, async || (!socket.exists()).then_some(())).await.unwrap();
    other.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_logs_without_end_delays_no_call_of_any_guest() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let other = Sandbox::start(&world, &daemons, "other").await.unwrap();
    let_vms_sleep(&mut daemons).await;
    let pod = world.pod().unwrap();
    let ours = Ours::join(&world, &daemons, &pod.namespace().path()).await;
    let (endpoint, handle) = Endpoint::new(Role::Guest, Liar(Arc::default(), true), Limits::default());
    tokio::spawn(endpoint.run());
    handle.attach(ours.dial(&world).await.into());
    let socket = daemons.run_dir().join("pods").join(&ours.id).join("agent.ttrpc");
    let mut shim = Shim::connect(&socket).await;
    shim.goes_on(1, "the guest is there").await;
    let (relay, idle) = (daemons.relay_pid().unwrap(), resident(daemons.relay_pid().unwrap()).unwrap());
    let lines = |result: &str| {
        let metrics = daemons.metrics("relay").unwrap();
        sample(&metrics, &format!("peerpod_relay_guest_log_lines_total{{result=\"{result}\"}}")).unwrap()
    };

    let (mut times, mut stream) = (Vec::new(), 3);
    while times.is_empty() || lines("left_out") < 20_000.0 {
        let asked = Instant::now();
        shim.goes_on(stream, "between lines").await;
        times.push(asked.elapsed());
        stream += 2;
    }
    times.sort_unstable();
    // Not the maximum: on a busy machine a single check may be late.
    let p90 = times[times.len() * 9 / 10];
    println!("{} health checks, p90 {p90:?}, worst {:?}", times.len(), times[times.len() - 1]);
    assert!(p90 < Duration::from_secs(1), "a tenth of the health checks took {p90:?} or more");
    other.lives().await.unwrap();
    unharmed(&daemons, relay, idle);
    assert!(lines("written") < 2000.0, "{}", lines("written"));
    let log = fs::read(daemons.log("relay")).unwrap();
    assert!(log.len() < 40 << 20, "{} bytes of log", log.len());
    let log = String::from_utf8(log).unwrap();
    assert!(log.contains("the guest logs too much; lines were left out"));
    assert!(!log.contains("\u{1b}[31m") && log.lines().all(|line| !line.starts_with("x")), "escaped");
    handle.close();

    // The same without flow control: as fast as the connection accepts it.
    let mut raw = ours.linked(&world, 9).await;
    let payload = line(&"y".repeat(record::MAX_TEXT));
    let mut seq = 0;
    let (before, began) = (lines("left_out"), Instant::now());
    while lines("left_out") - before < 5000.0 && began.elapsed() < PATIENCE {
        let mut bytes = Vec::new();
        for _ in 0..100 {
            seq += 1;
            let header = record::RecordHeader {
                seq,
                ..record::RecordHeader::new(RecordKind::Line, payload.len() as u32)
            };
            bytes.extend_from_slice(&[&header.encode()[..], &payload].concat());
        }
        timeout(PATIENCE, raw.write_all(&bytes)).await.unwrap().unwrap();
        other.lives().await.unwrap();
    }
    assert!(lines("left_out") - before >= 5000.0);
    unharmed(&daemons, relay, idle);
    drop(raw);
    daemons.shim().await.unwrap().stop_vm(&ours.id).await.unwrap();
    daemons.gone(&ours.id, PATIENCE).await.unwrap();
    other.stop(&daemons).await.unwrap();
}
