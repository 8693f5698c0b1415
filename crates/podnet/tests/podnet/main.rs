//! Tests of pods' networks in real namespaces.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod conntrack;
mod copy;
mod external;
mod follow;
mod inspect;
mod messages;
mod path;
mod shapes;
mod tunnel;
mod world;
