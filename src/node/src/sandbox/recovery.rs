//! Continues after a crash of the node (`recover`), and after a panic of one task (`restart`).

pub(crate) mod recover;
pub(crate) mod restart;
