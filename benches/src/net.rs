//! Measures the network: the cost of setting a pod's network up and taking it down, and the throughput through redirect
//! and tunnel relative to a plain VXLAN. All in scratch namespaces.

mod choices;
pub(crate) mod cloud;
mod mtu;
mod set_up;
pub(crate) mod traffic;

use peerpod_node::tunnel::{Tunnel, TunnelConfig};

use self::cloud::{Cloud, VM};
use self::traffic::Rates;
use crate::encrypted;
use crate::report::{Goal, Report};

/// Runs all measurements.
pub(crate) async fn run(report: &mut Report) -> anyhow::Result<()> {
    set_up::run(report)?;
    mtu::run(report).await?;
    choices::run(report)?;
    throughput(report)
}

/// Measures four paths from the node to a VM, in the same rounds: the bare underlay; a plain VXLAN without a redirect;
/// a pod by bridge, veth, redirect and tunnel; and the same encrypted.
fn throughput(report: &mut Report) -> anyhow::Result<()> {
    let cloud = Cloud::new(cloud::MTU)?;
    let tunnel = cloud.world.node().run(|| Tunnel::open(TunnelConfig::default()))??;
    let pod = cloud.world.pod()?;
    cloud.connect(&tunnel, pod.namespace().netns(), "bench")?;
    let secret = cloud.world.pod()?;
    let podns = cloud.world.namespace("vmsecret")?;
    let ends = (secret.namespace().netns(), "bench-encrypted");
    let _planes = encrypted::connect(&cloud.world, ends, (&cloud.vm, &podns), (cloud::NODE, VM), cloud::MTU)?;
    let paths = [cloud.bare(), cloud.plain_vxlan()?, cloud.to_pod(pod.v4()), cloud.path(&podns, secret.v4())];
    if let [veth, vxlan, ours, encrypted] = &traffic::measure(&paths)?[..] {
        tell(report, veth, vxlan, ours);
        tell_encrypted(report, vxlan, encrypted);
    }
    Ok(())
}

fn tell(report: &mut Report, veth: &Rates, vxlan: &Rates, ours: &Rates) {
    report.figure("plain_vxlan_gbit", vxlan.tcp1 / 1e9, Goal::None, "one TCP stream, node to VM");
    report.figure("plain_vxlan_kpps", vxlan.pps / 1e3, Goal::None, "UDP packets of 64 bytes that arrive");
    let vs = [("tcp1", "one TCP stream"), ("tcp64", "64 TCP streams"), ("pps", "UDP of 64 bytes, packets/s")];
    for (what, about) in vs {
        let [veth, vxlan, ours] = [veth, vxlan, ours].map(|rates| rates.of(what));
        report.figure(&format!("vxlan_{what}_vs_veth"), vxlan / veth, Goal::None, about);
        let gate = if what == "tcp1" { Goal::Gate(0.88) } else { Goal::None };
        let about = if what == "tcp1" { "one TCP stream, node to pod; 0.93 is the goal" } else { about };
        report.figure(&format!("tunnel_{what}_vs_vxlan"), ours / vxlan, gate, about);
        report.figure(&format!("tunnel_{what}_vs_veth"), ours / veth, Goal::None, about);
    }
    report.figure(
        "tunnel_vs_plain_vxlan",
        ours.tcp1 / vxlan.tcp1,
        Goal::Gate(0.88),
        "the same by an older name",
    );
}

fn tell_encrypted(report: &mut Report, vxlan: &Rates, encrypted: &Rates) {
    report.figure(
        "tunnel_enc_tcp1_gbit",
        encrypted.tcp1 / 1e9,
        Goal::None,
        "one TCP stream, node to pod, encrypted",
    );
    let vs = [
        ("tcp1", "one TCP stream, node to pod; both ends encrypt on this machine's processors"),
        ("tcp64", "64 TCP streams"),
        ("pps", "UDP of 64 bytes, packets/s"),
    ];
    for (what, about) in vs {
        let ratio = encrypted.of(what) / vxlan.of(what);
        report.figure(&format!("tunnel_enc_{what}_vs_vxlan"), ratio, Goal::None, about);
    }
}
