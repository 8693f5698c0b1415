//! Tests of pods in virtual machines that boot, made by libvirt.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod images;
#[path = "../images_common/mod.rs"]
mod images_common;
mod memory;
mod network;
mod pods;
mod uefi;
mod volumes;
