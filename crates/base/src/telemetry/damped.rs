//! Damps repeated log lines: of lines that differ in their time alone, the first ten of each minute are written. The next
//! one that is written has the number of those that were left out. Lines of guests have limits of their own, in the relay.

use std::collections::HashMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
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
/// Target of guests' lines.
const GUEST: &str = "guest";

/// A format with damping.
pub(super) struct Damped<F> {
    format: F,
    is_json: bool,
    lines: Mutex<Lines>,
}

/// Lines of the present window by their hash, with their number.
#[derive(Default)]
struct Lines(HashMap<u64, (Instant, u64)>);

impl Lines {
    /// Counts a line. Returns how many equal ones were left out before it; `None`: it is left out as well.
    fn count(&mut self, line: &str, now: Instant) -> Option<u64> {
        let mut hasher = DefaultHasher::new();
        line.hash(&mut hasher);
        let key = hasher.finish();
        if self.0.len() >= MOST_LINES && !self.0.contains_key(&key) {
            self.0.retain(|_, (since, _)| now.duration_since(*since) < WINDOW);
            if self.0.len() >= MOST_LINES {
                self.0.clear();
            }
        }
        let (since, count) = self.0.entry(key).or_insert((now, 0));
        let mut left_out = 0;
        if now.duration_since(*since) >= WINDOW {
            left_out = count.saturating_sub(MOST_EQUAL);
            (*since, *count) = (now, 0);
        }
        *count += 1;
        (*count <= MOST_EQUAL).then_some(left_out)
    }
}

impl<F> Damped<F> {
    pub(super) fn new(format: F, is_json: bool) -> Damped<F> {
        Damped { format, is_json, lines: Mutex::default() }
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
        match self.lines.lock().count(rest.unwrap_or(&line), Instant::now()) {
            None => Ok(()),
            Some(0) => to.write_str(&line),
            Some(left_out) if self.is_json => {
                let open = line.trim_end().strip_suffix('}').unwrap_or(&line);
                writeln!(to, "{open},\"left_out\":{left_out}}}")
            }
            Some(left_out) => writeln!(to, "{} left_out={left_out}", line.trim_end()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_lines_are_bounded_in_each_window_and_counted() {
        let (mut lines, begin) = (Lines::default(), Instant::now());
        let written = (0..100).filter(|_| lines.count("again", begin).is_some()).count();
        assert_eq!(written as u64, MOST_EQUAL);
        assert_eq!(lines.count("another", begin), Some(0));
        assert_eq!(lines.count("again", begin + WINDOW), Some(100 - MOST_EQUAL));
        assert_eq!(lines.count("again", begin + WINDOW), Some(0));
    }

    #[test]
    fn the_memory_is_bounded() {
        let (mut lines, begin) = (Lines::default(), Instant::now());
        for number in 0..MOST_LINES * 3 {
            assert_eq!(lines.count(&number.to_string(), begin), Some(0));
            assert!(lines.0.len() <= MOST_LINES);
        }
    }
}
