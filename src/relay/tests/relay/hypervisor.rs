//! Tests of `hypervisor.sock` with the node present, absent, slow and restarted, and with misbehaving shims.

use super::common;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::node::{Memory, Node};
use common::{Raw, World, header, resident_kib, until};
use peerpod_link::frame;
use peerpod_proto::hypervisor::CreateVMResponse;
use protobuf::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const CANCELLED: i32 = 1;
const INVALID_ARGUMENT: i32 = 3;
const UNIMPLEMENTED: i32 = 12;
const INTERNAL: i32 = 13;

#[tokio::test(flavor = "multi_thread")]
async fn calls_reach_the_node_and_answers_come_back_unchanged() {
    let world = World::new("calls").await;
    let _node = Node::start(&world, Arc::default()).await;
    let mut shim = world.shim().await;
    let create = shim.create("a").await;
    let answer = shim.answer().await;
    assert_eq!((answer.stream, answer.code), (create, 0));
    let path = CreateVMResponse::parse_from_bytes(&answer.payload).unwrap().agentSocketPath;
    assert_eq!(path, "/path/of/a");
    shim.start("fails").await;
    let answer = shim.answer().await;
    assert_eq!((answer.code, answer.message.as_str()), (9, "no such image: try another"));
    shim.send("podvminfo.PodVMInfo", "GetInfo", vec![], Duration::ZERO).await;
    assert_eq!(shim.answer().await.code, 0);
    shim.send("hypervisor.Hypervisor", "Version", vec![], Duration::ZERO).await;
    assert_eq!(shim.answer().await.code, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_are_held_while_the_node_is_dead_and_answered_in_order_when_it_is_back() {
    let world = World::new("held").await;
    let memory = Arc::new(Memory::default());
    let node = Node::start(&world, memory.clone()).await;
    let mut shim = world.shim().await;
    memory.hang.lock().unwrap().insert("CreateVM".into());
    let create = shim.create("a").await;
    until("the call", || memory.calls().contains(&"CreateVM a".into())).await;
    node.kill().await;
    let start = shim.start("a").await;
    let mut other = world.shim().await;
    other.create("b").await;
    assert!(shim.silent().await);

    memory.hang.lock().unwrap().clear();
    memory.calls.lock().unwrap().clear();
    let _node = Node::start(&world, memory.clone()).await;
    let first = shim.answer().await;
    let second = shim.answer().await;
    assert_eq!([(first.stream, first.code), (second.stream, second.code)], [(create, 0), (start, 0)]);
    assert_eq!(other.answer().await.code, 0);
    let calls = memory.calls();
    assert_eq!(calls[0], "ReadInbox");
    let at = |call: &str| calls.iter().position(|seen| seen == call).unwrap();
    assert!(at("CreateVM a") < at("StartVM a"), "{calls:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_with_the_node_dead_is_recorded_and_cancels_the_create() {
    let world = World::new("stop").await;
    let mut shim = world.shim().await;
    let create = shim.create("a").await;
    let stop = shim.stop("a").await;
    let first = shim.answer().await;
    let second = shim.answer().await;
    assert_eq!([(first.stream, first.code), (second.stream, second.code)], [(create, CANCELLED), (stop, 0)]);
    assert_eq!(world.inbox(), ["a.json"]);
    for _ in 0..2 {
        shim.stop("a").await;
        assert_eq!(shim.answer().await.code, 0);
    }
    // A create after the stop reaches the node only after the node has read its inbox.
    let late = shim.create("a").await;
    let memory = Arc::new(Memory::default());
    let _node = Node::start(&world, memory.clone()).await;
    let answer = shim.answer().await;
    assert_eq!((answer.stream, answer.code), (late, 0));
    assert_eq!(memory.calls(), ["ReadInbox", "inbox a", "CreateVM a"]);
    assert!(world.inbox().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_unanswered_by_a_hung_node_goes_to_the_inbox_and_the_node_reads_it() {
    let world = World::new("slow").await;
    let memory = Arc::new(Memory::default());
    let _node = Node::start(&world, memory.clone()).await;
    memory.hang.lock().unwrap().extend(["StopVM".to_owned(), "StartVM".to_owned()]);
    let mut shim = world.shim().await;
    let start = shim.start("a").await;
    until("the start", || memory.calls().contains(&"StartVM a".into())).await;
    let begun = Instant::now();
    let stop = shim.stop("a").await;
    let first = shim.answer().await;
    let second = shim.answer().await;
    assert!(begun.elapsed() >= Duration::from_millis(400), "{:?}", begun.elapsed());
    assert_eq!([(first.stream, first.code), (second.stream, second.code)], [(start, CANCELLED), (stop, 0)]);
    until("the node to read its inbox", || memory.calls().contains(&"inbox a".into())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_survives_the_disconnect_of_its_shim() {
    let world = World::new("left").await;
    let mut shim = world.shim().await;
    shim.create("a").await;
    shim.stop("a").await;
    drop(shim);
    until("the inbox", || world.inbox() == ["a.json"]).await;
    let memory = Arc::new(Memory::default());
    let _node = Node::start(&world, memory.clone()).await;
    until("the node to read", || memory.calls().contains(&"inbox a".into())).await;
    assert!(!memory.calls().contains(&"CreateVM a".into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_that_cannot_be_recorded_is_an_error() {
    let world = World::new("disk").await;
    let inbox = world.config.state_dir.join("inbox");
    std::fs::remove_dir(&inbox).unwrap();
    std::fs::write(&inbox, "").unwrap();
    let mut shim = world.shim().await;
    shim.stop("a").await;
    let answer = shim.answer().await;
    assert_eq!(answer.code, INTERNAL);
    assert!(answer.message.contains("record the stop of sandbox a"), "{}", answer.message);
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_services_and_bad_ids_are_refused_without_the_node() {
    let world = World::new("unknown").await;
    let mut shim = world.shim().await;
    for service in ["peerpod.node.v1.Node", "grpc.AgentService", ""] {
        shim.send(service, "Claim", vec![], Duration::ZERO).await;
        assert_eq!(shim.answer().await.code, UNIMPLEMENTED);
    }
    for id in ["", "../../etc", "a/b", &"x".repeat(129)] {
        shim.create(id).await;
        assert_eq!(shim.answer().await.code, INVALID_ARGUMENT, "{id:?}");
        shim.stop(id).await;
        assert_eq!(shim.answer().await.code, INVALID_ARGUMENT, "{id:?}");
    }
    assert!(world.inbox().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_oversize_frame_is_answered_and_the_connection_stays_usable() {
    let world = World::new("oversize").await;
    let _node = Node::start(&world, Arc::default()).await;
    let mut shim = world.shim().await;
    let length = (4 << 20) + 1;
    shim.stream.write_all(&header(length, 77, frame::REQUEST)).await.unwrap();
    shim.stream.write_all(&vec![0; length as usize]).await.unwrap();
    let answer = shim.answer().await;
    assert_eq!((answer.stream, answer.code), (77, INVALID_ARGUMENT));
    assert_eq!(answer.message, "message length 4194305 exceed maximum message size of 4194304");
    shim.stream.write_all(&header(3, 79, frame::DATA)).await.unwrap();
    shim.stream.write_all(b"abc").await.unwrap();
    assert_eq!(shim.answer().await.code, INVALID_ARGUMENT);
    shim.stream.write_all(&common::frame_of(81, &[0xff; 50])).await.unwrap();
    assert_eq!(shim.answer().await.code, INVALID_ARGUMENT);
    shim.create("a").await;
    assert_eq!(shim.answer().await.code, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_closes_only_its_own_connection() {
    let world = World::new("garbage").await;
    let _node = Node::start(&world, Arc::default()).await;
    let mut shim = world.shim().await;
    for n in 0..20u8 {
        let mut bad = world.shim().await;
        let mut bytes = [0xa5 ^ n; 64];
        bytes[8] = 0x7f;
        drop(bad.stream.write_all(&bytes).await);
        bad.closed().await;
    }
    shim.create("a").await;
    assert_eq!(shim.answer().await.code, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_creating_connection_is_reported() {
    let world = World::new("creator").await;
    let _node = Node::start(&world, Arc::default()).await;
    let mut shim = world.shim().await;
    shim.create("a").await;
    shim.answer().await;
    world.put("a", &[]).await;
    world.state("a", "the connection", |state| state.hypervisor_connected).await;
    drop(shim);
    world.state("a", "its end", |state| !state.hypervisor_connected).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_relay_does_not_take_the_sockets_of_a_running_one() {
    let world = World::new("second").await;
    // A handover would end the running relay, and with it this test process.
    std::fs::remove_file(world.run("takeover.sock")).unwrap();
    let Err(error) = peerpod_relay::app::build(world.config.clone()).await else { panic!("it started") };
    assert!(error.to_string().contains("take over from the peerpod-relay that serves"), "{error}");
    let mut shim = world.shim().await;
    shim.stop("a").await;
    assert_eq!(shim.answer().await.code, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_relay_leaves_no_socket_behind() {
    let mut world = World::new("gone").await;
    world.put("a", &[]).await;
    let mut shim = world.shim().await;
    world.stop().await;
    shim.closed().await;
    let left: Vec<_> = std::fs::read_dir(&world.config.run_dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(left.iter().all(|name| ["relay.lock", "pods", "stops"].contains(&name.as_str())), "{left:?}");
    for folder in ["pods", "stops"] {
        assert_eq!(std::fs::read_dir(world.run(folder)).unwrap().count(), 0, "{folder}");
    }
}

/// Measures the whole test process; the other tests of this file are small beside the limit.
#[tokio::test(flavor = "multi_thread")]
async fn half_open_connections_that_announce_4_mib_cost_nothing_like_it() {
    let world = World::new("halfopen").await;
    let before = resident_kib();
    let mut open = Vec::new();
    for _ in 0..500 {
        let mut raw = world.shim().await;
        raw.stream.write_all(&header(4 << 20, 1, frame::REQUEST)).await.unwrap();
        raw.stream.write_all(&[0; 1000]).await.unwrap();
        open.push(raw);
    }
    let mut shim = world.shim().await;
    shim.stop("a").await;
    assert_eq!(shim.answer().await.code, 0, "others are served");
    let held = resident_kib().saturating_sub(before);
    assert!(held < 32 << 10, "{held} KiB for 500 half-open connections");
    drop(open);
    let mut raw = Raw::connect(&world.run("hypervisor.sock")).await;
    raw.stop("b").await;
    assert_eq!(raw.answer().await.code, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_and_connections_are_counted() {
    let world = World::new("metrics").await;
    let mut shim = world.shim().await;
    shim.stop("a").await;
    shim.answer().await;
    let mut admin = TcpStream::connect(world.relay.as_ref().unwrap().admin).await.unwrap();
    admin.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut text = String::new();
    common::soon("the metrics", admin.read_to_string(&mut text)).await.unwrap();
    for line in [
        "peerpod_relay_inbox_writes_total 1",
        "peerpod_relay_calls_total{method=\"StopVM\"} 1",
        "peerpod_relay_node_connected 0",
        "peerpod_relay_hypervisor_connections 1",
        "peerpod_relay_bytes_total{direction=\"to_guest\"} 0",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
}
