//! Queries an account with boto3, as a witness.

use std::process::Stdio;

use anyhow::{Context, ensure};
use serde_json::Value;

use crate::{Proxy, REGION};

impl Proxy {
    /// Returns boto3's result of one operation, all pages of it: `boto3("describe_instances", &json!({}))`.
    ///
    /// # Errors
    /// When boto3 fails.
    pub async fn boto3(&self, operation: &str, arguments: &Value) -> anyhow::Result<Value> {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/witness.py");
        let ran = tokio::process::Command::new(self.shared.moto.python())
            .args([script, &self.witness_endpoint(), REGION, operation, &arguments.to_string()])
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output();
        let ran = tokio::time::timeout(std::time::Duration::from_secs(60), ran)
            .await
            .context("boto3 takes too long")??;
        ensure!(ran.status.success(), "boto3 {operation}: {}", String::from_utf8_lossy(&ran.stderr));
        Ok(serde_json::from_slice(&ran.stdout)?)
    }
}
