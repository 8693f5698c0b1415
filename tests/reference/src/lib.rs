//! Renders the reference pages of `docs/` from the code. Unit tests of each program compare the generated sections with
//! the pages; `PEERPOD_UPDATE=1 cargo test documented` writes them.
//!
//! May touch: the pages of `docs/`, if `PEERPOD_UPDATE` is set.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use serde_json::Value;

use peerpod_base::config::Setting;
use peerpod_base::metrics::plain;

/// Compares the section `name` of `docs/<page>` with the generated text, or writes the text if `PEERPOD_UPDATE` is set.
/// In the page, the section is between the lines `<!-- generated: NAME -->` and `<!-- end: NAME -->`.
///
/// # Errors
/// The section is out of date, the page lacks the two lines, or the page cannot be read or written.
pub fn section(page: &str, name: &str, text: &str) -> Result<(), String> {
    compare(page, name, text, str::to_owned, "PEERPOD_UPDATE")
}

/// Compares the section `name` of `docs/front-door.md` with the output of a command, or writes the output if
/// `PEERPOD_TEST_UPDATE` is set. The page has the output of a real run. Two outputs are equal if `shape` gives the same
/// text for both.
///
/// # Errors
/// As [`section`].
pub fn capture(name: &str, command: &str, text: &str) -> Result<(), String> {
    let text = format!("```text\n# {command}\n{}\n```", text.trim_end());
    // Programs under test refuse variables that are no settings, unless they begin so.
    compare("front-door.md", name, &text, shape, "PEERPOD_TEST_UPDATE")
}

/// Headings of lines that differ from run to run.
const VARYING: [&str; 2] = ["events", "end of the console"];

/// Returns the lines of an output without all that differs between two runs and two machines: words with digits (times,
/// ids, addresses, sizes), bars, causes of items, Events, log lines after the program's name, the order of lines, and
/// equal lines.
fn shape(text: &str) -> String {
    let levels = [" ERROR ", " WARN ", " INFO ", " DEBUG "];
    let (mut lines, mut varies) = (Vec::new(), false);
    for line in text.lines() {
        let is_below = line.starts_with("  ");
        if !is_below {
            varies = line.starts_with('!') || VARYING.contains(&line);
        }
        let is_log = levels.iter().any(|level| line.contains(level));
        if !is_below || !is_log && !varies {
            lines.push(shape_of_line(line));
        }
    }
    lines.sort();
    lines.dedup();
    lines.join("\n")
}

fn shape_of_line(line: &str) -> String {
    // An item of a check that is in order, or depends on the machine: its name.
    let item = line.strip_prefix(['✓', '!', '-']).and_then(|item| item.split_once(": "));
    if let Some((name, _)) = item.filter(|(name, _)| name.contains('/')) {
        return name.trim_start().to_owned();
    }
    let is_time = |word: &str| word.starts_with("20") && word.contains('T') && word.ends_with('Z');
    let mut words = line.split_whitespace();
    if let (Some(name), Some(second)) = (words.next(), words.next())
        && is_time(second)
    {
        return name.to_owned();
    }
    let word = |word: &str| if word.contains(|c: char| c.is_ascii_digit()) { "#" } else { word }.to_owned();
    line.split_whitespace()
        .map(|one| word(one.trim_matches('█')))
        .collect::<Vec<_>>()
        .join(" ")
        .trim_end()
        .to_owned()
}

fn compare(
    page: &str,
    name: &str,
    text: &str,
    shape: fn(&str) -> String,
    variable: &str,
) -> Result<(), String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(page);
    let update = std::env::var_os(variable).is_some();
    replace(&path, name, text, shape, update).map_err(|why| format!("{}: {why}", path.display()))
}

