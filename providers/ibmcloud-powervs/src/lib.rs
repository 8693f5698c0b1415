//! Provider of pod VMs on IBM Power Virtual Server (PowerVS).
//!
//! * `config.rs` holds the settings; `size.rs` the size of a VM, in quarters of a core.
//! * `create.rs` makes VMs. PowerVS has neither idempotent calls nor unique names, so it looks by name before and after
//!   each POST; `duplicates.rs` chooses one of several VMs of one name. `body.rs` builds the POST.
//! * `vms.rs` lists and looks up VMs, and reads their tags once; `leases.rs` finds addresses that DHCP gives.
//! * `client.rs` makes every call; `refusal.rs` is the table of refusals.
//!
//! Touches the PowerVS API of a region and IAM; keeps nothing on disk.

mod body;
mod client;
pub mod config;
mod create;
mod duplicates;
mod leases;
mod preflight;
mod provider;
mod refusal;
mod size;
mod vms;

pub use config::PowerVsConfig;
use provider::PowerVs;
pub use provider::PowerVsProvider;
