//! Makes the targets' seeds: frames and conversations of the real shim and agent, a session's records, plans. They come
//! from recordings and from the code itself, so that they always match the code's version.

use std::path::{Path, PathBuf};
use std::{fs, io};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use peerpod_link::frame::{Header, REQUEST, RESPONSE};
use peerpod_link::path_mtu::{Datagram, DatagramKind, Token};
use peerpod_link::record::{self, Hello, RecordKind, SessionId, StreamKind, Target, Welcome};
use peerpod_proto::guest::{self, Claim, ClaimReply, NetworkPlan};
use peerpod_proto::ttrpc_frame::{Request, Response};
use protobuf::Message;
use serde_json::{Value, json};

use crate::{agent, link};

/// Name and input.
pub type Seed = (String, Vec<u8>);

/// Returns the seeds of a target.
///
/// # Panics
/// When the recordings of this repository cannot be read.
pub fn of(target: &str) -> Vec<Seed> {
    match target {
        "agent" => conversations(),
        "user_data" => files("fuzz/seeds/user_data"),
        "frames" => frames(),
        "greeting" => greetings(),
        "initdata" => files("fuzz/seeds/initdata"),
        "layer" => files("fuzz/seeds/layer"),
        "ledger" => files("src/node/tests/samples"), // every released version of a record
        "link" => {
            link::recorded().into_iter().enumerate().map(|(n, seed)| (format!("side-{n}"), seed)).collect()
        }
        "libvirt" => files("fuzz/seeds/libvirt"), // as libvirtd 9.0 sent them
        "packets" => packets(),
        "plan" => plans(),
        "sources" => files("fuzz/seeds/sources"),
        _ => Vec::new(),
    }
}

/// Returns inputs of earlier runs of a target, from its corpus in git.
///
/// # Panics
/// When the target has no corpus, or it cannot be read.
pub fn kept(target: &str) -> Vec<Seed> {
    files(&format!("fuzz/corpus/{target}"))
}

