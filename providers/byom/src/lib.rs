//! Provider of pod VMs on machines that exist ("machines you bring"), by SSH and SFTP.
//!
//! A machine keeps its own claim: one file, made with exclusive creation, in a folder that is a tmpfs. A reboot frees
//! the machine, so no state of a pod outlives it, and no record exists anywhere else.
//!
//! * `config.rs` holds the settings; `config/machines.rs` parses addresses and ranges.
//! * `pool/` is the provider, with the feature `ssh`:
//!   * `connect.rs` dials a machine whose host key is pinned, `files.rs` reads and writes its files by SFTP.
//!   * `claim.rs` defines the files of a machine.
//!   * `machine.rs` looks at a machine; `known.rs` keeps the last look.
//!   * `place.rs` chooses a free machine, `create.rs` claims it, `remove.rs` has it rebooted.
//!   * `list.rs` lists the machines with claims of this owner, `events.rs` watches them, `metrics.rs` counts all.
//!
//! Touches the machines, and the files of the key and of the host keys; keeps nothing on disk.

pub mod config;
#[cfg(feature = "ssh")]
mod pool;

pub use config::ByomConfig;
#[cfg(feature = "ssh")]
pub use pool::ByomProvider;
