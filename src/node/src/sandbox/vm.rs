//! Makes the VMs of sandboxes, and follows their state in the cloud.
//!
//! * `batch`: one create call for the VMs of several sandboxes.
//! * `liveness`: finds VMs that are gone. `events`: announces VMs that the cloud will reclaim.
//! * `console`: the end of a VM's console, for error messages.
//! * `reaper`: stops sandboxes without a StopVM.

pub(crate) mod batch;
pub(crate) mod console;
pub(crate) mod events;
pub(crate) mod liveness;
pub(crate) mod reaper;
