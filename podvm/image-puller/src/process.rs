//! Runs one job in a process: `peerpod-pull`.

use std::fmt::Display;
use std::io::{self, Read, Write};
use std::process::ExitCode;
use std::time::Duration;

use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::Signal;

use crate::cause::{Cause, Error};
use crate::pull::pull;
use crate::{Event, Job};

/// Size limit of a job in bytes: a pull secret, CA certificates and some names.
const MAX_JOB: u64 = 32 << 20;

/// Reads a [`Job`] from standard input, does it, and writes [`Event`]s to standard output. Ends with the program that
/// started it: a pull without a waiting caller has no use.
pub fn run() -> ExitCode {
    let (event, code) = match begin().and_then(work) {
        Ok(outcome) => (Event::Done(outcome), ExitCode::SUCCESS),
        Err(error) => (Event::Failed(error), ExitCode::FAILURE),
    };
    say(&event);
    code
}

fn internal<E: Display>(what: &str) -> impl Fn(E) -> Error {
    move |error| Error::new(Cause::Internal, format!("{what}: {error}"))
}

fn begin() -> Result<Job, Error> {
    prctl::set_pdeathsig(Signal::SIGKILL).map_err(internal("asking to end with the guest"))?;
    // The process holds a pull secret.
    prctl::set_dumpable(false).map_err(internal("asking for no core dump"))?;
    let mut text = Vec::new();
    io::stdin().take(MAX_JOB).read_to_end(&mut text).map_err(internal("reading the job"))?;
    // The parser's text could repeat the secret; the position suffices.
    serde_json::from_slice(&text)
        .map_err(|e| internal("reading the job")(format!("line {}, column {}", e.line(), e.column())))
}

fn work(job: Job) -> Result<crate::Outcome, Error> {
    let memory = job.limits.memory_mib << 20;
    setrlimit(Resource::RLIMIT_DATA, memory, memory).map_err(internal("bounding its memory"))?;
    nix::sys::stat::umask(nix::sys::stat::Mode::empty());
    if rustls::crypto::ring::default_provider().install_default().is_err() {
        return Err(internal("choosing cryptography")("it was chosen before"));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(internal("starting"))?;
    let limit = Duration::from_secs(job.limits.seconds);
    let pulled = runtime.block_on(async { tokio::time::timeout(limit, pull(&job)).await });
    // A name look-up cannot be interrupted.
    runtime.shutdown_background();
    let mut outcome = pulled.unwrap_or_else(|_| {
        let seconds = limit.as_secs();
        let text = format!("not done within {seconds} s (images.limits.seconds); the next pull continues it");
        Err(Error::new(Cause::Late, text))
    });
    if let Err(error) = &mut outcome {
        error.text = format!("pulling {}: {}", crate::cause::quote(&job.image), error.text);
    }
    outcome
}

/// Writes one line. The reader may be gone; then this process ends in a moment, too.
pub(crate) fn say(event: &Event) {
    if let Ok(mut line) = serde_json::to_vec(event) {
        line.push(b'\n');
        let mut out = io::stdout().lock();
        drop(out.write_all(&line).and_then(|()| out.flush()));
    }
}
