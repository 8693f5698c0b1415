//! Handover from one relay process to another, unnoticed by the pods. The new relay asks the old one on `takeover.sock`
//! and gets duplicates of its descriptors and its state; then the old relay exits.
//!
//! The old relay (`old`) is frozen while it sends its state. Until it sends `Yours`, it can always resume, independent
//! of the new relay. The handover takes effect with that one message. The new relay (`new`) changes nothing before it.
//! If the old relay dies between `Taken` and `Yours`, the new relay takes over: no other process is left.
//!
//! May touch: `takeover.sock`, and the descriptors and state that it receives.

pub(crate) mod new;
pub(crate) mod old;
mod protocol;
pub(crate) mod report;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tokio::sync::RwLock;

/// Name of the socket in the run-dir.
pub(crate) const SOCKET: &str = "takeover.sock";
/// Newest version of the handover format.
pub(crate) const VERSION: u32 = 1;
/// Oldest version of the handover format that this program reads.
pub(crate) const OLDEST: u32 = 1;

/// State of the process itself, sent with its descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Process {
    /// Epoch and number of changes that the node has seen.
    pub(crate) epoch: String,
    pub(crate) version: u64,
    names: Vec<String>,
}

/// Lock that each change of the node takes shared (`read_owned`), and a handover exclusively (`write_owned`).
pub(crate) type Pause = Arc<RwLock<()>>;

/// Descriptors of the process itself, by name: the lock and the listeners.
pub(crate) type Named = Vec<(String, OwnedFd)>;

pub(crate) mod name {
    pub(crate) const LOCK: &str = "lock";
    pub(crate) const HANDOVER: &str = "takeover";
    pub(crate) const HYPERVISOR: &str = "hypervisor";
    pub(crate) const CONTROL: &str = "control";
    pub(crate) const FD_HANDOFF: &str = "hand-in";
    pub(crate) const GUESTS: &str = "guests";
    pub(crate) const PROBES: &str = "probes";
    pub(crate) const ADMIN: &str = "admin";
}

#[cfg(test)]
mod tests;
