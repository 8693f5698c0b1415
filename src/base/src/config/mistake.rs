//! One mistake in the configuration, and all of them.

use std::fmt;

/// The longest value a mistake repeats, in characters; the rest is cut off.
const SHOWN: usize = 120;

/// One thing that is wrong: `where = value: why; what would do`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mistake {
    /// Layer and line, to tell the mistakes in the order a person looks for them.
    pub(super) order: (u8, usize),
    /// Where: `file:line: key`, the variable's name, or the flag.
    pub place: String,
    /// What stood there; none for a secret, for what is missing, and for keys nobody knows (they may be secrets).
    pub value: Option<String>,
    /// Why it cannot be used, and what would do.
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

/// Every mistake that was found, in the order file, environment, flags.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mistakes(pub Vec<Mistake>);

impl Mistakes {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether nothing is wrong.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

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

/// A value as a mistake shows it: one line, bounded, control characters escaped.
pub(super) fn shown(value: &str) -> String {
    let mut out = String::new();
    for (n, c) in value.chars().enumerate() {
        if n == SHOWN {
            out.push('…');
            break;
        }
        if c.is_control() {
            out.extend(c.escape_default());
        } else {
            out.push(c);
        }
    }
    if out.is_empty() {
        out.push_str("\"\"");
    }
    out
}
