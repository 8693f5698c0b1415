//! Measures a thousand sandboxes on one node with a provider that takes no time: the memory of one sandbox, and the
//! five hundredth start against the first.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use peerpod_client::{Annotations, ShimClient};
use peerpod_podnet::netns::{self, Netns};
use peerpod_world::{Daemons, Settings, World, many};

use crate::chain::role;
use crate::guests::{Guests, rss_mib};
use crate::load::{Call, Client, median};
use crate::report::{Goal, Report};

const MANY: usize = 1000;

/// Starts that are compared: the first ones (without the very first, which pays for one-time work), and those around
/// the five hundredth.
const WINDOWS: [Range<usize>; 2] = [1..21, 490..510];

/// Runs the measurement.
pub(crate) async fn run(folder: &Path, report: &mut Report) -> anyhow::Result<()> {
    let agent = folder.join("thousand-agent.sock");
    let (mut agent_process, _) = role(&["agent"], folder, &agent)?;
    let outcome = scenario(&agent, report).await;
    agent_process.kill()?;
    agent_process.wait()?;
    outcome
}

async fn scenario(agent: &Path, report: &mut Report) -> anyhow::Result<()> {
    let world = World::new()?;
    let cloud = cloud(&world)?;
    let settings = Settings::privileged()
        .set("provider.kind", "fake")
        .set("log.level", "info")
        .set("node.max-sandboxes", MANY + 10)
        .set("node.relay-addresses", vec!["192.168.200.1:15151"]);
    let daemons = Daemons::start(&world, settings).await?;
    let fake = daemons.state_dir().join("fake");
    let _guests = Guests::watch(cloud, fake, agent.to_owned());
    let shim = daemons.shim().await?;
    let (node, relay) = (daemons.node_pid().context("no node")?, daemons.relay_pid().context("no relay")?);

    let mut took = Vec::with_capacity(MANY);
    let mut agents = Vec::with_capacity(MANY);
    let mut seen = [Vec::new(), Vec::new()];
    for number in 0..MANY {
        let path = many::attach(&world, number)?;
        for (window, seen) in WINDOWS.iter().zip(&mut seen) {
            if [window.start, window.end].contains(&number) {
                seen.push(Stages::of(&daemons)?);
            }
        }
        let began = Instant::now();
        let socket = start(&shim, number, &path).await.with_context(|| daemons.log_tails())?;
        took.push(began.elapsed().as_secs_f64());
        let mut client = Client::connect(&socket)?;
        client.call(Call::Check)?;
        agents.push(client);
        if [1, 100, 1000].contains(&(number + 1)) {
            settle(node, relay).await;
            for (name, pid, goal) in [("relay", relay, 32.0), ("node", node, 40.0)] {
                let goal = if number + 1 == MANY { Goal::AtMost(goal) } else { Goal::None };
                let key = format!("rss_{name}_{}_mib", number + 1);
                report.figure(&key, rss_mib(pid)?, goal, "idle sandboxes, one Check done on each");
            }
        }
    }
    if let [[a, b], [c, d]] = &seen.each_ref().map(Vec::as_slice) {
        Stages::print(&b.since(a), &d.since(c));
    }
    let [first, later] = WINDOWS.map(|window| median(&mut took[window]));
    let (first, later) = (first.context("none")?, later.context("none")?);
    report.figure(
        "start_1st_ms",
        first * 1e3,
        Goal::None,
        "CreateVM + StartVM, provider and guest take no time",
    );
    report.figure("start_500th_vs_1st", later / first, Goal::AtMost(1.2), "medians of 20 around each");
    Ok(())
}

/// Makes a namespace behind the node's, which holds every address of the fake provider's "VMs": the guests dial from
/// it.
fn cloud(world: &World) -> anyhow::Result<Netns> {
    let name = format!("{}cloud", world.prefix());
    let netns = netns::create_named(Path::new("/run/netns").join(&name))?;
    world.node().ip(&format!(
        "link add ens0 type veth peer name ens0 netns {name}\n\
         addr add 192.168.200.1/24 dev ens0\n\
         link set ens0 up\n\
         route add 10.200.0.0/16 via 192.168.200.2\n"
    ))?;
    peerpod_world::ip(
        &name,
        "link set lo up\n\
         addr add 192.168.200.2/24 dev ens0\n\
         link set ens0 up\n\
         route add local 10.200.0.0/16 dev lo\n",
    )?;
    Ok(netns)
}

async fn start(shim: &ShimClient, number: usize, netns: &Path) -> anyhow::Result<std::path::PathBuf> {
    let id = format!("bench-{number}");
    let annotations = Annotations::new("bench", &id);
    let socket = shim.create_vm(&id, annotations, netns).await?;
    shim.start_vm_within(&id, Duration::from_secs(20)).await?;
    Ok(socket)
}

/// Time of starts up to each stage, by the node's metrics: total seconds and count.
struct Stages(BTreeMap<String, (f64, f64)>);

impl Stages {
    fn of(daemons: &Daemons) -> anyhow::Result<Stages> {
        let mut stages = BTreeMap::<String, (f64, f64)>::new();
        for line in daemons.metrics("node")?.lines() {
            let parts = line.strip_prefix("peerpod_node_stage_seconds_").and_then(|line| {
                let (what, rest) = line.split_once("{stage=\"")?;
                let (stage, value) = rest.split_once("\"} ")?;
                Some((what, stage.to_owned(), value.parse::<f64>().ok()?))
            });
            match parts {
                Some(("sum", stage, value)) => stages.entry(stage).or_default().0 = value,
                Some(("count", stage, value)) => stages.entry(stage).or_default().1 = value,
                _ => {}
            }
        }
        Ok(Stages(stages))
    }

    /// Returns the mean milliseconds to each stage of the starts between two scrapes.
    fn since(&self, before: &Stages) -> BTreeMap<String, f64> {
        let difference = |(stage, now): (&String, &(f64, f64))| {
            let then = before.0.get(stage).copied().unwrap_or_default();
            (now.1 > then.1).then(|| (stage.clone(), (now.0 - then.0) / (now.1 - then.1) * 1e3))
        };
        self.0.iter().filter_map(difference).collect()
    }

    /// Prints the mean times to each stage of first and later starts, in the order of the stages.
    fn print(first: &BTreeMap<String, f64>, later: &BTreeMap<String, f64>) {
        let mut rows: Vec<_> =
            first.iter().filter_map(|(stage, ms)| Some((stage, *ms, *later.get(stage)?))).collect();
        rows.sort_by(|a, b| a.1.total_cmp(&b.1));
        eprintln!("  ms until stage, mean:       first   500th");
        for (stage, first, later) in rows {
            eprintln!("    {stage:24} {first:>7.2} {later:>7.2}");
        }
    }
}

/// Waits until both processes are idle for a moment (their CPU clocks stand still).
async fn settle(node: u32, relay: u32) {
    let clock = || crate::chain::cpu_of(node).ok().zip(crate::chain::cpu_of(relay).ok());
    let mut last = clock();
    for _ in 0..50 {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let now = clock();
        let still = |a: Duration, b: Duration| b.saturating_sub(a) < Duration::from_millis(4);
        if let (Some((n0, r0)), Some((n1, r1))) = (last, now)
            && still(n0, n1)
            && still(r0, r1)
        {
            return;
        }
        last = now;
    }
}
