//! Writes log records to stderr, as text for people or as JSON for collectors. Repeated lines are damped, and the level
//! can be changed at run time. Each component makes its own metrics.
//!
//! Log style: messages are constant and in lower case. Every variable part is a field (`sandbox`, `pod`, `instance`,
//! `provider`, `phase`, `took`, `error`). A span holds the fields common to all records of a request.

mod damped;

use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use tracing_subscriber::filter::ParseError;
use tracing_subscriber::fmt::format::JsonFields;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Registry, fmt, reload};

use damped::{Damped, Shared, with_left_out};

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

impl Level {
    fn filter(&self) -> Result<EnvFilter, ParseError> {
        EnvFilter::try_new(format!("{QUIET},{}", self.0))
    }
}

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

/// Changes the level of a process that has set up its logging.
static CHANGE: OnceLock<(reload::Handle<EnvFilter, Registry>, Level)> = OnceLock::new();

/// The damped lines, and whether they are JSON.
static LINES: OnceLock<(Shared, bool)> = OnceLock::new();
/// Interval of the search for damped lines that have stopped.
const FINISH_EVERY: Duration = Duration::from_secs(10);

/// Whether the level is switched to `debug`.
static IS_DEBUG: AtomicBool = AtomicBool::new(false);

/// Sends log records to stderr from now on. Called once per process, first in `main`; fails after that.
pub fn init(config: &LogConfig) -> Result<(), Error> {
    let failed = |why: &dyn Display| Error(why.to_string());
    let (filter, handle) = reload::Layer::new(config.level.filter().map_err(|why| failed(&why))?);
    let registry = tracing_subscriber::registry().with(filter);
    let lines = fmt::layer().with_writer(std::io::stderr);
    let damped = Shared::default();
    let done = if config.json {
        let format = fmt::format().json().flatten_event(true).with_current_span(false);
        let lines = lines.fmt_fields(JsonFields::new());
        registry.with(lines.event_format(Damped::new(format, true, damped.clone()))).try_init()
    } else {
        let is_terminal = std::io::stderr().is_terminal();
        let format = Damped::new(fmt::format().with_ansi(is_terminal), false, damped.clone());
        registry.with(lines.with_ansi(is_terminal).event_format(format)).try_init()
    };
    done.map_err(|why| failed(&why))?;
    drop(CHANGE.set((handle, config.level.clone())));
    drop(LINES.set((damped, config.json)));
    if !config.overridden.is_empty() {
        tracing::warn!(keys = config.overridden.join(","), "a test overrides constants");
    }
    Ok(())
}

/// Writes, for ever, the numbers of damped lines that have stopped. Runs beside a daemon.
pub(crate) async fn finish_lines() {
    let Some((lines, is_json)) = LINES.get() else { return };
    loop {
        tokio::time::sleep(FINISH_EVERY).await;
        let finished = lines.lock().finished(Instant::now());
        let text: String =
            finished.iter().map(|(line, left_out)| with_left_out(line, *left_out, *is_json)).collect();
        // Ignored as for every line: there is no other place for it.
        std::io::stderr().lock().write_all(text.as_bytes()).ok();
    }
}

/// Switches the level to `debug`, or back to `log.level`. Does nothing before [`init`].
pub fn switch_level() {
    let Some((handle, configured)) = CHANGE.get() else { return };
    let was_debug = IS_DEBUG.fetch_xor(true, Ordering::Relaxed);
    let level = if was_debug { configured.clone() } else { Level("debug".to_owned()) };
    if level.filter().is_ok_and(|filter| handle.reload(filter).is_ok()) {
        tracing::info!(level = level.0, "the level of the log has changed");
    }
}

#[cfg(test)]
mod tests;
