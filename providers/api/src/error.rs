//! Errors of a provider, grouped by the caller's reaction. Pure.
//!
//! The text names the attempted operation and its object, the cause and the remedy. It never holds a request, user-data
//! or a credential.

use std::fmt::Display;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Cause of a failed provider call. Only the class decides on a retry ([`Error::retry`]); the text is for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub enum Error {
    /// The cloud asks for fewer calls.
    Throttled {
        /// Pause that the cloud asks for, if any.
        after: Option<Duration>,
        /// Human-readable text.
        text: String,
    },
    /// The cloud has no capacity left for this offering. Another offering may work, as a new attempt.
    Capacity {
        /// Exhausted offering, e.g. `m6a.large eu-north-1a spot`.
        offering: String,
        /// Every examined offering with the reason for its rejection, grouped: details that do not fit in the text. At
        /// most [`Error::MAX_REJECTED`].
        rejected: Vec<Rejected>,
        /// Human-readable text; it already holds the most telling entries of `rejected`.
        text: String,
    },
    /// A limit of the account is reached; a person must act.
    Quota {
        /// Human-readable text.
        text: String,
    },
    /// Credentials are missing, expired or do not allow this; a person must act.
    Auth {
        /// Human-readable text.
        text: String,
    },
    /// The request or the configuration can never work as it is.
    Invalid {
        /// Human-readable text.
        text: String,
    },
    /// The VM (or disk) does not exist any more. `delete` never returns this: it returns `Ok` for a VM that is gone.
    NotFound {
        /// Human-readable text.
        text: String,
    },
    /// The idempotency key was used before with another request (the clouds' `IdempotentParameterMismatch`).
    KeyReused {
        /// Human-readable text.
        text: String,
    },
    /// A repeated call may work: network failure, a 5xx, a deadline that passed without an answer.
    Transient {
        /// Human-readable text.
        text: String,
    },
    /// The request asks for a feature that this provider lacks. No call was made.
    Unsupported {
        /// Field of the request.
        field: String,
        /// Human-readable text.
        text: String,
    },
}

/// Rejected offerings with one common reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejected {
    /// One or several offerings, e.g. `m6a.large in eu-north-1a, eu-north-1b (spot)` or `310 types`.
    pub offerings: String,
    /// Reason, e.g. `no capacity (2 min ago)` or `less than 4 vCPUs`.
    pub reason: String,
}

/// Reaction to an [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// Repeat the same call with the same key, not before this time has passed. (A `create` that failed this way may
    /// have made the VM, so only the same key is safe.)
    After(Duration),
    /// Make a new attempt, with a new key, for the next offering.
    NextOffering,
    /// Do not retry; report the error to a person.
    Never,
}

/// Pause for a throttle without a stated pause: EC2 refills its narrowest bucket at two per second.
const THROTTLE_DEFAULT: Duration = Duration::from_millis(500);
/// First pause after a transport failure.
const TRANSIENT_DEFAULT: Duration = Duration::from_millis(200);

impl AsRef<Error> for Error {
    fn as_ref(&self) -> &Error {
        self
    }
}

/// Treats a missing VM or disk as success, for a detach and the like.
///
/// # Errors
/// All errors but [`Error::NotFound`].
pub fn unless_gone(done: Result<(), Error>) -> Result<(), Error> {
    match done {
        Err(Error::NotFound { .. }) => Ok(()),
        other => other,
    }
}

impl Error {
    /// Returns the reaction of the caller. Retry policy is decided only here.
    pub fn retry(&self) -> Retry {
        match self {
            Error::Throttled { after, .. } => Retry::After(after.unwrap_or(THROTTLE_DEFAULT)),
            Error::Transient { .. } => Retry::After(TRANSIENT_DEFAULT),
            Error::Capacity { .. } => Retry::NextOffering,
            Error::Quota { .. }
            | Error::Auth { .. }
            | Error::Invalid { .. }
            | Error::NotFound { .. }
            | Error::KeyReused { .. }
            | Error::Unsupported { .. } => Retry::Never,
        }
    }

    /// Returns the class as one word, for metrics and Kubernetes Event reasons.
    pub fn class(&self) -> &'static str {
        match self {
            Error::Throttled { .. } => "throttled",
            Error::Capacity { .. } => "capacity",
            Error::Quota { .. } => "quota",
            Error::Auth { .. } => "auth",
            Error::Invalid { .. } => "invalid",
            Error::NotFound { .. } => "not_found",
            Error::KeyReused { .. } => "key_reused",
            Error::Transient { .. } => "transient",
            Error::Unsupported { .. } => "unsupported",
        }
    }

    /// Puts the attempt before the text: `create of web-0: the text`.
    #[must_use]
    pub fn during(mut self, attempt: impl Display) -> Error {
        let (Error::Throttled { text, .. }
        | Error::Capacity { text, .. }
        | Error::Quota { text }
        | Error::Auth { text }
        | Error::Invalid { text }
        | Error::NotFound { text }
        | Error::KeyReused { text }
        | Error::Transient { text }
        | Error::Unsupported { text, .. }) = &mut self;
        *text = format!("{attempt}: {text}");
        self
    }

    /// Most entries of `rejected` in [`Error::Capacity`].
    pub const MAX_REJECTED: usize = 64;

    /// Returns [`Error::Capacity`] of this offering with this text and no rejected offerings.
    pub fn capacity(offering: impl Into<String>, text: impl Into<String>) -> Error {
        Error::Capacity { offering: offering.into(), rejected: Vec::new(), text: text.into() }
    }

    /// Returns [`Error::Invalid`] with this text.
    pub fn invalid(text: impl Into<String>) -> Error {
        Error::Invalid { text: text.into() }
    }

    /// Returns [`Error::NotFound`] with this text.
    pub fn not_found(text: impl Into<String>) -> Error {
        Error::NotFound { text: text.into() }
    }

    /// Returns [`Error::Transient`] with this text.
    pub fn transient(text: impl Into<String>) -> Error {
        Error::Transient { text: text.into() }
    }

    /// Returns [`Error::KeyReused`] with this text.
    pub fn key_reused(text: impl Into<String>) -> Error {
        Error::KeyReused { text: text.into() }
    }

    /// Returns [`Error::Unsupported`] for this field of the request.
    pub fn unsupported(field: impl Into<String>, text: impl Into<String>) -> Error {
        Error::Unsupported { field: field.into(), text: text.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_throttled_and_transient_errors_are_repeatable() {
        let after = Some(Duration::from_secs(7));
        let throttled = Error::Throttled { after, text: "slow down".into() };
        assert_eq!(throttled.retry(), Retry::After(Duration::from_secs(7)));
        assert!(matches!(Error::transient("reset").retry(), Retry::After(_)));
        let capacity = Error::capacity("m6a.large", "none left");
        assert_eq!(capacity.retry(), Retry::NextOffering);
        for never in [
            Error::Quota { text: String::new() },
            Error::Auth { text: String::new() },
            Error::invalid("bad"),
            Error::not_found("gone"),
            Error::key_reused("other"),
            Error::unsupported("gpus", "no"),
        ] {
            assert_eq!(never.retry(), Retry::Never, "{}", never.class());
        }
    }
}