/// Writes the seeds of a target into a folder, for libFuzzer.
///
/// # Errors
/// When the folder or a file cannot be written.
pub fn write(target: &str, folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    of(target).into_iter().try_for_each(|(name, seed)| fs::write(folder.join(name), seed))
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn files(folder: &str) -> Vec<Seed> {
    let listing = fs::read_dir(repository().join(folder)).expect("a folder of this repository");
    let paths = listing.map(|entry| entry.expect("an entry").path()).filter(|path| path.is_file());
    paths.map(|path| (name_of(&path), fs::read(&path).expect("a file of this repository"))).collect()
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// A recorded frame: its socket, its direction, its method, and all of its bytes.
struct Frame {
    agent: bool,
    of_shim: bool,
    method: String,
    bytes: Vec<u8>,
}

/// Returns all frames, by recording.
fn recordings() -> Vec<(String, Vec<Frame>)> {
    let all = files("tests/transcripts").into_iter().filter(|(name, _)| name.ends_with(".jsonl"));
    all.map(|(name, text)| {
        let text = String::from_utf8(text).expect("text");
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        (name, lines.filter_map(|line| frame(&line)).collect())
    })
    .collect()
}

fn frame(line: &Value) -> Option<Frame> {
    let payload = BASE64_STANDARD.decode(line["payload_b64"].as_str()?).expect("base64");
    let number = |key: &str| line[key].as_u64().unwrap_or_default();
    let header = Header {
        length: payload.len() as u32,
        stream: number("stream") as u32,
        kind: number("type") as u8,
        flags: number("flags") as u8,
    };
    Some(Frame {
        agent: line["sock"] == "agent",
        of_shim: line["dir"].as_str().is_some_and(|dir| dir.starts_with("shim>")),
        method: line["method"].as_str().unwrap_or("none").to_owned(),
        bytes: [&header.encode()[..], &payload].concat(),
    })
}

/// Returns the first frame of each method and direction, and the first frames of each recording joined.
fn frames() -> Vec<Seed> {
    let mut seeds: Vec<Seed> = Vec::new();
    for (recording, frames) in recordings() {
        let first: Vec<u8> = frames.iter().take(6).flat_map(|frame| frame.bytes.clone()).collect();
        seeds.push((format!("{recording}-first"), first));
        for frame in frames {
            let name = format!("{}-{}", frame.method, if frame.of_shim { "request" } else { "response" });
            if !seeds.iter().any(|(known, _)| *known == name) {
                seeds.push((name, frame.bytes));
            }
        }
    }
    seeds
}

/// Returns the conversations on the agent's socket, message by message, and one with refusals.
fn conversations() -> Vec<Seed> {
    let of_agent = |frame: &Frame| {
        let who = if frame.of_shim { agent::SHIM } else { agent::AGENT };
        frame.agent.then(|| agent::word(who, &frame.bytes))
    };
    let all = recordings().into_iter();
    let all =
        all.map(|(name, frames)| (name, frames.iter().filter_map(of_agent).flatten().collect::<Vec<u8>>()));
    let refusals = std::iter::once(("refusals-during-an-answer".to_owned(), refusals()));
    all.filter(|(_, seed)| !seed.is_empty()).chain(refusals).collect()
}

/// Returns a conversation in which the relay refuses calls while a large answer of the agent passes: a container because
/// of its volume, and calls beyond the limit.
fn refusals() -> Vec<u8> {
    let frame = |kind, stream, payload: &[u8]| {
        let header = Header { length: payload.len() as u32, stream, kind, flags: 0 };
        [&header.encode()[..], payload].concat()
    };
    let call = |stream: u32, method: &str| {
        let service = "grpc.AgentService".to_owned();
        // These bytes are no CreateContainer.
        let request =
            Request { service, method: method.to_owned(), payload: vec![7; 10], ..Request::default() };
        agent::word(agent::SHIM, &frame(REQUEST, stream, &request.write_to_bytes().expect("a message")))
    };
    let response = Response { payload: vec![9; 20_000], ..Response::default() };
    let answer = frame(RESPONSE, 1, &response.write_to_bytes().expect("a message"));
    let (first, rest) = answer.split_at(10_000);
    let (first, rest) = (agent::word(agent::AGENT, first), agent::word(agent::AGENT, rest));
    let more: Vec<u8> = (5..25).step_by(2).flat_map(|stream| call(stream, "WaitProcess")).collect();
    [call(1, "ReadStdout"), first, call(3, "CreateContainer"), more, rest].concat()
}

fn greetings() -> Vec<Seed> {
    let hello = Hello {
        versions: (record::OLDEST, record::VERSION),
        session: SessionId([7; 16]),
        epoch: 3,
        recv: 99,
        program: "0.1.0".to_owned(),
    };
    let welcome = Welcome { version: 2, resumed: true, epoch: 3, recv: 7, program: "0.1.0".to_owned() };
    let claim = Claim {
        version: 1,
        ticket_id: "0".repeat(32),
        ticket_secret: vec![9; 32],
        csr: vec![0x30; 200],
        tunnel_key: vec![8; 32],
        guest_version: "0.1.0".to_owned(),
        ..Claim::default()
    };
    let reply = ClaimReply {
        sandbox_id: "sandbox".to_owned(),
        certificates: vec![vec![1; 300]],
        ..ClaimReply::default()
    };
    let whole = |kind, payload: Vec<u8>| record::plain(kind, &payload).expect("it fits a record");
    let bytes = |message: &dyn protobuf::MessageDyn| message.write_to_bytes_dyn().expect("a message");
    let (open, length) = StreamKind::Dial(Target { v6: true, port: 8080 }).encode();
    let hand_off = json!({"version": 1, "kind": "localhost", "sandbox": "sandbox", "descriptors": ["log", "listen4"],
        "detail": {"port": 1}});
    let seeds = [
        ("hello", hello.encode()),
        ("hello-record", whole(RecordKind::Hello, hello.encode())),
        ("welcome", welcome.encode()),
        ("claim-record", whole(RecordKind::Claim, bytes(&claim))),
        ("reply-record", whole(RecordKind::ClaimReply, bytes(&reply))),
        ("open", open[..length].to_vec()),
        ("hand-in", hand_off.to_string().into_bytes()),
        ("hand-in-answer", json!({"version": 1, "error": "no", "held": true}).to_string().into_bytes()),
    ];
    seeds.map(|(name, seed)| (name.to_owned(), seed)).into()
}

/// Returns a path MTU probe.
fn packets() -> Vec<Seed> {
    let probe = Datagram { kind: DatagramKind::Question, nonce: [1; 8], token: Token::new([2; 16]) };
    vec![("probe".to_owned(), probe.write(64))]
}

/// Returns a plan of each version, and one with every field set.
fn plans() -> Vec<Seed> {
    let underlay = guest::Underlay {
        kind: "vxlan".to_owned(),
        node_address: "10.0.0.1".to_owned(),
        vm_address: "10.0.0.2".to_owned(),
        port: 4789,
        overhead: 50,
        ..Default::default()
    };
    let address = |prefix: &str| guest::Address { prefix: prefix.to_owned(), ..Default::default() };
    let route = |destination: &str, gateway: &str| guest::Route {
        destination: destination.to_owned(),
        gateway: gateway.to_owned(),
        table: 254,
        protocol: 3,
        ..Default::default()
    };
    let interface = |number: u8| guest::Interface {
        name: format!("eth{number}"),
        mac: format!("02:00:00:00:00:0{number}"),
        mtu: 1450,
        vni: 77 + u32::from(number),
        index: 2 + u32::from(number),
        addresses: vec![address(&format!("10.244.{number}.7/24")), address(&format!("fd10:{number}::7/64"))],
        routes: vec![route("0.0.0.0/0", "169.254.1.1"), route("::/0", "fe80::1")],
        neighbours: vec![guest::Neighbour {
            address: "169.254.1.1".to_owned(),
            mac: "ee:ee:ee:ee:ee:ee".to_owned(),
            ..Default::default()
        }],
        ..Default::default()
    };
    let plan = |version, interfaces| NetworkPlan {
        version,
        interfaces,
        underlay: Some(underlay.clone()).into(),
        ..Default::default()
    };
    let (first, plain, mut full) =
        (plan(1, vec![interface(0)]), plan(2, vec![interface(0)]), plan(2, vec![interface(0), interface(1)]));
    let sysctl =
        |name: &str| guest::Sysctl { name: name.to_owned(), value: "1".to_owned(), ..Default::default() };
    full.interfaces[1].sysctls = vec![sysctl("ipv4/rp_filter")];
    full.interfaces[1].tx_queue_len = Some(500);
    full.interfaces[1].addresses[0].valid = Some(600);
    full.interfaces[1].addresses[0].peer = "10.244.1.8".to_owned();
    full.sysctls = vec![sysctl("core/somaxconn")];
    full.loopback = vec![address("10.9.9.9/32")];
    let hop = |interface: &str, gateway: &str| guest::Hop {
        interface: interface.to_owned(),
        gateway: gateway.to_owned(),
        weight: 1,
        ..Default::default()
    };
    let mut several = route("10.50.0.0/16", "");
    several.hops = vec![hop("eth0", "10.244.0.1"), hop("eth1", "10.244.1.1")];
    several.metrics = vec![guest::Metric { kind: 7, value: 10, ..Default::default() }];
    (several.advmss, several.mtu, several.expires) = (1400, 1440, Some(60));
    let mut hole = route("10.66.0.0/16", "");
    hole.kind = 6;
    full.routes = vec![several, hole];
    full.rules = vec![guest::Rule {
        priority: 1000,
        from: "10.244.0.0/16".to_owned(),
        iif: "eth0".to_owned(),
        fwmark: 1,
        fwmask: 0xff,
        table: 100,
        action: 1,
        uids: Some(guest::Range { first: 0, last: 1000, ..Default::default() }).into(),
        destination_ports: Some(guest::Range { first: 80, last: 90, ..Default::default() }).into(),
        ip_protocol: 6,
        suppress_prefix_length: Some(0),
        ..Default::default()
    }];
    let seeds = [("version-1", first), ("version-2", plain), ("everything", full)];
    seeds.map(|(name, plan)| (name.to_owned(), plan.write_to_bytes().expect("a message"))).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_plan_is_one() {
        for (name, bytes) in plans() {
            let message = NetworkPlan::parse_from_bytes(&bytes).unwrap();
            let planned = peerpod_podnet::plan::read(&message);
            assert!(planned.is_ok(), "{name}: {planned:?}");
        }
    }

    #[test]
    fn every_packet_and_greeting_is_what_its_name_says() {
        assert!(packets().iter().all(|(_, bytes)| Datagram::read(bytes).is_some()));
        let named = |name: &str| greetings().into_iter().find(|(known, _)| known == name).unwrap().1;
        assert!(Hello::decode(&named("hello")).is_ok() && Welcome::decode(&named("welcome")).is_ok());
        assert!(StreamKind::decode(&named("open")).is_some());
        assert!(record::split(&mut &named("claim-record")[..]).unwrap().is_some());
        serde_json::from_slice::<peerpod_base::fd_handoff::HandoffHeader>(&named("hand-in")).unwrap();
    }
}
