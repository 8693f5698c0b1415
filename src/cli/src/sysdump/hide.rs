//! Removes secrets from texts and values. Pure.
//!
//! A text loses the rest of a line after the name of a secret, private keys, and the ends of long lines, which contain
//! whole requests. A value loses all annotations, variables of containers, user-data, and strings under the name of a
//! secret.

use peerpod_base::redact;
use serde_json::Value;

/// Length limit of a line, in characters.
const LINE: usize = 2000;
/// Keys under which all strings are hidden.
const HIDDEN: [&str; 12] = [
    "annotations",
    "env",
    "data",
    "stringdata",
    "binarydata",
    "userdata",
    "user_data",
    "initdata",
    "args",
    "command",
    "auth",
    "envfrom",
];
/// Key that is removed: it repeats the names of all fields.
const REMOVED: &str = "managedFields";

/// Removes secrets from a text.
pub(super) fn text(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut is_in_key = false;
    for line in text.lines() {
        let begins = line.contains("-----BEGIN") && line.contains("PRIVATE KEY");
        if begins || is_in_key {
            is_in_key = !line.contains("-----END");
            if begins {
                out.push_str("(a private key is hidden)\n");
            }
            continue;
        }
        out.push_str(&one_line(line));
        out.push('\n');
    }
    out
}

fn one_line(line: &str) -> String {
    let json = line.find('{').and_then(|at| Some((line.get(..at)?, line.get(at..)?)));
    if let Some((before, json)) = json
        && let Ok(mut json) = serde_json::from_str::<Value>(json)
    {
        value(&mut json);
        return format!("{}{json}", redact::line(before));
    }
    // The agent writes requests in the form of Rust and of protobuf, with the container's variables in them.
    let request = ["env:", "env=", "\"env\"", "Env:"].iter().filter_map(|name| line.find(name)).min();
    let line = request.and_then(|at| line.get(..at)).map_or(line.to_owned(), |rest| format!("{rest}…"));
    let line = redact::line(&line.chars().map(|c| if c == '\t' { ' ' } else { c }).collect::<String>());
    match line.char_indices().nth(LINE) {
        Some((end, _)) => format!("{}…", line.get(..end).unwrap_or_default()),
        None => line,
    }
}

/// Removes secrets from a value.
pub(super) fn value(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.remove(REMOVED);
            for (name, field) in fields.iter_mut() {
                let is_hidden = HIDDEN.contains(&&*name.to_ascii_lowercase());
                if is_hidden || redact::is_secret_name(name) && field.is_string() {
                    hide(field);
                } else {
                    self::value(field);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(self::value),
        Value::String(words) => *words = text(words).trim_end().to_owned(),
        _ => {}
    }
}

/// Hides all strings, and keeps the names of fields and variables.
fn hide(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields.iter_mut() {
                if name != "name" || !field.is_string() {
                    hide(field);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(hide),
        Value::String(words) => *words = format!("(hidden, {} bytes)", words.len()),
        Value::Number(_) | Value::Bool(_) | Value::Null => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn no_secret_is_left_and_the_rest_is_readable() {
        let mut pod = json!({
            "metadata": {"name": "web", "annotations": {"a": "hunter2"}, "managedFields": [1]},
            "spec": {"containers": [{"name": "c", "env": [{"name": "DB", "value": "hunter2"}], "args": ["--x=hunter2"]}]},
            "api_key": "hunter2",
            "count": 3,
        });
        value(&mut pod);
        let shown = pod.to_string();
        assert!(!shown.contains("hunter2") && !shown.contains("managedFields"), "{shown}");
        assert!(
            shown.contains("\"web\"") && shown.contains("\"DB\"") && shown.contains("\"count\":3"),
            "{shown}"
        );

        let log = "password: hunter2\n2026Z stdout F {\"env\":[\"DB=hunter2\"],\"msg\":\"made\"}\n\
            request { env: [\"DB=hunter2\"] }\n-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----\nend\n";
        let shown = text(log);
        assert!(!shown.contains("hunter2"), "{shown}");
        assert!(shown.contains("\"msg\":\"made\"") && shown.ends_with("end\n"), "{shown}");
    }
}
