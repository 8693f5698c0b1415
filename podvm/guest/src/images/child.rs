//! Runs the image puller, `peerpod-pull`, as a child process.

use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use peerpod_image_job::{Cause, Error, Event, Fetched, Job, Outcome};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::timeout;

/// Time beyond the job's own limit, after which the process is killed.
const GRACE: Duration = Duration::from_secs(10);
/// Bytes of an image between two lines of the log.
const LOGGED: u64 = 64 << 20;
/// Limit of the whole output in bytes.
const MAX_WORDS: u64 = 4 << 20;

/// Path of the image puller in the VM image, if it is not beside this program.
const INSTALLED: &str = "/usr/local/bin/peerpod-pull";

fn program() -> PathBuf {
    let beside_us = std::env::current_exe().ok().map(|us| us.with_file_name("peerpod-pull"));
    beside_us.filter(|program| program.is_file()).unwrap_or_else(|| INSTALLED.into())
}

/// Runs the job in a process of its own, which dies with the returned future. `told` gets the progress, about once a
/// second.
pub(super) async fn run(job: &Job, told: impl FnMut(Fetched)) -> Result<Outcome, Error> {
    let internal =
        |what: &str, error: std::io::Error| Error::new(Cause::Internal, format!("{what}: {error}"));
    let text = serde_json::to_vec(job).map_err(|e| internal("writing the job", e.into()))?;
    let program = program();
    let mut child = Command::new(&program)
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .kill_on_drop(true)
        .spawn()
        .map_err(|e| internal(&format!("starting {}", program.display()), e))?;
    let limit = Duration::from_secs(job.limits.seconds) + GRACE;
    let late = |_| Err(Error::new(Cause::Late, format!("pulling {}: not done within {limit:?}", job.image)));
    let outcome = timeout(limit, talk(&mut child, &text, job, told)).await.unwrap_or_else(late);
    // The process has sent its result, or must not send one any more.
    child.start_kill().ok();
    let status = timeout(GRACE, child.wait()).await;
    match (outcome, status) {
        (Err(error), Ok(Ok(status))) if error.text.is_empty() => Err(ended(job, status)),
        (outcome, _) => outcome,
    }
}

/// Sends the job and reads the result. An error without text means that the process ended without a result.
async fn talk(
    child: &mut Child,
    job: &[u8],
    about: &Job,
    mut told: impl FnMut(Fetched),
) -> Result<Outcome, Error> {
    let silent = || Error::new(Cause::Internal, "");
    let (Some(mut input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
        return Err(silent());
    };
    // If the process has ended already, its exit status is the better report.
    drop(input.write_all(job).await);
    drop(input);
    let mut lines = BufReader::new(output.take(MAX_WORDS)).lines();
    let mut logged = 0;
    while let Ok(Some(line)) = lines.next_line().await {
        match serde_json::from_str(&line) {
            Ok(Event::Fetched(fetched)) => {
                let Fetched { bytes, of } = fetched;
                if bytes / LOGGED != std::mem::replace(&mut logged, bytes / LOGGED) {
                    let text = format!("{} of {} MiB", bytes >> 20, of >> 20);
                    tracing::info!(image = about.image, text, "pull");
                }
                told(fetched);
            }
            Ok(Event::Progress { text }) => tracing::info!(image = about.image, text, "pull"),
            Ok(Event::Warning { text }) => tracing::warn!(image = about.image, text, "pull"),
            Ok(Event::Done(outcome)) => return Ok(outcome),
            Ok(Event::Failed(error)) => return Err(error),
            Err(error) => tracing::warn!(%error, "the pulling process sent an unreadable line"),
        }
    }
    // The process gets time to end by itself before it is killed.
    drop(timeout(Duration::from_secs(1), child.wait()).await);
    Err(silent())
}

fn ended(job: &Job, status: std::process::ExitStatus) -> Error {
    let (cause, how) = match status.signal() {
        Some(6) => {
            let mib = job.limits.memory_mib;
            let how = format!(
                "the registry's answers did not fit into {mib} MiB of memory (images.limits.memory_mib)"
            );
            (Cause::TooLarge, how)
        }
        Some(signal) => (Cause::Internal, format!("the pulling process was ended by signal {signal}")),
        None => (Cause::Internal, format!("the pulling process ended without a result: {status}")),
    };
    Error::new(cause, format!("pulling {}: {how}", job.image))
}
