//! Describes how one cloud words its errors. Plain data that a provider fills.

use peerpod_provider_cloud::Refusals;

use crate::request::HttpAnswer;

/// Code and message of a refusal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Said {
    /// Code of the cloud, like `SkuNotAvailable`; empty if the answer has none.
    pub code: String,
    /// Message of the cloud, for people.
    pub message: String,
}

/// Errors and limits of one cloud, as its answers show them.
#[derive(Debug, Clone)]
pub struct Dialect {
    /// Refusals by class.
    pub refusals: Refusals,
    /// Reads code and message of an answer without success.
    pub said: fn(&HttpAnswer) -> Said,
    /// Reads the number of calls like this one that the cloud still accepts for now, where an answer has it.
    pub left: fn(&HttpAnswer) -> Option<u32>,
}
