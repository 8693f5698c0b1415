//! The AWS provider against a simulated EC2.

mod common;
mod conformance;
mod drops;
mod node;
mod policy;
mod refusals;
mod witness;
