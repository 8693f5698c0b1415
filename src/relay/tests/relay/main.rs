//! Tests of the relay's program from outside.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod common;
mod guest_dialer;
mod guests;
mod hypervisor;
mod process;
mod replaced;
mod sandbox;
