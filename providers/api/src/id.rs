//! Identifiers that cross the provider interface: the cloud's id of a VM, and the caller's key for one creation
//! attempt. Pure; the hash is the only computation.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::Error;

/// Text that is not an instance id or an idempotency key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} {text:?}: {why}")]
pub struct NotAnId {
    what: &'static str,
    text: String,
    why: &'static str,
}

impl From<NotAnId> for Error {
    fn from(error: NotAnId) -> Error {
        Error::invalid(error.to_string())
    }
}

/// Longest accepted instance id. Azure resource ids are the longest known, some 250 bytes.
const MAX_INSTANCE_ID: usize = 1024;

/// Cloud's id of a VM. Opaque to all code but its provider; 1 to 1024 printable ASCII bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct InstanceId(String);

impl InstanceId {
    /// Checks and wraps an id from the cloud.
    ///
    /// # Errors
    /// When it is empty, too long, or holds anything but printable ASCII.
    pub fn new(text: impl Into<String>) -> Result<InstanceId, NotAnId> {
        let text = text.into();
        let refuse = |why| NotAnId { what: "instance id", text: clip(&text), why };
        if text.is_empty() {
            return Err(refuse("it is empty"));
        }
        if text.len() > MAX_INSTANCE_ID {
            return Err(refuse("it is longer than 1024 bytes"));
        }
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(refuse("it holds something else than printable ASCII"));
        }
        Ok(InstanceId(text))
    }

    /// Returns the id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Idempotency key of a create: at most 64 of `[A-Za-z0-9-]`, the limit of the narrowest cloud (AWS and Alibaba client
/// tokens: 64 ASCII characters).
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct IdempotencyKey(String);

impl IdempotencyKey {
    /// Derives the key of one attempt: SHA-256 over cluster, sandbox and attempt, as 64 hex digits. A fallback to
    /// another offering is another attempt, recorded before it is tried.
    pub fn derive(cluster: &str, sandbox: &str, attempt: u32) -> IdempotencyKey {
        let mut hash = Sha256::new();
        // Lengths first, so that no two different triples give the same bytes.
        for part in [cluster.as_bytes(), sandbox.as_bytes(), &attempt.to_be_bytes()] {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        IdempotencyKey(hex::encode(hash.finalize()))
    }

    /// Checks and wraps a key read back from a cloud's tag or from disk.
    ///
    /// # Errors
    /// When it is empty, longer than 64, or holds another character.
    pub fn parse(text: impl Into<String>) -> Result<IdempotencyKey, NotAnId> {
        let text = text.into();
        let refuse = |why| NotAnId { what: "idempotency key", text: clip(&text), why };
        if text.is_empty() || text.len() > 64 {
            return Err(refuse("it must have 1 to 64 characters"));
        }
        if !text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
            return Err(refuse("only letters, digits and '-' are allowed"));
        }
        Ok(IdempotencyKey(text))
    }

    /// Returns the key as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// SHA-256 of the key. Providers derive names, UUIDs and similar values from it.
    pub fn sha256(&self) -> [u8; 32] {
        Sha256::digest(self.0.as_bytes()).into()
    }
}

/// Start of a bad text, long enough to recognise it in a message.
fn clip(text: &str) -> String {
    text.chars().take(80).collect()
}

/// Implements the conversions of a checked text.
macro_rules! text_type {
    ($name:ident, $check:path, $refusal:ty) => {
        impl TryFrom<String> for $name {
            type Error = $refusal;
            fn try_from(text: String) -> Result<$name, $refusal> {
                $check(text)
            }
        }
        impl From<$name> for String {
            fn from(text: $name) -> String {
                text.0
            }
        }
        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}
pub(crate) use text_type;

text_type!(InstanceId, InstanceId::new, NotAnId);
text_type!(IdempotencyKey, IdempotencyKey::parse, NotAnId);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_stable_and_fits_the_narrowest_cloud() {
        let key = IdempotencyKey::derive("cluster", "sandbox", 0);
        assert_eq!(key, IdempotencyKey::derive("cluster", "sandbox", 0));
        assert_eq!(key.as_str().len(), 64);
        assert_eq!(IdempotencyKey::parse(key.as_str()).unwrap(), key);
    }

    #[test]
    fn no_two_attempts_share_a_key() {
        let keys = [
            IdempotencyKey::derive("c", "s", 0),
            IdempotencyKey::derive("c", "s", 1),
            IdempotencyKey::derive("cs", "", 0),
            IdempotencyKey::derive("", "cs", 0),
        ];
        let distinct: std::collections::HashSet<_> = keys.iter().collect();
        assert_eq!(distinct.len(), keys.len());
    }

    #[test]
    fn an_invalid_id_is_refused_also_from_json() {
        for bad in ["", "a b", "ä", "new\nline"] {
            assert!(InstanceId::new(bad).is_err(), "{bad:?}");
            assert!(IdempotencyKey::parse(bad).is_err(), "{bad:?}");
            assert!(serde_json::from_value::<InstanceId>(bad.into()).is_err(), "{bad:?}");
        }
        assert!(InstanceId::new("x".repeat(1025)).is_err());
        assert!(IdempotencyKey::parse("x".repeat(65)).is_err());
        assert!(IdempotencyKey::parse("../x").is_err());
    }
}
