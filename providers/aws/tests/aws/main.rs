//! Tests the AWS provider against a simulated EC2.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod common;
mod conformance;
mod drops;
mod node;
mod policy;
mod refusals;
mod upload;
mod witness;
