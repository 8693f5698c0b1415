//! What providers of clouds share, so that none writes its own.
//!
//! * [`catalogue`], [`mod@plan`], [`marks`] and [`Planner`]: which instance types, zones and markets suit a request, in
//!   which order, and for every other one the reason why not. Pure but for [`Planner`]'s memory of what was exhausted.
//! * [`calls`]: the cloud's API calls of one account, each in its turn: token buckets that adapt, fair between pods,
//!   with limits of concurrency and deadlines.
//! * [`batch`]: one call for what many callers want within a moment.
//! * [`wait`]: waiting for what a cloud does in its own time, with few looks.
//!
//! Depends on no cloud, and opens no connection: the calls are the provider's. May touch the clock and spawn tasks.

pub mod batch;
pub mod calls;
pub mod catalogue;
pub mod marks;
pub mod plan;
mod planner;
pub mod wait;
mod words;

pub use batch::{Batcher, Window};
pub use calls::{Call, Scheduler};
pub use catalogue::{Catalogue, MachineType, Offering, Place, Prices};
pub use plan::{Need, Plan, Policy, Reason, Rejection, plan};
pub use planner::{Planner, offerings};
pub use wait::Wait;
