//! Messages between the guest program and `peerpod-pull`, which it starts for each image. Only data types: the guest
//! program lives as long as its VM, and should contain nothing of an HTTP client.

pub mod cause;
mod job;

pub use cause::{Cause, Error};
pub use job::{Event, Job, Limits, Outcome};
