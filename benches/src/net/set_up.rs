//! Measures the node's cost of setting one pod's network up and taking it down. The cost is measured by the number of
//! existing pods and by the number of foreign devices.

use std::time::Instant;

use anyhow::Context;
use peerpod_node::tunnel::{Netns, Reserved, Tunnel, TunnelConfig, inspect};
use peerpod_podnet::netlink::messages_sent;
use peerpod_world::{World, many};

use super::cloud::{Cloud, VM};
use crate::load::{median, quantile};
use crate::report::{Goal, Report};

const PODS: usize = 300;
/// Number of pods that exist when one more is measured: the cases of the 1st, the 100th and the 300th pod.
///
/// The first number is never 0. Otherwise the 1st pod would pay each time for the filter's table, which is removed with
/// the last pod. The ratios would then look better than they are.
const PLACES: [(&str, usize); 3] = [("1st", 1), ("100th", 99), ("300th", PODS)];
/// Number of set-ups and undos at each place.
const ROUNDS: usize = 100;
/// Devices of other programs in the node's namespace, and the number of pods that are set up beside them.
const FOREIGN: usize = 5000;
const BESIDE: usize = 40;

/// Runs the measurements.
pub(crate) fn run(report: &mut Report) -> anyhow::Result<()> {
    many_pods(report)?;
    many_links(report)
}

/// A pod with its network set up.
struct Set {
    name: String,
    netns: Netns,
    reserved: Reserved,
}

/// Inspects, reserves and connects, as for one sandbox. Returns the time in milliseconds. The pods share a VM, which
/// makes no difference to the node.
fn set_up(tunnel: &Tunnel, netns: &Netns, name: String) -> anyhow::Result<(Set, f64)> {
    let began = Instant::now();
    let seen = inspect(netns)?;
    let reserved = tunnel.reserve(netns, &name, &seen, false, None)?;
    tunnel.connect(netns, &name, &reserved, &seen, VM.into())?;
    let took = began.elapsed().as_secs_f64() * 1e3;
    Ok((Set { name, netns: netns.clone(), reserved }, took))
}

fn undo(tunnel: &Tunnel, set: &Set) -> anyhow::Result<f64> {
    let began = Instant::now();
    let undone = tunnel.undo(&set.name, Some(&set.netns), Some(&set.reserved), Some(VM.into()));
    let took = began.elapsed().as_secs_f64() * 1e3;
    undone.map_err(|errors| anyhow::anyhow!("undo of {}: {errors:?}", set.name))?;
    Ok(took)
}

fn open(cloud: &Cloud) -> anyhow::Result<Tunnel> {
    // A socket belongs to the namespace of the thread that opens it.
    Ok(cloud.world.node().run(|| Tunnel::open(TunnelConfig::default()))??)
}

fn namespaces(world: &World, count: usize) -> anyhow::Result<Vec<Netns>> {
    (0..count).map(|number| Ok(Netns::open(many::attach(world, number)?)?)).collect()
}

/// A node with pods, and the namespace of one more.
struct Crowd {
    tunnel: Tunnel,
    sets: Vec<Set>,
    more: Netns,
    _cloud: Cloud,
}

impl Crowd {
    /// Sets the pods up one after another, and returns the time of each.
    fn gather(count: usize) -> anyhow::Result<(Crowd, Vec<f64>)> {
        let cloud = Cloud::new(1500)?;
        let tunnel = open(&cloud)?;
        let mut all = namespaces(&cloud.world, count + 1)?;
        let more = all.pop().context("one more pod")?;
        let (mut sets, mut took) = (Vec::new(), Vec::new());
        for (number, netns) in all.iter().enumerate() {
            let (set, ms) = set_up(&tunnel, netns, format!("bench-{number}"))?;
            sets.push(set);
            took.push(ms);
        }
        Ok((Crowd { tunnel, sets, more, _cloud: cloud }, took))
    }
}

