//! A pod's way out of the cluster, with the real binaries and the local provider: by the node, or by the VM's own
//! network (`tunnel.external`).

#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::{
    io::{Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    path::Path,
    process::Command,
    time::Duration,
};

use peerpod_link::net::netns::Netns;
use peerpod_tests::{PATIENCE, Sandbox};
use peerpod_world::{Daemons, Settings, Sight, World, eventually, ip, picture::Picture};

/// A machine outside of the cluster, behind the cloud's gateway (which is the node here). It knows the way back to VMs
/// and to pods. Gone with the world: its name begins as all the world's do.
fn internet(world: &World) -> Netns {
    let name = format!("{}inet", world.prefix());
    assert!(Command::new("ip").args(["netns", "add", &name]).status().unwrap().success());
    world
        .node()
        .ip(&format!(
            "link add inet0 type veth peer name eth0 netns {name}\n\
             addr add 203.0.113.1/24 dev inet0\n\
             addr add 2001:db8::1/64 dev inet0 nodad\n\
             link set inet0 up\n"
        ))
        .unwrap();
    ip(
        &name,
        "addr add 203.0.113.2/24 dev eth0\n\
         addr add 2001:db8::2/64 dev eth0 nodad\n\
         link set eth0 up\n\
         route add default via 203.0.113.1\n\
         route add default via 2001:db8::1\n",
    )
    .unwrap();
    Netns::open(Path::new("/run/netns").join(name)).unwrap()
}

/// Tells everybody who comes which address he comes from.
fn mirror(netns: &Netns, address: IpAddr) -> SocketAddr {
    let listener = netns.run(|| TcpListener::bind((address, 0)).unwrap()).unwrap();
    let bound = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let from = stream.peer_addr().unwrap().ip().to_canonical();
            drop(write!(stream, "{from}"));
        }
    });
    bound
}

/// The address under which the pod's container is seen there; `None` when it does not get through.
async fn seen_as(sandbox: &Sandbox, at: SocketAddr) -> Option<IpAddr> {
    let script = format!("timeout 3 bash -c 'exec 3<>/dev/tcp/{}/{} && cat <&3'", at.ip(), at.port());
    let exec = peerpod_tests::fresh_id("seen");
    let output = sandbox.shell(&exec, &script).await.unwrap();
    String::from_utf8_lossy(&output.stdout).trim().parse().ok()
}

fn of_the_cloud(address: Option<IpAddr>) -> bool {
    match address {
        Some(IpAddr::V4(v4)) => v4.octets()[..2] == [10, 99],
        Some(IpAddr::V6(v6)) => v6.segments()[0] == 0xfd99,
        None => false,
    }
}

/// The same of a program beside the pod: in the VM itself, say.
async fn seen_from(netns: &Netns, at: SocketAddr) -> Option<IpAddr> {
    let netns = netns.clone();
    let ask = move || {
        let stream = netns.run(|| TcpStream::connect_timeout(&at, Duration::from_secs(3))).ok()?;
        let mut stream = stream.ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(3))).ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        text.trim().parse().ok()
    };
    tokio::task::spawn_blocking(ask).await.unwrap()
}

/// The network namespaces of the VMs themselves, in the order of their births.
fn vms(world: &World, daemons: &Daemons) -> Vec<Netns> {
    let sight = Sight::of(world, &[], daemons).unwrap();
    let mut all: Vec<Netns> = Vec::new();
    for guest in sight.pids("peerpod-guest") {
        let netns = Netns::open(format!("/proc/{guest}/ns/net")).unwrap();
        if all.iter().all(|known| known.id() != netns.id()) {
            all.push(netns);
        }
    }
    all
}

