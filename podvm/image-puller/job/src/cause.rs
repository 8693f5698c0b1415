//! Classifies failures of image pulls: kinds that a caller can act on, and text for the pod's user.

use std::error::Error as StdError;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Limit of quoted text of a registry, in characters.
const MAX_QUOTE: usize = 300;

/// Kind of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The registry does not have the image.
    NotFound,
    /// The registry denies access to the image.
    Denied,
    /// The VM's disk is full.
    NoSpace,
    /// The registry cannot be reached, or does not answer.
    Unreachable,
    /// The VM does not trust the registry's certificate.
    Untrusted,
    /// The received bytes do not match their digest.
    Digest,
    /// The received bytes are not an image, or are malicious.
    Malformed,
    /// The image is not one for this VM or this program.
    Unsupported,
    /// The image is larger than permitted.
    TooLarge,
    /// The pull was not done in time.
    Late,
    /// Internal fault of the VM.
    Internal,
}

impl Cause {
    /// Returns the few words with which the error begins.
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

    /// Returns whether the same may work in a moment.
    pub fn is_transient(self) -> bool {
        self == Cause::Unreachable
    }
}

/// Failure: its kind, and a sentence with the attempt, the reason and a remedy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Error {
    /// Kind of failure.
    pub cause: Cause,
    /// Text for people.
    pub text: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.cause.words(), self.text)
    }
}

impl StdError for Error {}

impl Error {
    /// Makes a failure of this kind.
    pub fn new(cause: Cause, text: impl Into<String>) -> Error {
        Error { cause, text: text.into() }
    }
}

/// Quotes foreign text: bounded, and on one line.
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
    fn foreign_text_is_bounded_and_on_one_line() {
        let text = quote(&format!("a\n\x1b[31m{}", "ß".repeat(1000)));
        assert!(text.starts_with("a  [31mß") && text.chars().count() == MAX_QUOTE + 1, "{text}");
    }
}
