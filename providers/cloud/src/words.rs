//! Words of errors: bounded, whatever they are made of.

use std::time::Duration;

/// At most this many bytes, and a sign that there was more.
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

/// A duration as people say it.
pub(crate) fn ago(time: Duration) -> String {
    match time.as_secs() {
        seconds @ ..120 => format!("{seconds} s ago"),
        seconds => format!("{} min ago", seconds / 60),
    }
}
