//! Sandbox id, checked because it becomes the name of files and folders.

use std::{fmt, sync::Arc};

use thiserror::Error;

/// Longest id that is accepted, in bytes.
pub(crate) const MAX_LEN: usize = 128;

/// Sandbox id of the form `[A-Za-z0-9][A-Za-z0-9_.-]{0,127}`: safe as one path component. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SandboxId(Arc<str>);

/// Reason why a text is not a sandbox id.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum IdError {
    /// The text has no characters.
    #[error("the sandbox id is empty; send the id that the container runtime uses")]
    Empty,
    /// The text is longer than [`MAX_LEN`].
    #[error("the sandbox id has {0} bytes, more than {MAX_LEN}; send the id that the container runtime uses")]
    TooLong(usize),
    /// The text has a character that could leave its folder or confuse a path.
    #[error(
        "the sandbox id has {0:?} at byte {1}; letters, digits, '_', '.' and '-' are allowed, the first must be a letter or digit"
    )]
    Character(char, usize),
}

impl SandboxId {
    /// Checks `text`.
    ///
    /// # Errors
    /// [`IdError`] when it is empty, too long, or has a character outside the allowed set.
    pub(crate) fn parse(text: &str) -> Result<SandboxId, IdError> {
        if text.is_empty() {
            return Err(IdError::Empty);
        }
        if text.len() > MAX_LEN {
            return Err(IdError::TooLong(text.len()));
        }
        let wrong = text
            .char_indices()
            .find(|&(at, c)| !(c.is_ascii_alphanumeric() || (at > 0 && matches!(c, '_' | '.' | '-'))));
        match wrong {
            Some((at, c)) => Err(IdError::Character(c, at)),
            None => Ok(SandboxId(text.into())),
        }
    }

    /// Returns the id as text.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for SandboxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_a_safe_piece_of_a_path_or_refused() {
        for good in ["a", "0", "a.b", "9f3_x-1", &"x".repeat(MAX_LEN)] {
            assert_eq!(SandboxId::parse(good).map(|id| id.to_string()), Ok(good.to_owned()));
        }
        assert_eq!(SandboxId::parse(""), Err(IdError::Empty));
        assert_eq!(SandboxId::parse(&"x".repeat(MAX_LEN + 1)), Err(IdError::TooLong(MAX_LEN + 1)));
        for (bad, at) in [("../x", 0), (".", 0), ("a/b", 1), ("a\0", 1), ("-a", 0), ("aä", 1), ("a b", 1)] {
            assert!(
                matches!(SandboxId::parse(bad), Err(IdError::Character(_, found)) if found == at),
                "{bad:?}"
            );
        }
    }
}
