//! Mistakes in the configuration.

use std::fmt;

/// Longest repeated value, in characters; the rest is cut off.
const SHOWN: usize = 120;

/// One mistake: `where = value: why; advice`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// Layer and line, to sort the mistakes in reading order.
    pub(super) order: (u8, usize),
    /// Place: `file:line: key`, the variable's name, or the flag.
    pub place: String,
    /// The given value; `None` for a secret, a missing key and an unknown key (which may be a secret).
    pub value: Option<String>,
    /// Reason why it cannot be used, and advice.
    pub why: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.place)?;
        if let Some(value) = &self.value {
            write!(f, " = {value}")?;
        }
        write!(f, ": {}", self.why)
    }
}

/// Every mistake found, in the order file, environment, flags.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mistakes(pub Vec<Mistake>);

impl fmt::Display for Mistakes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.len() {
            1 => f.write_str("the configuration has a mistake:")?,
            n => write!(f, "the configuration has {n} mistakes:")?,
        }
        for mistake in &self.0 {
            write!(f, "\n  {mistake}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Mistakes {}

/// Formats a value for a mistake: one line, limited, control characters escaped.
pub(super) fn shown(value: &str) -> String {
    let mut out = String::new();
    for c in value.chars().take(SHOWN) {
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    if value.chars().nth(SHOWN).is_some() {
        out.push('…');
    }
    if out.is_empty() {
        out.push_str("\"\"");
    }
    out
}
