//! The inside of `peerpod-local-vm`: the process that is a VM's "hypervisor", and the first program inside the VM.
//!
//! * `hypervisor` stays outside, in a session of its own: it makes the namespaces and the uplink, starts pid 1,
//!   keeps the console, records how the VM ended. It dies with the VM and the VM with it, and neither with the node.
//! * `inside` is pid 1 until the guest program takes its place: it builds the root directory and steps into it.
//!
//! Both are single-threaded and plain synchronous code: a process with threads cannot be moved to new namespaces as
//! a whole. They touch what the description on their standard input names, and nothing else of the node's.

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

use crate::network::Card;
use crate::process::ProcessId;

/// Descriptions hold user-data of at most 64 KiB; anything near this is a mistake.
const MAX_DESCRIPTION: u64 = 1 << 20;

/// One VM to make: what the provider writes to the hypervisor process.
#[derive(Serialize, Deserialize)]
pub(crate) struct Description {
    pub(crate) version: u32,
    /// The instance id.
    pub(crate) id: String,
    /// The VM's directory in the provider's state.
    pub(crate) dir: PathBuf,
    /// Its network cards, at least one.
    pub(crate) cards: Vec<Card>,
    pub(crate) inside: Inside,
}

/// What pid 1 has to know; the hypervisor process hands it on.
#[derive(Serialize, Deserialize)]
pub(crate) struct Inside {
    pub(crate) hostname: String,
    pub(crate) machine_id: String,
    pub(crate) guest_binary: PathBuf,
    pub(crate) agent_binary: PathBuf,
    pub(crate) user_data: String,
    pub(crate) boot_delay_ms: u64,
    /// Where the root is mounted, an empty directory.
    pub(crate) root: PathBuf,
    /// The hypervisor process, filled in by itself: pid 1 must not outlive it.
    pub(crate) hypervisor: Option<ProcessId>,
}

/// What the hypervisor process answers on its standard output, as one line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Answer {
    /// The VM runs.
    Running,
    /// Another process makes or unmakes this VM right now.
    Busy,
    /// It could not be made.
    Failed {
        /// For people.
        text: String,
        /// Whether it may work when tried again.
        transient: bool,
    },
}

/// `main` of `peerpod-local-vm`.
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

/// A session of our own, so that no terminal's and no process group's signal finds us.
fn leave_the_session() {
    // Fails only where we lead one already, which is as good.
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
