//! Measures the MTU of the pod in the VM over underlays of several clouds, and checks that a packet of that size is not
//! fragmented.

use anyhow::{Context, ensure};
use peerpod_node::tunnel::{Tunnel, TunnelConfig};
use peerpod_podnet::netns::Netns;
use peerpod_world::traffic;

use super::cloud::Cloud;
use crate::report::{Goal, Report};

/// Underlay MTUs of Google, most clouds, and Amazon.
const UNDERLAYS: [u32; 3] = [1460, 1500, 9001];
/// Ethernet, IPv4, UDP and VXLAN.
const OVERHEAD: u32 = 50;

/// Runs the check.
pub(crate) async fn run(report: &mut Report) -> anyhow::Result<()> {
    for underlay in UNDERLAYS {
        let cloud = Cloud::new(underlay)?;
        let tunnel = cloud.world.node().run(|| Tunnel::open(TunnelConfig::default()))??;
        // Like a CNI that uses the cloud's own network: the pod's MTU is the node's.
        let pod = cloud.world.pod_with_mtu(underlay)?;
        let node = cloud.world.node();
        node.ip(&format!("link set cni0 mtu {underlay}\n"))?;
        let applied = cloud.connect(&tunnel, pod.namespace().netns(), "bench")?;
        let key = format!("tunnel_mtu_{underlay}");
        let due = f64::from(underlay - OVERHEAD);
        report.figure(&key, f64::from(applied.mtu), Goal::Exactly(due), "the pod's MTU in the VM");
        traffic::ping_whole(node.netns(), pod.v4(), applied.mtu.into()).await?;
        let before = fragments(node.netns())? + fragments(cloud.vm.netns())?;
        cloud.to_pod(pod.v4()).tcp(1)?;
        let after = fragments(node.netns())? + fragments(cloud.vm.netns())?;
        ensure!(after == before, "{} packets were fragmented with an underlay of {underlay}", after - before);
    }
    Ok(())
}

/// Returns the number of fragments that a namespace has made so far.
fn fragments(netns: &Netns) -> anyhow::Result<u64> {
    let text = netns.run(|| std::fs::read_to_string("/proc/thread-self/net/snmp"))??;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("Ip: "));
    let (names, values) = lines.next().zip(lines.next()).context("no Ip lines in /proc/net/snmp")?;
    let at = names.split_whitespace().position(|name| name == "FragCreates").context("no FragCreates")?;
    Ok(values.split_whitespace().nth(at).context("no value of FragCreates")?.parse()?)
}
