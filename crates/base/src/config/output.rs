//! Prints the requested settings as a JSON Schema, as a configuration, and as help.

use serde_json::{Map, Value, json};

use super::reader::{Origin, Setting};
use super::sources::env_name;

/// Returns the JSON Schema (2020-12) of a file with these settings.
pub fn schema(settings: &[Setting]) -> Value {
    let mut root = section();
    for setting in settings {
        let mut at = &mut root;
        let mut steps = setting.key.split('.').peekable();
        while let Some(step) = steps.next() {
            if steps.peek().is_none() {
                at["properties"][step] = leaf(setting);
                if setting.required
                    && let Some(required) =
                        at.as_object_mut().map(|object| object.entry("required").or_insert_with(|| json!([])))
                    && let Some(required) = required.as_array_mut()
                {
                    required.push(json!(step));
                }
            } else {
                if at["properties"][step].is_null() {
                    at["properties"][step] = section();
                }
                at = &mut at["properties"][step];
            }
        }
    }
    root["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    root["title"] = json!("peerpod configuration");
    root
}

/// Schema of a section that allows only its own properties. The section may be empty in the file.
fn section() -> Value {
    json!({"type": ["object", "null"], "additionalProperties": false, "properties": {}})
}

fn leaf(setting: &Setting) -> Value {
    let mut leaf = match &setting.schema {
        Value::Object(fields) => fields.clone(),
        _ => Map::new(),
    };
    leaf.insert("description".to_owned(), json!(setting.help));
    if setting.default.is_some() {
        leaf.insert("default".to_owned(), setting.default_shown.clone());
    }
    Value::Object(leaf)
}

/// Prints the effective values as a configuration file, each with its origin, below its meaning. Unset and secret values
/// are comments.
pub fn print(settings: &[Setting]) -> String {
    let mut out = String::new();
    let mut around: Vec<&str> = Vec::new();
    for setting in settings {
        let mut steps: Vec<&str> = setting.key.split('.').collect();
        let name = steps.pop().unwrap_or_default();
        let same = around.iter().zip(&steps).take_while(|(a, b)| a == b).count();
        for (depth, step) in steps.iter().enumerate().skip(same) {
            out.push_str(&format!("{:1$}{step}:\n", "", depth * 2));
        }
        let (sign, value) = match &setting.value {
            Value::Null => ("# ", "(not set)".to_owned()),
            _ if setting.secret => ("# ", "(set)".to_owned()),
            value => ("", value.to_string()),
        };
        let indent = steps.len() * 2;
        for line in setting.help.lines() {
            out.push_str(&format!("{:indent$}# {line}\n", ""));
        }
        out.push_str(&format!("{:indent$}{sign}{name}: {value}  # {}\n", "", setting.origin));
        around = steps;
    }
    out
}

/// Prints every setting with its flag, variable, default, choices and meaning, without values.
pub fn help(settings: &[Setting]) -> String {
    let mut out = String::new();
    for setting in settings {
        let Setting { key, help, default, required, schema, .. } = setting;
        let default = match default.as_deref() {
            None if *required => "must be given",
            None | Some("") => "none",
            Some(default) => default,
        };
        let choices: Vec<&str> =
            schema["enum"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let choices = match choices[..] {
            [] => String::new(),
            _ => format!(" [one of: {}]", choices.join(", ")),
        };
        let variable = env_name(key);
        out.push_str(&format!(
            "  --{key} <value>\n      {help}{choices} [default: {default}] [env: {variable}]\n"
        ));
    }
    out
}

impl Setting {
    /// Whether a layer gave the value, as opposed to the default.
    pub fn is_given(&self) -> bool {
        self.origin != Origin::Default
    }
}
