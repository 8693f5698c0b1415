//! Makes the VMs of sandboxes, and follows their state in the cloud.

pub(crate) mod batch;
pub(crate) mod console;
pub(crate) mod events;
pub(crate) mod liveness;
pub(crate) mod reaper;
