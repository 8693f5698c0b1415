//! Calls StopVM as shims do, each call with a time limit of one second, and checks whether the machine had the time to
//! answer.
//!
//! A machine that is busy with other tests may take that second away from any process. Beside each late StopVM this
//! module therefore does work like that of the relay for a stop. If that work is late too, the test accepts the delay.

use std::fs;
use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::{TimeVal, TimeValLike};
use peerpod_client::ShimClient;
use tokio::task::spawn_blocking;

/// Time within which a live node answers; after it the relay records the stop instead.
const GRACE: Duration = Duration::from_millis(400);
/// Start of the reference work before the second is over, with time left for some work. Starting it earlier would slow
/// down hundreds of simultaneous stops.
const SOON_OVER: Duration = Duration::from_millis(700);
/// Time that the reference work needs if undisturbed: some processor time, and an fsync of a file.
const ROOM: Duration = Duration::from_millis(100);
const WORK_MS: i64 = 50;
/// An error after this time may result from the end of the second alone.
const LATE: Duration = Duration::from_millis(900);
/// Number of attempts on a machine that is too busy.
const TRIES: usize = 10;

struct Stop {
    took: Duration,
    /// The stop was late, and so was the reference work.
    excused: bool,
}

/// Calls StopVM, which must return within one second, and returns how long it took.
pub async fn in_time(shim: &ShimClient, id: &str) -> anyhow::Result<Duration> {
    Ok(answered(shim, id, SOON_OVER).await?.took)
}

/// Calls StopVM three times, as shims do: each within one second, and at most one of them as slow as a relay without a
/// node.
pub async fn promptly(shim: &ShimClient, id: &str) -> anyhow::Result<Vec<Duration>> {
    let mut stops = Vec::new();
    for _ in 0..3 {
        stops.push(answered(shim, id, GRACE).await?);
    }
    let took: Vec<Duration> = stops.iter().map(|stop| stop.took).collect();
    let late = stops.iter().filter(|stop| stop.took >= GRACE && !stop.excused).count();
    ensure!(late < 2, "of three StopVMs {late} took as long as without a node: {took:?}");
    Ok(took)
}

/// Calls StopVM. Compares a call that takes longer than `late` with the reference work.
async fn answered(shim: &ShimClient, id: &str, late: Duration) -> anyhow::Result<Stop> {
    let mut in_vain = Vec::new();
    while in_vain.len() < TRIES {
        let reference = tokio::spawn(relays_part(late));
        let began = Instant::now();
        let answer = shim.stop_vm(id).await;
        let took = began.elapsed();
        if took < late {
            reference.abort();
            answer?;
            return Ok(Stop { took, excused: false });
        }
        let part = reference.await??;
        let excused = part > late + ROOM;
        match answer {
            Ok(()) => return Ok(Stop { took, excused }),
            Err(_) if excused && took > LATE => in_vain.push((took, part)),
            Err(error) => {
                let beside = || format!("after {took:?}; the relay's part alone took {part:?}");
                return Err(error).with_context(beside);
            }
        }
    }
    bail!("no StopVM of {id} was answered in its second; each, and the relay's part alone: {in_vain:?}")
}

/// Waits, then does the relay's work for a stop that the node does not answer, and returns how long both took.
async fn relays_part(wait: Duration) -> anyhow::Result<Duration> {
    let began = Instant::now();
    tokio::time::sleep(wait).await;
    spawn_blocking(work).await?.context("do a relay's part of a StopVM")?;
    Ok(began.elapsed())
}

fn work() -> anyhow::Result<()> {
    let used = || {
        let usage = getrusage(UsageWho::RUSAGE_THREAD)?;
        anyhow::Ok(usage.user_time() + usage.system_time())
    };
    let enough = used()? + TimeVal::milliseconds(WORK_MS);
    while used()? < enough {
        std::hint::spin_loop();
    }
    let name = format!("peerpod-stop-{}-{:?}", std::process::id(), std::thread::current().id());
    let path = std::env::temp_dir().join(name);
    let mut file = fs::File::create(&path)?;
    fs::remove_file(&path)?;
    file.write_all(b"stopped")?;
    Ok(file.sync_all()?)
}
