//! Tests `node.link-dial: node`, where the node dials: no VM may open a connection to the node, and everything still
//! works.

use super::guest_common;
use std::collections::VecDeque;
use std::fs;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::thread::JoinHandle;
use std::time::Duration;

use guest_common::secure;
use peerpod_client::{AgentClient, Annotations, exec_request};
use peerpod_link::tls;
use peerpod_link::user_data::UserData;
use peerpod_tests::{CONTAINER, PATIENCE, Sandbox, fresh_id, sample};
use peerpod_world::{Daemons, Settings, Sight, World, eventually};
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use rustls_pki_types::PrivateKeyDer;

const PORT: u16 = 15150;

/// Rules that drop and count every SYN of a VM to the node, and count every SYN of the node to a VM.
const WALL: &str = "table inet wall {
    counter from_vm {}
    counter to_vm {}
    chain in {
        type filter hook input priority 0;
        ip saddr 10.99.0.0/16 tcp flags & (syn | ack) == syn counter name from_vm drop
        ip6 saddr fd99::/64 tcp flags & (syn | ack) == syn counter name from_vm drop
    }
    chain out {
        type filter hook output priority 0;
        tcp dport 15150 tcp flags & (syn | ack) == syn counter name to_vm
    }
    chain cut {
        type filter hook output priority 1;
    }
}";

async fn walled(settings: Settings) -> (World, Daemons) {
    let world = World::new().unwrap();
    world.node().shell(&format!("nft -f - <<'END'\n{WALL}\nEND"), &[]).unwrap();
    let daemons = Daemons::start(&world, settings.set("node.link-dial", "node")).await.unwrap();
    (world, daemons)
}

/// Returns the number of SYNs counted so far.
fn syns(world: &World, counter: &str) -> u64 {
    let shown = world.node().shell(&format!("nft list counter inet wall {counter}"), &[]).unwrap();
    let mut words = shown.split_whitespace().skip_while(|word| *word != "packets");
    words.nth(1).unwrap().parse().unwrap()
}

/// Cuts the links like a network that has lost their state: the relay's end is reset, and the guest receives nothing.
async fn cut(world: &World, daemons: &Daemons) {
    let before = reconnects(daemons);
    world.node().shell("nft add rule inet wall cut tcp dport 15150 reject with tcp reset", &[]).unwrap();
    linked(daemons, 0.0).await;
    world.node().shell("nft flush chain inet wall cut", &[]).unwrap();
    eventually("the link is resumed", PATIENCE, async || (reconnects(daemons) > before).then_some(()))
        .await
        .unwrap_or_else(|error| panic!("{error}\n{}", daemons.log_tails()));
}

fn relay_says(daemons: &Daemons, name: &str) -> f64 {
    sample(&daemons.metrics("relay").unwrap(), name).unwrap()
}

fn reconnects(daemons: &Daemons) -> f64 {
    relay_says(daemons, "peerpod_relay_reconnects_total")
}

async fn linked(daemons: &Daemons, guests: f64) {
    eventually(&format!("{guests} guests are connected"), PATIENCE, async || {
        (relay_says(daemons, "peerpod_relay_guests_connected") == guests).then_some(())
    })
    .await
    .unwrap_or_else(|error| panic!("{error}\n{}", daemons.log_tails()));
}

