//! Keeps a relay's container when its place was taken: the relay is a child, whose end is waited for. One that ended because
//! another process took over would be started again by whoever runs the container, and take over in its turn, for ever;
//! so then this process goes on and does nothing, until it is told to end. Every other end is passed on.
//!
//! May touch: its child.

use std::{
    io,
    os::unix::process::ExitStatusExt,
    process::{ExitCode, ExitStatus},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tokio::{
    process::Command,
    signal::unix::{SignalKind, signal},
};

/// What makes the child a relay; the last flag of a name counts.
const CHILD: &str = "--relay.replaced=end";

/// Runs a relay as a child until it ends, or its place was taken and we are told to end.
///
/// # Errors
/// It cannot be started.
pub async fn keep() -> io::Result<ExitCode> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
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
                    // One that is gone; its end comes next.
                    tracing::debug!(%error, "not told to end");
                }
            }
        }
    };
    if status.success() && !passed {
        tracing::info!("another peerpod-relay has taken this one's place; waiting to be told to end");
        told().await;
    }
    Ok(code(status))
}

/// As a shell says it.
fn code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}
