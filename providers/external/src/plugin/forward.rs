//! Forwards the output of the provider's program to the log, bounded in length and number of lines.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::time::Instant;

use crate::wire::clipped;

/// Longest line; the rest of it is dropped.
const LINE: usize = 2000;
/// Most lines of one stream in one [`WINDOW`]; further lines are counted and dropped.
const LINES: u32 = 200;
const WINDOW: Duration = Duration::from_secs(1);

/// Last line of the output, for the error that describes the end of the program.
pub(super) type LastLines = Arc<Mutex<Option<String>>>;

/// Reads to the end of the stream.
pub(super) async fn forward(
    mut from: impl AsyncRead + Unpin,
    stream: &'static str,
    program: String,
    words: LastLines,
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

fn say(line: &str, stream: &str, program: &str, words: &LastLines, budget: &mut Budget) {
    *words.lock() = Some(line.to_owned());
    let (may, left_out) = budget.take();
    if left_out > 0 {
        tracing::warn!(program, stream, left_out, "provider printed too many lines; some were left out");
    }
    if may {
        tracing::info!(program, stream, line, "provider output");
    }
}

/// Splits bytes into lines for the log.
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
                // Keeps more than is shown, so that the cut remains visible.
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
    /// Returns whether one more line may be logged, and how many lines were dropped before it.
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
    fn lines_are_split_at_newlines_and_at_the_limit() {
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