fn replace(path: &Path, name: &str, text: &str, shape: fn(&str) -> String, update: bool) -> io::Result<()> {
    let mut file = File::options().read(true).write(update).open(path)?;
    if update {
        // Other tests may write other sections of the page at the same time.
        file.lock()?;
    }
    let mut page = String::new();
    file.read_to_string(&mut page)?;
    let (begin, end) = (format!("<!-- generated: {name} -->\n"), format!("<!-- end: {name} -->"));
    let from = page.find(&begin).map(|at| at + begin.len());
    let Some((from, to)) = from.zip(page.find(&end)).filter(|(from, to)| from <= to) else {
        return Err(io::Error::other(format!("has no lines `{}` and `{end}`", begin.trim_end())));
    };
    let wanted = format!("\n{}\n\n", text.trim());
    if shape(&page[from..to]) == shape(&wanted) {
        return Ok(());
    }
    if !update {
        let why = format!(
            "section {name} is out of date; PEERPOD_UPDATE=1 cargo test documented writes it, and the test of a capture \
             with PEERPOD_TEST_UPDATE=1; now it is:\n{text}"
        );
        return Err(io::Error::other(why));
    }
    page.replace_range(from..to, &wanted);
    file.rewind()?;
    file.set_len(0)?;
    file.write_all(page.as_bytes())
}

/// Renders the help text of a command.
pub fn help(command: &str, text: &str) -> String {
    format!("### `{command}`\n\n```text\n{}\n```\n", text.trim_end())
}

/// Renders settings, one table for each section of the configuration file.
pub fn settings(settings: &[Setting]) -> String {
    let mut sections: BTreeMap<&str, Vec<[String; 4]>> = BTreeMap::new();
    for setting in settings {
        let section = setting.key.rsplit_once('.').map_or("", |(section, _)| section);
        let default = match &setting.default {
            Some(default) if !default.is_empty() => code(default),
            _ if setting.required => "required".to_owned(),
            _ => String::new(),
        };
        let row = [code(&setting.key), kind(&setting.schema), default, cell(&setting.help)];
        sections.entry(section).or_default().push(row);
    }
    let tables = sections.iter().map(|(section, rows)| {
        format!("### `{section}`\n\n{}", table(["Key", "Type", "Default", "Meaning"], rows))
    });
    tables.collect::<Vec<_>>().join("\n")
}

/// Renders the fields of an OpenAPI schema, with those of its objects and lists.
pub fn fields(schema: &Value) -> String {
    let mut rows = Vec::new();
    collect_fields("", schema, &mut rows);
    table(["Field", "Type", "Default", "Meaning"], &rows)
}

fn collect_fields(path: &str, schema: &Value, rows: &mut Vec<[String; 4]>) {
    let Some(properties) = schema["properties"].as_object() else { return };
    let required = schema["required"].as_array();
    for (name, field) in properties {
        let path = format!("{path}.{name}");
        let default = match &field["default"] {
            Value::Null if required.is_some_and(|all| all.iter().any(|one| one == name)) => {
                "required".to_owned()
            }
            Value::Null => String::new(),
            Value::String(text) => code(text),
            other => code(&other.to_string()),
        };
        let mut meaning = cell(field["description"].as_str().unwrap_or_default());
        for rule in field["x-kubernetes-validations"].as_array().into_iter().flatten() {
            if let Some(message) = rule["message"].as_str() {
                meaning += &format!("<br>Rule: {}.", cell(message));
            }
        }
        rows.push([code(&path), kind(field), default, meaning]);
        collect_fields(&path, field, rows);
        collect_fields(&format!("{path}[]"), &field["items"], rows);
    }
}

