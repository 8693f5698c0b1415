//! Lists the rights and the limits of each call.

use crate::rates::Rate;

/// Returns the actions that a RAM policy must allow for this call. Sources: the pages of the calls, and "Create a resource
/// with a specific tag": tags of a new instance need no action of their own.
pub(super) fn of(action: &str) -> Vec<String> {
    match action {
        "" | "AssumeRoleWithOIDC" => Vec::new(),
        action if action.starts_with("metadata.") => Vec::new(),
        "DescribeVSwitches" => vec!["vpc:DescribeVSwitches".to_owned()],
        action => vec![format!("ecs:{action}")],
    }
}

/// Returns the counter of this call. The cloud counts by the minute, and shows its figures in an account's Quota Center
/// only.
pub(super) fn rates(action: &str) -> Vec<(String, Rate)> {
    match action {
        "AssumeRoleWithOIDC" => Vec::new(),
        action if action.starts_with("metadata.") => Vec::new(),
        "DescribeInstances" | "DescribeDisks" => vec![(action.to_owned(), Rate::Minute { calls: 600 })],
        action => vec![(action.to_owned(), Rate::Minute { calls: 300 })],
    }
}
