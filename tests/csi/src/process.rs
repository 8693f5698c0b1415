//! Finds the programs.

use std::path::PathBuf;

use anyhow::{Context, Result};

pub use peerpod_test_kube::{Process, program as ours};

/// Returns a program that `tests/csi/build` puts into `target/csi`.
///
/// # Errors
/// When it does not exist.
pub fn tool(name: &str) -> Result<PathBuf> {
    ours(&format!("csi/{name}")).context("build it first (`tests/csi/build`, or `make test-csi`)")
}