/// Sets up one pod after another, measures one more beside few and many in turn, then undoes all.
fn many_pods(report: &mut Report) -> anyhow::Result<()> {
    let sent = messages_sent();
    let (many, mut took) = Crowd::gather(PODS)?;
    let messages = (messages_sent() - sent) as f64 / PODS as f64;
    report.figure("net_setup_messages", messages, Goal::None, "netlink messages per pod");
    let p50 = median(&mut took).context("no pods")?;
    report.figure("net_setup_p50_ms", p50, Goal::AtMost(1.0), "look + reserve + connect of one pod, of 300");
    report.figure("net_setup_p99_ms", quantile(&mut took, 0.99).context("no pods")?, Goal::None, "");
    let many = at_places(many, report)?;

    let (sent, mut took) = (messages_sent(), Vec::new());
    for set in &many.sets {
        took.push(undo(&many.tunnel, set)?);
    }
    let messages = (messages_sent() - sent) as f64 / PODS as f64;
    report.figure("net_undo_messages", messages, Goal::None, "netlink messages per pod");
    let p50 = median(&mut took).context("no pods")?;
    report.figure("net_undo_p50_ms", p50, Goal::None, "undo of one pod; the kernel's grace period is in it");
    report.figure("net_undo_p99_ms", quantile(&mut took, 0.99).context("no pods")?, Goal::None, "");
    Ok(())
}

/// Sets one more pod up and takes it away, repeatedly, on three nodes with few and many pods. The nodes take turns, so
/// that other load on the machine affects all of them alike.
fn at_places(many: Crowd, report: &mut Report) -> anyhow::Result<Crowd> {
    let [(_, few), (_, more), _] = PLACES;
    let crowds = [Crowd::gather(few)?.0, Crowd::gather(more)?.0, many];
    let mut took = PLACES.map(|_| (Vec::new(), Vec::new()));
    for round in 0..=ROUNDS {
        for (crowd, (up, down)) in crowds.iter().zip(&mut took) {
            let (set, ms) = set_up(&crowd.tunnel, &crowd.more, "bench-more".to_owned())?;
            let undone = undo(&crowd.tunnel, &set)?;
            // The first round only warms this pod's namespace.
            if round > 0 {
                up.push(ms);
                down.push(undone);
            }
        }
    }
    let (up, down): (Vec<_>, Vec<_>) = took.into_iter().unzip();
    tell_places(report, "net_setup", up, Goal::AtMost(1.0))?;
    tell_places(report, "net_undo", down, Goal::None)?;
    let [_, _, many] = crowds;
    Ok(many)
}

/// Reports p50 and p99 at each place, and their ratios to the first.
fn tell_places(report: &mut Report, what: &str, took: Vec<Vec<f64>>, goal: Goal) -> anyhow::Result<()> {
    let mut first = None;
    for ((place, others), mut took) in PLACES.into_iter().zip(took) {
        let p50 = median(&mut took).context("no rounds")?;
        let p99 = quantile(&mut took, 0.99).context("no rounds")?;
        let about = format!("one more pod beside {others}, {ROUNDS} times");
        report.figure(&format!("{what}_{place}_p50_ms"), p50, goal, &about);
        report.figure(&format!("{what}_{place}_p99_ms"), p99, Goal::None, "");
        let (p50_first, p99_first) = *first.get_or_insert((p50, p99));
        if place != PLACES[0].0 {
            report.figure(&format!("{what}_{place}_vs_1st"), p50 / p50_first, Goal::AtMost(1.2), "p50");
            report.figure(&format!("{what}_{place}_vs_1st_p99"), p99 / p99_first, Goal::AtMost(1.2), "p99");
        }
    }
    Ok(())
}

/// Measures the same set-up on a node with thousands of foreign devices, in turn with a node without them.
fn many_links(report: &mut Report) -> anyhow::Result<()> {
    let clouds = [Cloud::new(1500)?, Cloud::new(1500)?];
    // Both ends are in the node's namespace; a listing returns devices whether they are up or down.
    let lines: String = (0..FOREIGN / 2)
        .map(|number| format!("link add f{number} type veth peer name g{number}\n"))
        .collect();
    clouds[1].world.node().ip(&lines)?;
    let tunnels = [open(&clouds[0])?, open(&clouds[1])?];
    let pods = [namespaces(&clouds[0].world, BESIDE)?, namespaces(&clouds[1].world, BESIDE)?];
    let mut took = [Vec::new(), Vec::new()];
    for (number, pair) in pods[0].iter().zip(&pods[1]).enumerate() {
        for (at, netns) in [pair.0, pair.1].into_iter().enumerate() {
            let (_, ms) = set_up(&tunnels[at], netns, format!("bench-{number}"))?;
            took[at].push(ms);
        }
    }
    let [none, many] = took.each_mut().map(|took| median(took));
    let ratio = many.context("no pods")? / none.context("no pods")?;
    report.figure("net_setup_5000links_vs_0", ratio, Goal::AtMost(1.2), "links of others on the node");
    Ok(())
}
