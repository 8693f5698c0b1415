//! Tests with the recorded conversation of a real shim and a real kata-agent, and with input that neither would send.

use std::path::Path;
use std::sync::Mutex;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use peerpod_link::frame::{DATA, HEADER_LEN, RESPONSE, method_of};
use peerpod_proto::{agent, ttrpc_frame};
use proptest::prelude::*;
use protobuf::{Message, UnknownValueRef};

use super::*;

mod gpu;
mod volumes;

#[derive(Default)]
struct Seen(Mutex<Vec<String>>, std::sync::atomic::AtomicU32);

impl Notice for Seen {
    fn container(&self) {
        self.0.lock().unwrap().push("container".into());
    }
    fn bind_source(&self, source: &str) {
        self.0.lock().unwrap().push(source.into());
    }
    fn network_admin(&self) {
        self.0.lock().unwrap().push("network admin".into());
    }
    fn gpus(&self) -> u32 {
        self.1.load(std::sync::atomic::Ordering::Relaxed)
    }
    fn sandbox_ends(&self) {
        self.0.lock().unwrap().push("sandbox ends".into());
    }
}

const PODNS: &str = "/run/netns/podns";

/// Filter and its output.
struct Bench {
    filter: Intercept,
    seen: Arc<Seen>,
    to_agent: BytesMut,
    to_peer: BytesMut,
}

impl Bench {
    fn new() -> Bench {
        let seen = Arc::new(Seen::default());
        let filter = Intercept::new(seen.clone(), PODNS.into());
        Bench { filter, seen, to_agent: BytesMut::new(), to_peer: BytesMut::new() }
    }

    fn request(&mut self, bytes: &[u8]) {
        // As the endpoint does: the shortcut first.
        if self.filter.passes_from_peer(bytes) {
            self.to_agent.extend_from_slice(bytes);
        } else {
            self.filter.from_peer(bytes, &mut self.to_peer, &mut self.to_agent);
        }
    }

    fn response(&mut self, bytes: &[u8]) {
        if self.filter.passes_from_local(bytes) {
            self.to_peer.extend_from_slice(bytes);
        } else {
            self.filter.from_local(bytes, &mut self.to_peer, &mut self.to_agent);
        }
    }
}

fn frame(stream: u32, kind: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Header { length: payload.len() as u32, stream, kind, flags: 0 }.encode().to_vec();
    bytes.extend_from_slice(payload);
    bytes
}

fn frames(mut bytes: &[u8]) -> Vec<(Header, Vec<u8>)> {
    let mut reader = FrameReader::new();
    let mut found = Vec::new();
    while let Some(piece) = reader.next(&mut bytes) {
        match piece {
            Piece::Head(head) => found.push((head, Vec::new())),
            Piece::Body(body) => found.last_mut().unwrap().1.extend_from_slice(body),
            Piece::End => {}
        }
    }
    found
}

/// Returns the frames of one recorded kata-agent connection: `(from the shim, bytes)`.
fn recorded(file: &str) -> Vec<(bool, Vec<u8>)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/transcripts").join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .filter(|line| line["sock"] == "agent" && line["conn"] == 0 && line["payload_b64"].is_string())
        .map(|line| {
            let payload = BASE64_STANDARD.decode(line["payload_b64"].as_str().unwrap()).unwrap();
            let number = |key: &str| line[key].as_u64().unwrap();
            (line["dir"] == "shim>agent", frame(number("stream") as u32, number("type") as u8, &payload))
        })
        .collect()
}

fn request(method: &str, payload: Vec<u8>) -> Vec<u8> {
    let mut request = ttrpc_frame::Request::new();
    request.service = SERVICE.into();
    request.method = method.into();
    request.payload = payload;
    request.timeout_nano = 30_000_000_000;
    request.write_to_bytes().unwrap()
}

#[test]
fn only_network_namespace_and_dns_of_a_recorded_pod_change() {
    let mut containers = 0;
    for file in ["rust-cri-pod.jsonl", "rust-volume.jsonl", "rust-ctr-run.jsonl"] {
        let mut bench = Bench::new();
        for (from_shim, bytes) in recorded(file) {
            bench.to_agent.clear();
            bench.to_peer.clear();
            if !from_shim {
                bench.response(&bytes);
                assert_eq!(bench.to_peer[..], bytes[..]);
                continue;
            }
            bench.request(&bytes);
            assert!(bench.to_peer.is_empty());
            let (head, before) = frames(&bytes).remove(0);
            let (new_head, after) = frames(&bench.to_agent).remove(0);
            assert_eq!(
                (head.stream, head.kind, head.flags),
                (new_head.stream, new_head.kind, new_head.flags)
            );
            match method_of(&before).unwrap().1 {
                "CreateContainer" => {
                    same_container(&before, &after);
                    containers += 1;
                }
                "CreateSandbox" => same_sandbox(&before, &after),
                _ => assert_eq!(before, after),
            }
        }
    }
    assert_eq!(containers, 5);
}