/// Renders the metrics of a registry. Every family must have a series, because an empty family is not encoded.
///
/// # Errors
/// A metric cannot be encoded, or a family is empty.
pub fn metrics(registry: &Registry) -> Result<String, String> {
    let mut text = String::new();
    encode(&mut text, registry).map_err(|why| why.to_string())?;
    lint(&plain(&text))?;
    let mut rows: Vec<[String; 4]> = Vec::new();
    for line in text.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            rows.push([name.to_owned(), String::new(), String::new(), cell(help.trim_end_matches('.'))]);
            continue;
        }
        let Some(row) = rows.last_mut() else { continue };
        if let Some((_, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            row[1] = kind.to_owned();
        } else if let Some((_, series)) = line.split_once('{') {
            for label in labels(series) {
                let label = code(label);
                if row[2].is_empty() {
                    row[2] = label;
                } else if !row[2].contains(&label) {
                    row[2] += ", ";
                    row[2] += &label;
                }
            }
        }
    }
    // The registry has no list of its metrics; its Debug output shows the empty families, too.
    let registered = format!("{registry:?}").matches("Descriptor {").count();
    if rows.len() < registered {
        let empty = registered - rows.len();
        return Err(format!("{empty} of {registered} metrics have no series; count in every family"));
    }
    for row in &mut rows {
        row[0] = code(&format!("{}{}", row[0], if row[1] == "counter" { "_total" } else { "" }));
    }
    Ok(table(["Metric", "Type", "Labels", "Meaning"], &rows))
}

/// Passes metrics in the text format 0.0.4 through `promtool check metrics`.
fn lint(text: &str) -> Result<(), String> {
    let failed = |why: io::Error| format!("run promtool: {why}; scripts/setup installs it");
    let mut promtool = Command::new("promtool")
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let input = promtool.stdin.take();
    // It reads all before it prints.
    input.map_or(Ok(()), |mut input| input.write_all(text.as_bytes())).map_err(failed)?;
    let done = promtool.wait_with_output().map_err(failed)?;
    if done.status.success() && done.stderr.is_empty() {
        return Ok(());
    }
    Err(format!("promtool check metrics: {}", String::from_utf8_lossy(&done.stderr)))
}

#[cfg(test)]
mod monitoring;

/// Returns the names of the labels in `a="x",b="y"} 1`, without the bounds of a histogram.
fn labels(series: &str) -> Vec<&str> {
    let mut parts: Vec<&str> = series.split("=\"").collect();
    // The last part holds a value and no name.
    parts.pop();
    parts.into_iter().filter_map(|part| part.rsplit([',', '"']).next()).filter(|name| *name != "le").collect()
}

/// Returns the type that a JSON Schema describes.
fn kind(schema: &Value) -> String {
    if let Some(values) = schema["enum"].as_array() {
        return values.iter().filter_map(Value::as_str).map(code).collect::<Vec<_>>().join(", ");
    }
    // Alternatives are the two families of addresses, or the two forms of a list.
    if let Some(first) = schema["anyOf"].as_array().and_then(|alternatives| alternatives.first()) {
        return if first["format"] == "ipv4" { "IP address".to_owned() } else { kind(first) };
    }
    let word = match schema["type"].as_str() {
        Some("array") => return format!("list of {}", kind(&schema["items"])),
        Some("object") if schema["additionalProperties"].is_object() => "map",
        Some("string") if schema["writeOnly"] == true => "secret",
        Some("string") if schema["pattern"] == "^/" => "path",
        Some("string") if schema["description"] == "address:port" => "address:port",
        Some("string") if schema["format"] == "date-time" => "time",
        None if schema["type"].is_array() => "duration",
        other => other.unwrap_or("any"),
    };
    word.to_owned()
}

fn table<const N: usize>(head: [&str; N], rows: &[[String; N]]) -> String {
    let mut out = format!("| {} |\n|{}\n", head.join(" | "), "---|".repeat(N));
    for row in rows {
        out += &format!("| {} |\n", row.join(" | "));
    }
    out
}

/// Returns a code span for a cell of a table.
fn code(text: &str) -> String {
    format!("`{}`", text.replace('|', "\\|"))
}

