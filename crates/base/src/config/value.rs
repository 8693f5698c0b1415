//! Types of settings: how each is read, shown and described.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde_json::json;

use super::duration::{format_duration, parse_duration};
use super::node::Node;
use super::secret::Secret;

/// Reason why a value cannot be used, and advice. It must not repeat the value, which may be a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bad {
    why: String,
    instead: String,
}

impl Bad {
    /// Takes reason and advice in lower case, without a full stop.
    pub fn new(why: &str, instead: &str) -> Bad {
        Bad { why: why.to_owned(), instead: instead.to_owned() }
    }
}

impl fmt::Display for Bad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.why, self.instead)
    }
}

/// Type of a setting.
pub trait Value: Sized {
    /// Whether the value must never be shown.
    const SECRET: bool = false;

    /// Reads the value of one layer. The error names the reason and gives advice, without repeating the value.
    fn read(node: &Node) -> Result<Self, Bad>;

    /// Returns the value as `config print` shows it, in a form that [`Value::read`] accepts.
    fn show(&self) -> serde_json::Value;

    /// Returns the JSON Schema of the value.
    fn schema() -> serde_json::Value;
}

impl Value for Secret {
    const SECRET: bool = true;

    fn read(node: &Node) -> Result<Secret, Bad> {
        node.text().map(Secret::new)
    }
    fn show(&self) -> serde_json::Value {
        json!("(set)")
    }
    fn schema() -> serde_json::Value {
        json!({"type": "string", "writeOnly": true})
    }
}

impl Value for PathBuf {
    fn read(node: &Node) -> Result<PathBuf, Bad> {
        let text = node.text()?;
        if !text.starts_with('/') || text.contains('\0') {
            return Err(Bad::new("not an absolute path", "begin it with /"));
        }
        Ok(PathBuf::from(text))
    }
    fn show(&self) -> serde_json::Value {
        json!(self.to_string_lossy())
    }
    fn schema() -> serde_json::Value {
        json!({"type": "string", "pattern": "^/"})
    }
}

/// Implements [`Value`] for types that are shown in serde's form.
macro_rules! values {
    ($($kind:ty: $schema:expr, |$node:ident| $read:expr;)*) => {$(
        impl Value for $kind {
            fn read($node: &Node) -> Result<$kind, Bad> {
                $read
            }
            fn show(&self) -> serde_json::Value {
                json!(self)
            }
            fn schema() -> serde_json::Value {
                $schema
            }
        }
    )*};
}

values! {
    String: json!({"type": "string"}), |node| node.text();
    bool: json!({"type": "boolean"}), |node| match node.scalar()?.as_str() {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(Bad::new("neither true nor false", "write true or false")),
    };
    u16: json!({"type": "integer", "minimum": 0, "maximum": u16::MAX}), |node| whole_number(node, u16::MAX);
    u32: json!({"type": "integer", "minimum": 0, "maximum": u32::MAX}), |node| whole_number(node, u32::MAX);
    u64: json!({"type": "integer", "minimum": 0, "maximum": u64::MAX}), |node| whole_number(node, u64::MAX);
    i32: json!({"type": "integer", "minimum": i32::MIN, "maximum": i32::MAX}), |node| {
        let text = node.scalar()?;
        let digits = text.strip_prefix('-').unwrap_or(&text);
        let bad = || Bad::new("not a whole number of this size", &format!("write one up to {}", i32::MAX));
        text.parse().ok().filter(|_| is_digits(digits)).ok_or_else(bad)
    };
    SocketAddr: json!({"type": "string", "description": "address:port"}), |node| {
        let bad = || Bad::new("not an address with a port", "write it like 10.0.0.1:15151 or [fd00::1]:15151");
        node.scalar()?.trim().parse().map_err(|_| bad())
    };
    IpAddr: json!({"anyOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "ipv6"}]}), |node| {
        let bad = || Bad::new("not an IP address", "write it like 10.0.0.1 or fd00::1");
        node.scalar()?.trim().parse().map_err(|_| bad())
    };
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

fn whole_number<T: FromStr + fmt::Display>(node: &Node, most: T) -> Result<T, Bad> {
    let text = node.scalar()?;
    let why = if is_digits(&text) { "too large" } else { "not a whole number" };
    let bad = || Bad::new(why, &format!("write one from 0 to {most}"));
    text.parse().ok().filter(|_| is_digits(&text)).ok_or_else(bad)
}

impl Value for Duration {
    fn read(node: &Node) -> Result<Duration, Bad> {
        parse_duration(&node.scalar()?)
    }
    fn show(&self) -> serde_json::Value {
        json!(format_duration(*self))
    }
    fn schema() -> serde_json::Value {
        json!({"type": ["string", "integer"], "pattern": "^(0|([0-9]+(d|h|m|s|ms))+)$", "maximum": 0})
    }
}

/// A list in the file, or one text with commas in any layer.
impl<T: Value> Value for Vec<T> {
    const SECRET: bool = T::SECRET;

    fn read(node: &Node) -> Result<Vec<T>, Bad> {
        let parts: Vec<Node> = match node {
            Node::List(items) => items.clone(),
            Node::Map(_) => return Err(Bad::new("a section where a list is expected", "write a list")),
            Node::Text(text) => text
                .split(',')
                .map(str::trim)
                .filter(|part| !part.is_empty())
                .map(|part| Node::Text(part.to_owned()))
                .collect(),
            single => vec![single.clone()],
        };
        let one = |(n, part): (usize, &Node)| {
            T::read(part).map_err(|bad| Bad { why: format!("item {}: {}", n + 1, bad.why), ..bad })
        };
        parts.iter().enumerate().map(one).collect()
    }
    fn show(&self) -> serde_json::Value {
        self.iter().map(T::show).collect()
    }
    fn schema() -> serde_json::Value {
        json!({"anyOf": [{"type": "array", "items": T::schema()}, {"type": "string", "description": "with commas"}]})
    }
}
