//! One relay process takes the place of another, and no pod notices: the new one asks the old one on `takeover.sock`, gets
//! copies of its descriptors and what it knows, and the old one leaves.
//!
//! The old process stands still while it shows what it is (`give`), and until it says the last word it goes on as if nothing
//! had been, whatever happens to the new one. Its last word is one message; that this was sent is what decides. The new one
//! touches nothing before (`take`). When the old one dies between the new one's word and its own, there is nobody else left,
//! and the new one goes on. `wire` is how messages look.
//!
//! May touch: `takeover.sock`, and what it is given.

pub(crate) mod give;
pub(crate) mod report;
pub(crate) mod take;
mod wire;

use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};

/// The socket's name in the run-dir.
pub(crate) const SOCKET: &str = "takeover.sock";
/// The newest form of what is handed over, and the oldest that is understood.
pub(crate) const VERSION: u32 = 1;
pub(crate) const OLDEST: u32 = 1;

/// What of the process itself is handed over, beside its descriptors.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Process {
    /// The epoch and the number of changes that the node has seen.
    pub(crate) epoch: String,
    pub(crate) version: u64,
    /// A name for each descriptor.
    names: Vec<String>,
}

/// Descriptors of the process itself, by name: the lock and the listeners.
pub(crate) type Named = Vec<(String, OwnedFd)>;

/// Names of [`Named`].
pub(crate) mod name {
    pub(crate) const LOCK: &str = "lock";
    pub(crate) const TAKEOVER: &str = "takeover";
    pub(crate) const HYPERVISOR: &str = "hypervisor";
    pub(crate) const CONTROL: &str = "control";
    pub(crate) const HAND_IN: &str = "hand-in";
    pub(crate) const GUESTS: &str = "guests";
    pub(crate) const PROBES: &str = "probes";
    pub(crate) const ADMIN: &str = "admin";
}

#[cfg(test)]
mod tests;