fn same_container(before: &[u8], after: &[u8]) {
    let envelope = |bytes: &[u8]| ttrpc_frame::Request::parse_from_bytes(bytes).unwrap();
    let (mut old, new) = (envelope(before), envelope(after));
    let mut expected = agent::CreateContainerRequest::parse_from_bytes(&old.payload).unwrap();
    let got = agent::CreateContainerRequest::parse_from_bytes(&new.payload).unwrap();
    let namespaces = &mut expected.OCI.mut_or_insert_default().Linux.mut_or_insert_default().Namespaces;
    assert!(namespaces.iter().all(|n| n.Type != "network"), "the shim strips it");
    let mut network = agent::LinuxNamespace::new();
    network.Type = "network".into();
    network.Path = PODNS.into();
    namespaces.push(network);
    assert_eq!(expected, got);
    // The envelope around it is unchanged.
    old.payload = new.payload.clone();
    assert_eq!(old, new);
}

fn same_sandbox(before: &[u8], after: &[u8]) {
    let (old, new) = (
        ttrpc_frame::Request::parse_from_bytes(before).unwrap(),
        ttrpc_frame::Request::parse_from_bytes(after).unwrap(),
    );
    let mut expected = agent::CreateSandboxRequest::parse_from_bytes(&old.payload).unwrap();
    let had_dns = !std::mem::take(&mut expected.dns).is_empty();
    assert_eq!(expected, agent::CreateSandboxRequest::parse_from_bytes(&new.payload).unwrap());
    assert!(had_dns || before == after);
}

#[test]
fn any_chunks_give_the_same_bytes() {
    let conversation: Vec<u8> = recorded("rust-ctr-run.jsonl")
        .into_iter()
        .filter_map(|(from_shim, bytes)| from_shim.then_some(bytes))
        .flatten()
        .collect();
    let mut whole = Bench::new();
    whole.request(&conversation);
    for size in [1, 2, 3, 7, 11, 64, 513, 4000] {
        let mut bench = Bench::new();
        for part in conversation.chunks(size) {
            bench.request(part);
        }
        let (expected, got) = (frames(&whole.to_agent), frames(&bench.to_agent));
        assert_eq!(expected.len(), got.len());
        for ((head, body), (new_head, new_body)) in expected.iter().zip(&got) {
            assert_eq!(head, new_head, "cut every {size} bytes");
            // The order of unknown fields is free, so rewritten bodies are compared by length.
            assert!(body == new_body || method_of(body).unwrap().1 == "CreateContainer");
        }
    }
}

#[test]
fn an_existing_network_namespace_is_replaced_and_bind_sources_are_reported() {
    let mut container = agent::CreateContainerRequest::new();
    container.container_id = "c1".into();
    let spec = container.OCI.mut_or_insert_default();
    for (kind, source, options) in [
        ("bind", "/run/kata-containers/shared/containers/c1-x-data", vec![]),
        ("proc", "proc", vec![]),
        ("none", "/run/peerpod/volumes/v0", vec!["rbind".to_owned()]),
    ] {
        let mut mount = agent::Mount::new();
        (mount.type_, mount.source, mount.options) = (kind.into(), source.into(), options);
        spec.Mounts.push(mount);
    }
    let namespaces = &mut spec.Linux.mut_or_insert_default().Namespaces;
    for kind in ["network", "mount", "network"] {
        let mut namespace = agent::LinuxNamespace::new();
        (namespace.Type, namespace.Path) = (kind.into(), "/proc/1/ns/net".into());
        namespaces.push(namespace);
    }
    let mut bench = Bench::new();
    bench.request(&frame(5, REQUEST, &request("CreateContainer", container.write_to_bytes().unwrap())));
    let (_, payload) = frames(&bench.to_agent).remove(0);
    let envelope = ttrpc_frame::Request::parse_from_bytes(&payload).unwrap();
    assert_eq!(envelope.timeout_nano, 30_000_000_000);
    let got = agent::CreateContainerRequest::parse_from_bytes(&envelope.payload).unwrap();
    let kinds: Vec<_> = got.OCI.Linux.Namespaces.iter().map(|n| (n.Type.as_str(), n.Path.as_str())).collect();
    assert_eq!(kinds, [("mount", "/proc/1/ns/net"), ("network", PODNS)]);
    assert_eq!(
        *bench.seen.0.lock().unwrap(),
        ["/run/kata-containers/shared/containers/c1-x-data", "/run/peerpod/volumes/v0", "container"]
    );
}

