//! Implements `peerpod-local-vm`: the hypervisor process of a VM, and the first program inside the VM.
//!
//! * `hypervisor` stays outside, in its own session. It makes the namespaces and the underlay devices, starts pid 1,
//!   keeps the console and records the end of the VM. It ends with the VM and the VM with it, and neither ends with the
//!   node.
//! * `inside` is pid 1 until the guest program replaces it. It builds the root directory and enters it.
//!
//! Both are single-threaded and plain synchronous code: a process with threads cannot be moved to new namespaces as a
//! whole. On the node, they touch only the paths and devices that the description on their standard input names.

mod console;
mod hypervisor;
mod inside;
mod root;

pub(crate) use console::tail as console_tail;

use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::network::LocalNic;
use crate::process::ProcessId;

/// Most bytes of a description. It holds user-data of at most 64 KiB, so anything near this is a mistake.
const MAX_DESCRIPTION: u64 = 1 << 20;

/// Description of a VM, which the provider writes to the hypervisor process.
#[derive(Serialize, Deserialize)]
pub(crate) struct Description {
    pub(crate) version: u32,
    /// Directory of the VM in the provider's state.
    pub(crate) dir: PathBuf,
    /// NICs of the VM, at least one.
    pub(crate) nics: Vec<LocalNic>,
    pub(crate) inside: Inside,
}

/// Description for pid 1, which the hypervisor process passes on.
#[derive(Serialize, Deserialize)]
pub(crate) struct Inside {
    /// Instance id of the VM.
    pub(crate) id: String,
    pub(crate) hostname: String,
    pub(crate) machine_id: String,
    pub(crate) guest_binary: PathBuf,
    pub(crate) agent_binary: PathBuf,
    pub(crate) user_data: String,
    pub(crate) boot_delay_ms: u64,
    /// Mount point of the root, an empty directory.
    pub(crate) root: PathBuf,
    /// Hypervisor process, which fills this in: pid 1 must not outlive it.
    pub(crate) hypervisor: Option<ProcessId>,
}

/// Answer of the hypervisor process on its standard output, as one line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LaunchAnswer {
    Running,
    /// Another process is making or removing this VM.
    Busy,
    /// The VM could not be made.
    Failed {
        text: String,
        /// Whether another try may succeed.
        transient: bool,
    },
}

/// Entry point of `peerpod-local-vm`.
pub fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        None => hypervisor::main(),
        Some(inside::ARGUMENT) => inside::main(),
        Some(_) => {
            eprintln!(
                "peerpod-local-vm is started by the local provider, with a VM's description on standard input"
            );
            ExitCode::from(2)
        }
    }
}

/// Starts a new session, so that no signal of a terminal or of a process group arrives.
fn leave_the_session() {
    // Fails only where this process leads one already, which is as good.
    if let Err(errno) = nix::unistd::setsid() {
        debug_assert_eq!(errno, nix::errno::Errno::EPERM);
    }
}

/// Reads a description to the end of the input.
fn read<T: DeserializeOwned>(input: impl Read) -> anyhow::Result<T> {
    let mut bytes = Vec::new();
    input.take(MAX_DESCRIPTION).read_to_end(&mut bytes)?;
    Ok(serde_json::from_slice(&bytes)?)
}
