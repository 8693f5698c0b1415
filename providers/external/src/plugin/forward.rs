//! What the provider's program prints, as log lines of ours: bounded in length and number, whatever it prints.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::Instant;

use crate::wire::clipped;

/// Longest line; the rest of it is left out.
const LINE: usize = 2000;
/// Lines of one stream in one [`WINDOW`]; more are counted and left out.
const LINES: u32 = 200;
const WINDOW: Duration = Duration::from_secs(1);

/// The last line that was printed, for the error that says how the program ended.
#[derive(Clone, Default)]
pub(super) struct LastWords(Arc<Mutex<Option<String>>>);

impl LastWords {
    pub(super) fn get(&self) -> Option<String> {
        self.0.lock().clone()
    }

    fn set(&self, line: &str) {
        // An assignment cannot be half done.
        *self.0.lock() = Some(line.to_owned());
    }
}

/// Reads to the end of the stream.
pub(super) async fn forward(
    mut from: impl AsyncRead + Unpin,
    stream: &'static str,
    program: String,
    words: LastWords,
) {
    let mut lines = Lines::default();
    let mut budget = Budget { since: Instant::now(), said: 0, left_out: 0 };
    let mut buffer = [0u8; 4096];
    loop {
        let ended = match from.read(&mut buffer).await {
            Ok(0) | Err(_) => lines.end(),
            Ok(read) => {
                for line in lines.more(&buffer[..read]) {
                    say(&line, stream, &program, &words, &mut budget);
                }
                continue;
            }
        };
        if let Some(line) = ended {
            say(&line, stream, &program, &words, &mut budget);
        }
        return;
    }
}

fn say(line: &str, stream: &str, program: &str, words: &LastWords, budget: &mut Budget) {
    words.set(line);
    let (may, left_out) = budget.take();
    if left_out > 0 {
        tracing::warn!(program, stream, left_out, "provider printed too many lines; some were left out");
    }
    if may {
        tracing::info!(program, stream, line, "provider says");
    }
}

/// Cuts bytes into lines that can be logged.
#[derive(Default)]
struct Lines {
    line: Vec<u8>,
}

impl Lines {
    fn more(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut whole = Vec::new();
        for byte in bytes {
            match byte {
                b'\n' => whole.extend(self.end()),
                // One more than is shown, so that it can be seen that something is missing.
                _ if self.line.len() <= 4 * LINE => self.line.push(*byte),
                _ => {}
            }
        }
        whole
    }

    fn end(&mut self) -> Option<String> {
        let line = clipped(&String::from_utf8_lossy(&std::mem::take(&mut self.line)), LINE);
        (!line.is_empty()).then_some(line)
    }
}

struct Budget {
    since: Instant,
    said: u32,
    left_out: u64,
}

impl Budget {
    /// Whether one more line may be said, and how many were left out before it.
    fn take(&mut self) -> (bool, u64) {
        if self.since.elapsed() >= WINDOW {
            (self.since, self.said) = (Instant::now(), 0);
        }
        if self.said >= LINES {
            self.left_out += 1;
            return (false, 0);
        }
        self.said += 1;
        (true, std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_where_they_end_and_where_they_are_too_long() {
        let mut lines = Lines::default();
        assert_eq!(lines.more(b"one\ntw"), ["one"]);
        assert_eq!(lines.more(b"o\r\n\n\x1b[31mred\n"), ["two", "[31mred"]);
        assert!(lines.more(&[b'x'; 100_000]).is_empty());
        assert!(lines.line.len() <= 4 * LINE + 1);
        let long = lines.end().unwrap();
        assert_eq!(long.chars().count(), LINE + 1);
        assert!(long.ends_with('…'));
        assert_eq!(lines.more(b"\xff\xfe\n"), ["\u{fffd}\u{fffd}"]);
        assert_eq!(lines.end(), None);
    }

    #[tokio::test]
    async fn a_flood_is_counted_not_logged() {
        let mut budget = Budget { since: Instant::now(), said: 0, left_out: 0 };
        for _ in 0..LINES {
            assert_eq!(budget.take(), (true, 0));
        }
        assert_eq!(budget.take(), (false, 0));
        budget.since -= WINDOW;
        assert_eq!(budget.take(), (true, 1));
    }
}
