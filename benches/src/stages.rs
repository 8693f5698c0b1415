//! Measures the stages of a StartVM of a VM that boots (libvirt; KVM where it works, else emulation). The node's stages
//! come from its ledger, the guest's from its first message. Starts with and without the provider's reserved address
//! for each VM take turns.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use peerpod_client::Annotations;
use peerpod_world::{Daemons, Libvirtd, Settings, World, eventually, eventually_blocking};

use crate::load::quantile;
use crate::report::{Goal, Report};

const ROUNDS: usize = 3;
const BOOT: Duration = Duration::from_secs(180);
const PATIENCE: Duration = Duration::from_secs(60);
/// Field of the guest's stages in the line that the node logs at the end of a start.
const FIELD: &str = "guest_stages";

/// Milliseconds by stage, in the order of the stages' first appearance.
#[derive(Default)]
struct Table(Vec<(String, Vec<f64>)>);

impl Table {
    fn add(&mut self, stage: &str, ms: f64) {
        match self.0.iter_mut().find(|(known, _)| known == stage) {
            Some((_, all)) => all.push(ms),
            None => self.0.push((stage.to_owned(), vec![ms])),
        }
    }

    fn medians(&mut self) -> Vec<(&str, f64)> {
        let rows = self.0.iter_mut();
        rows.filter_map(|(stage, all)| Some((stage.as_str(), quantile(all, 0.5)?))).collect()
    }
}

/// Runs the measurement with the image in this folder.
pub(crate) async fn run(image: &Path, report: &mut Report) -> anyhow::Result<()> {
    let world = World::new()?;
    let libvirtd = Arc::new(Libvirtd::start(&world)?);
    let settings = Settings::privileged()
        .set("log.level", "info")
        .set("provider.libvirt.memory-mib", 512)
        .set("provider.libvirt.vcpus", 1);
    let daemons = Daemons::start(&world, libvirtd.settings(image, settings)?).await?;
    let shim = daemons.shim().await?;
    let (mut pinged, mut reserved) = (Times::default(), Times::default());
    // The first start has neither a cached image nor the KVM check, and does not count. Then both kinds alternate, so
    // that the machine is equally busy for both.
    for round in 0..=2 * ROUNDS {
        let id = format!("machine-{round}");
        let is_pinged = round % 2 == 1;
        let Times { whole, node, guest } = if is_pinged { &mut pinged } else { &mut reserved };
        let pod = world.pod()?;
        let unreserved = is_pinged.then(|| unreserve(&libvirtd));
        let began = Instant::now();
        let annotations = Annotations::new("bench", &id).size("1", 512);
        shim.create_vm(&id, annotations, &pod.namespace().path()).await?;
        shim.start_vm_within(&id, BOOT).await.with_context(|| daemons.log_tails())?;
        let took = began.elapsed();
        if let Some(unreserved) = unreserved {
            unreserved.await??;
        }
        let entry = daemons.ledger()?.into_iter().find(|entry| entry.id == id);
        let mut stages = entry.context("the ledger has the running sandbox")?.stages();
        let inside = eventually("the node's closing line of the start", PATIENCE, async || {
            let log = fs::read_to_string(daemons.log("node")).ok()?;
            log.lines().filter(|line| line.contains(FIELD)).nth(round).map(guest_stages)
        });
        let inside = inside.await?;
        shim.stop_vm(&id).await?;
        daemons.gone(&id, PATIENCE).await?;
        if round == 0 {
            continue;
        }
        whole.push(took.as_secs_f64());
        stages.sort_by_key(|(_, at)| *at);
        for (stage, at) in stages {
            node.add(&stage, at.as_secs_f64() * 1e3);
        }
        for (stage, took) in inside {
            guest.add(&stage, took);
        }
    }
    for (name, goal, times, words) in [
        ("machine_start_pinged_s", Goal::None, &mut pinged, "the same, with an address that is not reserved"),
        (
            "machine_start_s",
            Goal::AtMost(4.2),
            &mut reserved,
            "CreateVM to StartVM's answer, a machine of libvirt's",
        ),
    ] {
        report.figure(name, quantile(&mut times.whole, 0.5).context("no machines")?, goal, words);
        print(name, &mut times.node, &mut times.guest, report);
    }
    let uplink = reserved.guest.medians().into_iter().find(|(stage, _)| *stage == "uplink");
    let (_, uplink) = uplink.context("the guest reports no stage `uplink`")?;
    report.figure("machine_uplink_s", uplink / 1e3, Goal::AtMost(0.4), "of it, the guest's DHCP");
    Ok(())
}

/// Measurements of one kind of start.
#[derive(Default)]
struct Times {
    whole: Vec<f64>,
    node: Table,
    guest: Table,
}

/// Removes the next VM's reservation, long before the VM asks for an address.
fn unreserve(libvirtd: &Arc<Libvirtd>) -> tokio::task::JoinHandle<anyhow::Result<()>> {
    let libvirtd = Arc::clone(libvirtd);
    tokio::task::spawn_blocking(move || {
        eventually_blocking("the VM's reservation", BOOT, || {
            libvirtd.unreserve().ok().filter(|removed| *removed > 0).map(drop)
        })
    })
}

fn print(name: &str, node: &mut Table, guest: &mut Table, report: &mut Report) {
    report.row(format!("{name} by stage, medians of {ROUNDS}: {:>16} {:>9}", "ms from CreateVM", "ms taken"));
    let mut reached = node.medians();
    reached.sort_by(|one, other| one.1.total_cmp(&other.1));
    let mut before = 0.0;
    for (stage, at) in reached {
        report.row(format!("  {stage:42} {at:>16.0} {:>9.0}", at - before));
        before = at;
    }
    for (stage, took) in guest.medians() {
        report.row(format!("  in the guest: {stage:28} {:>16} {took:>9.0}", ""));
    }
}

/// Parses names and milliseconds of `guest_stages="boot=12us init=3us"`, in the text or the JSON form.
fn guest_stages(line: &str) -> Vec<(String, f64)> {
    let rest = line.split_once(FIELD).map(|(_, rest)| rest).unwrap_or_default();
    let rest = rest.trim_start_matches(['"', '=', ':', ' ']);
    let words = rest.split(['"', ',']).next().unwrap_or_default().split_whitespace();
    let read = |word: &str| {
        let (stage, took) = word.split_once('=')?;
        Some((stage.to_owned(), took.strip_suffix("us")?.parse::<f64>().ok()? / 1e3))
    };
    words.map_while(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nodes_line_is_read_in_both_forms() {
        let expected = [("boot".to_owned(), 1.5), ("init".to_owned(), 0.002)];
        for line in [
            r#"INFO x: running stages="recorded=1ms" guest_stages="boot=1500us init=2us" guest_version="1""#,
            r#"{"fields":{"guest_stages":"boot=1500us init=2us","guest_version":"1"}}"#,
        ] {
            assert_eq!(guest_stages(line), expected, "{line}");
        }
        assert!(guest_stages("running").is_empty());
    }

    #[test]
    fn a_table_has_medians_in_the_order_of_what_came_first() {
        let mut table = Table::default();
        for (stage, ms) in [("late", 9.0), ("early", 3.0), ("late", 5.0), ("early", 1.0), ("late", 7.0)] {
            table.add(stage, ms);
        }
        table.add("early", 2.0);
        assert_eq!(table.medians(), [("late", 7.0), ("early", 2.0)]);
    }
}
