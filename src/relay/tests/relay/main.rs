//! Tests of the relay's program from outside.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod common;
mod dials;
mod door;
mod guests;
mod process;
mod replaced;
mod sandbox;