/// Runs execs one after another until `ending` is set. Each output must be complete and in order. Returns their number.
async fn stream_execs(agent: AgentClient, name: String, ending: Arc<AtomicBool>) -> u32 {
    const NUMBERS: usize = 20_000;
    let expected: String = (1..=NUMBERS).map(|number| format!("{number}\n")).collect();
    let mut count = 0;
    while !ending.load(Relaxed) {
        let exec = exec_request(CONTAINER, &format!("{name}-{count}"), &["seq", &NUMBERS.to_string()]);
        let output = agent.exec(&exec).await.unwrap();
        assert!(output.status == 0 && output.stdout == expected.as_bytes(), "{}", output.stdout.len());
        count += 1;
    }
    count
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_comes_and_goes_where_no_vm_may_dial_the_node() {
    let (world, daemons) = walled(Settings::none()).await;
    let (one, two) =
        tokio::try_join!(Sandbox::start(&world, &daemons, "one"), Sandbox::start(&world, &daemons, "two"),)
            .unwrap();
    one.lives().await.unwrap();
    two.lives().await.unwrap();
    assert_eq!(syns(&world, "from_vm"), 0, "no guest tries");
    one.stop(&daemons).await.unwrap();
    two.lives().await.unwrap();
    two.stop(&daemons).await.unwrap();
    // The relay stops dialling a stopped sandbox.
    let before = syns(&world, "to_vm");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(syns(&world, "to_vm"), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn execs_do_not_notice_that_links_are_cut_and_the_node_killed_and_a_relay_dials_again_by_itself() {
    let (world, mut daemons) = walled(Settings::none()).await;
    let sandbox = Sandbox::start(&world, &daemons, "cut").await.unwrap();
    let ending = Arc::new(AtomicBool::new(false));
    let streams: Vec<_> = (0..3)
        .map(|index| tokio::spawn(stream_execs(sandbox.agent.clone(), format!("s{index}"), ending.clone())))
        .collect();
    for round in 0..10 {
        daemons.kill_node().unwrap();
        if round % 2 == 0 {
            // Also without a node.
            cut(&world, &daemons).await;
            daemons.start_node().unwrap();
        } else {
            daemons.start_node().unwrap();
            cut(&world, &daemons).await;
        }
        assert!(streams.iter().all(|stream| !stream.is_finished()), "a stream ended in round {round}");
    }
    daemons.ready().await.unwrap();
    ending.store(true, Relaxed);
    for stream in streams {
        assert!(stream.await.unwrap() > 0);
    }
    assert_eq!(relay_says(&daemons, "peerpod_relay_sessions_lost_total"), 0.0);
    sandbox.lives().await.unwrap();

    // The relay's own record contains the address that it dials.
    daemons.kill_node().unwrap();
    daemons.kill_relay().unwrap();
    daemons.start_relay().unwrap();
    eventually("the relay answers", PATIENCE, async || daemons.metrics("relay").ok().map(drop))
        .await
        .unwrap();
    linked(&daemons, 1.0).await;
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
    assert_eq!(syns(&world, "from_vm"), 0);
    let shim = daemons.shim().await.unwrap();
    shim.stop_vm(&sandbox.id).await.unwrap();
    daemons.gone(&sandbox.id, PATIENCE).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_waits_believes_the_node_s_next_ca_and_not_the_last_one() {
    let (world, daemons) = walled(Settings::none().set("node.ca-roll-over", "2s")).await;
    let sandbox = Sandbox::start(&world, &daemons, "rolled").await.unwrap();
    let guest = Sight::of(&world, &[], &daemons).unwrap().pids("peerpod-guest")[0];
    let born = fs::read(format!("/proc/{guest}/root/media/cidata/user-data")).unwrap();
    let pins = UserData::parse(&born).unwrap().node.ca_sha256;
    eventually("the first CA is no longer shown", Duration::from_secs(60), async || {
        sandbox.lives().await.unwrap();
        cut(&world, &daemons).await;
        secure(&world, &pins, None).await.is_err().then_some(())
    })
    .await
    .unwrap_or_else(|error| panic!("{error}\n{}", daemons.log_tails()));
    cut(&world, &daemons).await;
    sandbox.lives().await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

/// Connects to the guest's port again and again from the node's own address, sends nothing, and keeps the last 300
/// connections open.
fn strangers(world: &World, to: SocketAddr, ending: &Arc<AtomicBool>) -> (Arc<AtomicU32>, JoinHandle<()>) {
    let (node, ending, connected) = (world.node().clone(), ending.clone(), Arc::<AtomicU32>::default());
    let counted = connected.clone();
    let thread = std::thread::spawn(move || {
        let crowd = || {
            let mut open = VecDeque::new();
            while !ending.load(Relaxed) {
                if let Ok(stream) = TcpStream::connect_timeout(&to, Duration::from_millis(200)) {
                    open.push_back(stream);
                    counted.fetch_add(1, Relaxed);
                }
                if open.len() > 300 {
                    open.pop_front();
                }
                std::thread::sleep(Duration::from_millis(3));
            }
        };
        node.run(crowd).unwrap();
    });
    (connected, thread)
}

/// Connects to the guest as the relay of another node.
async fn impostor(world: &World, to: SocketAddr) -> std::io::Result<()> {
    let ca_key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = params.self_signed(&ca_key).unwrap().der().clone();
    let key = KeyPair::generate().unwrap();
    let mut leaf = CertificateParams::new(vec![tls::SERVER_NAME.to_owned()]).unwrap();
    leaf.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let leaf = leaf.signed_by(&key, &Issuer::new(params, ca_key)).unwrap().der().clone();
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let config = tls::server_config(vec![leaf, ca.clone()], key, &[ca]).unwrap();
    let stream = world.node().run(|| TcpStream::connect(to)).unwrap()?;
    stream.set_nonblocking(true)?;
    let stream = tokio::net::TcpStream::from_std(stream)?;
    let accepted = tokio_rustls::TlsAcceptor::from(config).accept(stream);
    tokio::time::timeout(PATIENCE, accepted).await?.map(drop)
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_connections_to_the_guest_s_port_do_not_block_the_node() {
    // The connections begin before the guest listens.
    let (world, daemons) = walled(Settings::none().set("provider.local.boot-delay", "1s")).await;
    let (id, pod, shim) = (fresh_id("crowd"), world.pod().unwrap(), daemons.shim().await.unwrap());
    let socket =
        shim.create_vm(&id, Annotations::new("default", &id), &pod.namespace().path()).await.unwrap();
    let address: IpAddr = eventually("the VM's address is known", PATIENCE, async || {
        let entries = daemons.ledger().ok()?;
        entries.iter().find(|entry| entry.id == id)?.record["addresses"][0].as_str()?.parse().ok()
    })
    .await
    .unwrap();
    let to = SocketAddr::new(address, PORT);
    let ending = Arc::new(AtomicBool::new(false));
    let (connected, thread) = strangers(&world, to, &ending);
    tokio::time::timeout(PATIENCE, shim.start_vm(&id)).await.unwrap().unwrap();
    AgentClient::connect(&socket).await.unwrap().check().await.unwrap();
    eventually("there is a crowd", PATIENCE, async || (connected.load(Relaxed) > 500).then_some(()))
        .await
        .unwrap();

    // The other connections may evict this one before the guest has checked it.
    eventually("the guest says why it does not believe an impostor", PATIENCE, async || {
        let refused = impostor(&world, to).await.expect_err("another node's relay is not believed");
        refused.to_string().contains("alert").then_some(())
    })
    .await
    .unwrap();
    for _ in 0..3 {
        cut(&world, &daemons).await;
        AgentClient::connect(&socket).await.unwrap().check().await.unwrap();
    }
    assert_eq!(relay_says(&daemons, "peerpod_relay_sessions_lost_total"), 0.0);
    ending.store(true, Relaxed);
    thread.join().unwrap();
    shim.stop_vm(&id).await.unwrap();
    daemons.gone(&id, PATIENCE).await.unwrap();
}
