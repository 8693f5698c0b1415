//! Reads values of an answer by JSON pointers (RFC 6901). A value of another type counts as absent. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::SystemTime;

use serde_json::Value;

/// Longest text of [`text`], in bytes.
const MAX_TEXT: usize = 16 << 10;

/// Returns a text; `None`: it is absent, empty or longer than 16 KiB.
pub fn text<'v>(value: &'v Value, pointer: &str) -> Option<&'v str> {
    let text = value.pointer(pointer)?.as_str()?;
    (!text.is_empty() && text.len() <= MAX_TEXT).then_some(text)
}

/// Returns a whole number, also one in a text: 64-bit numbers of Google and numbers of Azure's SKUs are texts.
pub fn number(value: &Value, pointer: &str) -> Option<u64> {
    match value.pointer(pointer)? {
        Value::Number(number) => number.as_u64(),
        Value::String(text) => text.parse().ok(),
        _ => None,
    }
}

/// Returns a truth value, also one in a text of any case (`True` of Azure's SKUs).
pub fn flag(value: &Value, pointer: &str) -> Option<bool> {
    match value.pointer(pointer)? {
        Value::Bool(flag) => Some(*flag),
        Value::String(text) if text.eq_ignore_ascii_case("true") => Some(true),
        Value::String(text) if text.eq_ignore_ascii_case("false") => Some(false),
        _ => None,
    }
}

/// Returns the items of a list; none if it is absent.
pub fn list<'v>(value: &'v Value, pointer: &str) -> &'v [Value] {
    value.pointer(pointer).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

/// Returns the texts of an object, without its other values: tags or labels.
pub fn texts(value: &Value, pointer: &str) -> BTreeMap<String, String> {
    let object = value.pointer(pointer).and_then(Value::as_object);
    let pairs = object.into_iter().flatten();
    pairs.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect()
}

/// Returns an IP address other than `0.0.0.0` and `::`, which stand for none.
pub fn address(value: &Value, pointer: &str) -> Option<IpAddr> {
    let address: IpAddr = text(value, pointer)?.parse().ok()?;
    (!address.is_unspecified()).then_some(address)
}

/// Returns a time of RFC 3339.
pub fn time(value: &Value, pointer: &str) -> Option<SystemTime> {
    let at: jiff::Timestamp = text(value, pointer)?.parse().ok()?;
    Some(at.into())
}
