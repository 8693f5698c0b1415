//! Provides an EC2 for tests: moto, behind a proxy that adds EC2's behaviour where moto lacks it.
//!
//! * [`Proxy`]: one EC2 per test, with client tokens, capacity per type and zone, token buckets, delayed visibility,
//!   EC2's refusals, lost and late answers. It records every call.
//!   It serves the EBS direct APIs and EC2's quotas, too.
//! * [`Moto`]: the simulator behind it, one per test process, with an account per proxy. `setup` in this folder makes
//!   its Python environment, from PyPI, once.
//! * [`Proxy::boto3`]: an independent client, as a witness of the account's state.

mod ebs;
pub mod form;
mod moto;
mod proxy;
mod quotas;
mod rules;
mod witness;
pub mod xml;

pub use moto::Moto;
pub use peerpod_test_clouds::{Fault, Rate};
pub use proxy::{Call, Proxy, REGION};
pub use rules::rate;
