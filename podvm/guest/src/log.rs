//! Where the guest's log goes: to the console, always, and over the link to the node, so that `kubectl logs` there shows
//! why a VM misbehaves. What was said before the link was up, or while it is cut, waits in a bounded ring; the oldest
//! is given up first, and how much was is said with the next line.
//!
//! Whoever says something is never held up by the link: the ring is a lock for as long as a line is copied. What the
//! link itself says of its own work stays on the console, or each line would make the next.

use std::{
    collections::VecDeque,
    fmt::{self, Write},
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};
use peerpod_link::record::{Level, Line, MAX_TARGET, MAX_TEXT, cut};
use tracing::{Event, Metadata, Subscriber, field::Field};
use tracing_subscriber::{
    Layer,
    filter::Targets,
    layer::{self, SubscriberExt},
    util::SubscriberInitExt,
};

use crate::status;

/// What waits for the link, in bytes, and in lines of which each costs as much as a short one at least.
const MOST_BYTES: usize = 256 << 10;
const LEAST_COST: usize = 64;

/// Who works for the link: below a warning, what they say is about lines on their way.
const LINK_S_OWN: [&str; 6] =
    ["peerpod_link::endpoint", "peerpod_link::session", "peerpod_guest::log", "rustls", "tokio", "mio"];

/// Lines that wait for the link. Clones are the same ring.
#[derive(Clone)]
pub(crate) struct Ring {
    inner: Arc<Mutex<Inner>>,
    /// When this VM's time begins, on the clock of [`status::since_boot`].
    zero: Duration,
}

#[derive(Default)]
struct Inner {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    lost: u32,
    waker: Option<Waker>,
    /// The image wants the log to stay on the console.
    off: bool,
}

fn cost(line: &[u8]) -> usize {
    line.len().max(LEAST_COST)
}

impl Ring {
    /// An empty one. One that is off keeps nothing.
    pub(crate) fn new(on: bool) -> Ring {
        let inner = Inner { off: !on, ..Inner::default() };
        Ring { inner: Arc::new(Mutex::new(inner)), zero: status::birth_of_vm() }
    }

    /// Keeps a line, at the price of the oldest.
    pub(crate) fn say(&self, level: Level, target: &str, text: &str) {
        let uptime_ms = status::since_boot().saturating_sub(self.zero).as_millis() as u64;
        let line = Line { level, lost: 0, uptime_ms, target, text }.encode();
        let mut inner = self.lock();
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

    /// The oldest line, as it goes over the link; with it goes how many before it were given up.
    pub(crate) fn poll_next(&self, cx: &mut Context<'_>) -> Poll<Vec<u8>> {
        let mut inner = self.lock();
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

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }
}

/// Begins to log: to the console, and into the ring when there is one.
pub(crate) fn init(filter: Targets, ring: Option<Ring>) {
    let console = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(std::io::stderr);
    tracing_subscriber::registry().with(filter).with(console).with(ring.map(ToRing)).init();
}

/// What tracing hands to the ring.
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

/// An event as text: its message, then its fields, `name=value`; no longer than a line may be.
struct Words {
    text: String,
    begun: bool,
}

impl Words {
    fn add(&mut self, field: &Field, value: fmt::Arguments<'_>) {
        // A full line ends the formatting early, which is what the error is for.
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
