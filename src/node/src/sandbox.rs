//! Owns the sandboxes of this node: one task per sandbox, a table that maps ids to tasks, and the intent that the
//! ledger records before every operation. Independent of ttrpc, sockets and provider names.

use std::path::PathBuf;
use std::time::Duration;

mod error;
mod guest;
mod lifecycle;
mod network;
pub(crate) mod ports;
mod recovery;
mod vm;

pub(crate) use error::{ClaimRefused, Error};
pub(crate) use guest::claims::Claim;
pub(crate) use lifecycle::{CreateVm, Sandboxes, Stop, View, phase};
pub(crate) use recovery::recover::{Kept, Orphans, recover};
pub(crate) use vm::liveness::VmLiveness;
pub(crate) use vm::reaper::Reaper;

use peerpod_base::admin::Ready;

use crate::spec::SandboxId;
use crate::traces::Tracer;

/// Settings shared by all sandboxes of this node.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Part of every idempotency key; the same for the life of the cluster.
    pub cluster_id: String,
    /// Name of this node, for VM labels.
    pub node_name: String,
    /// Absolute path of the directory that holds `<id>/agent.ttrpc`.
    pub pods_dir: PathBuf,
    /// Addresses at which guests reach this node, as text for error messages.
    pub guest_addresses: String,
    /// Time from CreateVM, or from a restart of the node, until the guest must be ready.
    pub boot_timeout: Duration,
    /// Time after which the node logs and posts the missing step of a start.
    pub slow_after: Duration,
    pub start_timeout: Duration,
    /// Time within which kata-agent in the VM must listen.
    pub agent_timeout: Duration,
    pub flush_timeout: Duration,
    /// Lifetime of a ticket, from CreateVM.
    pub ticket_ttl: Duration,
    /// Silence on the link after which the guest powers off.
    pub lease: Duration,
    /// Time for which the id of a stopped sandbox stays known.
    pub tombstone_ttl: Duration,
    /// Time after which the node stops a sandbox that got no StartVM.
    pub never_started_grace: Duration,
    /// Time for which a network namespace must be gone before the node stops its sandbox.
    pub netns_gone_grace: Duration,
    /// Time for which a shim must be gone before the node stops its sandbox.
    pub shim_gone_grace: Duration,
    /// Time for which the guest of a running sandbox must be away before the node asks the provider about its VM.
    pub vm_gone_grace: Duration,
    pub max_sandboxes: usize,
    /// Memory in MiB that a guest needs in addition to its pod.
    pub guest_memory_mib: u64,
    pub second_nic: bool,
    /// VM options that a pod may set itself, by their names in [`crate::spec::VmOptions::ALL`].
    pub allowed_options: Vec<String>,
    /// Port on which VMs wait for the relay to dial; `None` if the guests dial.
    pub dial: Option<u16>,
    /// Maximum number of VMs in one create call; below 2, each VM has its own call.
    pub max_batch: u32,
    /// Exports the traces of starts.
    pub tracer: Tracer,
    /// The node's readiness, for warnings.
    pub ready: Ready,
}

/// Size of `sun_path` in bytes, including the closing NUL.
const SUN_PATH: usize = 108;

impl Settings {
    /// Returns the path on which the relay serves the sandbox's agent.
    pub fn agent_socket(&self, id: &SandboxId) -> PathBuf {
        self.pods_dir.join(id.as_str()).join("agent.ttrpc")
    }

    /// Returns the agent socket's path as text for the shim. Fails where it does not fit a socket address.
    pub(crate) fn agent_socket_text(&self, id: &SandboxId) -> Result<String, Error> {
        let text = self.agent_socket(id).to_string_lossy().into_owned();
        if text.len() >= SUN_PATH {
            return Err(Error::Invalid(format!(
                "agent socket {text}: {} bytes, and a socket's path has at most {}; shorten paths.run-dir",
                text.len(),
                SUN_PATH - 1
            )));
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests;
