//! Tests providers in other programs, over their socket.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod common;
mod faults;
mod pki;
mod python;
mod served;
mod tls;
