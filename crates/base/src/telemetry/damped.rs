//! Damps repeated log lines: of lines that differ in their time alone, the first ten of each minute are written. The next
//! one that is written has the number of those that were left out. If none follows, the last one that was left out is
//! written when its minute is over, with the number of the others. Lines of guests have limits of their own, in the relay.

use std::collections::HashMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Equal lines that are written in one window.
const MOST_EQUAL: u64 = 10;
const WINDOW: Duration = Duration::from_secs(60);
/// Different lines that are remembered; with more of them in one window, the count begins anew.
const MOST_LINES: usize = 1024;
/// Longest line that is kept until its window is over, in bytes.
const MOST_KEPT: usize = 4096;
/// Target of guests' lines.
const GUEST: &str = "guest";

/// A format with damping.
pub(super) struct Damped<F> {
    format: F,
    is_json: bool,
    lines: Shared,
}

/// Lines of one output.
pub(super) type Shared = Arc<Mutex<Lines>>;

/// Lines of the present window by their hash.
#[derive(Default)]
pub(super) struct Lines(HashMap<u64, Counted>);

/// Equal lines of one window.
struct Counted {
    since: Instant,
    number: u64,
    /// The last one that was left out, whole; empty: none, or a long one.
    last: String,
}

impl Lines {
    /// Counts a line. Returns how many equal ones were left out before it; `None`: it is left out as well.
    /// `rest` is the line without its time.
    fn count(&mut self, line: &str, rest: &str, now: Instant) -> Option<u64> {
        let mut hasher = DefaultHasher::new();
        rest.hash(&mut hasher);
        let key = hasher.finish();
        if self.0.len() >= MOST_LINES && !self.0.contains_key(&key) {
            self.0.retain(|_, counted| now.duration_since(counted.since) < WINDOW);
            if self.0.len() >= MOST_LINES {
                self.0.clear();
            }
        }
        let new = || Counted { since: now, number: 0, last: String::new() };
        let counted = self.0.entry(key).or_insert_with(new);
        let mut left_out = 0;
        if now.duration_since(counted.since) >= WINDOW {
            left_out = counted.number.saturating_sub(MOST_EQUAL);
            *counted = new();
        }
        counted.number += 1;
        if counted.number <= MOST_EQUAL {
            return Some(left_out);
        }
        counted.last.clear();
        if line.len() <= MOST_KEPT {
            counted.last.push_str(line);
        }
        None
    }

    /// Returns the last line of each finished window that was left out, with the number of the others. A long line stays:
    /// the next equal one has its number.
    pub(super) fn finished(&mut self, now: Instant) -> Vec<(String, u64)> {
        let over = self.0.extract_if(|_, counted| {
            let is_told = counted.number <= MOST_EQUAL || !counted.last.is_empty();
            is_told && now.duration_since(counted.since) >= WINDOW
        });
        let rest = over.filter(|(_, counted)| !counted.last.is_empty());
        rest.map(|(_, Counted { number, last, .. })| (last, number.saturating_sub(MOST_EQUAL + 1))).collect()
    }
}

/// Adds the number of lines that were left out to a line.
pub(super) fn with_left_out(line: &str, left_out: u64, is_json: bool) -> String {
    match left_out {
        0 => line.to_owned(),
        _ if is_json => {
            let open = line.trim_end().strip_suffix('}').unwrap_or(line);
            format!("{open},\"left_out\":{left_out}}}\n")
        }
        _ => format!("{} left_out={left_out}\n", line.trim_end()),
    }
}

impl<F> Damped<F> {
    pub(super) fn new(format: F, is_json: bool, lines: Shared) -> Damped<F> {
        Damped { format, is_json, lines }
    }
}

impl<S, N, F> FormatEvent<S, N> for Damped<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut to: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        if event.metadata().target() == GUEST {
            return self.format.format_event(context, to, event);
        }
        let mut line = String::new();
        self.format.format_event(context, Writer::new(&mut line), event)?;
        // The time is before the first space of a text, and before the first comma of an object.
        let rest = line.find(if self.is_json { ',' } else { ' ' }).and_then(|at| line.get(at..));
        match self.lines.lock().count(&line, rest.unwrap_or(&line), Instant::now()) {
            None => Ok(()),
            Some(left_out) => to.write_str(&with_left_out(&line, left_out, self.is_json)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_lines_are_bounded_in_each_window_and_counted() {
        let (mut lines, begin) = (Lines::default(), Instant::now());
        let mut count = |line: &str, now| lines.count(line, line, now);
        let written = (0..100).filter(|_| count("again", begin).is_some()).count();
        assert_eq!(written as u64, MOST_EQUAL);
        assert_eq!(count("another", begin), Some(0));
        assert_eq!(count("again", begin + WINDOW), Some(100 - MOST_EQUAL));
        assert_eq!(count("again", begin + WINDOW), Some(0));
    }

    #[test]
    fn the_number_is_written_when_the_lines_stop() {
        let (mut lines, begin) = (Lines::default(), Instant::now());
        for second in 0..30 {
            lines.count(&format!("{second} again\n"), " again\n", begin);
            lines.count("once\n", &format!("{second}"), begin);
        }
        assert!(lines.finished(begin + WINDOW / 2).is_empty());
        assert_eq!(lines.finished(begin + WINDOW), [("29 again\n".to_owned(), 30 - MOST_EQUAL - 1)]);
        assert!(lines.0.is_empty());
        let long = "long ".repeat(MOST_KEPT);
        for _ in 0..30 {
            lines.count(&long, &long, begin);
        }
        assert!(lines.finished(begin + WINDOW).is_empty());
        assert_eq!(lines.count(&long, &long, begin + WINDOW), Some(30 - MOST_EQUAL));
        assert_eq!(with_left_out("29 again\n", 19, false), "29 again left_out=19\n");
        assert_eq!(with_left_out("{\"a\":1}\n", 19, true), "{\"a\":1,\"left_out\":19}\n");
    }

    #[test]
    fn the_memory_is_bounded() {
        let (mut lines, begin) = (Lines::default(), Instant::now());
        for number in 0..MOST_LINES * 3 {
            assert_eq!(lines.count("", &number.to_string(), begin), Some(0));
            assert!(lines.0.len() <= MOST_LINES);
        }
    }
}
