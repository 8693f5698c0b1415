//! Credential that can be used but not shown.

use std::fmt;

use secrecy::{ExposeSecret, SecretString};

/// A credential. Debug, Display, the printed configuration and mistakes show only `(set)`. Its memory is wiped on drop.
#[derive(Clone)]
pub struct Secret(SecretString);

impl Secret {
    /// Wraps a credential.
    pub fn new(text: String) -> Secret {
        Secret(SecretString::from(text))
    }

    /// Returns the credential, for the one call that needs it. Do not keep the result.
    pub fn expose(&self) -> &str {
        self.0.expose_secret()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(set)")
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(set)")
    }
}
