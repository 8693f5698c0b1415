//! Implements the common parts of cloud providers.
//!
//! * [`catalogue`], [`mod@plan`], [`exhausted`] and [`Planner`]: the instance types, zones and markets that suit a
//!   request, in order, and the reason for rejecting every other one. Pure, except that [`Planner`] remembers exhausted
//!   offerings.
//! * [`calls`]: the schedule of the API calls of one account, with adaptive token buckets, fairness between pods,
//!   limits of concurrency, and deadlines.
//! * [`batch`]: one call for the requests of many callers within a short time.
//! * [`names`] and [`marks`]: the name of a VM, which makes a create idempotent, and the marks that prove its owner.
//! * [`VmState`] and [`addresses`]: the life-cycle states of a VM, and the order of its addresses.
//! * [`Kept`], [`Recent`], [`Strays`], [`Wait`] and [`wait_for`]: answers of the cloud that are old, late or not yet
//!   consistent.
//! * [`image`]: the upload of a built disk image.
//! * [`refusal`]: the cloud's error codes as provider errors, by a table. [`settings`]: the settings of every cloud.
//!
//! Depends on no cloud and opens no connection: the provider makes the calls. May touch the clock, read configuration and
//! built images, and spawn tasks.

pub mod batch;
pub mod calls;
pub mod catalogue;
pub mod exhausted;
pub mod image;
mod kept;
pub mod marks;
pub mod names;
pub mod plan;
mod planner;
mod recent;
pub mod refusal;
pub mod settings;
mod strays;
mod text;
mod vm;
mod wait;

pub use batch::{Batcher, Lookup, Window};
pub use calls::{ApiCall, Scheduler, until};
pub use catalogue::{Catalogue, Location, MachineType, Offering, Prices};
pub use kept::Kept;
pub use marks::{Alphabet, Marks};
pub use plan::{Plan, Policy, RejectReason, Rejection, plan};
pub use planner::{Planner, check_creates, offering, offerings};
pub use recent::Recent;
pub use refusal::{Meaning, Refusals};
pub use strays::Strays;
pub use vm::{VmState, addresses};
pub use wait::{Look, Wait, wait_for};
