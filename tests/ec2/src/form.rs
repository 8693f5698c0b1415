//! Reads and writes the bodies of EC2's query protocol: `Action=RunInstances&InstanceId.1=…`. Pure.

use std::collections::BTreeMap;

/// Parameters of one call.
pub type Params = BTreeMap<String, String>;

/// Reads a form. A malformed form gives its readable parts.
pub fn decode(body: &[u8]) -> Params {
    let text = String::from_utf8_lossy(body);
    let pairs = text.split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .map(|(k, v)| (unescape(k), unescape(v)))
        .collect()
}

/// Writes a form.
pub fn encode(params: &Params) -> String {
    let pairs: Vec<String> = params.iter().map(|(k, v)| format!("{}={}", escape(k), escape(v))).collect();
    pairs.join("&")
}

/// Returns the values of a list, in its order: `list(&params, "InstanceId")` reads `InstanceId.1`, `InstanceId.2`, …
pub fn list(params: &Params, name: &str) -> Vec<String> {
    (1..).map_while(|n| params.get(&format!("{name}.{n}")).cloned()).collect()
}

fn unescape(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        match byte {
            b'+' => bytes.push(b' '),
            b'%' => {
                let hex = rest.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
                match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
                    Some(value) => {
                        bytes.push(value);
                        rest = &rest[2..];
                    }
                    None => bytes.push(b'%'),
                }
            }
            other => bytes.push(other),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let text =
            "Action=RunInstances&Tag.1.Value=a%20b%2B%26%C3%A4&Tag.2.Value=x+y&InstanceId.1=i&InstanceId.2=j";
        let params = decode(text.as_bytes());
        assert_eq!(params["Tag.1.Value"], "a b+&ä");
        assert_eq!(params["Tag.2.Value"], "x y");
        assert_eq!(list(&params, "InstanceId"), ["i", "j"]);
        assert_eq!(decode(encode(&params).as_bytes()), params);
    }
}