/// Returns a text for a cell of a table. Its code spans stay.
fn cell(text: &str) -> String {
    let mut out = String::new();
    let mut in_code = false;
    for c in text.trim().chars() {
        in_code ^= c == '`';
        match c {
            '\n' => out.push(' '),
            '|' => out.push_str("\\|"),
            '\\' | '<' | '*' | '[' if !in_code => out.extend(['\\', c]),
            _ => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use peerpod_base::metrics::{expiries, program};
    use prometheus_client::metrics::counter::Counter;
    use prometheus_client::metrics::family::Family;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_section_is_compared_and_written_only_on_request() {
        let path = std::env::temp_dir().join(format!("peerpod-reference-{}.md", std::process::id()));
        let page = |text: &str| format!("# A\n\n<!-- generated: a -->\n{text}<!-- end: a -->\n\nEnd.\n");
        std::fs::write(&path, page("")).unwrap();
        assert!(
            replace(&path, "a", "new", str::to_owned, false).unwrap_err().to_string().contains("out of date")
        );
        assert!(
            replace(&path, "b", "new", str::to_owned, true).unwrap_err().to_string().contains("no lines")
        );
        replace(&path, "a", "new\n", str::to_owned, true).unwrap();
        replace(&path, "a", "new", str::to_owned, false).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), page("\nnew\n\n"));
        replace(&path, "a", "n", str::to_owned, true).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), page("\nn\n\n"));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn two_runs_of_one_command_have_one_shape() {
        let one = "✓ kernel/tun: works\n! kernel/x: old 1\n    remedy: new\nvm  a1\n  made  0.1 s  █\n  2026Z  INFO a\n";
        let two = "- kernel/tun: absent\n✓ kernel/x: ok\nvm   b23\n  made  0.25 s     ███\n";
        assert_eq!(shape(one), shape(two));
        assert_ne!(shape(one), shape(&two.replace("vm ", "machine ")));
        assert_ne!(shape("✗ kata/shim: no file"), shape("✗ kata/shim: no right"));
        let [one, two] = ["node   2026-01-01T00:00:00Z a", "events\n  1s  a\nnode 2027-01-01T00:00:00Z b"];
        assert_eq!(format!("events\n{}", shape(one)), shape(two));
    }

    #[test]
    fn documented_metrics_of_every_program_are_up_to_date() {
        let mut registry = program("peerpod-x", "1.2.3");
        expiries(&mut registry, || vec![("x", SystemTime::UNIX_EPOCH)]);
        section("metrics.md", "programs", &metrics(&registry).unwrap()).unwrap();
        assert!(lint("# TYPE peerpod_things counter\npeerpod_things 1\n").unwrap_err().contains("_total"));
    }

    #[test]
    fn cells_are_valid_markdown() {
        assert_eq!(cell("a|b\n<c> `<d>|*` *\n"), "a\\|b \\<c> `<d>\\|*` \\*");
        assert_eq!(code("a|b"), "`a\\|b`");
    }

    #[test]
    fn every_family_is_shown_with_its_labels() {
        let mut registry = Registry::default();
        let family = Family::<Vec<(String, String)>, Counter>::default();
        registry.sub_registry_with_prefix("p").register("calls", "Calls", family.clone());
        assert!(metrics(&registry).unwrap_err().starts_with("1 of 1 metrics"));
        let label = |name: &str| (name.to_owned(), "x,y".to_owned());
        family.get_or_create(&vec![label("method"), label("result")]).inc();
        let text = metrics(&registry).unwrap();
        assert!(text.ends_with("| `p_calls_total` | counter | `method`, `result` | Calls |\n"), "{text}");
    }

    #[test]
    fn fields_of_lists_are_shown_with_their_types() {
        let item = json!({"type": "object", "required": ["b"], "properties": {"b": {"type": "string"}}});
        let schema = json!({"properties": {"a": {"type": "array", "description": "A.", "items": item}}});
        let text = fields(&schema);
        let rows = "| `.a` | list of object |  | A. |\n| `.a[].b` | string | required |  |\n";
        assert!(text.ends_with(rows), "{text}");
    }
}