/// The global addresses of a VM's uplink.
fn addresses_of(vm: &Netns) -> Vec<IpAddr> {
    let seen = Picture::of(vm, &[]).unwrap().addresses();
    seen.into_iter().filter(|(name, _)| name == "eth0").map(|(_, address)| address).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_may_leave_by_its_vm_and_reaches_the_cluster_by_the_node() {
    leaves_by_its_vm("vxlan").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_may_leave_by_its_vm_while_the_rest_is_encrypted() {
    leaves_by_its_vm("wireguard").await;
}

async fn leaves_by_its_vm(kind: &str) {
    let world = World::new().unwrap();
    let internet = internet(&world);
    let settings = Settings::none()
        .set("tunnel.kind", kind)
        .set("tunnel.external", "vm")
        .set("tunnel.cluster-cidrs", vec!["10.244.0.0/16", "fd10:244::/32"]);
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "out").await.unwrap();
    let other = world.pod().unwrap();
    for address in ["203.0.113.2", "2001:db8::2"] {
        let seen = seen_as(&sandbox, mirror(&internet, address.parse().unwrap())).await;
        assert!(of_the_cloud(seen), "{address} saw {seen:?}");
    }
    let inside = [(other.v4(), sandbox.pod.v4()), (other.v6(), sandbox.pod.v6())];
    for (address, pod) in inside {
        let seen = seen_as(&sandbox, mirror(other.namespace().netns(), address)).await;
        assert_eq!(seen, Some(pod), "by the node, as ever");
    }
    // The cloud's own services, the VM, its neighbours and its network, as every VM of this node reaches them, are not
    // the pod's.
    let neighbour = Sandbox::start(&world, &daemons, "beside").await.unwrap();
    let vms = vms(&world, &daemons);
    let [vm, next] = &vms[..] else { panic!("{} VMs", vms.len()) };
    let node = world.node().netns();
    world.node().ip("addr add 169.254.169.254/32 dev lo\naddr add fd00:ec2::254/128 dev lo nodad\n").unwrap();
    let mut kept = vec![(node, "169.254.169.254".parse().unwrap()), (node, "fd00:ec2::254".parse().unwrap())];
    for (place, like) in [(vm, vm), (next, next)] {
        kept.extend(addresses_of(like).into_iter().map(|address| (place, address)));
    }
    assert_eq!(kept.len(), 6, "{kept:?}");
    for (place, address) in kept {
        let service = mirror(place, address);
        // The cloud network's IPv4 addresses lie in what the pod's CNI routes into the cluster: by the node, as ever.
        let by_the_node = (address.is_ipv4() && of_the_cloud(Some(address))).then_some(sandbox.pod.v4());
        assert_eq!(seen_as(&sandbox, service).await, by_the_node, "{address}");
        assert!(seen_from(vm, service).await.is_some(), "the VM itself does not reach {address}");
    }
    neighbour.stop(&daemons).await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test]
async fn without_it_a_pod_leaves_by_the_node_under_its_own_address() {
    let world = World::new().unwrap();
    let internet = internet(&world);
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "in").await.unwrap();
    for (address, pod) in [("203.0.113.2", sandbox.pod.v4()), ("2001:db8::2", sandbox.pod.v6())] {
        let seen = seen_as(&sandbox, mirror(&internet, address.parse().unwrap())).await;
        assert_eq!(seen, Some(pod), "{address}");
    }
    sandbox.stop(&daemons).await.unwrap();
}

/// What the VMs of this world said on their consoles.
fn consoles(folder: &Path) -> String {
    let mut all = String::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            all += &consoles(&path);
        } else if entry.file_name().to_string_lossy().starts_with("console") {
            all += &String::from_utf8_lossy(&std::fs::read(&path).unwrap_or_default());
        }
    }
    all
}

#[tokio::test]
async fn the_guest_tries_the_path_to_its_node_while_the_pod_starts() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "path").await.unwrap();
    let state = daemons.state_dir().join("local");
    eventually("the relay answered the guest's probes", PATIENCE, async || {
        let said = consoles(&state);
        (said.contains("the path to the node") && said.contains("probed=1500")).then_some(())
    })
    .await
    .unwrap_or_else(|error| panic!("{error}: {}", consoles(&state)));
    sandbox.stop(&daemons).await.unwrap();
}
