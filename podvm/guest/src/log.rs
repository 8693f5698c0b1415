//! Writes the guest's log to the console, always, and over the link to the node, so that `kubectl logs` there shows why
//! a VM misbehaves.
//!
//! Lines from before the link, or while it is cut, wait in a bounded ring. The ring drops the oldest line first, and
//! sends the number of dropped lines with the next one. The link never delays a log call: the ring's lock is held only
//! while a line is copied. Log records of the link's own code stay on the console, or each line would cause the next.

use std::collections::VecDeque;
use std::fmt::{self, Write};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use peerpod_link::claim::CANNOT_JOIN;
use peerpod_link::record::{Level, Line, MAX_TARGET, MAX_TEXT, cut};
use tracing::field::Field;
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{self, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::status;

/// Limit of the ring in bytes, and least cost of a line, which bounds the number of short lines.
const MOST_BYTES: usize = 256 << 10;
const LEAST_COST: usize = 64;

/// Targets of the link's own code: below a warning, their records concern lines in transit.
const LINK_S_OWN: [&str; 6] =
    ["peerpod_link::endpoint", "peerpod_link::session", "peerpod_guest::log", "rustls", "tokio", "mio"];

/// Lines that wait for the link. Clones share the ring.
#[derive(Clone)]
pub(crate) struct Ring {
    inner: Arc<Mutex<Inner>>,
    /// Start of this VM's time, on the clock of [`status::since_boot`].
    zero: Duration,
}

#[derive(Default)]
struct Inner {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    lost: u32,
    waker: Option<Waker>,
    /// Whether the VM image wants the log to stay on the console.
    off: bool,
}

fn cost(line: &[u8]) -> usize {
    line.len().max(LEAST_COST)
}

impl Ring {
    /// Makes an empty ring, which keeps nothing unless it is on.
    pub(crate) fn new(on: bool) -> Ring {
        let inner = Inner { off: !on, ..Inner::default() };
        Ring { inner: Arc::new(Mutex::new(inner)), zero: status::birth_of_vm() }
    }

    /// Adds a line, and drops the oldest ones if necessary.
    pub(crate) fn say(&self, level: Level, target: &str, text: &str) {
        let uptime_ms = status::since_boot().saturating_sub(self.zero).as_millis() as u64;
        let line = Line { level, lost: 0, uptime_ms, target, text }.encode();
        let mut inner = self.inner.lock();
        if inner.off {
            return;
        }
        inner.bytes += cost(&line);
        inner.lines.push_back(line);
        while inner.bytes > MOST_BYTES {
            let Some(oldest) = inner.lines.pop_front() else { break };
            inner.bytes -= cost(&oldest);
            inner.lost = inner.lost.saturating_add(1);
        }
        let waker = inner.waker.take();
        drop(inner);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Returns the oldest line, encoded for the link, with the number of lines that were dropped before it.
    pub(crate) fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Vec<u8>> {
        let mut inner = self.inner.lock();
        let Some(mut line) = inner.lines.pop_front() else {
            inner.waker = Some(cx.waker().clone());
            return Poll::Pending;
        };
        inner.bytes -= cost(&line);
        let lost = std::mem::take(&mut inner.lost);
        if lost > 0
            && let Ok(known) = Line::decode(&line)
        {
            line = Line { lost, ..known }.encode();
        }
        Poll::Ready(line)
    }
}

/// Writes the reason why the VM cannot join the node. The node finds it on the console of a VM that does not join.
pub(crate) fn cannot_join(why: &str) {
    tracing::error!("{CANNOT_JOIN}{why}");
}

/// Starts to log to the console, and into the ring if there is one.
pub(crate) fn init(filter: Targets, ring: Option<Ring>) {
    let console = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(std::io::stderr);
    tracing_subscriber::registry().with(filter).with(console).with(ring.map(ToRing)).init();
}

struct ToRing(Ring);

impl<S: Subscriber> Layer<S> for ToRing {
    fn on_event(&self, event: &Event<'_>, _: layer::Context<'_, S>) {
        let metadata = event.metadata();
        if is_links_own(metadata) {
            return;
        }
        let mut words = Words { text: String::new(), begun: false };
        event.record(&mut words);
        self.0.say(level(metadata), cut(metadata.target(), MAX_TARGET), &words.text);
    }
}

fn is_links_own(metadata: &Metadata<'_>) -> bool {
    let works_for_it = |of: &&str| {
        let rest = metadata.target().strip_prefix(*of);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    };
    *metadata.level() > tracing::Level::WARN && LINK_S_OWN.iter().any(works_for_it)
}

fn level(metadata: &Metadata<'_>) -> Level {
    match *metadata.level() {
        tracing::Level::ERROR => Level::Error,
        tracing::Level::WARN => Level::Warn,
        tracing::Level::INFO => Level::Info,
        tracing::Level::DEBUG => Level::Debug,
        tracing::Level::TRACE => Level::Trace,
    }
}

/// Text of an event: its message, then its fields, `name=value`; no longer than a line may be.
struct Words {
    text: String,
    begun: bool,
}

impl Words {
    fn add(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        // A full line ends the formatting early by means of the error.
        let space = if std::mem::replace(&mut self.begun, true) { " " } else { "" };
        let _full = match field.name() {
            "message" => write!(self, "{space}{value}"),
            name => write!(self, "{space}{name}={value}"),
        };
    }
}

impl Write for Words {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        let fits = cut(part, MAX_TEXT - self.text.len());
        self.text.push_str(fits);
        if fits.len() == part.len() { Ok(()) } else { Err(fmt::Error) }
    }
}

impl tracing::field::Visit for Words {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" || !value.contains([' ', '"', '=']) {
            self.add(field, format_args!("{value}"));
        } else {
            self.add(field, format_args!("{value:?}"));
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, format_args!("{value:?}"));
    }
}

#[cfg(test)]
mod tests;
