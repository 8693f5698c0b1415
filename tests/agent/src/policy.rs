//! Enforces the smallest part of a policy that tests need: the requests that it denies by `default <name> := false`.

use std::collections::HashSet;
use std::sync::Mutex;

use ttrpc::{Code, Result};

use crate::error;

/// Package of the rules that the real agent evaluates.
const PACKAGE: &str = "package agent_policy";

/// Names of the denied requests.
#[derive(Default)]
pub(crate) struct Policy(Mutex<HashSet<String>>);

impl Policy {
    /// Replaces the policy. Fails if the text has not the real agent's package.
    pub(crate) fn set(&self, policy: &str) -> Result<()> {
        if !policy.lines().any(|line| line.trim() == PACKAGE) {
            return Err(error::invalid(format!("the policy has no line {PACKAGE:?}")));
        }
        let denied = policy.lines().filter_map(|line| line.trim().strip_prefix("default "));
        let denied =
            denied.filter_map(|rule| rule.split_once(":=")).filter(|(_, value)| value.trim() == "false");
        *self.lock() = denied.map(|(name, _)| name.trim().to_owned()).collect();
        Ok(())
    }

    /// Fails with the real agent's error if the policy denies the request.
    pub(crate) fn check(&self, request: &str) -> Result<()> {
        if self.lock().contains(request) {
            return Err(error::status(Code::PERMISSION_DENIED, format!("{request} is blocked by policy: ")));
        }
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashSet<String>> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
