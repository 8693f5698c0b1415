//! Tests the encrypted tunnel: WireGuard below VXLAN.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use peerpod_client::Annotations;
use peerpod_podnet::netns::{Netns, NetnsId};
use peerpod_tests::{PATIENCE, Sandbox, fresh_id, long, stop_in_time, vm};
use peerpod_world::ping::ping;
use peerpod_world::spy::Spy;
use peerpod_world::{Daemons, Namespace, Settings, World, eventually, stages};

fn encrypted() -> Settings {
    Settings::none().set("tunnel.kind", "wireguard")
}

const VXLAN: u16 = 4789;
const WIREGUARD: u16 = 51820;
/// Delay that a lost handshake message costs: WireGuard retries after this time.
const SAID_AGAIN: Duration = Duration::from_secs(5);

/// Counts the packets between the node and its VMs, by port.
fn spy(world: &World) -> Spy {
    Spy::start(world.node(), "pplocal0", &[VXLAN, WIREGUARD]).unwrap()
}

/// Returns a metric of the relay's encrypted tunnel.
fn counted(daemons: &Daemons, name: &str) -> f64 {
    let metrics = daemons.metrics("relay").unwrap();
    let line = metrics.lines().find(|line| line.starts_with(&format!("peerpod_relay_wireguard_{name}")));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0.0)
}

/// Pings the sandbox from a pod beside it, in both families.
fn reachable(from: &Namespace, sandbox: &Sandbox, patience: Duration) {
    for address in sandbox.pod.addresses() {
        ping(from, address, 56, patience).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_encrypted_tunnel_passes_the_end_to_end_run() {
    let world = World::new().unwrap();
    let spy = spy(&world);
    stages::walk_in(&world, encrypted(), &mut stages::Silent).await.unwrap();
    // Two pages in each direction, and the pings.
    assert!(spy.packets(WIREGUARD).unwrap() > 40);
    assert_eq!(spy.packets(VXLAN).unwrap(), 0, "VXLAN in clear");
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_connect_through_the_encrypted_tunnel_alone() {
    let world = World::new().unwrap();
    let spy = spy(&world);
    let daemons = Daemons::start(&world, encrypted()).await.unwrap();
    let other = world.pod().unwrap();
    let one = Sandbox::start(&world, &daemons, "one").await.unwrap();
    let two = Sandbox::start(&world, &daemons, "two").await.unwrap();
    reachable(other.namespace(), &one, PATIENCE);
    reachable(other.namespace(), &two, PATIENCE);
    let device = one.pod.namespace().shell("ip -d link show pp-vx0", &[]).unwrap();
    assert!(device.contains("local 10.0.0.1"), "{device}");
    assert_eq!(spy.packets(VXLAN).unwrap(), 0, "VXLAN in clear");
    assert!(spy.packets(WIREGUARD).unwrap() > 8, "four pings and their answers");
    assert!(counted(&daemons, "packets_to_guest_total") > 0.0);
    assert!(counted(&daemons, "peers") == 2.0);
    one.stop(&daemons).await.unwrap();
    assert!(counted(&daemons, "peers") == 1.0, "a stopped pod's guest is a peer");
    reachable(other.namespace(), &two, PATIENCE);
    two.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn traffic_goes_on_while_the_node_is_dead_and_comes_back_after_the_relay_was() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, encrypted()).await.unwrap();
    let other = world.pod().unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "stays").await.unwrap();
    reachable(other.namespace(), &sandbox, PATIENCE);

    // No reply waits for new keys while the node is killed and restarted.
    let (over, address, from) =
        (Arc::new(AtomicBool::new(false)), sandbox.pod.v4(), other.namespace().clone());
    let pinging = std::thread::spawn({
        let over = over.clone();
        move || {
            let mut answers = 0;
            while !over.load(Ordering::SeqCst) {
                ping(&from, address, 1000, SAID_AGAIN).unwrap();
                answers += 1;
            }
            answers
        }
    });
    daemons.kill_node().unwrap();
    for _ in 0..20 {
        reachable(other.namespace(), &sandbox, SAID_AGAIN);
    }
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
    over.store(true, Ordering::SeqCst);
    assert!(pinging.join().unwrap() > 0);
    sandbox.lives().await.unwrap();

    // The tunnel's sessions end with the relay; the node hands the descriptors to the next relay, and the guest starts
    // a new handshake.
    daemons.kill_relay().unwrap();
    daemons.start_relay().unwrap();
    let since = Instant::now();
    reachable(other.namespace(), &sandbox, PATIENCE);
    println!("healed {:?} after the relay was killed", since.elapsed());

    // Again, with a node that did not open the device itself.
    daemons.kill_relay().unwrap();
    daemons.kill_node().unwrap();
    daemons.start_relay().unwrap();
    daemons.start_node().unwrap();
    reachable(other.namespace(), &sandbox, PATIENCE);
}

/// Returns the path of the tunnel's private namespace in the node's container.
fn tunnel_netns(daemons: &Daemons) -> PathBuf {
    let path = daemons.run_dir().join("wireguard.netns");
    PathBuf::from(format!("/proc/{}/root{}", daemons.node_pid().unwrap(), path.display()))
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_parts_of_the_tunnel_are_restored_without_a_restart() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, encrypted()).await.unwrap();
    let other = world.pod().unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "mended").await.unwrap();
    reachable(other.namespace(), &sandbox, PATIENCE);

    let inside = Netns::open(tunnel_netns(&daemons)).unwrap();
    let delete = || std::process::Command::new("ip").args(["link", "del", "pp-wg0"]).status();
    assert!(inside.run(delete).unwrap().unwrap().success());
    let since = Instant::now();
    reachable(other.namespace(), &sandbox, PATIENCE);
    println!("mended {:?} after the device was deleted", since.elapsed());
    assert_eq!(counted(&daemons, "failures_total"), 1.0);
    assert_eq!(counted(&daemons, "running"), 1.0);

    // The name of the namespace, which is a mount of the node's container.
    let node = daemons.node_pid().unwrap();
    let unmount = ["--mount", "--pid", "--target", &node.to_string(), "umount", "--lazy"];
    let path = daemons.run_dir().join("wireguard.netns");
    assert!(std::process::Command::new("nsenter").args(unmount).arg(path).status().unwrap().success());
    eventually("it has its name again", PATIENCE, async || {
        (NetnsId::of(&tunnel_netns(&daemons)) == Some(inside.id())).then_some(())
    })
    .await
    .unwrap();
    // The next node's container lacks the mount. The relay holds the namespace.
    let id = inside.id();
    drop(inside);
    daemons.kill_node().unwrap();
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
    assert_eq!(NetnsId::of(&tunnel_netns(&daemons)), Some(id), "{}", daemons.log_tails());
    reachable(other.namespace(), &sandbox, PATIENCE);

    // With a node that did not open the device itself, and has to get the port back from the relay.
    let inside = Netns::open(tunnel_netns(&daemons)).unwrap();
    assert!(inside.run(delete).unwrap().unwrap().success());
    drop(inside);
    reachable(other.namespace(), &sandbox, PATIENCE);
    assert_eq!(counted(&daemons, "failures_total"), 2.0);
    sandbox.lives().await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

