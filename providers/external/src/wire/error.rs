//! Converts typed errors to and from the protocol. The class decides the caller's reaction, so an unknown class is
//! mapped: to a throttle if it has a time to wait, otherwise to an error that needs a person.

use std::time::Duration;

use peerpod_proto::provider as wire;
use peerpod_provider_api::{Error, Rejected};
use ttrpc::Code;

use super::{TEXT, WORD, clipped};

/// Longest pause that a provider can ask for: a pause of a day would delay the start of a pod as long.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// Converts the error of an answer. `secret` is cut out of the text: a provider must not show user-data, but a
/// third-party one may. The first argument names the provider.
pub(crate) fn error_from(who: &str, error: wire::Error, secret: Option<&str>) -> Error {
    let mut said = error.text;
    if let Some(secret) = secret.filter(|secret| !secret.is_empty()) {
        said = said.replace(secret, "(user-data)");
    }
    let text = format!("{who}: {}", clipped(&said, TEXT));
    let after =
        (error.retry_after_ms > 0).then(|| Duration::from_millis(error.retry_after_ms).min(LONGEST_WAIT));
    match error.class.as_str() {
        "throttled" => Error::Throttled { after, text },
        "transient" => Error::Transient { text },
        "capacity" => {
            let one = |one: &wire::Rejected| Rejected {
                offerings: clipped(&one.offerings, WORD),
                reason: clipped(&one.reason, WORD),
            };
            let rejected = error.rejected.iter().take(Error::MAX_REJECTED).map(one).collect();
            Error::Capacity { offering: clipped(&error.offering, WORD), rejected, text }
        }
        "quota" => Error::Quota { text },
        "auth" => Error::Auth { text },
        "invalid" => Error::Invalid { text },
        "not_found" => Error::NotFound { text },
        "key_reused" => Error::KeyReused { text },
        "unsupported" => Error::Unsupported { field: clipped(&error.field, WORD), text },
        class => {
            let text =
                format!("{text} (of class {:?}, which this program does not know)", clipped(class, 40));
            match after {
                Some(_) => Error::Throttled { after, text },
                None => Error::Invalid { text },
            }
        }
    }
}

pub(crate) fn error_to(error: &Error) -> wire::Error {
    let mut out =
        wire::Error { class: error.class().to_owned(), text: error.to_string(), ..wire::Error::default() };
    match error {
        Error::Throttled { after: Some(after), .. } => {
            out.retry_after_ms = u64::try_from(after.as_millis()).unwrap_or(u64::MAX).max(1);
        }
        Error::Capacity { offering, rejected, .. } => {
            out.offering.clone_from(offering);
            let one = |one: &Rejected| wire::Rejected {
                offerings: one.offerings.clone(),
                reason: one.reason.clone(),
                ..wire::Rejected::default()
            };
            out.rejected = rejected.iter().map(one).collect();
        }
        Error::Unsupported { field, .. } => out.field.clone_from(field),
        _ => {}
    }
    out
}

/// Converts a failure of the transport or of the ttrpc library. The second argument names the call.
pub(crate) fn status_error(who: &str, what: &str, error: &ttrpc::Error) -> Error {
    let ttrpc::Error::RpcStatus(status) = error else {
        let why = clipped(&error.to_string(), WORD);
        return Error::transient(format!(
            "{what}: {who} gave no answer: {why}; its effect is unknown, so only the same call may be \
             repeated"
        ));
    };
    let text = format!("{what}: {who} reports {:?}: {}", status.code(), clipped(&status.message, TEXT));
    match status.code() {
        Code::UNIMPLEMENTED => Error::unsupported(what, text),
        Code::INVALID_ARGUMENT => Error::invalid(text),
        Code::NOT_FOUND => Error::not_found(text),
        Code::UNAUTHENTICATED | Code::PERMISSION_DENIED => Error::Auth { text },
        Code::RESOURCE_EXHAUSTED => Error::Throttled { after: None, text },
        _ => Error::transient(text),
    }
}
