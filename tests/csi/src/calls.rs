//! What the driver was asked, as it wrote it down.

use anyhow::Result;
use serde_json::Value;

use crate::Folder;

/// The calls of a method (`NodePublishVolume`), or of all when it is empty: their requests, oldest first.
///
/// # Errors
/// The driver's list cannot be read.
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
