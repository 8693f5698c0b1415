//! Tests of one sandbox from its agent socket to the agent behind the link, through losses and restarts.

use super::common;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::guest::Guest;
use common::{Identity, Raw, World, header, resident_kib, soon, until};
use peerpod_link::frame;
use peerpod_proto::guest::{Flush, Personalise, Reply, Request};
use peerpod_proto::relay::{DeleteSandboxRequest, GuestCallRequest};
use protobuf::Message;
use tokio::io::AsyncWriteExt;
use ttrpc::{Code, Error, context};

const INVALID_ARGUMENT: i32 = 3;
const RESOURCE_EXHAUSTED: i32 = 8;
const UNAVAILABLE: i32 = 14;

struct Pod {
    world: World,
    identity: Identity,
    guest: Guest,
}

impl Pod {
    async fn new(name: &str) -> Pod {
        let world = World::new(name).await;
        world.configure().await;
        let identity = world.ca.client();
        world.put("a", &[&identity]).await;
        let guest = Guest::start(world.listen, world.ca.sha256(), &identity).await;
        world.state("a", "the guest", |state| state.guest_connected).await;
        Pod { world, identity, guest }
    }

    async fn shim(&self) -> Raw {
        Raw::connect(&self.world.agent_socket("a")).await
    }
}

