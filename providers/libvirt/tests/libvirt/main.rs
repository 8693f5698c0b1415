//! The libvirt provider against a real libvirtd.

mod common;
mod conformance;
mod faults;
mod reserve;
