//! Tests the provider against govmomi's simulator of a vCenter.

#![cfg(feature = "witness")]
#![allow(clippy::unwrap_used)] // test code outside of test functions

mod common;
mod conformance;
mod disks;
mod drops;
mod node;
mod policy;
mod refusals;
mod requests;
mod sessions;
mod witness;
