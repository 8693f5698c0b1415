//! Tests with the recorded frames of a shim for a pod with volumes (`tests/transcripts/rust-volume.jsonl`) and the
//! pod's volume map.

use std::path::Path;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use peerpod_proto::intercept::{CopyFileRequest, CreateContainerRequest};

use super::*;

/// Returns the shim's frames on its only active connection.
fn recorded() -> Vec<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/transcripts/rust-volume.jsonl");
    let text = std::fs::read_to_string(path).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines
        .filter(|line| line["sock"] == "agent" && line["conn"] == 0 && line["dir"] == "shim>agent")
        .filter_map(|line| {
            let payload = BASE64_STANDARD.decode(line["payload_b64"].as_str()?).unwrap();
            Some(frame(frame::REQUEST, line["stream"].as_u64()? as u32, &payload))
        })
        .collect()
}

fn body<M: Message>(frame: &[u8], method: &str) -> Option<M> {
    let request = Request::parse_from_bytes(&frame[HEADER_LEN..]).unwrap();
    (request.method == method).then(|| M::parse_from_bytes(&request.payload).unwrap())
}

/// Decodes the frames, because a container's annotations are a map with a different order in each encoding.
fn said(mut bytes: &[u8]) -> Vec<(Header, Result<CreateContainerRequest, Vec<u8>>)> {
    let mut found = Vec::new();
    while let Some(head) = bytes.first_chunk() {
        let header = Header::decode(head);
        let (frame, rest) = bytes.split_at(HEADER_LEN + header.length as usize);
        found.push((header, body(frame, "CreateContainer").ok_or_else(|| frame.to_vec())));
        bytes = rest;
    }
    found
}

/// Returns the volumes of the copied markers, in the order of the copies.
fn volumes(frames: &[Vec<u8>]) -> Vec<Volume> {
    let copies = frames.iter().filter_map(|frame| body::<CopyFileRequest>(frame, "CopyFile"));
    let markers = copies.filter(|copied| copied.path.ends_with("/.peerpod-volume"));
    let named = markers.zip(["a", "b", "c", "d"]);
    let volume = |(copied, id): (CopyFileRequest, &str)| Volume {
        id: id.repeat(32),
        name: id.into(),
        target_path: format!("/pods/u/{id}/mount"),
        marker: String::from_utf8(copied.data).unwrap(),
        ..Volume::default()
    };
    named.map(volume).collect()
}

fn with(volumes: &[Volume]) -> AgentFilter {
    let shared = Arc::new(Shared::default());
    shared.set("", volumes);
    AgentFilter::new(shared, Bounds::default())
}

