//! Tests hostile shims, guests and files, and the trust between components.

#![allow(clippy::unwrap_used)] // test code outside of test functions

#[path = "../guest_common/mod.rs"]
mod guest_common;
mod hostile;
mod hostile_guest;
mod policy;
mod rights;
mod trust;
