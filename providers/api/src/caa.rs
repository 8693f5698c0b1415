//! Converts the settings of a cloud-api-adaptor (its `peer-pods-cm` ConfigMap and secret) into settings of a provider, by
//! a table of its variables. Pure.

use std::collections::BTreeMap;

pub use serde_json::Value;

/// Result of a conversion.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Converted {
    /// Keys below the provider's section, with their values.
    pub settings: BTreeMap<String, Value>,
    /// Variables that have no counterpart, or have a value without one, each with its remedy.
    pub lost: Vec<(String, String)>,
    /// All recognised variables, converted or not.
    pub known: Vec<String>,
}

/// Form of a variable's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Text.
    Text,
    /// Texts, separated by commas.
    List,
    /// Boolean.
    Flag,
    /// Number.
    Number,
}

/// Variable, key of the provider, form of the value.
pub type Row = (&'static str, &'static str, Form);

/// Variables by name.
pub type Variables = BTreeMap<String, String>;

/// Returns the value of a variable, if it has one.
pub fn get<'v>(variables: &'v Variables, name: &str) -> Option<&'v str> {
    variables.get(name).map(|value| value.trim()).filter(|value| !value.is_empty())
}

/// Parses a flag as the cloud-api-adaptor does: `1` and `true` are true, all other texts are false.
pub fn is_true(text: &str) -> bool {
    text == "1" || text.eq_ignore_ascii_case("true")
}

impl Converted {
    /// Converts the variables of a table for the provider of this section; ignores all other variables.
    pub fn by_table(section: &str, table: &[Row], variables: &Variables) -> Converted {
        let mut converted = Converted::default();
        for (name, key, form) in table {
            converted.recognise(variables, name);
            let Some(text) = get(variables, name) else { continue };
            let value = match form {
                Form::Text => Some(text.into()),
                Form::List => Some(list(text).into()),
                Form::Flag => Some(is_true(text).into()),
                Form::Number => converted.number(text, name, &format!("{section}.{key}")),
            };
            converted.settings.extend(value.map(|value| ((*key).to_owned(), value)));
        }
        converted
    }

    /// Records that a variable is recognised, if it is set.
    pub fn recognise(&mut self, variables: &Variables, name: &str) {
        if variables.contains_key(name) {
            self.known.push(name.to_owned());
        }
    }

    /// Records that a variable has no counterpart. The second argument names the reason and the remedy.
    pub fn lose(&mut self, name: &str, why: impl Into<String>) {
        self.lost.push((name.to_owned(), why.into()));
    }

    /// Parses a number as the cloud-api-adaptor does, and reports the deviations. The cloud-api-adaptor silently reads
    /// `30GiB` as 30 and `lots` as the default.
    fn number(&mut self, text: &str, name: &str, key: &str) -> Option<Value> {
        let digits: String = text.chars().take_while(char::is_ascii_digit).collect();
        let value = digits.parse().ok();
        if value.is_none() {
            self.lose(name, format!("`{text}` is no number and was ignored; set {key} if you want one"));
        } else if digits != text {
            self.lose(
                name,
                format!("`{text}` was read as {digits}, and is written so; check that this is intended"),
            );
        }
        value.map(|value: u64| value.into())
    }
}

fn list(text: &str) -> Vec<String> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned).collect()
}
