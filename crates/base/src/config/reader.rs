//! Reads settings from the layers and records the requested keys.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::lines::Lines;
use super::mistake::{Mistake, Mistakes, shown};
use super::node::{self, Node};
use super::sources::{Sources, TESTING_VARIABLE, env_name};
use super::unknown;
use super::value::{Bad, Value};

/// Largest accepted file, in bytes. A real one has a few kilobytes.
const MAX_FILE: u64 = 256 * 1024;

/// Origin of an effective value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// No layer gave one.
    Default,
    /// The file, and the line of the key if it was found.
    File(PathBuf, Option<usize>),
    /// The variable of this name.
    Env(String),
    /// The flag of this name, with its dashes.
    Flag(String),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File(path, Some(line)) => write!(f, "{}:{line}", path.display()),
            Origin::File(path, None) => write!(f, "{}", path.display()),
            Origin::Env(name) | Origin::Flag(name) => f.write_str(name),
        }
    }
}

/// A requested setting.
#[derive(Clone, Debug)]
pub struct Setting {
    /// Dotted key, like `node.boot-timeout`.
    pub key: String,
    /// Purpose, in one sentence.
    pub help: String,
    /// Default as text; `None` if there is no default.
    pub default: Option<String>,
    /// Whether a value must be given.
    pub required: bool,
    /// JSON Schema of the value.
    pub schema: serde_json::Value,
    /// Effective value; `"(set)"` for a secret, null if there is none.
    pub value: serde_json::Value,
    /// Origin of the effective value.
    pub origin: Origin,
    pub(super) secret: bool,
    /// The default in the form of a value; null if none can be shown.
    pub(super) default_shown: serde_json::Value,
}

/// Returns the values of settings. Instead of a mistake it returns the default; nothing may start before
/// [`Reader::finish`].
#[derive(Debug)]
pub struct Reader {
    pub(super) sources: Sources,
    pub(super) tree: Node,
    pub(super) lines: Lines,
    pub(super) mine: Vec<String>,
    pub(super) others: Vec<String>,
    pub(super) asked: BTreeMap<String, Setting>,
    pub(super) left: Vec<String>,
    pub(super) removed: BTreeSet<String>,
    pub(super) overridden: Vec<String>,
    pub(super) mistakes: Vec<Mistake>,
    /// Beginning of every requested key, see [`Reader::section`].
    section: String,
    /// The file is not YAML. Its content is unknown, so no key is reported as missing.
    broken: bool,
}

impl Reader {
    /// Reads the layers. `mine` are the top-level sections read here. `others`, of other binaries, are not checked.
    ///
    /// # Errors
    /// The file cannot be read at all. [`Reader::finish`] reports a file that is not YAML.
    pub fn load(sources: Sources, mine: &[&str], others: &[&str]) -> Result<Reader, Mistakes> {
        let text = match &sources.file {
            Some(path) => read_file(path).map_err(|why| {
                let place = path.display().to_string();
                Mistakes(vec![Mistake { order: (0, 0), place, value: None, why }])
            })?,
            None => String::new(),
        };
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let mut reader = Reader {
            sources,
            tree: Node::Map(Vec::new()),
            lines: Lines::scan(&text),
            mine: owned(mine),
            others: owned(others),
            asked: BTreeMap::new(),
            left: Vec::new(),
            removed: BTreeSet::new(),
            overridden: Vec::new(),
            mistakes: Vec::new(),
            section: String::new(),
            broken: false,
        };
        reader.take_tree(&text);
        Ok(reader)
    }

    fn take_tree(&mut self, text: &str) {
        let mut tree = match node::parse(text) {
            Ok(tree @ Node::Map(_)) => tree,
            Ok(_) => {
                self.note_file("", None, "no settings at its top; write sections like `node:`".to_owned());
                self.broken = true;
                return;
            }
            Err(why) => {
                let line = why.location().map(|location| location.line());
                self.note_file("", line, format!("not YAML: {}; correct the line", shown(&why.to_string())));
                self.broken = true;
                return;
            }
        };
        let mut repeated = Vec::new();
        node::take_repeated(&mut tree, "", &mut repeated);
        for path in repeated {
            let lines = self.lines.all(&path);
            let first = lines.first().map_or_else(String::new, |line| format!(" (first in line {line})"));
            let why = format!("given twice{first}; keep one of them");
            self.note_file(&path, lines.get(1).copied(), why);
        }
        self.tree = tree;
    }

    /// Returns a setting with a default, which is written as in the file.
    ///
    /// # Panics
    /// Panics if the default itself is invalid: a bug, which the first test that reads the key finds.
    pub fn get<T: Value>(&mut self, key: &str, default: &str, help: &str) -> T {
        let found = self.ask::<T>(key, Some(default), false, help);
        found.unwrap_or_else(|| match T::read(&Node::Text(default.to_owned())) {
            Ok(value) => value,
            Err(bad) => panic!("the built-in default of {key} is wrong: {bad}"),
        })
    }

