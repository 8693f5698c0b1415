//! Tests faults of the pod's network: devices that go down, lost packets, vanished namespaces, VNIs in use, and a node
//! that is killed at any point. Running pods continue, and ended ones leave nothing.

use super::network_common;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use network_common::Vm;
use peerpod_client::{Annotations, ShimClient};
use peerpod_podnet::netns::Netns;
use peerpod_tests::{Dice, PATIENCE, fresh_id, long, nothing_beyond, stop_in_time};
use peerpod_world::traffic::{self, ECHO_PORT, Echo};
use peerpod_world::{Daemons, Namespace, Pod, Settings, Sight, World, eventually};
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// One sandbox, and a pod beside it.
struct Scene {
    vm: Vm,
    pod: Pod,
    other: Pod,
    before: Sight,
    daemons: Daemons,
    world: World,
}

impl Scene {
    async fn start(name: &str, settings: Settings) -> Scene {
        let world = World::new().unwrap();
        let daemons = Daemons::start(&world, settings).await.unwrap();
        let (pod, other) = (world.pod().unwrap(), world.pod().unwrap());
        let before = Sight::of(&world, &[pod.namespace()], &daemons).unwrap();
        let vm = Vm::start(&daemons, name, &pod.namespace().path()).await.unwrap();
        Scene { vm, pod, other, before, daemons, world }
    }

    fn servers(&self) -> [Echo; 2] {
        [
            Echo::start(&self.vm.inside, &self.pod.addresses()).unwrap(),
            Echo::start(self.other.namespace().netns(), &self.other.addresses()).unwrap(),
        ]
    }

    /// Exchanges `bytes` bytes in both directions and both families.
    async fn talks(&self, bytes: usize) -> anyhow::Result<()> {
        for (pod, other) in self.pod.addresses().into_iter().zip(self.other.addresses()) {
            traffic::tcp(self.other.namespace().netns(), at(pod), bytes).await?;
            traffic::tcp(&self.vm.inside, at(other), bytes).await?;
        }
        Ok(())
    }

    /// Waits until the exchange succeeds.
    async fn talks_again(&self) {
        eventually("they talk again", PATIENCE, async || self.talks(1000).await.ok()).await.unwrap();
    }

    async fn end(self) {
        let running = Sight::of(&self.world, &[self.pod.namespace()], &self.daemons).unwrap();
        self.vm.stop(&self.daemons).await.unwrap();
        let spaces = [self.pod.namespace()];
        nothing_beyond(&self.world, &spaces, &self.daemons, &self.before, &running).await.unwrap();
    }
}

fn at(address: IpAddr) -> SocketAddr {
    SocketAddr::new(address, ECHO_PORT)
}

/// Returns the output of `ip -j` for the devices of a namespace.
fn links(namespace: &Namespace, more: &str) -> Vec<Value> {
    let text = namespace.shell(&format!("ip -d -j link show {more}"), &[]).unwrap();
    let all: Value = serde_json::from_str(if text.trim().is_empty() { "[]" } else { &text }).unwrap();
    all.as_array().unwrap().iter().filter(|link| link["ifname"].is_string()).cloned().collect()
}

