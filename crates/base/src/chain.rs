//! Formats an error with its causes in one line.

use std::error::Error;

/// Returns the text of the error and of each cause behind it, joined by `: `. A cause that the text already contains is
/// left out. Errors of this project contain their causes; those of libraries (hyper, kube) often do not.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let said = cause.to_string();
        if !text.contains(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("client error (Connect)")]
    struct Outer(#[source] Inner);

    #[derive(Debug, thiserror::Error)]
    #[error("tcp connect error: {0}")]
    struct Inner(#[source] std::io::Error);

    #[test]
    fn every_cause_is_there_once() {
        let refused = std::io::Error::other("connection refused");
        assert_eq!(
            chain(&Outer(Inner(refused))),
            "client error (Connect): tcp connect error: connection refused"
        );
    }
}
