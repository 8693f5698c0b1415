//! The errors of a provider, by what the caller should do about them. Pure.
//!
//! The text says what was attempted on what, why it failed and what would help. It never holds a request,
//! user-data or a credential.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Why a provider call failed. Only the class decides on a retry ([`Error::retry`]); the text is for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The cloud asks us to slow down.
    #[error("{text}")]
    Throttled {
        /// How long the cloud asks us to wait, when it says so.
        after: Option<Duration>,
        /// For people.
        text: String,
    },
    /// The cloud has none of this offering left. Another offering may work, as a new attempt.
    #[error("{text}")]
    Capacity {
        /// What there is none of, e.g. `m6a.large eu-north-1a spot`.
        offering: String,
        /// Every offering that was looked at and why it did not do, grouped: what the text has no room for. At most
        /// [`Error::MAX_REJECTED`].
        rejected: Vec<Rejected>,
        /// For people; it already says the most telling of `rejected`.
        text: String,
    },
    /// A limit of the account is reached; a person must act.
    #[error("{text}")]
    Quota {
        /// For people.
        text: String,
    },
    /// Credentials are missing, expired or do not allow this; a person must act.
    #[error("{text}")]
    Auth {
        /// For people.
        text: String,
    },
    /// The request, or our configuration, can never work as it is.
    #[error("{text}")]
    Invalid {
        /// For people.
        text: String,
    },
    /// The VM (or disk) does not exist any more. `delete` never says this: gone is `Ok` there.
    #[error("{text}")]
    NotFound {
        /// For people.
        text: String,
    },
    /// The idempotency key was used before with another request (the clouds' `IdempotentParameterMismatch`).
    #[error("{text}")]
    KeyReused {
        /// For people.
        text: String,
    },
    /// It may work when asked again: network, a 5xx, a deadline that passed without an answer.
    #[error("{text}")]
    Transient {
        /// For people.
        text: String,
    },
    /// The request asks for something this provider cannot do. Nothing was called.
    #[error("{text}")]
    Unsupported {
        /// The field of the request.
        field: String,
        /// For people.
        text: String,
    },
}

/// Offerings that did not do, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejected {
    /// One or several, e.g. `m6a.large in eu-north-1a, eu-north-1b (spot)` or `310 types`.
    pub offerings: String,
    /// Why, e.g. `no capacity (2 min ago)` or `less than 4 vCPUs`.
    pub reason: String,
}

/// What to do after an [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// The same call with the same key, not before this long from now. (A `create` that ended so may have made
    /// the VM: only the same key is safe.)
    After(Duration),
    /// A new attempt, with a new key, for the next offering.
    NextOffering,
    /// No: say it to a person.
    Never,
}

/// When a cloud throttles without saying for how long: EC2 refills its narrowest bucket at two a second.
const THROTTLE_DEFAULT: Duration = Duration::from_millis(500);
/// First pause after a failure of the transport.
const TRANSIENT_DEFAULT: Duration = Duration::from_millis(200);

impl Error {
    /// What the caller should do. The one place retry policy is decided.
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

    /// The class as one word, for metrics and Kubernetes Event reasons.
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

    /// Most groups in [`Error::Capacity`].
    pub const MAX_REJECTED: usize = 64;

    /// [`Error::Capacity`] of this offering with this text, and nothing to say about others.
    pub fn capacity(offering: impl Into<String>, text: impl Into<String>) -> Error {
        Error::Capacity { offering: offering.into(), rejected: Vec::new(), text: text.into() }
    }

    /// [`Error::Invalid`] with this text.
    pub fn invalid(text: impl Into<String>) -> Error {
        Error::Invalid { text: text.into() }
    }

    /// [`Error::NotFound`] with this text.
    pub fn not_found(text: impl Into<String>) -> Error {
        Error::NotFound { text: text.into() }
    }

    /// [`Error::Transient`] with this text.
    pub fn transient(text: impl Into<String>) -> Error {
        Error::Transient { text: text.into() }
    }

    /// [`Error::KeyReused`] with this text.
    pub fn key_reused(text: impl Into<String>) -> Error {
        Error::KeyReused { text: text.into() }
    }

    /// [`Error::Unsupported`] for this field of the request.
    pub fn unsupported(field: impl Into<String>, text: impl Into<String>) -> Error {
        Error::Unsupported { field: field.into(), text: text.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_waiting_can_mend_a_throttle_or_a_broken_wire() {
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
