//! Removes secrets from texts and values. Pure.
//!
//! A text loses the rest of a line after the name of a secret, private keys, and the ends of long lines, which contain
//! whole requests. A value loses all annotations, variables of containers, user-data, and all under the name of a
//! secret.

use peerpod_base::redact;
use serde_json::Value;

/// Length limit of a line, in characters.
const LINE: usize = 2000;
/// Keys under which all is hidden, as [`redact::plain_name`] returns them.
const HIDDEN: [&str; 9] =
    ["annotations", "env", "data", "stringdata", "binarydata", "initdata", "args", "command", "envfrom"];
/// Keys with the name of a secret that only refer to one, in the same form.
const REFERENCES: [&str; 4] = ["imagepullsecrets", "secretname", "secretref", "serviceaccounttoken"];
/// Fields of the agent's requests with variables, arguments and annotations of a container.
const REQUEST: [&str; 3] = ["env", "args", "annotations"];
/// Kata's setting with many words; each word is hidden by itself.
const KERNEL: &str = "kernel_params";
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
    // Behind the name of a secret the whole object is one.
    if let Some((before, json)) = json
        && request(before).is_none()
        && let before = redact::line(before)
        && !before.ends_with('…')
        && let Ok(mut json) = serde_json::from_str::<Value>(json)
    {
        value(&mut json);
        return format!("{before}{json}");
    }
    let plain: String = line.chars().map(|c| if c == '\t' { ' ' } else { c }).collect();
    let is_kernel = plain.trim_start_matches(['#', ' ']).starts_with(KERNEL);
    // A quoted value within the value may contain spaces.
    let line = if is_kernel && !plain.contains(['\\', '\'']) {
        plain.split(' ').map(redact::line).collect::<Vec<_>>().join(" ")
    } else {
        match request(&plain).and_then(|at| plain.get(..at)) {
            Some(before) => redact::line(before) + "…",
            None => redact::line(&plain),
        }
    };
    match line.char_indices().nth(LINE) {
        Some((end, _)) => format!("{}…", line.get(..end).unwrap_or_default()),
        None => line,
    }
}

/// Returns the position of a request's first field with secrets, in the form of Rust, of protobuf or of JSON.
fn request(line: &str) -> Option<usize> {
    let lower = line.to_ascii_lowercase();
    let of = |name: &str| {
        let mut found = lower.match_indices(name);
        found.find_map(|(at, _)| {
            let after = lower.get(at + name.len()..)?.trim_start_matches([' ', '"', '\\']);
            after.starts_with([':', '=', '{', '[']).then_some(at)
        })
    };
    REQUEST.iter().filter_map(|name| of(name)).min()
}

/// Removes secrets from a value.
pub(super) fn value(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.remove(REMOVED);
            for (name, field) in fields.iter_mut() {
                let plain = redact::plain_name(name);
                let is_secret = redact::is_secret_name(name) && !REFERENCES.contains(&&*plain);
                if is_secret || HIDDEN.contains(&&*plain) {
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

/// Hides all strings and numbers, and keeps the names of fields, variables and Secrets.
fn hide(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields.iter_mut() {
                let is_name = ["name", "secretname"].contains(&&*redact::plain_name(name));
                if !is_name || !field.is_string() {
                    hide(field);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(hide),
        Value::String(words) => *words = format!("(hidden, {} bytes)", words.len()),
        Value::Number(_) => *value = "(hidden, a number)".into(),
        Value::Bool(_) | Value::Null => {}
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

    #[test]
    fn requests_and_kernel_parameters_lose_their_secrets() {
        for line in [
            "Process { Args: [\"hunter2\"] }",
            "spec args:\"hunter2\"",
            "Annotations: {\"a\": \"hunter2\"}",
            "tokens: {\"a\": \"hunter2\"}",
        ] {
            assert!(!text(line).contains("hunter2"), "{}", text(line));
        }
        let kata = "kernel_params = \"agent.log=debug x.token=hunter2 quiet\"";
        assert_eq!(text(kata), "kernel_params = \"agent.log=debug x.token=… quiet\"\n");
    }

    #[test]
    fn all_under_the_name_of_a_secret_is_hidden_except_references() {
        let mut spec = json!({
            "tokens": ["hunter2"], "user-data": {"a": "hunter2"}, "String_Data": "hunter2",
            "passwords": {"a": [31337]}, "imagePullSecrets": [{"name": "pull"}], "secret": {"secretName": "tls"},
            "secretRef": {"name": "ref"}, "serviceAccountToken": {"path": "sa-path", "expirationSeconds": 3600},
        });
        value(&mut spec);
        let shown = spec.to_string();
        assert!(!shown.contains("hunter2") && !shown.contains("31337"), "{shown}");
        for part in ["pull", "tls", "ref", "sa-path", "3600"] {
            assert!(shown.contains(part), "{part}: {shown}");
        }
    }
}
