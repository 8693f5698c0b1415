//! A thousand sandboxes on one node, with a provider that takes no time: what one costs in memory, and whether the
//! five hundredth starts as fast as the first.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::Context;
use peerpod_client::{Annotations, ShimClient};
use peerpod_link::net::netns::{self, Netns};
use peerpod_world::{Daemons, Settings, World};

use crate::{
    chain::role,
    guests::{Guests, rss_mib},
    load::{Call, Client, median},
    report::{Goal, Report},
};

const MANY: usize = 1000;

/// Runs it.
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
    let settings = Settings::none()
        .set("provider.kind", "drill")
        .set("log.level", "info")
        .set("node.max-sandboxes", MANY + 10)
        .set("node.relay-addresses", vec!["192.168.200.1:15151"]);
    let daemons = Daemons::start(&world, settings).await?;
    let drill = daemons.state_dir().join("drill");
    let _guests = Guests::watch(cloud, drill, agent.to_owned());
    let shim = daemons.shim().await?;
    let (node, relay) = (daemons.node_pid().context("no node")?, daemons.relay_pid().context("no relay")?);

    let mut took = Vec::with_capacity(MANY);
    let mut agents = Vec::with_capacity(MANY);
    for number in 0..MANY {
        let path = pod(&world, number)?;
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
    let first = median(&mut took[1..21]).context("none")?;
    let later = median(&mut took[490..510]).context("none")?;
    report.figure(
        "start_1st_ms",
        first * 1e3,
        Goal::None,
        "CreateVM + StartVM, provider and guest take no time",
    );
    report.figure("start_500th_vs_1st", later / first, Goal::AtMost(1.2), "medians of 20 around each");
    Ok(())
}

/// A namespace behind the node's, in which every address of the drill's "VMs" is at home: the guests dial from there.
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

/// A pod's network namespace; its name says that it is this world's, which takes it away.
fn pod(world: &World, number: usize) -> anyhow::Result<std::path::PathBuf> {
    let name = format!("{}many{number}", world.prefix());
    let path = Path::new("/run/netns").join(&name);
    netns::create_named(&path)?;
    world.node().ip(&format!(
        "link add many{number} mtu 1450 type veth peer name eth0 mtu 1450 netns {name}\n\
         link set many{number} up\n"
    ))?;
    let host = number + 1;
    peerpod_world::ip(
        &name,
        &format!(
            "link set eth0 up\n\
         addr add 10.245.{}.{}/32 dev eth0\n\
         route add 169.254.1.1 dev eth0\n\
         route add default via 169.254.1.1 dev eth0\n",
            host / 250,
            host % 250 + 1
        ),
    )?;
    Ok(path)
}

async fn start(shim: &ShimClient, number: usize, netns: &Path) -> anyhow::Result<std::path::PathBuf> {
    let id = format!("bench-{number}");
    let annotations = Annotations::new("bench", &id);
    let socket = shim.create_vm(&id, annotations, netns).await?;
    shim.start_vm_within(&id, Duration::from_secs(20)).await?;
    Ok(socket)
}

/// Waits until both have been idle for a moment (their CPU clocks stand still).
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
