//! Defines the refusal of a request.

use hyper::StatusCode;
use peerpod_kube::client;
use peerpod_kube::docker_config::Bad;

use super::metrics::SecretsOutcome;

/// Refusal of a request.
pub(super) struct No {
    pub(super) status: StatusCode,
    pub(super) outcome: SecretsOutcome,
    /// Text for the caller, with no more than the caller may know.
    pub(super) said: String,
    /// Text for the service's own log, where it may contain more.
    pub(super) why: Option<&'static str>,
}

pub(super) fn no(status: StatusCode, outcome: SecretsOutcome, said: impl Into<String>) -> No {
    No { status, outcome, said: said.into(), why: None }
}

/// Refuses a caller without an acceptable token.
pub(super) fn unknown(why: impl Into<String>) -> No {
    no(StatusCode::UNAUTHORIZED, SecretsOutcome::Unknown, why)
}

/// Refuses a request because of a failure that may pass.
pub(super) fn failed(why: impl std::fmt::Display) -> No {
    no(StatusCode::SERVICE_UNAVAILABLE, SecretsOutcome::Failed, format!("{why}; ask again later"))
}

impl From<client::Error> for No {
    fn from(why: client::Error) -> No {
        failed(why)
    }
}

impl From<Bad> for No {
    fn from(why: Bad) -> No {
        no(StatusCode::UNPROCESSABLE_ENTITY, SecretsOutcome::Refused, why.to_string())
    }
}
