//! Faults of a machine, by their meaning for the provider. Pure.

use std::fmt;

/// Reason why a machine cannot be used now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The machine does not answer, or the connection was lost: the effect of the last request is unknown.
    Away(String),
    /// The host key is not a pinned one, or no key is pinned. Nothing was sent.
    Distrusted(String),
    /// Our key is missing, or the machine refuses it. Nothing was sent.
    Denied(String),
    /// The machine refused a request, which had no effect.
    Refused(String),
}

impl Fault {
    /// Returns the class as one word, for metrics.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Fault::Away(_) => "unreachable",
            Fault::Distrusted(_) => "distrusted",
            Fault::Denied(_) => "denied",
            Fault::Refused(_) => "faulty",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Fault::Away(text) | Fault::Distrusted(text) | Fault::Denied(text) | Fault::Refused(text)) = self;
        f.write_str(text)
    }
}
