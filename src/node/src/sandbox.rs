//! The heart: one task per sandbox that owns its state, a table that finds it, and the ledger's intent before every
//! effect.
//!
//! * [`phase`]: where a sandbox may go; pure.
//! * [`effects`]: the seam to everything that is not pure.
//! * `task` (with `steps`, `outcomes`, `claims`, `clear`, `slots`): the owner of one sandbox.
//! * `batch`: VMs that several sandboxes get by one call. `tickets`: whose claim it is.
//! * `table` ([`Sandboxes`]): id → task; the door's calls end here.
//! * [`recover`]: what a restarted node does before it answers anybody.
//! * `reports`: what guests say of their networks.
//! * `reaper`: what nobody stops. `deaths`: VMs that are gone; `notices`: VMs that
//!   the cloud takes back. `revive`: tasks of ours that panicked.
//!
//! Knows nothing of ttrpc, sockets or providers' names.

use std::{path::PathBuf, time::Duration};

pub mod effects;
pub mod phase;
pub mod recover;

mod batch;
mod claims;
mod clear;
mod console;
mod deaths;
mod error;
pub mod follow;
mod localhost;
mod notices;
mod outcomes;
mod pull;
mod reaper;
mod renew;
mod reports;
mod revive;
mod slots;
mod steps;
mod table;
mod task;
mod tickets;
mod view;

pub use claims::{Claim, Secret};
pub use deaths::Deaths;
pub use error::{ClaimRefused, Error, Granted};
pub use reaper::Reaper;
pub use table::{Sandboxes, Wish};
pub use task::Stop;
pub use view::View;

use crate::spec::{SandboxId, Wishes};

/// What all sandboxes of this node have in common.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Part of every idempotency key; the same for the life of the cluster.
    pub cluster_id: String,
    /// This node, for VM labels.
    pub node_name: String,
    /// Where `<id>/agent.ttrpc` is, absolute.
    pub pods_dir: PathBuf,
    /// Where guests reach this node, in words.
    pub guest_addresses: String,
    /// How long from CreateVM (or a restart of ours) until the guest must be ready.
    pub boot_timeout: Duration,
    /// How long a start may take before it is said what it waits for.
    pub slow_after: Duration,
    /// How long one StartVM may wait.
    pub start_timeout: Duration,
    /// How long the agent in the VM may take to listen.
    pub agent_timeout: Duration,
    /// How long the guest may take to flush.
    pub flush_timeout: Duration,
    /// How long a ticket is good for, from CreateVM.
    pub ticket_ttl: Duration,
    /// The guest powers off when the link was silent for so long.
    pub lease: Duration,
    /// How long a stopped id stays known.
    pub tombstone_ttl: Duration,
    /// When a sandbox that StartVM never came for is taken away.
    pub never_started_grace: Duration,
    /// How long a sandbox's network namespace must have been gone before it is taken away.
    pub netns_gone_grace: Duration,
    /// How long a running sandbox's guest must have been away before the provider is asked whether its VM is gone.
    pub vm_gone_grace: Duration,
    /// Live sandboxes at once.
    pub max_sandboxes: usize,
    /// Memory in MiB that a guest needs besides its pod.
    pub guest_memory_mib: u64,
    /// Ask for VMs with a second network card.
    pub second_nic: bool,
    /// What pods' VMs are like that do not say so themselves.
    pub wishes: Wishes,
    /// Which wishes a pod may have of its own, by their names in [`Wishes::ALL`].
    pub may_wish: Vec<String>,
    /// The port on which VMs wait for the relay to dial; none: they dial.
    pub dial: Option<u16>,
    /// Most VMs to ask for by one call; below 2: each by itself.
    pub max_batch: u32,
}

/// `sun_path` holds this many bytes, the closing NUL among them.
const SUN_PATH: usize = 108;

impl Settings {
    /// Where the relay serves the sandbox's agent.
    pub fn agent_socket(&self, id: &SandboxId) -> PathBuf {
        self.pods_dir.join(id.as_str()).join("agent.ttrpc")
    }

    /// The same as text for the shim, which makes an URL of it.
    ///
    /// # Errors
    /// When it does not fit a socket address, or has a character that means something in an URL.
    pub fn agent_socket_text(&self, id: &SandboxId) -> Result<String, Error> {
        let path = self.agent_socket(id);
        let text = path.to_string_lossy();
        if text.len() >= SUN_PATH {
            return Err(Error::Invalid(format!(
                "agent socket {text}: {} bytes, and a socket's path has at most {}; shorten paths.run-dir",
                text.len(),
                SUN_PATH - 1
            )));
        }
        if text.contains([':', '%', '?', '#']) {
            return Err(Error::Invalid(format!(
                "agent socket {text}: the shim cannot parse it; choose another paths.run-dir"
            )));
        }
        Ok(text.into_owned())
    }
}

#[cfg(test)]
mod tests;
