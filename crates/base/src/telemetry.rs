//! Writes log records to stderr, as text for people or as JSON for collectors. Each component makes its own metrics.
//!
//! Log style: messages are constant and in lower case. Every variable part is a field (`sandbox`, `pod`, `instance`,
//! `provider`, `phase`, `took`, `error`). A span holds the fields common to all records of a request.

use std::io::IsTerminal;

use serde_json::json;
use tracing_subscriber::EnvFilter;

use crate::config::{Bad, Node, Reader, Value};

/// The client of the `kube` crate logs each failed request without cause and limit. Callers log it with both.
const QUIET: &str = "kube_client::client::builder=off";

/// Settings of the section `log`.
#[derive(Clone, Debug)]
pub struct LogConfig {
    /// `log.format`: whether a record is one JSON object per line, else text for people.
    pub json: bool,
    /// `log.level`: filter of the records.
    pub level: Level,
    /// Constants that a test overrides, for a warning.
    overridden: Vec<String>,
}

impl LogConfig {
    /// Reads the section `log`, after all other sections.
    pub fn read(reader: &mut Reader) -> LogConfig {
        LogConfig {
            json: reader.choice("log.format", "text", &["text", "json"], "format of log lines") == "json",
            level: reader.get(
                "log.level",
                "info",
                "level of the logged lines: error, warn, info, debug or trace, also per module, like \
                 info,peerpod_link=debug",
            ),
            overridden: reader.overridden().to_owned(),
        }
    }
}

/// Valid level, or list of levels by module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Level(String);

impl Value for Level {
    fn read(node: &Node) -> Result<Level, Bad> {
        let text = match node {
            // Accepted because the commas may suggest a list in the file.
            Node::List(items) => items.iter().map(Node::text).collect::<Result<Vec<_>, _>>()?.join(","),
            other => other.text()?,
        };
        // The filter reads an unknown bare word as a module name; here it is a misspelled level.
        let is_level = |word: &str| {
            ["off", "error", "warn", "info", "debug", "trace"]
                .iter()
                .any(|level| level.eq_ignore_ascii_case(word))
        };
        let understood =
            text.split(',').map(str::trim).all(|part| is_level(part) || part.contains(['=', '[']));
        if !understood || EnvFilter::try_new(&text).is_err() {
            return Err(Bad::new(
                "not a log level",
                "write error, warn, info, debug, trace, or info,module=debug",
            ));
        }
        Ok(Level(text))
    }
    fn show(&self) -> serde_json::Value {
        json!(self.0)
    }
    fn schema() -> serde_json::Value {
        json!({"type": "string"})
    }
}

/// Logging could not be set up.
#[derive(Debug, thiserror::Error)]
#[error("set up logging: {0}; it can be done only once in a process")]
pub struct Error(String);

/// Sends log records to stderr from now on. Called once per process, first in `main`; fails after that.
pub fn init(config: &LogConfig) -> Result<(), Error> {
    let level = format!("{QUIET},{}", config.level.0);
    let filter = EnvFilter::try_new(level).map_err(|why| Error(why.to_string()))?;
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let done = if config.json {
        lines.json().flatten_event(true).with_current_span(false).try_init()
    } else {
        lines.with_ansi(std::io::stderr().is_terminal()).try_init()
    };
    done.map_err(|why| Error(why.to_string()))?;
    if !config.overridden.is_empty() {
        tracing::warn!(keys = config.overridden.join(","), "a test overrides constants");
    }
    Ok(())
}

#[cfg(test)]
mod tests;