    /// Returns a setting that may be absent.
    pub fn optional<T: Value>(&mut self, key: &str, help: &str) -> Option<T> {
        self.ask(key, None, false, help)
    }

    /// Returns a setting that must be given; `None` is recorded as a mistake.
    pub fn required<T: Value>(&mut self, key: &str, help: &str) -> Option<T> {
        let found = self.ask(key, None, true, help);
        let missing = found.is_none() && !self.is_set(key) && !self.broken;
        if missing {
            let key = self.key(key);
            let why = format!("missing; {help} (or set {})", env_name(&key));
            self.note((0, usize::MAX), key, None, why);
        }
        found
    }

    /// Returns a setting with a fixed set of values.
    pub fn choice(&mut self, key: &str, default: &str, allowed: &[&str], help: &str) -> String {
        let value: String = self.get(key, default, help);
        if let Some(setting) = self.asked.get_mut(&self.key(key)) {
            setting.schema = json!({"type": "string", "enum": allowed});
        }
        if allowed.contains(&value.as_str()) {
            return value;
        }
        self.mistake(key, format!("not known; write one of {}", allowed.join(", ")));
        default.to_owned()
    }

    /// Makes a mistake of a key that is a setting no more. `instead` is advice, like `use cluster.node-name`.
    pub fn removed(&mut self, key: &str, instead: &str) {
        if self.is_set(key) {
            self.mistake(key, format!("no longer a setting; {instead}"));
        }
        self.removed.insert(self.key(key));
    }

    /// Returns the constant `name`, which was the setting `key`. Peerpod's tests override it by that key.
    pub fn constant<T: Value>(&mut self, key: &str, name: &str, value: T) -> T {
        let shown = match value.show() {
            serde_json::Value::String(text) => text,
            other => other.to_string(),
        };
        self.overridable(key, &format!("the constant {name} is {shown}; remove the key"), value)
    }

    /// Returns a value that was the setting `key` and now comes from `source`. Tests override it as a constant.
    pub fn derived<T: Value>(&mut self, key: &str, source: &str, value: T) -> T {
        self.overridable(key, &format!("it comes from {source}; remove the key"), value)
    }

    fn overridable<T: Value>(&mut self, key: &str, instead: &str, value: T) -> T {
        if self.sources.env.get(TESTING_VARIABLE).is_some_and(|text| text == "1")
            && let Some((found, _)) = self.read(&self.key(key))
        {
            self.overridden.push(self.key(key));
            return found;
        }
        self.removed(key, instead);
        value
    }

    /// Returns the constants that a test overrides, by their keys.
    pub fn overridden(&self) -> &[String] {
        &self.overridden
    }

