//! Serialises bytes as base64 text: `#[serde(with = "base64_bytes")]`.

use std::borrow::Cow;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serializer};

/// Writes bytes as text.
pub fn serialize<S: Serializer>(bytes: &impl AsRef<[u8]>, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&BASE64_STANDARD.encode(bytes))
}

/// Reads bytes from text.
pub fn deserialize<'de, D: Deserializer<'de>, T: for<'a> From<&'a [u8]>>(from: D) -> Result<T, D::Error> {
    let text = Cow::<'de, str>::deserialize(from)?;
    BASE64_STANDARD.decode(&*text).map(|bytes| T::from(&bytes)).map_err(D::Error::custom)
}
