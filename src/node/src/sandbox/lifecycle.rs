//! Runs a sandbox from CreateVM to its tombstone.
//!
//! * [`phase`]: the phases and their transitions; pure.
//! * `table` (`Sandboxes`): maps an id to its task; the hypervisor API's calls end here.
//! * `task`, with `steps`, `completions`, `in_flight` and `clear`: the owner of one sandbox's state.
//! * `view`: the state that the task publishes.

pub(crate) mod clear;
pub(crate) mod completions;
pub(crate) mod in_flight;
pub(crate) mod phase;
pub(crate) mod steps;
pub(crate) mod table;
pub(crate) mod task;
pub(crate) mod view;
