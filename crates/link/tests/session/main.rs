//! Tests of the link between two ends: dialled, cut, resumed.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod dialled;
mod link;
mod support;
