//! StopVM as shims ask for it, each with its one second; and whether the machine had the time to answer.
//!
//! A machine that is busy with other tests may take that second away from anybody. So beside each StopVM that is late
//! something like the relay's own part of one is done here, too; only where that is late as well nothing is held against
//! the daemons.

use std::{
    fs,
    io::Write,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use nix::sys::{
    resource::{UsageWho, getrusage},
    time::{TimeVal, TimeValLike},
};
use peerpod_client::ShimClient;
use tokio::task::spawn_blocking;

/// A node that lives answers before this; then the relay records the stop in its place.
const GRACE: Duration = Duration::from_millis(400);
/// Before the second is over, with room for some work: hundreds of stops at once are not to be made slower by it.
const SOON_OVER: Duration = Duration::from_millis(700);
/// What the relay's part needs where it is not disturbed: some work, and a file that is made durable.
const ROOM: Duration = Duration::from_millis(100);
const WORK_MS: i64 = 50;
/// An error that comes so late may be the end of the second and nothing else.
const LATE: Duration = Duration::from_millis(900);
/// How often a machine that is too busy is asked.
const TRIES: usize = 10;

struct Stop {
    took: Duration,
    /// Late, and so was the relay's part of it here.
    excused: bool,
}

/// StopVM, answered inside the shim's second; how long it took.
pub async fn in_time(shim: &ShimClient, id: &str) -> anyhow::Result<Duration> {
    Ok(answered(shim, id, SOON_OVER).await?.took)
}

/// StopVM three times, as shims do it: each in its second, and at most one of them as slow as a relay alone would be.
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

/// One that takes longer than `late` is compared with what this machine can do.
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

/// Waits, and then does what a relay does for a stop that the node does not answer: how long that takes here and now.
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
