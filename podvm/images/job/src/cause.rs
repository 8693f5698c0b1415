//! Why an image cannot be had, in kinds that a caller can act on and words that a pod's user reads.

use std::{error::Error as StdError, fmt};

use serde::{Deserialize, Serialize};

/// Most characters that a registry's own words get in our text.
const MAX_QUOTE: usize = 300;

/// The kind of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The registry does not have it.
    NotFound,
    /// The registry does not give it to us.
    Denied,
    /// The VM's disk is full.
    NoSpace,
    /// The registry cannot be reached, or does not answer.
    Unreachable,
    /// The registry's certificate is not one that the VM trusts.
    Untrusted,
    /// What came is not what its digest says.
    Digest,
    /// What came is not an image, or means ill.
    Malformed,
    /// It is an image, but not one for this VM or this program.
    Unsupported,
    /// Larger than is permitted.
    TooLarge,
    /// Not done in time.
    Late,
    /// Something of the VM's own.
    Internal,
}

impl Cause {
    /// In a few words, with which the error begins.
    pub fn words(self) -> &'static str {
        match self {
            Cause::NotFound => "not found",
            Cause::Denied => "denied",
            Cause::NoSpace => "no space",
            Cause::Unreachable => "no route",
            Cause::Untrusted => "TLS not trusted",
            Cause::Digest => "digest wrong",
            Cause::Malformed => "malformed image",
            Cause::Unsupported => "unsupported image",
            Cause::TooLarge => "too large",
            Cause::Late => "too slow",
            Cause::Internal => "internal error",
        }
    }

    /// Whether the same may work in a moment.
    pub fn is_transient(self) -> bool {
        self == Cause::Unreachable
    }
}

/// A failure: its kind, and a sentence that names what was attempted, why it failed and what would do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Error {
    /// The kind.
    pub cause: Cause,
    /// For people.
    pub text: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.cause.words(), self.text)
    }
}

impl StdError for Error {}

impl Error {
    /// One of the kind.
    pub fn new(cause: Cause, text: impl Into<String>) -> Error {
        Error { cause, text: text.into() }
    }
}

/// Words of a stranger: bounded, and on one line.
pub fn quote(text: &str) -> String {
    let mut out: String =
        text.chars().take(MAX_QUOTE).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().nth(MAX_QUOTE).is_some() {
        out.push('…');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strangers_words_are_bounded_and_on_one_line() {
        let text = quote(&format!("a\n\x1b[31m{}", "ß".repeat(1000)));
        assert!(text.starts_with("a  [31mß") && text.chars().count() == MAX_QUOTE + 1, "{text}");
    }
}