/// Returns the node's device for the only VM's uplink.
fn uplink(world: &World) -> String {
    let ports = links(world.node(), "master pplocal0");
    assert_eq!(ports.len(), 1, "{ports:?}");
    ports[0]["ifname"].as_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_outlive_a_link_that_goes_down_and_comes_up() {
    flaps("vxlan").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_in_an_encrypted_tunnel_outlive_a_link_that_goes_down_and_comes_up() {
    flaps("wireguard").await;
}

async fn flaps(kind: &str) {
    let scene = Scene::start("flap", Settings::none().set("tunnel.kind", kind)).await;
    let _servers = scene.servers();
    scene.talks(1000).await.unwrap();
    let (node, pod, to) = (scene.world.node().clone(), scene.pod.namespace().clone(), scene.pod.v4());
    for (name, namespace, link) in
        [("the VM's uplink", &node, uplink(&scene.world)), ("the pod's eth0", &pod, "eth0".to_owned())]
    {
        let from = scene.other.namespace().netns().clone();
        let over = Arc::new(AtomicBool::new(false));
        let stream = tokio::spawn({
            let over = over.clone();
            async move { traffic::tcp_until(&from, at(to), &over).await }
        });
        // Wait until the stream is in its middle.
        let sent = || scene.other.namespace().counters("eth0").unwrap().1;
        let began = sent();
        eventually("the stream runs", PATIENCE, async || (sent() > began + 1_000_000).then_some(()))
            .await
            .unwrap();
        namespace.ip(&format!("link set {link} down\n")).unwrap();
        let silent = traffic::udp_once(scene.other.namespace().netns(), at(to), 100).await;
        assert!(silent.is_err(), "{name} is down and there is an answer");
        assert!(!stream.is_finished(), "{name}: the stream had to be in the middle");
        let began = sent();
        namespace.ip(&format!("link set {link} up\n")).unwrap();
        let goes_on = eventually("the stream goes on", PATIENCE, async || {
            (stream.is_finished() || sent() > began + 1_000_000).then_some(())
        });
        goes_on.await.unwrap_or_else(|error| panic!("{name}: {error}"));
        over.store(true, Ordering::SeqCst);
        let seen = stream.await.unwrap().unwrap_or_else(|e| panic!("{name}: {e:#}"));
        assert_eq!(seen, scene.other.v4(), "{name}");
        scene.talks_again().await;
    }
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_underlay_that_loses_packets_slows_and_breaks_nothing() {
    loses_packets("vxlan").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_underlay_that_loses_encrypted_packets_slows_and_breaks_nothing() {
    loses_packets("wireguard").await;
}

async fn loses_packets(kind: &str) {
    let percents: &[u32] = if long() { &[1, 5, 10] } else { &[5] };
    for percent in percents {
        let scene = Scene::start("lossy", Settings::none().set("tunnel.kind", kind)).await;
        let _servers = scene.servers();
        let table = format!(
            "nft -f - <<EOF\ntable inet lossy {{\n\
             chain in {{\n type filter hook input priority -290\n\
             iifname pplocal0 numgen random mod 100 < {percent} counter drop\n}}\n\
             chain out {{\n type filter hook output priority -290\n\
             oifname pplocal0 numgen random mod 100 < {percent} counter drop\n}}\n}}\nEOF\n"
        );
        scene.world.node().shell(&table, &[]).unwrap();
        scene.talks(50_000).await.unwrap();
        for (from, to) in
            [(scene.other.namespace().netns(), scene.pod.v4()), (&scene.vm.inside, scene.other.v4())]
        {
            traffic::streams(from, at(to), 16, 20_000).await.unwrap();
        }
        // Nor does it break the agent's link, which takes the same path.
        peerpod_world::stages::transfer(&scene.vm.agent, peerpod_tests::CONTAINER, "lossy", 256 << 10)
            .await
            .unwrap();
        let rules = scene.world.node().shell("nft list table inet lossy; nft delete table inet lossy", &[]);
        let rules = rules.unwrap();
        assert_eq!(rules.matches("packets 0 ").count(), 0, "packets were lost both ways: {rules}");
        scene.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vni_taken_by_another_program_is_named_and_left_to_it() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let (pod, other) = (world.pod().unwrap(), world.pod().unwrap());
    let before = Sight::of(&world, &[pod.namespace()], &daemons).unwrap();
    let (id, shim) = (fresh_id("taken"), daemons.shim().await.unwrap());
    shim.create_vm(&id, Annotations::new("default", &id), &pod.namespace().path()).await.unwrap();
    let ours = || {
        let devices = links(pod.namespace(), "type vxlan");
        devices.into_iter().find_map(|it| it["linkinfo"]["info_data"]["id"].as_u64())
    };
    let vni = eventually("the number is reserved", PATIENCE, async || ours()).await.unwrap();
    let recorded = format!("\"vni\":{vni}");
    eventually("the number is recorded", PATIENCE, async || {
        let entries = daemons.ledger().ok()?;
        entries.iter().any(|entry| entry.record.to_string().contains(&recorded)).then_some(())
    })
    .await
    .unwrap();
    // The node dies, its device is removed, and a device of another owner takes the VNI.
    daemons.kill_node().unwrap();
    pod.namespace().ip("link del pp-vx0\n").unwrap();
    let foreign = format!("link add foreign0 type vxlan id {vni} dstport 4789 remote 192.0.2.1\n");
    world.node().ip(&foreign).unwrap();
    daemons.start_node().unwrap();
    let refused = timeout(PATIENCE, shim.start_vm(&id)).await.unwrap().unwrap_err().to_string();
    assert!(refused.contains(&vni.to_string()), "{refused}");
    let running = Sight::of(&world, &[pod.namespace()], &daemons).unwrap();
    stop_in_time(&shim, &id).await.unwrap();
    daemons.gone(&id, PATIENCE).await.unwrap();
    world.node().ip("link del foreign0\n").expect("what is not ours stays");
    drop(shim);
    nothing_beyond(&world, &[pod.namespace()], &daemons, &before, &running).await.unwrap();
    // The next sandbox of this pod gets another VNI.
    let vm = Vm::start(&daemons, "next", &pod.namespace().path()).await.unwrap();
    let _server = Echo::start(other.namespace().netns(), &other.addresses()).unwrap();
    assert_eq!(traffic::tcp(&vm.inside, at(other.v4()), 1000).await.unwrap(), pod.v4());
    vm.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_that_vanishes_during_setup_leaves_nothing() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let mut dice = Dice(23);
    for round in 0..if long() { 200 } else { 12 } {
        let pod = world.pod().unwrap();
        let (id, shim) = (fresh_id("vanish"), daemons.shim().await.unwrap());
        let start = tokio::spawn({
            let (id, shim, netns) = (id.clone(), shim.clone(), pod.namespace().path());
            async move {
                shim.create_vm(&id, Annotations::new("default", &id), &netns).await?;
                shim.start_vm(&id).await
            }
        });
        // Up to the duration of a whole start.
        tokio::time::sleep(Duration::from_millis(dice.roll(200))).await;
        drop(pod);
        let before = Sight::of(&world, &[], &daemons).unwrap();
        // The kubelet gives up and stops the sandbox, in any state.
        let early = dice.roll(2) == 0;
        if !early {
            // StartVM must return, with or without an error.
            let answered = timeout(PATIENCE, start).await;
            answered.unwrap_or_else(|_| panic!("round {round}\n{}", daemons.log_tails())).unwrap().ok();
        }
        stop_in_time(&daemons.shim().await.unwrap(), &id).await.unwrap();
        // A sandbox stopped before it was recorded has no record that could become a tombstone.
        eventually("nothing of it lives", PATIENCE, async || {
            let entries = daemons.ledger().ok()?;
            entries.iter().all(|entry| entry.id != id || entry.is_tombstone()).then_some(())
        })
        .await
        .unwrap();
        nothing_lives(&world, &daemons, &before).await;
    }
}

/// Waits until no VM, no device of a VM and no filter is left of the state in `alive`.
async fn nothing_lives(world: &World, daemons: &Daemons, alive: &Sight) {
    let mut left = Vec::new();
    let clean = eventually("nothing is left", PATIENCE, async || {
        let now = Sight::of(world, &[], daemons).ok()?;
        left = [now.containing("link ppl"), now.containing("peerpod"), now.containing("mount /tmp")]
            .concat()
            .into_iter()
            .map(str::to_owned)
            .filter(|line| !line.contains("link pplocal0"))
            .collect();
        left.extend(alive.pids("peerpod-guest").iter().map(|pid| format!("guest {pid}")));
        left.extend(now.pids("peerpod-local-vm").iter().map(|pid| format!("VM {pid}")));
        left.is_empty().then_some(())
    })
    .await;
    clean.unwrap_or_else(|e| panic!("{e}: {left:?}\n{}", daemons.log_tails()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_five_thousand_links_starts_pods() {
    let world = World::new().unwrap();
    // Each is a device with two ends.
    let lines: String = (0..2500).map(|n| format!("link add f{n} type veth peer name g{n}\n")).collect();
    world.node().ip(&lines).unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let (pod, other) = (world.pod().unwrap(), world.pod().unwrap());
    let vm = Vm::start(&daemons, "crowd", &pod.namespace().path()).await.unwrap();
    let _server = Echo::start(&vm.inside, &pod.addresses()).unwrap();
    for (pod, other_address) in pod.addresses().into_iter().zip(other.addresses()) {
        let seen = traffic::tcp(other.namespace().netns(), at(pod), 100_000).await.unwrap();
        assert_eq!(seen, other_address);
    }
    vm.stop(&daemons).await.unwrap();
    assert_eq!(links(pod.namespace(), "type vxlan").len(), 0);
}

/// Makes `count` pods as a routing CNI does.
fn crowd(world: &World, count: usize) -> Vec<Namespace> {
    let spaces: Vec<Namespace> = (0..count).map(|n| world.namespace(&format!("many{n}")).unwrap()).collect();
    let lines: String = spaces
        .iter()
        .enumerate()
        .map(|(n, space)| {
            let name = space.name();
            format!("link add many{n} type veth peer name eth0 netns {name}\nlink set many{n} up\n")
        })
        .collect();
    world.node().ip(&lines).unwrap();
    for (n, space) in spaces.iter().enumerate() {
        let (high, low) = (n / 200, n % 200 + 1);
        let lines = format!(
            "link set eth0 up\n\
             addr add 10.245.{high}.{low}/32 dev eth0\n\
             addr add fd10:245::{n:x}/128 dev eth0 nodad\n\
             route add 169.254.1.1 dev eth0\n\
             route add default via 169.254.1.1 dev eth0\n"
        );
        space.ip(&lines).unwrap();
    }
    spaces
}

#[tokio::test(flavor = "multi_thread")]
async fn many_pods_at_once_get_and_lose_their_tunnels() {
    let pods = if long() { 300 } else { 100 };
    let world = World::bare().unwrap();
    // Route to the addresses of the VMs, which this provider does not make: all the work is that of the node.
    world
        .node()
        .ip("link add ens0 type veth peer name ens1\n\
             addr add 192.168.200.1/24 dev ens0\n\
             link set ens0 up\n\
             link set ens1 up\n\
             route add 10.200.0.0/16 via 192.168.200.2\n")
        .unwrap();
    let settings = Settings::none()
        .set("provider.kind", "fake")
        .set("log.level", "info")
        .set("node.max-sandboxes", 2 * pods)
        .set("node.relay-addresses", vec!["192.168.200.1:15151"]);
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let spaces = crowd(&world, pods);
    let refs: Vec<&Namespace> = spaces.iter().take(5).collect();
    let before = Sight::of(&world, &refs, &daemons).unwrap();

    let began = Instant::now();
    let (mut created, mut starts) = (JoinSet::new(), JoinSet::new());
    let ids: Vec<String> = (0..pods).map(|_| fresh_id("crowd")).collect();
    for (id, space) in ids.iter().cloned().zip(&spaces) {
        let (socket, netns) = (daemons.hypervisor_socket(), space.path());
        created.spawn(async move {
            let shim = ShimClient::connect(&socket).await?;
            shim.create_vm(&id, Annotations::new("default", &id), &netns).await?;
            anyhow::Ok((shim, id))
        });
    }
    while let Some(done) = created.join_next().await {
        let (shim, id) = done.unwrap().unwrap();
        // Does not return before the end, because no VM ever comes up.
        starts.spawn(async move { shim.start_vm(&id).await });
    }
    let mut numbers = BTreeSet::new();
    for space in &spaces {
        let number = eventually("the tunnel is connected", PATIENCE, async || {
            let devices = links(space, "up type vxlan");
            devices.iter().find_map(|it| it["linkinfo"]["info_data"]["id"].as_u64())
        });
        let number = number.await.unwrap_or_else(|e| panic!("{space:?}: {e}\n{}", daemons.log_tails()));
        numbers.insert(number);
    }
    let up = began.elapsed();
    assert_eq!(numbers.len(), pods, "every pod has a number of its own");

    let running = Sight::of(&world, &refs, &daemons).unwrap();
    let began = Instant::now();
    let mut stops = JoinSet::new();
    for id in ids.clone() {
        let socket = daemons.hypervisor_socket();
        stops.spawn(async move { stop_in_time(&ShimClient::connect(&socket).await?, &id).await });
    }
    while let Some(done) = stops.join_next().await {
        done.unwrap().unwrap();
    }
    eventually("all are gone", 2 * PATIENCE, async || {
        let entries = daemons.ledger().ok()?;
        entries.iter().all(|entry| entry.is_tombstone()).then_some(())
    })
    .await
    .unwrap_or_else(|e| panic!("{e}\n{}", daemons.log_tails()));
    println!("{pods} pods: up in {up:?}, away in {:?}", began.elapsed());
    while let Some(answer) = starts.join_next().await {
        assert!(answer.unwrap().is_err(), "a start that was stopped says so");
    }
    for space in &spaces {
        assert_eq!(links(space, "type vxlan").len(), 0, "{space:?}");
    }
    nothing_beyond(&world, &refs, &daemons, &before, &running).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_at_random_moments_leaks_nothing() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let pod = world.pod().unwrap();
    let spaces = [pod.namespace()];
    let before = Sight::of(&world, &spaces, &daemons).unwrap();
    let mut dice = Dice(41);
    for round in 0..if long() { 1000 } else { 20 } {
        let id = fresh_id("random");
        let start = tokio::spawn({
            let (id, socket, netns) = (id.clone(), daemons.hypervisor_socket(), pod.namespace().path());
            async move {
                let shim = ShimClient::connect(&socket).await?;
                shim.create_vm(&id, Annotations::new("default", &id), &netns).await?;
                shim.start_vm(&id).await
            }
        });
        for _ in 0..1 + dice.roll(2) {
            tokio::time::sleep(Duration::from_millis(dice.roll(150))).await;
            daemons.kill_node().unwrap();
            // The stop finds no node, or a node that is just starting.
            if dice.roll(4) > 0 {
                daemons.start_node().unwrap();
            } else {
                break;
            }
        }
        let middle = Sight::of(&world, &spaces, &daemons).unwrap();
        stop_in_time(&daemons.shim().await.unwrap(), &id).await.unwrap();
        if daemons.node_pid().is_none() {
            daemons.start_node().unwrap();
        }
        daemons.ready().await.unwrap();
        timeout(PATIENCE, start).await.unwrap_or_else(|_| panic!("round {round}")).unwrap().ok();
        daemons.gone(&id, PATIENCE).await.unwrap_or_else(|e| panic!("round {round}: {e:#}"));
        let clean = nothing_beyond(&world, &spaces, &daemons, &before, &middle).await;
        clean.unwrap_or_else(|e| panic!("round {round}: {e:#}"));
    }
    // The namespace still works after all of it.
    let vm = Vm::start(&daemons, "after", &pod.namespace().path()).await.unwrap();
    let inside: &Netns = &vm.inside;
    let _server = Echo::start(inside, &pod.addresses()).unwrap();
    let other = world.pod().unwrap();
    traffic::tcp(other.namespace().netns(), at(pod.v4()), 100_000).await.unwrap();
    vm.stop(&daemons).await.unwrap();
}
