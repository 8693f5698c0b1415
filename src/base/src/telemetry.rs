//! Log lines on stderr, as text for people or as JSON for collectors. Metrics are made by each room and shown by
//! [`crate::admin`].
//!
//! House style: messages are constant and in lower case, everything that varies is a field (`sandbox`, `pod`, `instance`,
//! `provider`, `phase`, `took`, `error`), and a span carries what belongs on every line of a request.

use std::io::IsTerminal;

use serde_json::json;
use tracing_subscriber::EnvFilter;

use crate::config::{Bad, Node, Reader, Value};

/// kube's client logs each failed request, without its cause and without bound. Its callers log it with both. `log.level`
/// can name the module again.
const QUIET: &str = "kube_client::client::builder=off";

/// How log lines look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// For people.
    Text,
    /// One object a line.
    Json,
}

/// The section `log`.
#[derive(Clone, Debug)]
pub struct LogConfig {
    /// `log.format`
    pub format: Format,
    /// `log.level`
    pub level: Level,
}

impl LogConfig {
    /// Asks for the section `log`.
    pub fn read(reader: &mut Reader) -> LogConfig {
        LogConfig {
            format: match reader.choice("log.format", "text", &["text", "json"], "how log lines look").as_str() {
                "json" => Format::Json,
                _ => Format::Text,
            },
            level: reader.get("log.level", "info", "what is logged: error, warn, info, debug or trace, also per module, like info,peerpod_link=debug"),
        }
    }
}

/// A level or a list of levels by module, known to be understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Level(String);

impl Value for Level {
    fn read(node: &Node) -> Result<Level, Bad> {
        let text = match node {
            // Commas in the file may tempt to a list.
            Node::List(items) => items.iter().map(Node::text).collect::<Result<Vec<_>, _>>()?.join(","),
            other => other.text()?,
        };
        // The filter takes a bare word it does not know for a module's name; that is a misspelled level here.
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

/// Sends log lines to stderr from now on. Once per process, first thing in `main`.
///
/// # Errors
/// It was done before.
pub fn init(config: &LogConfig) -> Result<(), Error> {
    let level = format!("{QUIET},{}", config.level.0);
    let filter = EnvFilter::try_new(level).map_err(|why| Error(why.to_string()))?;
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let done = match config.format {
        Format::Text => lines.with_ansi(std::io::stderr().is_terminal()).try_init(),
        Format::Json => lines.json().flatten_event(true).with_current_span(false).try_init(),
    };
    done.map_err(|why| Error(why.to_string()))
}

#[cfg(test)]
mod tests;
