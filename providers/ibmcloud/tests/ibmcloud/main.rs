//! Tests the IBM Cloud VPC provider against a fake of the VPC API. Nothing here runs against IBM Cloud itself.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod common;
mod conformance;
mod credentials;
mod drops;
mod node;
mod policy;
mod refusals;
mod requests;
#[cfg(feature = "witness")]
mod witness;