#[test]
fn fields_that_kata_may_add_survive_at_every_depth() {
    let mut container = peerpod_proto::intercept::CreateContainerRequest::new();
    let add = |fields: &mut protobuf::SpecialFields, text: &str| {
        fields.mut_unknown_fields().add_length_delimited(4242, text.as_bytes().to_vec());
        fields.mut_unknown_fields().add_varint(4243, 7);
    };
    add(container.mut_special_fields(), "request");
    let spec = container.OCI.mut_or_insert_default();
    add(spec.mut_special_fields(), "spec");
    add(spec.Linux.mut_or_insert_default().mut_special_fields(), "linux");
    let mut mount = peerpod_proto::intercept::Mount::new();
    add(mount.mut_special_fields(), "mount");
    spec.Mounts.push(mount);
    let process = spec.Process.mut_or_insert_default();
    add(process.mut_special_fields(), "process");
    let capabilities = process.Capabilities.mut_or_insert_default();
    capabilities.Effective = ["CAP_CHOWN", "CAP_NET_ADMIN"].map(str::to_owned).into();
    add(capabilities.mut_special_fields(), "capabilities");
    let seen = Seen::default();
    let mut envelope = ttrpc_frame::Request::new();
    (envelope.service, envelope.method) = (SERVICE.into(), "CreateContainer".into());
    envelope.payload = container.write_to_bytes().unwrap();
    add(envelope.mut_special_fields(), "envelope");

    let out = rewrite::create_container(envelope.write_to_bytes().unwrap(), PODNS, &seen).unwrap();
    let Rewritten::Whole(out) = out else { panic!("it has no volume to wait for") };
    let envelope = ttrpc_frame::Request::parse_from_bytes(&out).unwrap();
    let container =
        peerpod_proto::intercept::CreateContainerRequest::parse_from_bytes(&envelope.payload).unwrap();
    let has = |fields: &protobuf::SpecialFields, text: &str| {
        let value = fields.unknown_fields().get(4242);
        assert!(matches!(value, Some(UnknownValueRef::LengthDelimited(b)) if b == text.as_bytes()), "{text}");
        assert!(matches!(fields.unknown_fields().get(4243), Some(UnknownValueRef::Varint(7))), "{text}");
    };
    has(envelope.special_fields(), "envelope");
    has(container.special_fields(), "request");
    has(container.OCI.special_fields(), "spec");
    has(container.OCI.Linux.special_fields(), "linux");
    has(container.OCI.Mounts[0].special_fields(), "mount");
    has(container.OCI.Process.special_fields(), "process");
    has(container.OCI.Process.Capabilities.special_fields(), "capabilities");
    assert_eq!(container.OCI.Process.Capabilities.Effective.len(), 2);
    assert!(seen.0.lock().unwrap().contains(&"network admin".to_owned()));
}

#[test]
fn methods_of_the_future_and_large_payloads_pass_before_they_are_complete() {
    let mut bench = Bench::new();
    let bytes = frame(1, REQUEST, &request("FutureMethod", vec![9; 300_000]));
    bench.request(&bytes[..200]);
    assert_eq!(bench.to_agent[..], bytes[..200], "cut through");
    bench.request(&bytes[200..]);
    assert_eq!(bench.to_agent[..], bytes[..]);
    let data = frame(1, DATA, &[1; 50]);
    bench.to_agent.clear();
    bench.request(&data);
    assert_eq!(bench.to_agent[..], data[..]);
}

