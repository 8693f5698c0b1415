//! Reads the driver's record of its calls.

use anyhow::Result;
use serde_json::Value;

use crate::Folder;

/// Returns the requests of a method's calls (`NodePublishVolume`), or of all calls when `method` is empty, oldest
/// first.
///
/// # Errors
/// When the driver's list cannot be read.
pub fn of(folder: &Folder, method: &str) -> Result<Vec<Value>> {
    let text = std::fs::read_to_string(folder.path("calls.json"))?;
    let mut found = Vec::new();
    for line in text.lines() {
        let call: Value = serde_json::from_str(line)?;
        let name = call["method"].as_str().unwrap_or_default();
        if method.is_empty() || name.ends_with(&format!("/{method}")) {
            found.push(call);
        }
    }
    Ok(found)
}
