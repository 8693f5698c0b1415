//! Tests changes while the pod runs: by the CNI in the pod's namespace, around the node, and in the VM.

use std::net::SocketAddr;
use std::time::Duration;

use peerpod_client::Annotations;
use peerpod_podnet::netns::Netns;
use peerpod_tests::{PATIENCE, Sandbox, fresh_id, sample, stop_in_time, vm};
use peerpod_world::ping::ping;
use peerpod_world::traffic::{self, ECHO_PORT, Echo};
use peerpod_world::{Daemons, Pod, Settings, World, eventually};
use tokio::task::spawn_blocking;

/// Runs a script in the pod and returns its output.
async fn inside(sandbox: &Sandbox, script: &str) -> String {
    let output = sandbox.shell(&fresh_id("look"), script).await.unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

async fn until_inside(sandbox: &Sandbox, daemons: &Daemons, script: &str, is: impl Fn(&str) -> bool) {
    let mut last = String::new();
    let seen = eventually(script, PATIENCE, async || {
        last = inside(sandbox, script).await;
        is(&last).then_some(())
    });
    if let Err(error) = seen.await {
        panic!("{error}: it prints {last:?}\n{}", daemons.log_tails());
    }
}

async fn reaches(from: &Pod, to: &Pod) {
    for address in to.addresses() {
        let from = from.namespace().clone();
        spawn_blocking(move || ping(&from, address, 56, PATIENCE)).await.unwrap().unwrap();
    }
}

fn ip_in(netns: &Netns, arguments: &str) {
    vm::run(netns, &format!("ip {arguments}")).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn later_changes_of_the_cni_reach_the_vm() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let other = world.pod().unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "cni").await.unwrap();
    let pod = sandbox.pod.namespace().clone();
    let route = "ip route show 10.50.0.0/16";

    pod.ip("route add 10.50.0.0/16 via 10.244.1.1 dev eth0 metric 7\n").unwrap();
    until_inside(&sandbox, &daemons, route, |text| text.contains("via 10.244.1.1 dev eth0 metric 7")).await;
    pod.ip("route del 10.50.0.0/16\naddr add 10.244.1.200/32 dev eth0\nlink set eth0 mtu 1300\n").unwrap();
    until_inside(&sandbox, &daemons, route, str::is_empty).await;
    until_inside(&sandbox, &daemons, "ip addr show dev eth0", |text| {
        text.contains("inet 10.244.1.200/32") && text.contains("mtu 1300")
    })
    .await;

    // Changes while the node is dead take effect too.
    daemons.kill_node().unwrap();
    pod.ip("route add 10.50.0.0/16 via 10.244.1.1 dev eth0\naddr del 10.244.1.200/32 dev eth0\n").unwrap();
    daemons.start_node().unwrap();
    until_inside(&sandbox, &daemons, route, |text| text.contains("10.50.0.0/16")).await;
    until_inside(&sandbox, &daemons, "ip addr show dev eth0", |text| !text.contains("10.244.1.200")).await;

    // A device that goes down loses its routes and IPv6 addresses, but the CNI did not remove them.
    let before = inside(&sandbox, "ip route; ip -6 addr show dev eth0").await;
    pod.ip("link set eth0 down\n").unwrap();
    pod.ip("link set eth0 up\n").unwrap();
    pod.ip("addr add 10.244.1.201/32 dev eth0\n").unwrap();
    until_inside(&sandbox, &daemons, "ip addr show dev eth0", |text| text.contains("10.244.1.201")).await;
    assert_eq!(inside(&sandbox, "ip route; ip -6 addr show dev eth0").await, before);
    reaches(&other, &sandbox.pod).await;
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_redirect_is_restored() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let other = world.pod().unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "mended").await.unwrap();
    sandbox.pod.namespace().ip("link set pp-vx0 down\n").unwrap();
    reaches(&other, &sandbox.pod).await;
    sandbox.pod.namespace().ip("link del pp-vx0\n").unwrap();
    reaches(&other, &sandbox.pod).await;
    sandbox.lives().await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_filter_of_a_redirect_is_restored_once() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "unredirected").await.unwrap();
    let pod = sandbox.pod.namespace();
    let filters = || pod.shell("tc filter show dev eth0 ingress", &[]).unwrap();
    assert_ne!(filters(), "");
    // The node inspects every pod after its start, and again after any other change there. Either inspection would
    // restore the filter without its netlink event. Wait until both are over.
    let looked = eventually("it was looked at", PATIENCE, async || {
        let record = daemons.ledger().ok()?.into_iter().find(|entry| entry.id == sandbox.id)?.record;
        record["network"]["tunnel"]["losses"].is_object().then_some(())
    });
    looked.await.unwrap();
    let silent = eventually("nothing else happens", PATIENCE, async || {
        pod.shell("timeout 2 ip monitor || true", &[]).unwrap().is_empty().then_some(())
    });
    silent.await.unwrap();
    pod.shell("tc qdisc del dev eth0 ingress", &[]).unwrap();
    let back = eventually("it is there again", PATIENCE, async || (!filters().is_empty()).then_some(()));
    back.await.unwrap_or_else(|error| panic!("{error}\n{}", daemons.log_tails()));
    // The repair causes netlink events, which must not cause another repair.
    let quiet = eventually("nothing changes any more", PATIENCE, async || {
        pod.shell("timeout 1 tc monitor || true", &[]).unwrap().is_empty().then_some(())
    });
    quiet.await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

