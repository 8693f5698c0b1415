//! Tests the libvirt provider against a real libvirtd.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod common;
mod conformance;
mod faults;
mod reserve;
mod upload;
