//! Runs a sandbox from CreateVM to its tombstone. The table maps its id to the task that owns its state. The steps of
//! the task are the operations of each phase.

mod clear;
mod completions;
mod dhcp;
mod flush;
mod in_flight;
pub(crate) mod phase;
mod steps;
mod table;
mod task;
mod view;

pub(crate) use completions::clip;
pub(crate) use in_flight::{Backoff, Completion, Slots, Which};
pub(crate) use phase::{MAX_ATTEMPTS, Phase, PhaseEvent, next};
pub(crate) use steps::address;
pub(crate) use table::{CreateVm, Entry, Running, Sandboxes};
pub(crate) use task::{Command, Stop, Task, Unapplied};
pub(crate) use view::View;