/// The guest's end: its threads lose their device, and no plan is sent.
#[tokio::test(flavor = "multi_thread")]
async fn the_vms_end_of_the_tunnel_is_made_anew_at_once_when_it_fails() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, encrypted()).await.unwrap();
    let other = world.pod().unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "anew").await.unwrap();
    reachable(other.namespace(), &sandbox, PATIENCE);
    let inside = vm::tunnel(&world, &daemons).unwrap();
    for round in 1..=3 {
        vm::run(&inside, "ip link del pp-wg0").unwrap();
        let since = Instant::now();
        reachable(other.namespace(), &sandbox, PATIENCE);
        println!("round {round}: carried again after {:?}", since.elapsed());
    }
    let told = eventually("the guest says so in its status", PATIENCE, async || {
        let log = std::fs::read_to_string(daemons.log("node")).ok()?;
        log.contains("the encrypted tunnel ended").then_some(())
    });
    told.await.unwrap_or_else(|error| panic!("{error}\n{}", daemons.log_tails()));
    assert_eq!(counted(&daemons, "peers"), 1.0, "the same key");
    sandbox.lives().await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

/// NAT between the VMs and the node's programs: the source of the VMs' packets becomes an address that no host has.
const NAT: &str = "add table ip nat
add chain ip nat in { type nat hook input priority 100; }
add rule ip nat in iifname pplocal0 snat to 10.99.200.200
add table ip6 nat
add chain ip6 nat in { type nat hook input priority 100; }
add rule ip6 nat in iifname pplocal0 meta l4proto { tcp, udp } snat to fd99::c8c8";

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_behind_a_nat_gets_an_encrypted_tunnel_by_itself() {
    let world = World::new().unwrap();
    let settings = Settings::none().set("tunnel.kind", "auto");
    let spy = spy(&world);
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let other = world.pod().unwrap();
    let near = Sandbox::start(&world, &daemons, "near").await.unwrap();
    reachable(other.namespace(), &near, PATIENCE);
    assert_eq!(counted(&daemons, "peers"), 0.0, "a VM on its own private address is reached plainly");
    assert!(spy.packets(VXLAN).unwrap() > 0, "the spy sees what goes in clear");
    assert_eq!(spy.packets(WIREGUARD).unwrap(), 0);

    world.node().shell(&format!("nft -f - <<'END'\n{NAT}\nEND"), &[]).unwrap();
    let far = Sandbox::start(&world, &daemons, "far").await.unwrap();
    reachable(other.namespace(), &far, PATIENCE);
    assert_eq!(counted(&daemons, "peers"), 1.0);
    assert!(counted(&daemons, "packets_to_guest_total") > 0.0);
    assert!(spy.packets(WIREGUARD).unwrap() > 0);
    reachable(other.namespace(), &near, PATIENCE);
    far.stop(&daemons).await.unwrap();
    near.stop(&daemons).await.unwrap();
}

