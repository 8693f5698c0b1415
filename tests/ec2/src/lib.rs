//! An EC2 to test against: moto, and in front of it what EC2 does and moto does not.
//!
//! * [`Proxy`]: an EC2 of its own per test, with client tokens, capacity per type and zone, token buckets, late sight,
//!   EC2's refusals, lost and late answers; it writes down every call.
//! * [`Moto`]: the simulator behind it, one per test process, with an account per proxy. Its Python environment is made
//!   by `setup` in this folder, from PyPI, once.
//! * [`Proxy::boto3`]: somebody else's client, as a witness of what there is.

mod faults;
pub mod form;
mod moto;
mod proxy;
mod rules;
mod witness;
pub mod xml;

pub use faults::{Bucket, Fault, ec2_bucket};
pub use moto::Moto;
pub use proxy::{Call, Proxy, REGION};
