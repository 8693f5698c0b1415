//! Tests the PowerVS provider against a fake of PowerVS. Nothing here runs against PowerVS itself.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod common;
mod conformance;
mod drops;
mod node;
mod policy;
mod refusals;
mod requests;
#[cfg(feature = "witness")]
mod witness;
