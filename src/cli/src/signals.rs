//! Signals that end a command which must clean up first.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Exit code that a shell reports for a program ended by Ctrl-C.
pub(crate) const INTERRUPTED: u8 = 130;

/// Signals that end a command. The handlers stay, so that a second Ctrl-C does not interrupt the clean-up.
pub(crate) struct Signals([Signal; 3]);

impl Signals {
    /// Takes the signals from now on.
    ///
    /// # Errors
    /// The process has no room for a handler.
    pub(crate) fn new() -> std::io::Result<Signals> {
        let [interrupt, terminate, hangup] =
            [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
        Ok(Signals([interrupt?, terminate?, hangup?]))
    }

    /// Waits for a signal and returns its name.
    pub(crate) async fn next(&mut self) -> &'static str {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => "Ctrl-C",
            _ = terminate.recv() => "SIGTERM",
            _ = hangup.recv() => "SIGHUP",
        }
    }
}
