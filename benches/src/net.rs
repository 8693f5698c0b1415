//! The network's figures: what it costs to set a pod's network up, and what the redirect takes from a plain VXLAN.

use std::{
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

use anyhow::Context;
use peerpod_link::net::{guest, netns};
use peerpod_node::tunnel::{Netns, Tunnel, TunnelConfig};
use peerpod_world::{Pod, World, ip};

use crate::{
    load::median,
    report::{Goal, Report},
};

const PODS: usize = 100;
const ROUNDS: usize = 10;
const BURST: Duration = Duration::from_millis(400);
const VM: Ipv4Addr = Ipv4Addr::new(192, 168, 100, 2);

/// A node's namespace with a "cloud network" and one VM with its podns.
struct Cloud {
    world: World,
    vm: Netns,
    podns: Netns,
    paths: [PathBuf; 2],
}

impl Cloud {
    fn new() -> anyhow::Result<Cloud> {
        let world = World::new()?;
        let named = |name: &str| Path::new("/run/netns").join(format!("{}{name}", world.prefix()));
        let paths = [named("vm"), named("vmpod")];
        let (vm, podns) = (netns::create_named(&paths[0])?, netns::create_named(&paths[1])?);
        let vm_name = format!("{}vm", world.prefix());
        world.node().ip(&format!(
            "link add ens0 type veth peer name ens0 netns {vm_name}\n\
             addr add 192.168.100.1/24 dev ens0\n\
             link set ens0 up\n"
        ))?;
        ip(&vm_name, "addr add 192.168.100.2/24 dev ens0\nlink set ens0 up\nlink set lo up\n")?;
        // The plain VXLAN beside it, with the same settings and no redirect.
        let plain = |local: &str, remote: &str, address: &str| {
            format!(
                "link add plain0 type vxlan id 77 local {local} remote {remote} dstport 4789 noudpcsum nolearning\n\
                 addr add {address}/24 dev plain0\n\
                 link set plain0 mtu 1450 up\n"
            )
        };
        world.node().ip(&plain("192.168.100.1", "192.168.100.2", "10.77.0.1"))?;
        ip(&vm_name, &plain("192.168.100.2", "192.168.100.1", "10.77.0.2"))?;
        Ok(Cloud { world, vm, podns, paths })
    }
}

impl Drop for Cloud {
    fn drop(&mut self) {
        for path in &self.paths {
            netns::delete_named(path).ok(); // The world's janitor takes what stays.
        }
    }
}

/// Runs both.
pub(crate) async fn run(report: &mut Report) -> anyhow::Result<()> {
    let cloud = Cloud::new()?;
    // The tunnel's sockets belong to the namespace of the thread that opens them.
    let tunnel = cloud.world.node().run(|| Tunnel::open(TunnelConfig::default()))??;
    set_up(&cloud, &tunnel, report).await?;
    let pod = cloud.world.pod()?;
    connect(&cloud, &tunnel, &pod).await?;
    throughput(&cloud, &pod, report)
}

async fn connect(cloud: &Cloud, tunnel: &Tunnel, pod: &Pod) -> anyhow::Result<()> {
    let netns = pod.namespace().netns();
    let seen = tunnel.look(netns).await?;
    let reserved = tunnel.reserve(netns, "bench", &seen, false, None).await?;
    let plan = tunnel.connect(netns, "bench", &reserved, &seen, VM.into()).await?;
    let podns = cloud.paths[1].clone();
    cloud.vm.run(move || guest::apply(&plan, None, &podns))??;
    Ok(())
}

/// Look, reserve, connect for one pod after another; each with an anti-spoof element and all redirects.
async fn set_up(cloud: &Cloud, tunnel: &Tunnel, report: &mut Report) -> anyhow::Result<()> {
    let pods = (0..PODS).map(|_| cloud.world.pod()).collect::<anyhow::Result<Vec<_>>>()?;
    let mut took = Vec::new();
    for (number, pod) in pods.iter().enumerate() {
        let netns = pod.namespace().netns();
        let began = Instant::now();
        let seen = tunnel.look(netns).await?;
        let sandbox = format!("bench-{number}");
        let reserved = tunnel.reserve(netns, &sandbox, &seen, false, None).await?;
        tunnel.connect(netns, &sandbox, &reserved, &seen, VM.into()).await?;
        took.push(began.elapsed().as_secs_f64() * 1e3);
    }
    let p50 = median(&mut took).context("no pods")?;
    report.figure("net_setup_p50_ms", p50, Goal::AtMost(1.0), "look + reserve + connect of one pod");
    Ok(())
}

/// One TCP stream into the pod by bridge, veth, redirect and tunnel, against one through the plain VXLAN.
fn throughput(cloud: &Cloud, pod: &Pod, report: &mut Report) -> anyhow::Result<()> {
    let into_pod = Sink::listen(&cloud.podns, pod.v4())?;
    let into_vm = Sink::listen(&cloud.vm, Ipv4Addr::new(10, 77, 0, 2).into())?;
    let node = cloud.world.node().netns();
    let (mut tunnel, mut plain) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        plain.push(into_vm.pour(node)?);
        tunnel.push(into_pod.pour(node)?);
    }
    let better = |rates: &mut Vec<f64>| {
        rates.sort_by(|a, b| b.total_cmp(a));
        median(&mut rates[..ROUNDS / 2]).context("no rounds")
    };
    let (tunnel, plain) = (better(&mut tunnel)?, better(&mut plain)?);
    report.figure("plain_vxlan_gbit", plain / 1e9, Goal::None, "one TCP stream, node to VM");
    report.figure(
        "tunnel_vs_plain_vxlan",
        tunnel / plain,
        Goal::AtLeast(0.88),
        "one TCP stream, node to pod",
    );
    Ok(())
}

/// Takes bytes in a namespace and counts them.
struct Sink {
    address: SocketAddr,
    state: std::sync::Arc<(AtomicU64, AtomicBool)>,
}

impl Sink {
    fn listen(netns: &Netns, address: IpAddr) -> anyhow::Result<Sink> {
        let listener = netns.run(|| TcpListener::bind((address, 0)))??;
        let address = listener.local_addr()?;
        let state = std::sync::Arc::new((AtomicU64::new(0), AtomicBool::new(false)));
        let ours = state.clone();
        std::thread::spawn(move || {
            let mut buffer = vec![0; 256 << 10];
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                while let Ok(read @ 1..) = stream.read(&mut buffer) {
                    ours.0.fetch_add(read as u64, Relaxed);
                }
                if ours.1.load(Relaxed) {
                    return;
                }
            }
        });
        Ok(Sink { address, state })
    }

    /// Pours for one burst from `from`; bits per second that arrived.
    fn pour(&self, from: &Netns) -> anyhow::Result<f64> {
        let connect = || TcpStream::connect_timeout(&self.address, Duration::from_secs(5));
        let mut stream = from.run(connect)??;
        stream.set_write_timeout(Some(Duration::from_secs(5)))?;
        let data = vec![0x5a; 256 << 10];
        let warm = Instant::now();
        while warm.elapsed() < Duration::from_millis(50) {
            stream.write_all(&data)?; // Past slow start.
        }
        let (before, began) = (self.state.0.load(Relaxed), Instant::now());
        while began.elapsed() < BURST {
            stream.write_all(&data)?;
        }
        let (after, took) = (self.state.0.load(Relaxed), began.elapsed());
        Ok((after - before) as f64 * 8.0 / took.as_secs_f64())
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.state.1.store(true, Relaxed);
    }
}
