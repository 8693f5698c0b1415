//! Where the programs are.

use std::path::PathBuf;

use anyhow::{Context, Result};

pub use peerpod_test_kube::{Process, program as ours};

/// What `tests/csi/build` puts into `target/csi`.
///
/// # Errors
/// It is not there.
pub fn tool(name: &str) -> Result<PathBuf> {
    ours(&format!("csi/{name}")).context("build it first (`tests/csi/build`, or `make test-csi`)")
}