    /// Runs `read`, for which every key is below this section: `kind` in `provider` is `provider.kind`.
    pub fn section<T>(&mut self, section: &str, read: impl FnOnce(&mut Reader) -> T) -> T {
        let outside = std::mem::replace(&mut self.section, format!("{section}."));
        let found = read(self);
        self.section = outside;
        found
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.section)
    }

    /// Accepts keys below this prefix without reading them, like the settings of a provider that was not chosen.
    pub fn leave(&mut self, prefix: &str) {
        self.left.push(prefix.to_owned());
    }

    /// Whether any layer gives the key a value.
    pub fn is_set(&self, key: &str) -> bool {
        !self.layers(&self.key(key)).is_empty()
    }

    /// Records that the value of a key cannot be used, for reasons that only the caller knows: a contradiction, a
    /// limit. `why` ends with advice: `"shorter than node.lease; make it longer"`.
    pub fn mistake(&mut self, key: &str, why: impl Into<String>) {
        let key = &self.key(key);
        let secret = self.asked.get(key).is_none_or(|setting| setting.secret);
        let (place, value, order) = match self.layers(key).pop() {
            Some((node, origin)) => {
                let value = (!secret).then(|| shown(&node.line()));
                (place(&origin, key), value, order(&origin))
            }
            None => {
                let default = self.asked.get(key).and_then(|setting| setting.default.clone());
                (format!("{key} (default)"), default.filter(|_| !secret).map(|d| shown(&d)), (0, usize::MAX))
            }
        };
        self.note(order, place, value, why.into());
    }

    /// Returns the settings requested so far, by key.
    pub fn asked(&self) -> Vec<Setting> {
        self.asked.values().cloned().collect()
    }

    /// Checks the whole configuration and returns the settings by key. Unknown keys are found here, so every key must
    /// have been requested before.
    pub fn finish(mut self) -> Result<Vec<Setting>, Mistakes> {
        unknown::find(&mut self);
        if self.mistakes.is_empty() {
            return Ok(self.asked.into_values().collect());
        }
        self.mistakes.sort_by_key(|mistake| mistake.order);
        Err(Mistakes(self.mistakes))
    }

    fn ask<T: Value>(&mut self, key: &str, default: Option<&str>, required: bool, help: &str) -> Option<T> {
        let key = self.key(key);
        let (value, origin) =
            self.read::<T>(&key).map_or((None, Origin::Default), |(v, from)| (Some(v), from));
        let default_shown = default.map_or(serde_json::Value::Null, default_shown::<T>);
        let setting = Setting {
            key: key.clone(),
            help: help.to_owned(),
            default: default.map(str::to_owned).filter(|_| !T::SECRET),
            required,
            schema: T::schema(),
            value: value.as_ref().map_or_else(|| default_shown.clone(), T::show),
            origin,
            secret: T::SECRET,
            default_shown,
        };
        self.asked.insert(key, setting);
        value
    }

    /// Reads the key in every layer, so that a mistake in a lower layer is reported although a higher one counts.
    fn read<T: Value>(&mut self, key: &str) -> Option<(T, Origin)> {
        let mut value = None;
        for (node, from) in self.layers(key) {
            let found = match &from {
                Origin::Flag(_) if T::SECRET => Err(Bad::new(
                    "a secret in a flag, which every user of the machine can read",
                    &format!("use {} or the file", env_name(key)),
                )),
                _ => T::read(&node),
            };
            match found {
                Ok(found) => value = Some((found, from)),
                Err(bad) => {
                    let seen = (!T::SECRET).then(|| shown(&node.line()));
                    self.note(order(&from), place(&from, key), seen, bad.to_string());
                }
            }
        }
        value
    }

    /// Returns the value of each layer for a key, lowest first.
    fn layers(&self, key: &str) -> Vec<(Node, Origin)> {
        let mut found = Vec::new();
        if let (Some(path), Some(node)) = (&self.sources.file, self.tree.at(key))
            && *node != Node::Null
        {
            found.push((node.clone(), Origin::File(path.clone(), self.lines.find(key))));
        }
        let name = env_name(key);
        if let Some(text) = self.sources.env.get(&name).filter(|text| !text.is_empty()) {
            found.push((Node::Text(text.clone()), Origin::Env(name)));
        }
        let flag = self.sources.flags.iter().rev().find(|(flag, _)| flag == key);
        if let Some((_, text)) = flag.filter(|(_, text)| !text.is_empty()) {
            found.push((Node::Text(text.clone()), Origin::Flag(format!("--{key}"))));
        }
        found
    }

    pub(super) fn note(&mut self, order: (u8, usize), place: String, value: Option<String>, why: String) {
        let mistake = Mistake { order, place, value, why };
        // Two components may request the same key; its mistake is reported once.
        if !self.mistakes.contains(&mistake) {
            self.mistakes.push(mistake);
        }
    }

    /// Records a mistake about the file, at a key if there is one.
    pub(super) fn note_file(&mut self, key: &str, line: Option<usize>, why: String) {
        let path = self.sources.file.clone().unwrap_or_default();
        let origin = Origin::File(path, line.or_else(|| self.lines.find(key)));
        self.note(order(&origin), place(&origin, key), None, why);
    }
}

/// Returns the default in the form of effective values.
fn default_shown<T: Value>(text: &str) -> serde_json::Value {
    T::read(&Node::Text(text.to_owned())).map_or(serde_json::Value::Null, |value| value.show())
}

fn place(origin: &Origin, key: &str) -> String {
    match origin {
        Origin::File(..) if key.is_empty() => origin.to_string(),
        Origin::File(..) => format!("{origin}: {key}"),
        Origin::Default => key.to_owned(),
        Origin::Env(name) | Origin::Flag(name) => name.clone(),
    }
}

fn order(origin: &Origin) -> (u8, usize) {
    match origin {
        Origin::File(_, line) => (0, line.unwrap_or(usize::MAX)),
        Origin::Default => (0, usize::MAX),
        Origin::Env(_) => (1, 0),
        Origin::Flag(_) => (2, 0),
    }
}

/// Returns the text of the file, or the reason why it cannot be read, with advice.
fn read_file(path: &Path) -> Result<String, String> {
    let cannot = |why: std::io::Error| format!("cannot be read: {why}; give it with --config or create it");
    // Checked before the open: opening a pipe would block for ever.
    if !std::fs::metadata(path).map_err(cannot)?.is_file() {
        return Err("not a file; name a YAML file".to_owned());
    }
    let mut text = Vec::new();
    let file = std::fs::File::open(path).map_err(cannot)?;
    file.take(MAX_FILE + 1).read_to_end(&mut text).map_err(cannot)?;
    if text.len() as u64 > MAX_FILE {
        return Err(format!("larger than {MAX_FILE} bytes; this is not a configuration of Peerpod"));
    }
    String::from_utf8(text).map_err(|_| "not UTF-8 text; save it as UTF-8".to_owned())
}
