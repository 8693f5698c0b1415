//! Continues after a crash: `recover` restores the sandboxes of a restarted node, `restart` those of a task that
//! panicked.

pub(crate) mod recover;
pub(crate) mod restart;
