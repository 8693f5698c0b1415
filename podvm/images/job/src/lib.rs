//! What the guest program and `peerpod-pull`, which it starts for each image, say to each other. Forms alone: so the guest
//! program, which lives as long as its VM, has nothing of an HTTP client in it.

pub mod cause;
mod job;

pub use cause::{Cause, Error};
pub use job::{Event, Job, Limits, Outcome};