#[test]
fn an_oversize_request_is_answered_and_skipped_and_the_next_one_passes() {
    let mut bench = Bench::new();
    let length = (MAX_PAYLOAD + 1) as u32;
    bench.request(&Header { length, stream: 9, kind: REQUEST, flags: 0 }.encode());
    let (head, body) = frames(&bench.to_peer).remove(0);
    assert_eq!((head.stream, head.kind), (9, RESPONSE));
    let response = ttrpc_frame::Response::parse_from_bytes(&body).unwrap();
    assert_eq!(response.status.code, INVALID_ARGUMENT);
    assert!(
        response.status.message.starts_with("message length 4194305 exceed maximum message size of 4194304")
    );
    for _ in 0..length / 4097 {
        bench.request(&[0; 4097]);
    }
    bench.request(&vec![0; (length % 4097) as usize]);
    assert!(bench.to_agent.is_empty());
    let next = frame(11, REQUEST, &request("StartContainer", vec![]));
    bench.request(&next);
    assert_eq!(bench.to_agent[..], next[..]);
}

#[test]
fn the_error_of_a_request_above_the_limit_names_the_limit() {
    let mut container = agent::CreateContainerRequest::new();
    container.OCI.mut_or_insert_default().Hostname = "h".repeat(MAX_PAYLOAD - 70);
    let bytes = frame(3, REQUEST, &request("CreateContainer", container.write_to_bytes().unwrap()));
    assert!(bytes.len() <= MAX_PAYLOAD + HEADER_LEN);
    let mut bench = Bench::new();
    bench.request(&bytes);
    assert!(bench.to_agent.is_empty() && bench.seen.0.lock().unwrap().is_empty());
    let (head, body) = frames(&bench.to_peer).remove(0);
    let response = ttrpc_frame::Response::parse_from_bytes(&body).unwrap();
    assert_eq!(head.stream, 3);
    assert!(response.status.message.starts_with("CreateContainer: with the pod's network namespace"));
}

#[test]
fn an_unreadable_request_is_refused_and_the_connection_continues() {
    let mut bench = Bench::new();
    bench.request(&frame(1, REQUEST, &[0xff; 40]));
    bench.request(&frame(3, REQUEST, &[]));
    bench.request(&frame(5, REQUEST, &request("CreateContainer", vec![0xff; 9])));
    let next = frame(7, REQUEST, &request("StartContainer", vec![]));
    bench.request(&next);
    assert_eq!(bench.to_agent[..], next[..]);
    let streams: Vec<_> = frames(&bench.to_peer).iter().map(|(head, _)| head.stream).collect();
    assert_eq!(streams, [1, 3, 5]);
}

#[test]
fn an_own_answer_never_splits_a_frame_of_the_agent() {
    let reply = frame(1, RESPONSE, &[5; 100]);
    for cut in 1..reply.len() {
        let mut bench = Bench::new();
        bench.response(&reply[..cut]);
        bench.request(&frame(3, REQUEST, &[0xff; 4]));
        bench.response(&[&reply[cut..], &reply[..]].concat());
        bench.request(&frame(5, REQUEST, &[0xff; 4]));
        let got = frames(&bench.to_peer);
        let streams: Vec<_> = got.iter().map(|(head, _)| head.stream).collect();
        // An incomplete header has not begun a frame yet.
        let expected = if cut < HEADER_LEN { [3, 1, 1, 5] } else { [1, 3, 1, 5] };
        assert_eq!(streams, expected, "cut at {cut}");
        let agents = got.iter().filter(|(head, _)| head.stream == 1);
        assert!(agents.clone().count() == 2 && agents.clone().all(|(_, body)| body == &[5; 100]));
    }
}

#[test]
fn the_end_of_the_sandbox_is_noticed_and_passed_on() {
    let mut bench = Bench::new();
    let bytes = frame(1, REQUEST, &request("DestroySandbox", vec![]));
    bench.request(&bytes);
    assert_eq!(bench.to_agent[..], bytes[..]);
    assert_eq!(*bench.seen.0.lock().unwrap(), ["sandbox ends"]);
}

proptest! {
    #[test]
    fn garbage_from_both_sides_does_not_panic(
        parts in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..200)), 0..20)
    ) {
        let mut bench = Bench::new();
        for (from_shim, bytes) in parts {
            if from_shim { bench.request(&bytes) } else { bench.response(&bytes) }
        }
    }

    #[test]
    fn damaged_create_container_requests_do_not_panic(at in 0usize..3000, with in any::<u8>()) {
        let bytes = recorded("rust-ctr-run.jsonl").into_iter().map(|(_, b)| b)
            .find(|b| method_of(&b[HEADER_LEN..]).is_some_and(|m| m.1 == "CreateContainer")).unwrap();
        let mut payload = bytes[HEADER_LEN..].to_vec();
        let at = at % payload.len();
        payload[at] = with;
        let mut bench = Bench::new();
        bench.request(&frame(1, REQUEST, &payload));
    }
}
