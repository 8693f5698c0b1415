//! Content of the file as a tree that keeps the order and repeated keys, which a map would lose.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

use super::value::Bad;

/// A value of one layer. The environment and flags give [`Node::Text`] only.
#[derive(Clone, Debug, PartialEq)]
pub enum Node {
    /// No value after the colon, or an empty text: equal to an absent key.
    Null,
    /// `true` or `false` without quotes.
    Bool(bool),
    /// A number without quotes, in decimal.
    Number(String),
    /// Text, or anything from the environment or a flag.
    Text(String),
    /// A list.
    List(Vec<Node>),
    /// A section, in the order of the file; a key may be repeated until that is reported.
    Map(Vec<(String, Node)>),
}

impl Node {
    /// Returns the text of a single value that is not necessarily text: `4789` and `"4789"` are the same.
    pub fn scalar(&self) -> Result<String, Bad> {
        match self {
            Node::Bool(b) => Ok(b.to_string()),
            Node::Number(n) => Ok(n.clone()),
            Node::Text(t) => Ok(t.clone()),
            Node::Null => Err(Bad::new("nothing where a value is expected", "give one or remove the key")),
            Node::List(_) => Err(Bad::new("a list where one value is expected", "give one value")),
            Node::Map(_) => Err(Bad::new("a section where one value is expected", "give one value")),
        }
    }

    /// Returns text unchanged. Numbers and booleans are refused: `1.10` would have become `1.1`.
    pub fn text(&self) -> Result<String, Bad> {
        match self {
            Node::Number(_) => Err(Bad::new("a number where text is expected", "put it in quotes")),
            Node::Bool(_) => Err(Bad::new("true or false where text is expected", "put it in quotes")),
            other => other.scalar(),
        }
    }

    /// Returns the value in one line, for a mistake. Never call it for a secret.
    pub(super) fn line(&self) -> String {
        match self {
            Node::Null => String::new(),
            Node::Bool(b) => b.to_string(),
            Node::Number(t) | Node::Text(t) => t.clone(),
            Node::List(items) => {
                format!("[{}]", items.iter().map(Node::line).collect::<Vec<_>>().join(", "))
            }
            Node::Map(_) => "{…}".to_owned(),
        }
    }

    /// Returns the node at a dotted path, if every step to it is a section.
    pub(super) fn at(&self, path: &str) -> Option<&Node> {
        path.split('.').try_fold(self, |node, step| match node {
            Node::Map(entries) => entries.iter().find(|(key, _)| key == step).map(|(_, child)| child),
            _ => None,
        })
    }
}

/// Parses the text of the file. An empty file is an empty section.
pub(super) fn parse(text: &str) -> Result<Node, serde_yaml::Error> {
    match serde_yaml::from_str::<Option<Node>>(text)? {
        None | Some(Node::Null) => Ok(Node::Map(Vec::new())),
        Some(node) => Ok(node),
    }
}

/// Removes repeated keys, except the first, and adds the dotted path of each removed one to `found`.
pub(super) fn take_repeated(node: &mut Node, path: &str, found: &mut Vec<String>) {
    let Node::Map(entries) = node else { return };
    let mut seen = std::collections::HashSet::new();
    entries.retain(|(key, _)| {
        let first = seen.insert(key.clone());
        if !first {
            found.push(join(path, key));
        }
        first
    });
    for (key, child) in entries {
        take_repeated(child, &join(path, key), found);
    }
}

pub(super) fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Node, D::Error> {
        deserializer.deserialize_any(NodeVisitor)
    }
}

struct NodeVisitor;

macro_rules! visit_numbers {
    ($($visit:ident: $kind:ty),*) => {$(
        fn $visit<E: de::Error>(self, v: $kind) -> Result<Node, E> {
            Ok(Node::Number(v.to_string()))
        }
    )*};
}

impl<'de> Visitor<'de> for NodeVisitor {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value, a list or a section")
    }
    fn visit_unit<E: de::Error>(self) -> Result<Node, E> {
        Ok(Node::Null)
    }
    fn visit_bool<E: de::Error>(self, v: bool) -> Result<Node, E> {
        Ok(Node::Bool(v))
    }
    visit_numbers!(visit_u64: u64, visit_i64: i64, visit_u128: u128, visit_i128: i128, visit_f64: f64);
    fn visit_str<E: de::Error>(self, v: &str) -> Result<Node, E> {
        Ok(Node::Text(v.to_owned()))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Node, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Node::List(items))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let mut entries = Vec::new();
        while let Some((key, value)) = map.next_entry::<Node, Node>()? {
            let key = match key {
                Node::Bool(b) => b.to_string(),
                Node::Number(t) | Node::Text(t) => t,
                _ => return Err(de::Error::custom("a key must be text")),
            };
            // Charts write `key: ""` for an absent value; an empty variable is unset, too.
            let value = if value == Node::Text(String::new()) { Node::Null } else { value };
            entries.push((key, value));
        }
        Ok(Node::Map(entries))
    }
}
