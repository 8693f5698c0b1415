//! Tests the provider against a fake of Google Cloud.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod batches;
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