#[test]
fn markers_and_the_bundle_identify_each_mount() {
    let frames = recorded();
    let volumes = volumes(&frames);
    assert_eq!(volumes.len(), 2);
    let is_main = |frame: &&Vec<u8>| {
        let container = body::<CreateContainerRequest>(frame, "CreateContainer");
        container.is_some_and(|c| c.OCI.Mounts.iter().any(|mount| mount.destination == "/data"))
    };
    let main = frames.iter().position(|frame| is_main(&frame)).unwrap();

    // Without the bundle, a subPath looks like any empty folder.
    let (mut filter, mut seen) = (with(&volumes), Seen::default());
    for frame in &frames[..=main] {
        seen.shim(&mut filter, frame);
    }
    let stream = Header::decode(frames[main].first_chunk().unwrap()).stream;
    assert_eq!(codes(&seen.local), [(stream, code::FAILED_PRECONDITION)]);

    // With the bundle, all three mounts are on the same volumes as on the node.
    let bundle = std::env::temp_dir().join(format!("peerpod-recorded-{}", std::process::id()));
    std::fs::create_dir_all(&bundle).unwrap();
    let config = serde_json::json!({ "mounts": [
        { "destination": "/data", "source": "/pods/u/a/mount" },
        { "destination": "/ro", "source": "/pods/u/b/mount" },
        { "destination": "/var/lib/db", "source": "/pods/u/b/mount/db" },
    ]});
    std::fs::write(bundle.join("config.json"), config.to_string()).unwrap();
    let mut request = Request::parse_from_bytes(&frames[main][HEADER_LEN..]).unwrap();
    let mut container = CreateContainerRequest::parse_from_bytes(&request.payload).unwrap();
    let key = "io.katacontainers.pkg.oci.bundle_path".to_owned();
    let annotations = &mut container.OCI.mut_or_insert_default().Annotations;
    assert!(annotations.insert(key, bundle.to_str().unwrap().into()).is_some(), "shims send it");
    request.payload = container.write_to_bytes().unwrap();
    let mut sent = frames[..main].to_vec();
    sent.push(frame(frame::REQUEST, stream, &request.write_to_bytes().unwrap()));

    let whole = sent.concat();
    let mut results = Vec::new();
    for pieces in [1, 7, 4096] {
        let (mut filter, mut seen) = (with(&volumes), Seen::default());
        for piece in whole.chunks(pieces) {
            seen.shim(&mut filter, piece);
        }
        assert!(seen.local.is_empty());
        results.push(seen.peer.to_vec());
    }
    std::fs::remove_dir_all(bundle).unwrap();
    assert!(results.iter().all(|result| said(result) == said(&results[0])), "cut anywhere it is the same");
    let before = sent[..main].concat();
    assert!(results[0].starts_with(&before), "everything else passes as it is");
    let made = &results[0][before.len()..];
    let made = body::<CreateContainerRequest>(made, "CreateContainer").unwrap();
    let source = |place: &str| {
        made.OCI
            .Mounts
            .iter()
            .find(|mount| mount.destination == place)
            .map(|mount| mount.source.clone())
            .unwrap()
    };
    let folder = |id: &str| format!("/run/peerpod/volumes/{}", id.repeat(32));
    assert_eq!(source("/data"), folder("a"));
    assert_eq!(source("/ro"), folder("b"));
    assert_eq!(source("/var/lib/db"), format!("{}/db", folder("b")));
    let ours = made.storages.iter().filter(|storage| storage.driver == "peerpod-volume").count();
    assert_eq!(ours, 2, "one for each volume");
}

#[test]
fn another_process_goes_on_between_a_marker_and_its_container() {
    let frames = recorded();
    let volumes = volumes(&frames);
    for cut in 0..frames.len() {
        let (mut first, mut seen) = (with(&volumes), Seen::default());
        let whole = frames.concat();
        let at: usize = frames[..cut].iter().map(Vec::len).sum::<usize>() + 15;
        seen.shim(&mut first, &whole[..at]);
        let mut second = with(&volumes);
        assert!(second.restore(&first.state().unwrap()));
        seen.shim(&mut second, &whole[at..]);
        let (mut undisturbed, mut alone) = (with(&volumes), Seen::default());
        alone.shim(&mut undisturbed, &whole);
        assert_eq!(said(&seen.peer), said(&alone.peer), "cut after frame {cut}");
        assert_eq!(seen.local, alone.local, "cut after frame {cut}");
    }
}

#[test]
fn a_gathered_request_goes_on_when_the_guest_is_replaced() {
    let frames = recorded();
    let (mut filter, mut seen) = (with(&volumes(&frames)), Seen::default());
    let container = request(21, "CreateContainer", 100);
    seen.shim(&mut filter, &container[..60]);
    assert!(filter.stream_lost(Some(&mut seen.peer), &mut seen.local));
    assert!(seen.local.is_empty());
    seen.shim(&mut filter, &container[60..]);
    assert_eq!(
        codes(&seen.local),
        [(21, code::FAILED_PRECONDITION)],
        "it is read whole, and cannot be decoded"
    );
    assert!(seen.peer.is_empty());
    let next = request(23, "StartContainer", 10);
    seen.shim(&mut filter, &next);
    assert_eq!(&seen.peer[..], &next[..]);
}
