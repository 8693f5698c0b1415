//! Forms of output that the subcommands share: a table, JSON or YAML, and colours for a terminal. Pure, but for the
//! environment and standard output.

use std::ffi::OsStr;
use std::fmt;
use std::io::{IsTerminal, Write};

use serde::Serialize;

/// Prints a line to `stdout` or `stderr`. A closed output is no error, because a clean-up must still be done.
macro_rules! say {
    ($stream:ident, $($words:tt)*) => {
        std::io::Write::write_fmt(&mut std::io::$stream(), format_args!("{}\n", format_args!($($words)*))).ok()
    };
}
pub(crate) use say;

/// Form of a subcommand's output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// Columns for people
    #[default]
    Table,
    /// More columns
    Wide,
    /// JSON; new versions add fields, and keep the meaning of those that exist
    Json,
    /// YAML, with the same fields as JSON
    Yaml,
}

/// The option `-o`.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub(crate) struct Output {
    /// Form of the output
    #[arg(short = 'o', long = "output", value_enum, default_value_t, value_name = "FORM")]
    pub(crate) format: Format,
}

impl Output {
    /// Prints a value as JSON or YAML, or else the text of `table`, which receives whether more columns are wanted.
    ///
    /// # Errors
    /// Standard output is closed, or the value has no such form.
    pub(crate) fn print<T: Serialize>(
        self,
        value: &T,
        table: impl FnOnce(bool) -> String,
    ) -> anyhow::Result<()> {
        let text = match self.format {
            Format::Table | Format::Wide => table(self.format == Format::Wide),
            Format::Json => format!("{}\n", serde_json::to_string_pretty(value)?),
            Format::Yaml => serde_yaml::to_string(value)?,
        };
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes())?;
        Ok(out.flush()?)
    }
}

/// Columns of text, aligned. A cell without text is shown as `-`.
#[derive(Debug)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Makes a table with these headings.
    pub(crate) fn new(headings: &[&str]) -> Table {
        Table { rows: vec![headings.iter().map(|&heading| heading.to_owned()).collect()] }
    }

    /// Appends a row.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |cell: &str| if cell.is_empty() { "-".to_owned() } else { safe(cell) };
        let rows: Vec<Vec<String>> =
            self.rows.iter().map(|row| row.iter().map(|cell| shown(cell)).collect()).collect();
        let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
        let width = |at: usize| {
            let cells = rows.iter().filter_map(|row| row.get(at));
            cells.map(|cell| cell.chars().count()).max().unwrap_or_default()
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &rows {
            let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}"));
            writeln!(f, "{}", cells.collect::<Vec<_>>().join("  ").trim_end())?;
        }
        Ok(())
    }
}

/// Replaces control characters: texts of guests and clouds must not drive the terminal.
pub(crate) fn safe(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Colours of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Colour {
    Green,
    Yellow,
    Red,
}

/// Colours a text if standard output is a terminal and `NO_COLOR` is not set.
pub(crate) fn paint(colour: Colour, text: &str) -> String {
    let is_on = has_colours(std::env::var_os("NO_COLOR").as_deref(), std::io::stdout().is_terminal());
    if is_on { painted(colour, text) } else { text.to_owned() }
}

/// Whether colours are shown, by the value of `NO_COLOR`, and whether standard output is a terminal.
fn has_colours(no_color: Option<&OsStr>, is_terminal: bool) -> bool {
    is_terminal && no_color.is_none_or(OsStr::is_empty)
}

fn painted(colour: Colour, text: &str) -> String {
    let code = match colour {
        Colour::Green => 32,
        Colour::Yellow => 33,
        Colour::Red => 31,
    };
    format!("\u{1b}[{code}m{text}\u{1b}[0m")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned_and_control_characters_are_replaced() {
        let mut table = Table::new(&["POD", "PHASE"]);
        table.row(["a/long-name".to_owned(), String::new()]);
        table.row(["ä".to_owned(), "\u{1b}[31mx".to_owned()]);
        assert_eq!(table.to_string(), "POD          PHASE\na/long-name  -\nä             [31mx\n");
    }

    #[test]
    fn colours_are_for_a_terminal_without_no_color() {
        let has = |no_color: Option<&str>, is_terminal| has_colours(no_color.map(OsStr::new), is_terminal);
        assert_eq!([has(None, true), has(Some(""), true)], [true, true]);
        assert_eq!([has(Some("1"), true), has(None, false)], [false, false]);
        assert_eq!(painted(Colour::Red, "x"), "\u{1b}[31mx\u{1b}[0m");
    }
}
