//! Validates sandbox ids, which all programs use as a segment of paths.

use std::borrow::Borrow;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The longest id; containerd's have 64 characters.
const MAX_LEN: usize = 128;

/// An id that is safe as a file name: a letter or digit, then letters, digits, `_`, `.` and `-`, at most 128. Cheap to
/// clone. The code that builds a socket's path checks that the path fits into `sun_path`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SandboxId(Arc<str>);

/// Reason that a text is no sandbox id.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadId {
    /// The text is empty.
    #[error("sandbox id: empty; the shim must send the sandbox's id")]
    Empty,
    /// Longer than 128 characters.
    #[error("sandbox id: {0} bytes; at most {MAX_LEN} are allowed")]
    TooLong(usize),
    /// It has a character with a meaning in paths, or another forbidden one.
    #[error(
        "sandbox id {0:?}: only letters, digits, '_', '.' and '-' are allowed, the first a letter or digit"
    )]
    Character(String),
}

impl SandboxId {
    /// Checks an id.
    pub fn new(text: &str) -> Result<SandboxId, BadId> {
        if text.is_empty() {
            return Err(BadId::Empty);
        }
        if text.len() > MAX_LEN {
            return Err(BadId::TooLong(text.len()));
        }
        let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-');
        if !text.as_bytes()[0].is_ascii_alphanumeric() || !text.bytes().all(allowed) {
            return Err(BadId::Character(text.to_owned()));
        }
        Ok(SandboxId(text.into()))
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for SandboxId {
    type Err = BadId;

    fn from_str(text: &str) -> Result<SandboxId, BadId> {
        SandboxId::new(text)
    }
}

impl TryFrom<String> for SandboxId {
    type Error = BadId;

    fn try_from(text: String) -> Result<SandboxId, BadId> {
        SandboxId::new(&text)
    }
}

impl From<SandboxId> for String {
    fn from(id: SandboxId) -> String {
        id.as_str().to_owned()
    }
}

impl AsRef<str> for SandboxId {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

impl AsRef<std::path::Path> for SandboxId {
    fn as_ref(&self) -> &std::path::Path {
        self.as_str().as_ref()
    }
}

impl Borrow<str> for SandboxId {
    fn borrow(&self) -> &str {
        self.as_str()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_a_safe_piece_of_a_path_or_refused() {
        for good in ["a", "0", "a.b", "9f3_x-1", &"x".repeat(MAX_LEN)] {
            assert_eq!(SandboxId::new(good).map(|id| id.to_string()), Ok(good.to_owned()));
        }
        assert_eq!(SandboxId::new(""), Err(BadId::Empty));
        assert_eq!(SandboxId::new(&"x".repeat(MAX_LEN + 1)), Err(BadId::TooLong(MAX_LEN + 1)));
        for bad in ["../x", ".", "a/b", "a\0", "-a", "aä", "a b"] {
            assert_eq!(SandboxId::new(bad), Err(BadId::Character(bad.to_owned())));
        }
    }
}
