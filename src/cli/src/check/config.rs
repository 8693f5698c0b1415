//! Reads the configuration of all programs, of which the checks need single values.

use std::collections::BTreeMap;

use peerpod_base::config::{Mistakes, Reader, Sources};
use peerpod_cluster::SECTIONS;
use serde_json::Value;

use crate::config::ask;
use crate::item::{Area, Item, failed};

/// Effective values by key. A mistaken value is the default.
pub(super) struct Config {
    values: BTreeMap<String, Value>,
    pub(super) sources: Sources,
}

impl Config {
    /// Reads the layers, and checks them.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(super) fn read(sources: Sources) -> Result<(Config, Item), Mistakes> {
        let mut reader = Reader::load(sources.clone(), &SECTIONS, &[])?;
        ask(&mut reader);
        let values = reader.asked().into_iter().map(|setting| (setting.key, setting.value)).collect();
        let file = sources.file.as_ref().map_or("no file".to_owned(), |file| file.display().to_string());
        let outcome = match reader.finish() {
            Ok(settings) => Ok(format!("{file}: {} settings, no mistakes", settings.len())),
            Err(mistakes) => {
                failed(format!("{file}: {mistakes}"), "correct each; `peerpod config check` prints them, too")
            }
        };
        Ok((Config { values, sources }, Area::Configuration.item("settings", outcome)))
    }

    /// Text of a value; empty where there is none.
    pub(super) fn text(&self, key: &str) -> String {
        match self.values.get(key) {
            None | Some(Value::Null) => String::new(),
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
        }
    }

    /// Value of a setting with a list.
    pub(super) fn list(&self, key: &str) -> Vec<String> {
        let list = self.values.get(key).and_then(Value::as_array).into_iter().flatten();
        list.filter_map(Value::as_str).map(str::to_owned).collect()
    }

    /// Port of a setting that is a port, or an address with a port.
    pub(super) fn port(&self, key: &str) -> Option<u16> {
        self.text(key).rsplit(':').next()?.parse().ok()
    }
}
