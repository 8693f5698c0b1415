//! Daemons that are killed, restarted and replaced under running pods.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod survive;
mod takeover;
