//! Defines Curve25519 keys. A private key cannot be printed, is wiped from memory, and leaves only through
//! [`PrivateKey::expose`].

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use boringtun::x25519;
use zeroize::Zeroizing;

/// Error for bytes that are not a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a WireGuard key: {0}")]
pub struct BadKey(&'static str);

fn checked(bytes: &[u8]) -> Result<[u8; 32], BadKey> {
    match bytes.try_into() {
        Ok(key) if key == [0; 32] => Err(BadKey("it is all zero")),
        Ok(key) => Ok(key),
        Err(_) => Err(BadKey("it has not 32 bytes")),
    }
}

/// A private key.
#[derive(Clone)]
pub struct PrivateKey(x25519::StaticSecret);

impl PrivateKey {
    /// Generates a key.
    pub fn generate() -> std::io::Result<PrivateKey> {
        let mut bytes = Zeroizing::new([0; 32]);
        getrandom::fill(bytes.as_mut()).map_err(|e| std::io::Error::other(e.to_string()))?;
        Ok(PrivateKey(x25519::StaticSecret::from(*bytes)))
    }

    /// Takes the 32 bytes that [`PrivateKey::expose`] returned. Refuses zeros: a file that was never written.
    pub fn from_bytes(bytes: &[u8]) -> Result<PrivateKey, BadKey> {
        Ok(PrivateKey(x25519::StaticSecret::from(*Zeroizing::new(checked(bytes)?))))
    }

    /// Returns the bytes, only for a file of mode 0600 or the relay's own socket.
    pub fn expose(&self) -> Zeroizing<[u8; 32]> {
        Zeroizing::new(self.0.to_bytes())
    }

    /// Returns the public key.
    pub fn public(&self) -> PublicKey {
        PublicKey(x25519::PublicKey::from(&self.0).to_bytes())
    }

    pub(crate) fn secret(&self) -> &x25519::StaticSecret {
        &self.0
    }
}

impl fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PrivateKey(of {})", self.public())
    }
}

/// Public key, which identifies a peer.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PublicKey([u8; 32]);

impl PublicKey {
    /// Takes 32 bytes. Refuses zeros: every handshake with that key ends in the same secret.
    pub fn from_bytes(bytes: &[u8]) -> Result<PublicKey, BadKey> {
        checked(bytes).map(PublicKey)
    }

    /// Returns the 32 bytes.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    pub(crate) fn to_x25519(self) -> x25519::PublicKey {
        x25519::PublicKey::from(self.0)
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&BASE64.encode(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_private_key_is_never_printed_and_survives_its_own_bytes() {
        let key = PrivateKey::generate().unwrap();
        let text = format!("{key:?}");
        assert!(!text.contains(&BASE64.encode(*key.expose())), "{text}");
        let again = PrivateKey::from_bytes(key.expose().as_ref()).unwrap();
        assert_eq!(again.public(), key.public());
        assert_ne!(PrivateKey::generate().unwrap().public(), key.public());
    }

    #[test]
    fn an_invalid_key_is_refused() {
        for bytes in [&[][..], &[1; 31], &[1; 33], &[0; 32]] {
            assert!(PrivateKey::from_bytes(bytes).is_err());
            assert!(PublicKey::from_bytes(bytes).is_err());
        }
    }
}