const MOVE: [&str; 2] = ["addr flush dev eth0", "addr add 10.99.77.7/16 dev eth0"];

/// Replaces all addresses of a VM's NIC: with one left, the link would continue over it. Returns the relay's metrics at
/// the end.
async fn a_vm_moves(settings: Settings, lines: &[&str], to: &str) -> String {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let other = world.pod().unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "moving").await.unwrap();
    let vm = vm::network(&world, &daemons).unwrap();
    lines.iter().for_each(|line| ip_in(&vm, line));
    let moved = eventually("the node knows the new address", PATIENCE, async || {
        let entry = daemons.ledger().ok()?.into_iter().find(|entry| entry.id == sandbox.id)?;
        entry.record.to_string().contains(to).then_some(())
    });
    if let Err(error) = moved.await {
        panic!("{error}\n{}", daemons.log_tails());
    }
    reaches(&other, &sandbox.pod).await;
    sandbox.lives().await.unwrap();
    let metrics = daemons.metrics("relay").unwrap();
    sandbox.stop(&daemons).await.unwrap();
    metrics
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_moves_to_another_address_takes_its_tunnel_along() {
    a_vm_moves(Settings::none(), &MOVE, "10.99.77.7").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_moves_to_another_address_takes_its_encrypted_tunnel_along() {
    let metrics = a_vm_moves(Settings::none().set("tunnel.kind", "wireguard"), &MOVE, "10.99.77.7").await;
    assert!(sample(&metrics, "peerpod_relay_wireguard_roams_total").unwrap() >= 1.0);
    assert!(sample(&metrics, "peerpod_relay_wireguard_packets_to_guest_total").unwrap() > 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_of_an_ipv6_cloud_that_moves_to_another_address_takes_its_tunnel_along() {
    let lines = ["-6 addr flush dev eth0 scope global", "addr add fd99::77:7/64 dev eth0 nodad"];
    a_vm_moves(Settings::none().set("provider.local.ipv4", false), &lines, "fd99::77:7").await;
}

/// Does the same as a driver that resets its NIC: the kernel removes all routes and the IPv6 addresses, and their
/// source (DHCP, router advertisements) adds them again.
async fn a_vms_nic_is_reset(settings: Settings) {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let other = world.pod().unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "reset").await.unwrap();
    let vm = vm::network(&world, &daemons).unwrap();
    let address = vm::v6_of(&vm, "eth0").unwrap();
    let gateway = vm::run(&vm, "ip route show default").unwrap();
    reaches(&other, &sandbox.pod).await;
    for round in 0..2 {
        ip_in(&vm, "link set eth0 down");
        let (from, to) = (other.namespace().clone(), sandbox.pod.v4());
        let silent = spawn_blocking(move || ping(&from, to, 56, Duration::from_millis(500))).await.unwrap();
        assert!(silent.is_err(), "the NIC is down and there is an answer");
        ip_in(&vm, "link set eth0 up");
        if !gateway.is_empty() {
            ip_in(&vm, &format!("route replace {}", gateway.trim()));
        }
        ip_in(&vm, &format!("addr replace {address} dev eth0 nodad"));
        ip_in(&vm, "-6 route replace default via fd99::1 dev eth0");
        reaches(&other, &sandbox.pod).await;
        sandbox
            .lives()
            .await
            .unwrap_or_else(|error| panic!("round {round}: {error:#}\n{}", daemons.log_tails()));
    }
    let noticed = eventually("the guest noticed", PATIENCE, async || {
        vm::consoles(&daemons).contains("the VM's own network changed").then_some(())
    });
    noticed.await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_keeps_its_pod_after_its_nic_goes_down_and_up() {
    a_vms_nic_is_reset(Settings::none()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_of_an_ipv6_cloud_keeps_its_pod_after_its_nic_goes_down_and_up() {
    a_vms_nic_is_reset(Settings::none().set("provider.local.ipv4", false)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_gets_another_address_is_found_there() {
    renumbered(Settings::none()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_gets_another_address_is_found_there_by_an_encrypted_tunnel() {
    renumbered(Settings::none().set("tunnel.kind", "wireguard")).await;
}

async fn renumbered(settings: Settings) {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let other = world.pod().unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "renumbered").await.unwrap();
    let vm = vm::network(&world, &daemons).unwrap();
    ip_in(&vm, "-6 addr flush dev eth0");
    let bridge = world.node().ip("route get 10.99.0.99\n").unwrap();
    let bridge = bridge.split_whitespace().skip_while(|word| *word != "dev").nth(1).unwrap().to_owned();
    let addresses = || world.node().ip(&format!("addr show dev {bridge}\n")).unwrap();
    world.node().ip(&format!("addr add 10.99.0.250/16 dev {bridge}\n")).unwrap();
    // The guest must have received the new address before the old one is removed.
    let told = eventually("the guest was told", PATIENCE, async || {
        let log = std::fs::read_to_string(daemons.log("node")).ok()?;
        log.contains("the guest follows").then_some(())
    });
    if let Err(error) = told.await {
        panic!("{error}: {}\n{}", addresses(), daemons.log_tails());
    }
    world.node().ip(&format!("addr del 10.99.0.1/16 dev {bridge}\n")).unwrap();
    // The kernel may have promoted the address or removed it with the first one; either way it exists now.
    world.node().ip(&format!("addr replace 10.99.0.250/16 dev {bridge}\n")).unwrap();
    reaches(&other, &sandbox.pod).await;
    sandbox.lives().await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

/// Waits for an MTU of the pod's interface in its VM.
async fn until_mtu(sandbox: &Sandbox, daemons: &Daemons, mtu: u32) {
    let expected = format!("mtu {mtu} ");
    until_inside(sandbox, daemons, "ip link show dev eth0", |text| text.contains(&expected)).await;
}

/// Sends full-sized segments in both directions between the pod in its VM and another pod, in both families. Without
/// offloads, no device merges or splits packets on the way, so that each has its apparent size.
async fn transfers(other: &Pod, sandbox: &Sandbox) -> anyhow::Result<()> {
    let inside = podns(sandbox).await;
    let servers = [
        Echo::start(other.namespace().netns(), &other.addresses())?,
        Echo::start(&inside, &sandbox.pod.addresses())?,
    ];
    for (pod, beside) in sandbox.pod.addresses().into_iter().zip(other.addresses()) {
        traffic::tcp(&inside, SocketAddr::new(beside, ECHO_PORT), 1 << 20).await?;
        traffic::tcp(other.namespace().netns(), SocketAddr::new(pod, ECHO_PORT), 1 << 20).await?;
    }
    for server in servers {
        server.end().await?;
    }
    Ok(())
}

/// Returns the pod's namespace in its VM.
async fn podns(sandbox: &Sandbox) -> Netns {
    let inode = inside(sandbox, "readlink /proc/self/ns/net").await;
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let path = entry.path().join("ns/net");
        // A process that ends meanwhile is not in the namespace.
        if std::fs::read_link(&path).is_ok_and(|found| found.to_str() == Some(inode.trim())) {
            return Netns::open(path).unwrap();
        }
    }
    panic!("no process is in {inode}")
}

const NO_OFFLOADS: &str = "tso off gso off gro off tx-udp-segmentation off";

/// Drops UDP packets of more than `bytes` bytes that arrive at an interface.
fn narrow(netns: &Netns, interface: &str, bytes: u32) {
    let rules = format!(
        "table inet narrow\ndelete table inet narrow\ntable inet narrow {{\n\
         chain coming {{\n type filter hook prerouting priority -310\n\
         iifname {interface} meta l4proto udp meta length > {bytes} counter drop\n}}\n}}\n"
    );
    let script = format!("nft -f - <<EOF\n{rules}EOF\n");
    let run = || std::process::Command::new("sh").args(["-euc", &script]).status();
    assert!(netns.run(run).unwrap().unwrap().success());
}

async fn without_offloads(world: &World, vm: &Netns, sandbox: &Sandbox, other: &Pod) {
    let inside = podns(sandbox).await;
    for (netns, device) in [
        (other.namespace().netns(), "eth0"),
        (&inside, "eth0"),
        (vm, "eth0"),
        (world.node().netns(), "pplocal0"),
    ] {
        let arguments: Vec<&str> = NO_OFFLOADS.split_whitespace().collect();
        let run = || std::process::Command::new("ethtool").args(["-K", device]).args(&arguments).status();
        assert!(netns.run(run).unwrap().unwrap().success(), "{device}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_path_that_drops_large_packets_narrows_the_pod_from_its_start() {
    for (kind, left) in [("vxlan", 50), ("wireguard", 110)] {
        let world = World::new().unwrap();
        narrow(world.node().netns(), "pplocal0", 1400);
        let daemons = Daemons::start(&world, Settings::none().set("tunnel.kind", kind)).await.unwrap();
        let other = world.pod().unwrap();
        let sandbox = Sandbox::start(&world, &daemons, "narrow").await.unwrap();
        until_mtu(&sandbox, &daemons, 1400 - left).await;
        let vm = vm::network(&world, &daemons).unwrap();
        without_offloads(&world, &vm, &sandbox, &other).await;
        narrow(&vm, "eth0", 1400);
        transfers(&other, &sandbox).await.unwrap_or_else(|e| panic!("{kind}: {e:#}"));
        sandbox.stop(&daemons).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_path_that_narrows_and_widens_while_the_pod_runs_is_followed() {
    let world = World::new().unwrap();
    let settings = Settings::none().set("tunnel.probe-interval", "1s");
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let other = world.pod().unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "breathing").await.unwrap();
    until_mtu(&sandbox, &daemons, 1450).await;
    let vm = vm::network(&world, &daemons).unwrap();
    without_offloads(&world, &vm, &sandbox, &other).await;
    for (path, mtu) in [(1400, 1350), (1380, 1330), (1500, 1450)] {
        narrow(world.node().netns(), "pplocal0", path);
        narrow(&vm, "eth0", path);
        until_mtu(&sandbox, &daemons, mtu).await;
        transfers(&other, &sandbox).await.unwrap_or_else(|e| panic!("{path}: {e:#}"));
    }
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_smaller_mtu_of_the_nodes_own_interface_is_followed() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let other = world.pod().unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "underlay").await.unwrap();
    until_mtu(&sandbox, &daemons, 1450).await;
    let vm = vm::network(&world, &daemons).unwrap();
    without_offloads(&world, &vm, &sandbox, &other).await;
    world.node().ip("link set pplocal0 mtu 1400\n").unwrap();
    until_mtu(&sandbox, &daemons, 1350).await;
    transfers(&other, &sandbox).await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

/// Checks that a widened path is used at once. The guest has probed the path while it was narrow, and its timer would
/// not probe again for ten minutes.
async fn widens(settings: Settings, left: u32) {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let other = world.pod().unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "widens").await.unwrap();
    until_mtu(&sandbox, &daemons, 1500 - left).await;
    let vm = vm::network(&world, &daemons).unwrap();
    without_offloads(&world, &vm, &sandbox, &other).await;
    let tried = async |what: &str| {
        let tried = eventually(what, PATIENCE, async || {
            let said = vm::consoles(&daemons);
            said.lines().rfind(|line| line.contains("the path to the node"))?.contains(what).then_some(())
        });
        tried.await.unwrap_or_else(|error| panic!("{error}\n{}", vm::consoles(&daemons)));
    };
    tried("probed=1500").await;
    world.node().ip("link set pplocal0 mtu 1400\n").unwrap();
    until_mtu(&sandbox, &daemons, 1400 - left).await;
    // A change in the VM makes the guest probe the path.
    ip_in(&vm, "addr add 10.99.88.8/32 dev eth0");
    tried("probed=1400").await;
    transfers(&other, &sandbox).await.unwrap();
    world.node().ip("link set pplocal0 mtu 1500\n").unwrap();
    until_mtu(&sandbox, &daemons, 1500 - left).await;
    transfers(&other, &sandbox).await.unwrap();
    // The same on the VM's side, by the MTU of its route to the node.
    let node = if left == 70 { "fd99::1" } else { "10.99.0.1" };
    for mtu in [1380, 1500] {
        ip_in(&vm, &format!("route replace {node} dev eth0 mtu {mtu}"));
        until_mtu(&sandbox, &daemons, mtu - left).await;
    }
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_underlay_that_is_wide_again_is_used_whole_at_once() {
    widens(Settings::none(), 50).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ipv6_underlay_that_is_wide_again_is_used_whole_at_once() {
    widens(Settings::none().set("provider.local.ipv4", false), 70).await;
}

/// A namespace has about 500 sysctls, most of which keep their defaults.
#[tokio::test(flavor = "multi_thread")]
async fn a_setting_that_is_not_copied_is_named_in_record_and_log() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let (plain, pod) = (world.pod().unwrap(), world.pod().unwrap());
    let netns = pod.namespace().clone();
    netns.sysctl("ipv4/neigh/eth0/ucast_solicit", "7").unwrap(); // carried
    netns.sysctl("ipv4/conf/all/log_martians", "1").unwrap(); // not carried
    netns.sysctl("ipv6/conf/eth0/max_addresses", "99").unwrap(); // not carried
    let shim = daemons.shim().await.unwrap();
    let left_out = async |pod: &Pod| {
        let id = fresh_id("settings");
        shim.create_vm(&id, Annotations::new("default", &id), &pod.namespace().path()).await.unwrap();
        shim.start_vm(&id).await.unwrap();
        let looked = eventually("it was looked at while it runs", PATIENCE, async || {
            let record = daemons.ledger().ok()?.into_iter().find(|entry| entry.id == id)?.record;
            let network = record["network"]["tunnel"].clone();
            network["losses"].is_object().then(|| network["seen"]["left_out"].clone())
        });
        let said = looked.await.unwrap_or_else(|error| panic!("{error}\n{}", daemons.log_tails()));
        stop_in_time(&shim, &id).await.unwrap();
        said.as_array().unwrap().iter().map(|what| what.as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let said = left_out(&pod).await;
    assert_eq!(said, ["sysctl ipv4/conf/all/log_martians=1", "sysctl ipv6/conf/eth0/max_addresses=99"]);
    let log = std::fs::read_to_string(daemons.log("node")).unwrap();
    assert!(said.iter().all(|what| log.contains(what.as_str())), "{log}");
    assert_eq!(left_out(&plain).await, Vec::<String>::new(), "nobody set anything there");
}
