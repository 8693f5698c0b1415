//! Tests the provider against a fake of Alibaba Cloud.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod common;
mod conformance;
mod credentials;
mod drops;
mod events;
mod node;
mod policy;
mod refusals;
mod requests;
#[cfg(feature = "witness")]
mod witness;
