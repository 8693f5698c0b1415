//! Tests of the guest program from outside, in namespaces and in machines.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod clouds;
mod life;
mod machine;
mod nics;
mod relay;
mod unit;
mod vm;
