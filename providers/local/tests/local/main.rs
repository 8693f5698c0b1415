//! Tests the local provider: VMs that are namespaces.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod common;
mod conformance;
mod deaths;
mod external;
mod machines;
