//! Tests of the TCP port that guests dial: tickets, certificates, and connections with neither.

use super::common;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::guest::{Guest, connect_from, dial, shake};
use common::node::{Memory, Node};
use common::{Ca, World, soon, until};
use peerpod_base::program::own_rights_and_limits;
use peerpod_link::claim;
use peerpod_proto::guest::{Claim, ClaimReply};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

fn ticket(secret: &[u8]) -> Claim {
    Claim {
        version: 1,
        ticket_id: "00112233445566778899aabbccddeeff".into(),
        ticket_secret: secret.to_vec(),
        csr: vec![1, 2, 3],
        guest_version: "1".into(),
        ..Default::default()
    }
}

async fn ask(world: &World, claim: &Claim) -> ClaimReply {
    let mut stream = dial(world.listen, world.ca.sha256(), None).await.unwrap();
    soon("the reply", claim::ask(&mut stream, claim)).await.unwrap()
}

async fn refused(mut stream: impl AsyncReadExt + Unpin) {
    let closed = soon("the end", stream.read(&mut [0; 64])).await;
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ticket_is_judged_by_the_node_and_the_answer_reaches_the_guest() {
    let world = World::new("ticket").await;
    world.configure().await;
    let reply = ask(&world, &ticket(b"secret")).await;
    assert!(reply.retry, "the node is away: {}", reply.error);
    let memory = Arc::new(Memory::default());
    *memory.chain.lock().unwrap() = vec![vec![7; 900], vec![8; 900]];
    let _node = Node::start(&world, memory.clone()).await;
    until("the node", || !memory.calls().is_empty()).await;
    let reply = soon("a grant", async {
        loop {
            let reply = ask(&world, &ticket(b"secret")).await;
            if !reply.retry {
                return reply;
            }
        }
    })
    .await;
    assert_eq!((reply.error.as_str(), reply.sandbox_id.as_str()), ("", "sb"));
    assert_eq!(reply.certificates, [vec![7; 900], vec![8; 900]]);
    assert!(memory.calls().contains(&"Claim 127.0.0.1".to_owned()));
    let reply = ask(&world, &ticket(b"guess")).await;
    assert!(!reply.retry && reply.error.contains("the ticket is used"), "{}", reply.error);
    let reply = ask(&world, &Claim { version: 2, ..ticket(b"secret") }).await;
    assert!(!reply.retry && reply.error.contains("version 2"), "{}", reply.error);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_with_its_certificate_is_its_sandbox_and_no_other() {
    let world = World::new("own").await;
    world.configure().await;
    let (a, b) = (world.ca.client(), world.ca.client());
    world.put("a", &[&a]).await;
    world.put("b", &[&b]).await;
    let _guest = Guest::start(world.listen, world.ca.sha256(), &a).await;
    let state = world.state("a", "the guest", |state| state.guest_connected).await;
    assert_eq!(state.guest_session.len(), 32);
    let other = world.state("b", "the other", |_| true).await;
    assert!(!other.guest_connected);
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_of_other_cas_and_of_no_sandbox_are_refused() {
    let world = World::new("wrong").await;
    world.configure().await;
    let known = world.ca.client();
    world.put("a", &[&known]).await;
    let stranger = Ca::new().client();
    // In TLS 1.3 the client gets the refusal when it reads.
    refused(dial(world.listen, world.ca.sha256(), Some(&stranger)).await.unwrap()).await;
    let nobodys = world.ca.client();
    refused(dial(world.listen, world.ca.sha256(), Some(&nobodys)).await.unwrap()).await;
    assert!(dial(world.listen, Ca::new().sha256(), None).await.is_err(), "a guest believes its own CA only");
    let request = peerpod_proto::relay::DeleteSandboxRequest { id: "a".into(), ..Default::default() };
    world.relay_client().delete_sandbox(Default::default(), &request).await.unwrap();
    refused(dial(world.listen, world.ca.sha256(), Some(&known)).await.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_without_a_certificate_and_garbage_are_refused() {
    let world = World::new("nocert").await;
    world.configure().await;
    for bytes in [&[0xff; 64][..], &[0; 64], b"GET / HTTP/1.1\r\nHost: node\r\n\r\n"] {
        let mut stream = dial(world.listen, world.ca.sha256(), None).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        refused(stream).await;
    }
    let mut plain = TcpStream::connect(world.listen).await.unwrap();
    plain.write_all(&[0xff; 64]).await.unwrap();
    let mut rest = Vec::new();
    drop(soon("the end", plain.read_to_end(&mut rest)).await);
}

/// A connection without a ClientHello ends before one that is as old and has sent it: its limit is the shorter one.
#[tokio::test(flavor = "multi_thread")]
async fn stalled_connections_are_dropped_and_the_newest_evicts_the_oldest() {
    let world = World::new("stall").await;
    world.configure().await;
    // From an address of its own: nothing evicts it.
    let shaken = connect_from(stranger(0), world.listen).await.unwrap();
    let shaken = shake(shaken, world.ca.sha256(), None).await.unwrap();
    let no_words = tokio::spawn(refused(shaken));
    // 32 places for one address.
    let mut silent = Vec::new();
    for _ in 0..40 {
        silent.push(TcpStream::connect(world.listen).await.unwrap());
    }
    for stream in &mut silent[..8] {
        let read = soon("the end of an evicted connection", stream.read(&mut [0; 8])).await;
        assert!(matches!(read, Ok(0) | Err(_)));
    }
    for stream in &mut silent[8..] {
        let read = soon("the end of a connection without a ClientHello", stream.read(&mut [0; 8])).await;
        assert!(matches!(read, Ok(0) | Err(_)));
    }
    assert!(!no_words.is_finished(), "a connection without a ClientHello has no longer limit");
    no_words.await.unwrap();
    let guest = world.ca.client();
    world.put("a", &[&guest]).await;
    let _guest = Guest::start(world.listen, world.ca.sha256(), &guest).await;
}

/// Returns the address of one of 16 strangers.
fn stranger(n: usize) -> [u8; 4] {
    [127, 0, 9, n as u8 % 16 + 1]
}

/// Returns the 99th percentile of the times of 100 claims that the relay answers on new connections.
async fn p99_of_claims(world: &World) -> Duration {
    let mut times = Vec::new();
    for n in 0..100 {
        let start = Instant::now();
        assert!(ask(world, &ticket(b"secret")).await.retry, "try {n}");
        times.push(start.elapsed());
    }
    times.sort_unstable();
    times[98]
}

/// 512 half-open connections of 16 addresses take all places, and more come at the rate of the observed attack.
#[tokio::test(flavor = "multi_thread")]
async fn half_open_connections_keep_no_guest_out() {
    own_rights_and_limits().unwrap();
    let world = World::new("crowd").await;
    world.configure().await;
    let guest = world.ca.client();
    world.put("a", &[&guest]).await;
    let calm = p99_of_claims(&world).await;
    let mut half_open = Vec::new();
    for n in 0..512 {
        half_open.push(connect_from(stranger(n), world.listen).await.unwrap());
    }
    let listen = world.listen;
    let attack = tokio::spawn(async move {
        let mut pace = tokio::time::interval(Duration::from_secs(1) / 34);
        for n in 512.. {
            pace.tick().await;
            half_open.push(connect_from(stranger(n), listen).await.unwrap());
        }
    });
    let p99 = p99_of_claims(&world).await;
    println!("p99 {p99:?}, without an attack {calm:?}");
    assert!(p99 < Duration::from_secs(1).max(20 * calm), "p99 {p99:?}, without an attack {calm:?}");
    let guest = Guest::start(listen, world.ca.sha256(), &guest).await;
    assert!(!attack.is_finished());
    attack.abort();
    drop(guest);
}

/// Guests behind one address connect again at once and are many more than its places.
#[tokio::test(flavor = "multi_thread")]
async fn many_guests_of_one_network_do_not_evict_each_other() {
    own_rights_and_limits().unwrap();
    let world = World::new("many").await;
    world.configure().await;
    let mut guests = JoinSet::new();
    for _ in 0..4 * world.config.max_handshakes_per_address {
        let (listen, ca) = (world.listen, world.ca.sha256());
        guests.spawn(async move {
            loop {
                let Ok(mut stream) = dial(listen, ca, None).await else { continue };
                if let Ok(reply) = claim::ask(&mut stream, &ticket(b"secret")).await {
                    return reply.retry;
                }
            }
        });
    }
    let answered = soon("an answer to each guest", guests.join_all()).await;
    assert!(answered.iter().all(|retry| *retry), "{answered:?}");
}

/// Strangers that connect as fast as they can take all places but those of known VMs. Every second stranger also shakes
/// hands, so its connections keep their places for a moment.
#[tokio::test(flavor = "multi_thread")]
async fn a_known_vm_has_a_place_in_any_crowd() {
    own_rights_and_limits().unwrap();
    let world = World::new("known").await;
    world.configure().await;
    const VM: [u8; 4] = [127, 0, 8, 1];
    world.put_at("a", &[], &["127.0.8.1"]).await;
    let mut crowd = JoinSet::new();
    let (listen, ca) = (world.listen, world.ca.sha256());
    for n in 0..16 {
        crowd.spawn(async move {
            let (mut silent, mut shaken) = (VecDeque::new(), VecDeque::new());
            loop {
                let Ok(stream) = connect_from(stranger(n), listen).await else { continue };
                if n % 2 == 0 {
                    silent.push_back(stream);
                } else {
                    shaken.extend(shake(stream, ca, None).await.ok());
                }
                if silent.len() + shaken.len() > 64 {
                    silent.pop_front();
                    shaken.pop_front();
                }
            }
        });
    }
    until_evicted(&world).await;
    for n in 0..20 {
        let answered = async {
            let stream = connect_from(VM, listen).await.unwrap();
            let mut stream = shake(stream, world.ca.sha256(), None).await.unwrap();
            claim::ask(&mut stream, &ticket(b"secret")).await.unwrap()
        };
        assert!(soon("an answer", answered).await.retry, "try {n}");
    }
    assert!(crowd.try_join_next().is_none(), "the attack goes on");
}

/// Waits until the connections are more than the places.
async fn until_evicted(world: &World) {
    soon("a full crowd", async {
        while metric(world, "peerpod_relay_guests_refused_total{reason=\"too_many\"}").await < 1000.0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// Returns the sum of the metrics that begin with this text.
async fn metric(world: &World, name: &str) -> f64 {
    let mut stream = TcpStream::connect(world.relay.as_ref().unwrap().admin).await.unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let values = text.lines().filter(|line| line.starts_with(name)).filter_map(|line| line.rsplit_once(' '));
    values.map(|(_, value)| value.parse::<f64>().unwrap()).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_connects_in_a_loop_is_held_off_and_others_are_not() {
    let world = World::new("loop").await;
    world.configure().await;
    let (wild, calm) = (world.ca.client(), world.ca.client());
    world.put("a", &[&wild]).await;
    world.put("b", &[&calm]).await;
    // Until the relay closes connections that it would have attached.
    soon("refusals", async {
        while metric(&world, "peerpod_relay_guests_refused_total{reason=\"too_often\"}").await < 20.0 {
            for _ in 0..50 {
                drop(dial(world.listen, world.ca.sha256(), Some(&wild)).await);
            }
        }
    })
    .await;
    let _calm = Guest::start(world.listen, world.ca.sha256(), &calm).await;
    // It is served again when it has slowed down.
    let _wild = Guest::start(world.listen, world.ca.sha256(), &wild).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unconfigured_relay_refuses_guests() {
    let world = World::new("unconfigured").await;
    assert!(dial(world.listen, world.ca.sha256(), None).await.is_err());
    world.configure().await;
    assert!(dial(world.listen, world.ca.sha256(), None).await.is_ok());
}
