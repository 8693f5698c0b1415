//! Holds the credentials for mounting a share: the contents of the secret that a [`crate::SecretRef`] names, as
//! passed by kubelet. They are in memory, in a separate file beside the pod's record ([`crate::records`]) and on the
//! encrypted link to the guest. No descriptor, object, log or error text contains any part of them.

use std::fmt;

use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::files::secret_json;

/// Version that this program writes, and the only one that it reads.
pub const VERSION: u32 = 1;

/// Longest field in bytes: the kernel's limit for one mount option, less the end of the string.
pub const MAX_FIELD: usize = 255;

/// Most bytes written or read: three fields in which every character is escaped, and their names.
pub const MAX_BYTES: usize = 8 << 10;

/// User name and password for a share.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    /// [`VERSION`].
    pub version: u32,
    /// The user's name, without a domain.
    pub username: Zeroizing<String>,
    /// The user's password.
    pub password: Zeroizing<String>,
    /// The user's domain or workgroup; `None`: that of the server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<Zeroizing<String>>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

impl Credentials {
    /// Returns the credentials as JSON.
    pub fn to_bytes(&self) -> Zeroizing<Vec<u8>> {
        secret_json(self, MAX_BYTES)
    }

    /// Reads credentials from JSON. Fails if their format is unknown, or the kernel accepts no such value. The text
    /// contains no part of them.
    pub fn read(bytes: &[u8]) -> Result<Credentials, String> {
        let read = Some(bytes).filter(|bytes| bytes.len() <= MAX_BYTES);
        let read: Option<Credentials> = read.and_then(|bytes| serde_json::from_slice(bytes).ok());
        let read = read.ok_or("their format is unknown")?;
        let version = read.version;
        if version != VERSION {
            return Err(format!("they have version {version}, this program reads {VERSION}: upgrade it"));
        }
        let fields = [("username", Some(&read.username)), ("password", Some(&read.password))];
        for (name, value) in fields.into_iter().chain([("domain", read.domain.as_ref())]) {
            value.map_or(Ok(()), |value| fits(value)).map_err(|why| format!("their {name} {why}"))?;
        }
        Ok(read)
    }
}

/// Checks whether the kernel accepts a value. The reason follows the name of the field, and contains no part of the value.
pub fn fits(value: &str) -> Result<(), &'static str> {
    if value.is_empty() {
        return Err("is empty");
    }
    if value.len() > MAX_FIELD {
        return Err("has more than 255 bytes, which is the kernel's limit");
    }
    if value.contains(['\n', '\r', '\0']) {
        return Err("has a line break or NUL in it");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credentials() -> Credentials {
        Credentials {
            version: VERSION,
            username: Zeroizing::new("joe".into()),
            password: Zeroizing::new("a, b\"c".into()),
            domain: Some(Zeroizing::new("EXAMPLE".into())),
        }
    }

    #[test]
    fn credentials_are_read_back_and_not_shown() {
        let one = credentials();
        assert!(Credentials::read(&one.to_bytes()).unwrap() == one);
        let shown = format!("{one:?}");
        assert!(!["joe", "a, b", "EXAMPLE"].iter().any(|part| shown.contains(part)), "{shown}");
        let longest = Zeroizing::new("\u{1}".repeat(MAX_FIELD));
        let long = Credentials {
            username: longest.clone(),
            password: longest.clone(),
            domain: Some(longest),
            ..credentials()
        };
        assert!(Credentials::read(&long.to_bytes()).unwrap() == long);
    }

    #[test]
    fn an_unusable_value_is_refused_without_being_shown() {
        let json = |text: &str| Credentials::read(text.as_bytes()).unwrap_err();
        let shape = json(r#"{"version":1,"username":"joe","password":["hidden"]}"#);
        assert_eq!(shape, "their format is unknown");
        assert!(json(r#"{"version":2,"username":"joe","password":"p"}"#).contains("version 2"));
        let long = "x".repeat(MAX_FIELD + 1);
        for (value, said) in
            [("a\nb", "line break"), ("a\0", "NUL"), ("", "empty"), (long.as_str(), "255 bytes")]
        {
            let bad = Credentials { password: Zeroizing::new(value.to_owned()), ..credentials() };
            let why = Credentials::read(&bad.to_bytes()).unwrap_err();
            assert!(why.contains("password") && why.contains(said), "{why}");
        }
    }
}
