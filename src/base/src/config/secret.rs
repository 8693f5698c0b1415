//! A value that can be used but not shown.

use std::fmt;

use secrecy::{ExposeSecret, SecretString};

/// A credential. Debug, Display, the printed configuration and mistakes say `(set)` and nothing else; the memory is
/// wiped when it is dropped.
#[derive(Clone)]
pub struct Secret(SecretString);

impl Secret {
    /// Takes a credential over.
    pub fn new(text: String) -> Secret {
        Secret(SecretString::from(text))
    }

    /// The credential itself, for the one call that needs it. Do not keep what it returns.
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
