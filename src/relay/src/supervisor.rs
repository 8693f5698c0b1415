//! Supervisor: runs the relay as a child process and keeps its container after a handover. A relay that ends because a
//! new relay took over would be restarted by the container runtime and take over in turn, for ever. So after a handover
//! the supervisor stays, idle, until a signal ends it. It passes on every other exit status.
//!
//! May touch: its child.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};

/// Flag that makes the child a relay; the last flag of a name counts.
const CHILD: &str = "--relay.replaced=end";

/// Runs a relay as a child until the child ends or, after a handover, until a signal arrives.
pub async fn keep() -> io::Result<ExitCode> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    // It switches the level of a relay's log, and must not end this process.
    let _level = signal(SignalKind::user_defined1())?;
    let mut told = async || {
        tokio::select! {
            _ = terminate.recv() => Signal::SIGTERM,
            _ = interrupt.recv() => Signal::SIGINT,
        }
    };
    let program = std::env::current_exe()?;
    let mut relay = Command::new(program).args(std::env::args_os().skip(1)).arg(CHILD).spawn()?;
    let mut passed = false;
    let status = loop {
        tokio::select! {
            status = relay.wait() => break status?,
            signal = told() => {
                passed = true;
                if let Some(pid) = relay.id().and_then(|pid| i32::try_from(pid).ok())
                    && let Err(error) = kill(Pid::from_raw(pid), signal)
                {
                    // The child has ended; the next iteration reads its status.
                    tracing::debug!(%error, "cannot signal the relay to end");
                }
            }
        }
    };
    if status.success() && !passed {
        tracing::info!("another peerpod-relay took over from this one; waiting for a signal to end");
        told().await;
    }
    Ok(code(status))
}

/// Converts an exit status as a shell does: a signal becomes 128 + its number.
fn code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
