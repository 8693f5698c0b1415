//! Tests the provider of machines that exist against real OpenSSH servers: each machine is an sshd in namespaces of its
//! own, with a tmpfs that ends with it. Needs root and the package openssh-server.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod claims;
mod common;
mod conformance;
mod drops;
mod faults;
mod lists;
mod node;
mod steps;
