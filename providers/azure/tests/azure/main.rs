//! Tests the Azure provider against a fake of Azure. Nothing here runs against Azure itself.

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