#[tokio::test]
async fn while_its_port_is_taken_no_pod_starts_and_nothing_is_sent_in_clear() {
    let world = World::new().unwrap();
    let spy = spy(&world);
    let taken = world.node().run(|| std::net::UdpSocket::bind("[::]:51820")).unwrap().unwrap();
    let settings = encrypted().set("node.boot-timeout", "5s");
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let log = daemons.log("node");
    eventually("the node says why", PATIENCE, async || {
        let text = std::fs::read_to_string(&log).ok()?;
        text.contains("tunnel.wireguard-port").then_some(())
    })
    .await
    .unwrap();
    let (pod, other) = (world.pod().unwrap(), world.pod().unwrap());
    let (id, shim) = (fresh_id("early"), daemons.shim().await.unwrap());
    shim.create_vm(&id, Annotations::new("default", &id), &pod.namespace().path()).await.unwrap();
    let pinging = tokio::task::spawn_blocking({
        let (from, to) = (other.namespace().clone(), pod.v4());
        move || ping(&from, to, 56, Duration::from_secs(2))
    });
    let started = tokio::time::timeout(PATIENCE, shim.start_vm(&id)).await.unwrap();
    let refused = started.expect_err("a pod without its tunnel").to_string();
    assert!(refused.contains("encrypted tunnel"), "{refused}");
    // Only the packets matter: the pod's namespace may or may not have answered.
    drop(pinging.await.unwrap());
    stop_in_time(&shim, &id).await.unwrap();
    daemons.gone(&id, PATIENCE).await.unwrap();
    assert_eq!(spy.packets(VXLAN).unwrap(), 0, "VXLAN in clear");

    drop(taken);
    let sandbox = Sandbox::start(&world, &daemons, "late").await.unwrap();
    reachable(other.namespace(), &sandbox, PATIENCE);
    assert!(spy.packets(WIREGUARD).unwrap() > 0);
    assert_eq!(spy.packets(VXLAN).unwrap(), 0, "VXLAN in clear");
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_answer_is_late_while_keys_are_exchanged_again() {
    // WireGuard renews its keys after two minutes with traffic.
    let (time, exchanges) =
        if long() { (Duration::from_secs(260), 3.0) } else { (Duration::from_secs(3), 1.0) };
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, encrypted()).await.unwrap();
    let other = world.pod().unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "rekey").await.unwrap();
    reachable(other.namespace(), &sandbox, PATIENCE);
    let (from, to) = (other.namespace().clone(), sandbox.pod.addresses());
    let worst = tokio::task::spawn_blocking(move || {
        let (began, mut worst) = (Instant::now(), Duration::ZERO);
        while began.elapsed() < time {
            for address in to {
                let asked = Instant::now();
                ping(&from, address, 1000, SAID_AGAIN).unwrap();
                worst = worst.max(asked.elapsed());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        worst
    });
    let worst = worst.await.unwrap();
    let handshakes = counted(&daemons, "handshakes_total");
    println!("{handshakes} handshakes in {time:?}; the slowest answer after {worst:?}");
    assert!(handshakes >= exchanges, "{handshakes} handshakes in {time:?}");
    sandbox.lives().await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}
