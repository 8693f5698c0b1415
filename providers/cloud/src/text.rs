//! Helpers for error texts of bounded length.

use std::time::Duration;

/// Returns at most this many bytes of the text, with an ellipsis if it was cut.
pub(crate) fn clip(text: &str, most: usize) -> String {
    if text.len() <= most {
        return text.to_owned();
    }
    let mut end = most;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}…", &text[..end])
}

/// Formats a past time for people.
pub(crate) fn ago(time: Duration) -> String {
    match time.as_secs() {
        seconds @ ..120 => format!("{seconds} s ago"),
        seconds => format!("{} min ago", seconds / 60),
    }
}
