//! View of a reader on one section, for components that do not know the section's path.

use super::reader::Reader;
use super::value::Value;

/// Keys below a prefix: `section("provider.local").get("bridge", …)` reads `provider.local.bridge`.
#[derive(Debug)]
pub struct Section<'r> {
    pub(super) reader: &'r mut Reader,
    pub(super) prefix: String,
}

impl Section<'_> {
    /// See [`Reader::get`].
    pub fn get<T: Value>(&mut self, key: &str, default: &str, help: &str) -> T {
        let key = self.key(key);
        self.reader.get(&key, default, help)
    }

    /// See [`Reader::optional`].
    pub fn optional<T: Value>(&mut self, key: &str, help: &str) -> Option<T> {
        let key = self.key(key);
        self.reader.optional(&key, help)
    }

    /// See [`Reader::required`].
    pub fn required<T: Value>(&mut self, key: &str, help: &str) -> Option<T> {
        let key = self.key(key);
        self.reader.required(&key, help)
    }

    /// See [`Reader::choice`].
    pub fn choice(&mut self, key: &str, default: &str, allowed: &[&str], help: &str) -> String {
        let key = self.key(key);
        self.reader.choice(&key, default, allowed, help)
    }

    /// See [`Reader::constant`].
    pub fn constant<T: Value>(&mut self, key: &str, name: &str, value: T) -> T {
        let key = self.key(key);
        self.reader.constant(&key, name, value)
    }

    /// See [`Reader::derived`].
    pub fn derived<T: Value>(&mut self, key: &str, source: &str, value: T) -> T {
        let key = self.key(key);
        self.reader.derived(&key, source, value)
    }

    /// See [`Reader::removed`].
    pub fn removed(&mut self, key: &str, instead: &str) {
        let key = self.key(key);
        self.reader.removed(&key, instead);
    }

    /// See [`Reader::mistake`].
    pub fn mistake(&mut self, key: &str, why: impl Into<String>) {
        let key = self.key(key);
        self.reader.mistake(&key, why);
    }

    /// See [`Reader::is_set`].
    pub fn is_set(&self, key: &str) -> bool {
        self.reader.is_set(&self.key(key))
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.prefix)
    }
}
