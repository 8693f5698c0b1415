//! Tests daemons that are killed, restarted and upgraded while pods run.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod handover;
mod survive;
