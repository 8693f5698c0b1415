//! Serialises bytes as base64 text: `#[serde(with = "base64_bytes")]`.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serializer};

/// Writes bytes as text.
///
/// # Errors
/// Those of the serialiser.
pub fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&BASE64_STANDARD.encode(bytes))
}

/// Reads bytes from text.
///
/// # Errors
/// The text is not base64.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
    let text = std::borrow::Cow::<'de, str>::deserialize(from)?;
    BASE64_STANDARD.decode(&*text).map_err(D::Error::custom)
}
