//! The local provider: VMs that are namespaces.

mod common;
mod conformance;
mod deaths;
mod external;
mod machines;
