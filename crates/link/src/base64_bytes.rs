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

/// Serialises a list of bytes as base64 texts: `#[serde(with = "base64_bytes::list")]`.
pub mod list {
    use super::*;

    /// Writes bytes as texts.
    pub fn serialize<S: Serializer>(all: &[Vec<u8>], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(all.iter().map(|bytes| BASE64_STANDARD.encode(bytes)))
    }

    /// Reads bytes from texts.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Vec<u8>>, D::Error> {
        let all = Vec::<String>::deserialize(from)?;
        all.iter().map(|text| BASE64_STANDARD.decode(text).map_err(D::Error::custom)).collect()
    }
}
