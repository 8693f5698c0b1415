//! Tests peerpod-csi in front of a real CSI driver.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod cluster;
mod crash;
mod peer_pods;
mod transparent;
