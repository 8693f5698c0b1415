//! Implements the common parts of cloud providers.
//!
//! * [`catalogue`], [`mod@plan`], [`marks`] and [`Planner`]: the instance types, zones and markets that suit a request,
//!   in order, and the reason for rejecting every other one. Pure, except that [`Planner`] remembers exhausted
//!   offerings.
//! * [`calls`]: the schedule of the API calls of one account, with adaptive token buckets, fairness between pods,
//!   limits of concurrency, and deadlines.
//! * [`batch`]: one call for the requests of many callers within a short time.
//!
//! Depends on no cloud and opens no connection: the provider makes the calls. May touch the clock and spawn tasks.

pub mod batch;
pub mod calls;
pub mod catalogue;
pub mod marks;
pub mod plan;
mod planner;
mod text;

pub use batch::{Batcher, Window};
pub use calls::{ApiCall, Scheduler};
pub use catalogue::{Catalogue, Location, MachineType, Offering, Prices};
pub use plan::{Plan, Policy, RejectReason, Rejection, plan};
pub use planner::{Planner, offerings};
