//! Measures bulk data of an exec through relay and guest, and through a plain copy of bytes. The copy goes from a Unix
//! socket over TCP to the agent's socket, as two `socat` make it. The two take turns. One VM is of the local provider: its
//! programs run on this processor, as in a VM with KVM. The other is an emulated one of libvirt.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use peerpod_client::{AgentClient, Annotations, ContainerSpec, exec_request};
use peerpod_proto::agent::CreateSandboxRequest;
use peerpod_world::{Daemons, Libvirtd, Settings, World, eventually};

use crate::chain::PlainCopy;
use crate::load::quantile;
use crate::machines;
use crate::report::{Goal, Report};

const BOOT: Duration = Duration::from_secs(180);
const PATIENCE: Duration = Duration::from_secs(60);
const ROUNDS: usize = 15;
/// Bytes of a call: 8 KiB with Kata's Rust shim, 32 KiB with the Go shim.
const PIECES: [(&str, usize); 2] = [("", 8 << 10), ("_32k", 32 << 10)];
/// Program name of a container that stands for the test agent's tools.
const TOOL: &str = "peerpod-test-tool";
const CONTAINER: &str = "main";
/// Port of the plain copy in the VM, and the socket of the image's kata-agent.
const PORT: &str = "7070";
const AGENT: &str = "/run/peerpod/agent.sock";

/// Runs the measurements. The image must exist (`make image`).
pub(crate) async fn run(folder: &Path, report: &mut Report) -> anyhow::Result<()> {
    let world = World::new()?;
    let settings = Settings::privileged().set("log.level", "info");
    let daemons = Daemons::start(&world, settings.clone()).await?;
    measure(&world, &daemons, ("native", "VM on this processor", 1024), folder.join("native.sock"), report)
        .await?;
    drop((daemons, world));
    let world = World::new()?;
    let libvirtd = Libvirtd::start(&world)?;
    let settings = settings.set("provider.libvirt.memory-mib", 512).set("provider.libvirt.vcpus", 1);
    let daemons = Daemons::start(&world, libvirtd.settings(&machines::image()?, settings)?).await?;
    measure(&world, &daemons, ("emulated", "emulated VM", 32), folder.join("emulated.sock"), report).await
}

/// Compares the two ways into one VM of this kind by turns of `calls` calls. `plain`: socket to make for the plain copy.
async fn measure(
    world: &World,
    daemons: &Daemons,
    (kind, of, calls): (&str, &str, usize),
    plain: PathBuf,
    report: &mut Report,
) -> anyhow::Result<()> {
    let shim = daemons.shim().await?;
    let pod = world.pod()?;
    let annotations = Annotations::new("bench", "stdin").size("1", 512);
    let socket = shim.create_vm("stdin", annotations, &pod.namespace().path()).await?;
    shim.start_vm_within("stdin", BOOT).await.with_context(|| daemons.log_tails())?;
    let ours = AgentClient::connect(&socket).await?;
    ours.create_sandbox(&CreateSandboxRequest { sandbox_id: "stdin".into(), ..Default::default() }).await?;
    for (container, arguments) in
        [(CONTAINER, &[TOOL, "pause"][..]), ("forward", &[TOOL, "forward", PORT, AGENT])]
    {
        ours.create_container(&ContainerSpec::new(container, arguments).request()).await?;
        ours.start_container(container).await?;
    }
    let to = SocketAddr::new(address(daemons)?, PORT.parse()?);
    // A process of its own, as the relay is.
    let _copy = world.node().run(|| PlainCopy::start(world.folder(), &plain, to))??;
    let plain = eventually("the plain copy answers", PATIENCE, async || {
        let client = AgentClient::connect(&plain).await.ok()?;
        tokio::time::timeout(Duration::from_secs(2), client.check()).await.ok()?.ok()?;
        Some(client)
    });
    let plain = plain.await?;
    for (name, command, is_read) in
        [("exec_stdin", "discard", false), ("exec_stdin_and_stdout", "echo", true)]
    {
        for (suffix, piece) in PIECES {
            let name = format!("{name}_{kind}{suffix}");
            let run = Run { command, calls, piece, is_read };
            let (mut through_ours, mut through_plain, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
            for round in 0..=ROUNDS {
                let plain = run.turn(&plain, &format!("{name}-plain-{round}")).await?;
                let ours = run.turn(&ours, &format!("{name}-ours-{round}")).await?;
                if round > 0 {
                    through_ours.push(ours);
                    through_plain.push(plain);
                    ratios.push(ours / plain);
                }
            }
            let median = |figures: &mut Vec<f64>| quantile(figures, 0.5).context("no turns");
            let words = format!("MB/s of an exec's data, in calls of {} KiB; {of}", piece >> 10);
            report.figure(&format!("{name}_mbs"), median(&mut through_ours)?, Goal::None, &words);
            let words = "the same, by a plain copy";
            report.figure(&format!("{name}_plain_mbs"), median(&mut through_plain)?, Goal::None, words);
            let words = "the two above, turn by turn; the median";
            report.figure(&format!("{name}_vs_plain"), median(&mut ratios)?, Goal::AtLeast(0.9), words);
        }
    }
    shim.stop_vm("stdin").await?;
    daemons.gone("stdin", PATIENCE).await
}

/// Returns the address of the only VM.
fn address(daemons: &Daemons) -> anyhow::Result<IpAddr> {
    let entry = daemons.ledger()?.into_iter().next().context("the ledger has no sandbox")?;
    let addresses = entry.record["addresses"].as_array().context("the record has no addresses")?;
    let mut read = addresses.iter().filter_map(|one| one.as_str()?.parse().ok());
    read.find(IpAddr::is_ipv4).with_context(|| format!("no IPv4 address among {addresses:?}"))
}

/// Exec that gets all data of a turn.
struct Run {
    command: &'static str,
    calls: usize,
    piece: usize,
    is_read: bool,
}

impl Run {
    /// Runs the exec. Returns its rate in MB/s.
    async fn turn(&self, agent: &AgentClient, exec: &str) -> anyhow::Result<f64> {
        let Run { command, calls, piece, is_read } = *self;
        agent.exec_process(&exec_request(CONTAINER, exec, &[TOOL, command])).await?;
        let began = Instant::now();
        let write = async {
            for _ in 0..calls {
                let written = agent.write_stdin(CONTAINER, exec, vec![b'x'; piece]).await?;
                ensure!(written as usize == piece, "{exec}: {written} bytes were written");
            }
            Ok(())
        };
        let read = async {
            let mut left = if is_read { calls * piece } else { 0 };
            while left > 0 {
                left -= agent.read_stdout(CONTAINER, exec, piece as u32).await?.len();
            }
            Ok(())
        };
        tokio::try_join!(write, read)?;
        let took = began.elapsed().as_secs_f64();
        agent.close_stdin(CONTAINER, exec).await?;
        let status = agent.wait_process(CONTAINER, exec).await?;
        ensure!(status == 0, "{exec}: it ended with {status}");
        Ok((calls * piece) as f64 / took / 1e6)
    }
}