async fn agent(shim: &mut Raw, method: &str, payload: Vec<u8>) -> u32 {
    shim.send("grpc.AgentService", method, payload, Duration::ZERO).await
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_pass_unchanged_in_both_directions() {
    let pod = Pod::new("pass").await;
    let mut silent = pod.shim().await;
    let mut shim = pod.shim().await;
    for size in [0usize, 1, 4000, 70_000, (4 << 20) - 100] {
        let payload: Vec<u8> = (0..size).map(|n| (n * 7) as u8).collect();
        let stream = agent(&mut shim, "WriteStdin", payload.clone()).await;
        let answer = shim.answer().await;
        assert_eq!((answer.stream, answer.code), (stream, 0));
        assert!(answer.payload == payload, "{size} bytes");
    }
    assert_eq!(
        pod.guest.seen.dials.load(Ordering::Relaxed),
        1,
        "a silent connection costs no agent connection"
    );
    let state = pod.world.state("a", "both connections", |state| state.shim_connections == 2).await;
    assert!(state.shim_seen);
    assert!(silent.silent().await);
    drop((silent, shim));
    let state = pod.world.state("a", "their end", |state| state.shim_connections == 0).await;
    assert!(state.shim_seen && state.frames_to_guest >= 5 && state.bytes_from_guest > 4 << 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_made_before_the_guest_comes_are_answered_when_it_is_there() {
    let world = World::new("early").await;
    world.configure().await;
    let identity = world.ca.client();
    world.put("a", &[&identity]).await;
    let mut shim = Raw::connect(&world.agent_socket("a")).await;
    agent(&mut shim, "Check", vec![5; 10]).await;
    assert!(shim.silent().await);
    let _guest = Guest::start(world.listen, world.ca.sha256(), &identity).await;
    assert_eq!(shim.answer().await.payload, [5; 10]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_oversize_frame_is_answered_and_the_connection_stays_usable() {
    let pod = Pod::new("big").await;
    let mut shim = pod.shim().await;
    let length = (4 << 20) + 1;
    shim.stream.write_all(&header(length, 1, frame::REQUEST)).await.unwrap();
    shim.stream.write_all(&vec![0; length as usize]).await.unwrap();
    let answer = shim.answer().await;
    assert_eq!(answer.code, INVALID_ARGUMENT);
    assert_eq!(answer.message, "message length 4194305 exceed maximum message size of 4194304");
    agent(&mut shim, "Check", vec![1]).await;
    assert_eq!(shim.answer().await.payload, [1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_thousand_unanswered_calls_are_carried_and_more_are_refused() {
    let pod = Pod::new("many").await;
    let mut shim = pod.shim().await;
    let before = resident_kib();
    for _ in 0..20_000 {
        agent(&mut shim, "WaitProcess", vec![1; 20]).await;
    }
    until("the agent", || pod.guest.calls().len() == 20_000).await;
    let grown = resident_kib().saturating_sub(before);
    // The guest and its agent are in this process, too.
    assert!(grown < 64 << 10, "{grown} KiB for 20 000 calls");
    agent(&mut shim, "Check", vec![1]).await;
    assert_eq!(shim.answer().await.payload, [1]);
    for _ in 20_000..32_768 {
        agent(&mut shim, "WaitProcess", vec![]).await;
    }
    agent(&mut shim, "Check", vec![2]).await;
    assert_eq!(shim.answer().await.code, RESOURCE_EXHAUSTED);
    let mut other = pod.shim().await;
    agent(&mut other, "Check", vec![3]).await;
    assert_eq!(other.answer().await.payload, [3], "another connection has its own share");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_link_is_only_a_pause() {
    let pod = Pod::new("cut").await;
    let mut shim = pod.shim().await;
    agent(&mut shim, "WaitProcess", vec![]).await;
    for n in 0..20u8 {
        // A newer connection of the same session replaces the earlier one during a call.
        agent(&mut shim, "WriteStdin", vec![n; 200_000]).await;
        pod.guest.connect(&pod.identity).await;
        let answer = shim.answer().await;
        assert!(answer.payload == vec![n; 200_000], "{n}");
    }
    let state = pod.world.state("a", "reconnects", |state| state.reconnects == 20).await;
    assert!(state.guest_connected);
    assert_eq!(pod.guest.calls().iter().filter(|call| call.ends_with("WriteStdin")).count(), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_guest_gets_the_calls_that_wait_again_and_costs_the_others() {
    let pod = Pod::new("replaced").await;
    let mut shim = pod.shim().await;
    let waits = ["WaitProcess", "GetOOMEvent", "ReadStdout"];
    let mut waiting = Vec::new();
    for method in waits {
        waiting.push(agent(&mut shim, method, vec![]).await);
    }
    let start = agent(&mut shim, "StartContainer", vec![]).await;
    until("the agent", || pod.guest.calls().len() == 4).await;
    let first = pod.world.state("a", "the session", |state| state.guest_connected).await;
    drop(pod.guest);
    pod.world.state("a", "its end", |state| !state.guest_connected).await;
    assert!(shim.silent().await, "gone may be only a pause");
    // A call that is made meanwhile waits for the next guest.
    agent(&mut shim, "WriteStdin", vec![9]).await;
    let guest = Guest::start(pod.world.listen, pod.world.ca.sha256(), &pod.identity).await;
    let answer = shim.answer().await;
    assert_eq!((answer.stream, answer.code), (start, UNAVAILABLE));
    assert_eq!(shim.answer().await.payload, [9], "the same connection goes on with the new guest");
    let session = first.guest_session;
    pod.world
        .state("a", "another session", |state| state.guest_connected && state.guest_session != session)
        .await;
    let again = [&waits[..], &["WriteStdin"]].concat();
    assert_eq!(
        guest.calls(),
        again.iter().map(|method| format!("grpc.AgentService/{method}")).collect::<Vec<_>>()
    );
    let request = DeleteSandboxRequest { id: "a".into(), ..Default::default() };
    pod.world.relay_client().delete_sandbox(Default::default(), &request).await.unwrap();
    for stream in waiting {
        let answer = shim.answer().await;
        assert_eq!((answer.stream, answer.code), (stream, UNAVAILABLE), "now nothing stays pending");
    }
    shim.closed().await;
    // Kata's Go shim dials an absent socket without a pause.
    Raw::connect(&pod.world.agent_socket("a")).await.closed().await;
    assert!(pod.world.agent_socket("a").exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_relay_serves_again_without_the_node() {
    let mut pod = Pod::new("restart").await;
    let mut shim = pod.shim().await;
    agent(&mut shim, "Check", vec![1]).await;
    shim.answer().await;
    pod.world.stop().await;
    shim.closed().await;
    assert!(!pod.world.agent_socket("a").exists());
    pod.world.start().await;
    let mut shim = pod.shim().await;
    agent(&mut shim, "Check", vec![2]).await;
    pod.guest.connect(&pod.identity).await;
    assert_eq!(shim.answer().await.payload, [2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_node_calls_the_guest_and_gets_the_errors() {
    let pod = Pod::new("calls").await;
    let client = pod.world.relay_client();
    let call = |id: &str, request: Request, patience: Duration| {
        let request = GuestCallRequest {
            id: id.into(),
            request: request.write_to_bytes().unwrap(),
            ..Default::default()
        };
        let client = client.clone();
        async move { client.guest_call(context::with_duration(patience), &request).await }
    };
    let code = |error: Error| match error {
        Error::RpcStatus(status) => status.code(),
        other => panic!("{other}"),
    };
    let mut personalise = Request::new();
    personalise.set_personalise(Personalise { sandbox_id: "a".into(), ..Default::default() });
    let answer = call("a", personalise.clone(), Duration::from_secs(5)).await.unwrap();
    assert_eq!(Reply::parse_from_bytes(&answer.reply).unwrap().status.stage, "running");
    let state = pod.world.state("a", "the status", |state| !state.guest_status.is_empty()).await;
    assert!(state.guest_connected);

    let mut flush = Request::new();
    flush.set_flush(Flush::new());
    let late = call("a", flush.clone(), Duration::from_millis(300)).await.unwrap_err();
    assert_eq!(code(late), Code::DEADLINE_EXCEEDED);
    assert_eq!(code(call("b", flush.clone(), Duration::from_secs(5)).await.unwrap_err()), Code::NOT_FOUND);
    until("the guest was asked", || pod.guest.flushes() == 1).await;
    let waiting = tokio::spawn(call("a", flush.clone(), Duration::from_secs(20)));
    until("the guest was asked again", || pod.guest.flushes() == 2).await;
    drop(pod.guest);
    pod.world.state("a", "its end", |state| !state.guest_connected).await;
    assert_eq!(code(call("a", flush.clone(), Duration::from_secs(5)).await.unwrap_err()), Code::UNAVAILABLE);
    let _guest = Guest::start(pod.world.listen, pod.world.ca.sha256(), &pod.identity).await;
    let lost = soon("the lost call", waiting).await.unwrap().unwrap_err();
    assert_eq!(code(lost), Code::UNAVAILABLE, "the program that was asked is gone");
}
