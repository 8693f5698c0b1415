//! Measures how soon the node learns that a VM is ready: from the creation of the agent's socket in the VM to the
//! answer of StartVM. The VMs are real ones of the local provider. Their boots take odd times, so that no polling
//! interval matches by chance.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use peerpod_client::Annotations;
use peerpod_world::{Daemons, Settings, World};

use crate::load::quantile;
use crate::report::{Goal, Report};

const STARTS: usize = 24;

/// Runs the measurement.
pub(crate) async fn run(report: &mut Report) -> anyhow::Result<()> {
    let (mut lags, mut starts) = (Vec::new(), Vec::new());
    for boot_ms in [0, 370, 810] {
        let world = World::new()?;
        let settings = Settings::privileged()
            .set("log.level", "info")
            .set("provider.local.agent-binary", std::env::current_exe()?.to_string_lossy().into_owned())
            .set("provider.local.boot-delay", format!("{boot_ms}ms"));
        let daemons = Daemons::start(&world, settings).await?;
        let shim = daemons.shim().await?;
        for number in 0..STARTS / 3 {
            let pod = world.pod()?;
            let id = format!("ready-{number}");
            let began = SystemTime::now();
            shim.create_vm(&id, Annotations::new("bench", &id), &pod.namespace().path()).await?;
            shim.start_vm_within(&id, Duration::from_secs(60)).await.with_context(|| daemons.log_tails())?;
            let answered = SystemTime::now();
            let ready = agent_ready(&daemons.state_dir().join("local"), began)?;
            // The file's time is that of the last tick (4 ms at HZ=250): it may be a little early, never late.
            lags.push(answered.duration_since(ready).unwrap_or_default().as_secs_f64() * 1e3);
            if boot_ms == 0 {
                starts.push(answered.duration_since(began)?.as_secs_f64() * 1e3);
            }
            shim.stop_vm(&id).await?;
            daemons.gone(&id, Duration::from_secs(30)).await?;
        }
    }
    let p50 = quantile(&mut lags, 0.5).context("no starts")?;
    let p99 = quantile(&mut lags, 0.99).context("no starts")?;
    report.figure("ready_lag_p50_ms", p50, Goal::None, "agent's socket exists -> StartVM answers");
    report.figure("ready_lag_p99_ms", p99, Goal::AtMost(100.0), "the same; the slowest of 24");
    let local = quantile(&mut starts, 0.5).context("no starts")?;
    report.figure(
        "start_local_p50_ms",
        local,
        Goal::None,
        "CreateVM to StartVM's answer, a VM out of namespaces",
    );
    Ok(())
}

/// Returns the creation time of the agent's socket in the VM that was made since `began`.
fn agent_ready(state: &Path, began: SystemTime) -> anyhow::Result<SystemTime> {
    let mut newest: Option<SystemTime> = None;
    for process in fs::read_dir("/proc")? {
        let path: PathBuf = process?.path();
        if !path.join("ns").exists() {
            continue;
        }
        // Only processes in a VM's root have this path. No other bench may start VMs at the same time.
        let command = fs::read(path.join("cmdline")).unwrap_or_default();
        if !command.starts_with(b"/usr/local/bin/kata-agent")
            && !command.windows(10).any(|w| w == b"kata-agent")
        {
            continue;
        }
        if let Ok(socket) = fs::metadata(path.join("root/run/peerpod/agent.sock")) {
            let at = socket.modified()?;
            if at + Duration::from_millis(10) >= began {
                newest = newest.max(Some(at));
            }
        }
    }
    newest.with_context(|| format!("no agent of a VM in {} listens", state.display()))
}
