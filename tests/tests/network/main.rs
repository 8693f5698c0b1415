//! Tests pods' traffic through the tunnel: CNI shapes, faults, changes, kills, encryption, localhost.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod encrypted;
mod faults;
mod follow;
mod killed;
mod localhost;
mod network_common;
mod pods;
mod underlay;
