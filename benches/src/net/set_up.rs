//! What it costs the node to set one pod's network up and to take it down: with how many pods there are already, and
//! with how many links that are nobody's business of ours.

use std::time::Instant;

use anyhow::Context;
use peerpod_link::net::netlink::messages_sent;
use peerpod_node::tunnel::{Netns, Reserved, Tunnel, TunnelConfig};
use peerpod_world::World;

use super::cloud::{Cloud, VM};
use crate::{
    load::{median, quantile},
    pods,
    report::{Goal, Report},
};

const PODS: usize = 300;
/// Figures "of the n-th pod" are medians over so many around it.
const AROUND: usize = 10;
/// Links of others in the node's namespace, and pods that are set up beside them.
const FOREIGN: usize = 5000;
const BESIDE: usize = 40;

/// Runs it.
pub(crate) async fn run(report: &mut Report) -> anyhow::Result<()> {
    many_pods(report).await?;
    many_links(report).await
}

/// A pod whose network is set up.
struct Set {
    name: String,
    netns: Netns,
    reserved: Reserved,
}

/// Look, reserve, connect, as for one sandbox; the pods share a VM, which the node does not care about. Milliseconds.
async fn set_up(tunnel: &Tunnel, netns: &Netns, name: String) -> anyhow::Result<(Set, f64)> {
    let began = Instant::now();
    let seen = tunnel.look(netns).await?;
    let reserved = tunnel.reserve(netns, &name, &seen, false, None).await?;
    tunnel.connect(netns, &name, &reserved, &seen, VM.into()).await?;
    let took = began.elapsed().as_secs_f64() * 1e3;
    Ok((Set { name, netns: netns.clone(), reserved }, took))
}

async fn undo(tunnel: &Tunnel, set: &Set) -> anyhow::Result<f64> {
    let began = Instant::now();
    let undone = tunnel.undo(&set.name, Some(&set.netns), Some(&set.reserved), Some(VM.into())).await;
    let took = began.elapsed().as_secs_f64() * 1e3;
    undone.map_err(|errors| anyhow::anyhow!("undo of {}: {errors:?}", set.name))?;
    Ok(took)
}

fn open(cloud: &Cloud) -> anyhow::Result<Tunnel> {
    // The tunnel's sockets belong to the namespace of the thread that opens them.
    Ok(cloud.world.node().run(|| Tunnel::open(TunnelConfig::default()))??)
}

fn namespaces(world: &World, count: usize) -> anyhow::Result<Vec<Netns>> {
    (0..count).map(|number| Ok(Netns::open(pods::attach(world, number)?)?)).collect()
}

/// One pod after another, then all of them away again.
async fn many_pods(report: &mut Report) -> anyhow::Result<()> {
    let cloud = Cloud::new(1500)?;
    let tunnel = open(&cloud)?;
    let (mut sets, mut took) = (Vec::new(), Vec::new());
    let sent = messages_sent();
    for (number, netns) in namespaces(&cloud.world, PODS)?.iter().enumerate() {
        let (set, ms) = set_up(&tunnel, netns, format!("bench-{number}")).await?;
        sets.push(set);
        took.push(ms);
    }
    let messages = (messages_sent() - sent) as f64 / PODS as f64;
    report.figure("net_setup_messages", messages, Goal::None, "netlink messages per pod");
    // The very first pays for what is made once: the table, the first thread.
    let around = |from: usize| median(&mut took[from..from + AROUND].to_vec()).context("no pods");
    let (first, hundredth, last) = (around(1)?, around(100 - AROUND / 2)?, around(PODS - AROUND)?);
    let p50 = median(&mut took).context("no pods")?;
    report.figure("net_setup_p50_ms", p50, Goal::AtMost(1.0), "look + reserve + connect of one pod, of 300");
    let p99 = quantile(&mut took, 0.99).context("no pods")?;
    report.figure("net_setup_p99_ms", p99, Goal::None, "");
    report.figure("net_setup_100th_vs_1st", hundredth / first, Goal::None, "medians of 10");
    report.figure("net_setup_300th_vs_1st", last / first, Goal::AtMost(1.2), "medians of 10");

    let (sent, mut took) = (messages_sent(), Vec::new());
    for set in &sets {
        took.push(undo(&tunnel, set).await?);
    }
    let messages = (messages_sent() - sent) as f64 / PODS as f64;
    report.figure("net_undo_messages", messages, Goal::None, "netlink messages per pod");
    let around = |from: usize| median(&mut took[from..from + AROUND].to_vec()).context("no pods");
    let (of_many, of_few) = (around(0)?, around(PODS - AROUND)?);
    let p50 = median(&mut took).context("no pods")?;
    report.figure("net_undo_p50_ms", p50, Goal::None, "undo of one pod; the kernel's grace period is in it");
    report.figure("net_undo_p99_ms", quantile(&mut took, 0.99).context("no pods")?, Goal::None, "");
    let about = "with 300 pods there against with ten";
    report.figure("net_undo_300th_vs_1st", of_many / of_few, Goal::AtMost(1.2), about);
    Ok(())
}

/// The same set-up on a node with thousands of links of others, in turn with one that has none.
async fn many_links(report: &mut Report) -> anyhow::Result<()> {
    let clouds = [Cloud::new(1500)?, Cloud::new(1500)?];
    // Both ends are in the node's namespace; up or down makes no difference to who lists them.
    let lines: String = (0..FOREIGN / 2)
        .map(|number| format!("link add f{number} type veth peer name g{number}\n"))
        .collect();
    clouds[1].world.node().ip(&lines)?;
    let tunnels = [open(&clouds[0])?, open(&clouds[1])?];
    let pods = [namespaces(&clouds[0].world, BESIDE)?, namespaces(&clouds[1].world, BESIDE)?];
    let mut took = [Vec::new(), Vec::new()];
    for (number, pair) in pods[0].iter().zip(&pods[1]).enumerate() {
        for (at, netns) in [pair.0, pair.1].into_iter().enumerate() {
            let (_, ms) = set_up(&tunnels[at], netns, format!("bench-{number}")).await?;
            took[at].push(ms);
        }
    }
    let [none, many] = took.each_mut().map(|took| median(took));
    let ratio = many.context("no pods")? / none.context("no pods")?;
    report.figure("net_setup_5000links_vs_0", ratio, Goal::AtMost(1.2), "links of others on the node");
    Ok(())
}
