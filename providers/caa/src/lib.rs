//! Converts the settings of a cloud-api-adaptor (its `peer-pods-cm` ConfigMap and secret) into settings of a provider, by
//! a table of its variables for each. Pure. The tables are part of every build, independently of its providers.
//!
//! Names and defaults: `<provider>/manager.go` of cloud-api-adaptor at `fbdde756`. Its flags have other names, which only
//! its command line reads; a deployment sets the variables.

mod alibabacloud;
mod aws;
mod azure;
mod byom;
mod gcp;
mod ibmcloud;
mod libvirt;
mod powervs;
#[cfg(test)]
mod tests;
mod vsphere;

use std::collections::BTreeMap;

pub use serde_json::Value;

/// Converts the variables of one provider; ignores all other variables.
type Convert = fn(&Variables) -> Converted;

/// `CLOUD_PROVIDER` values, each with its converter.
const TABLE: &[(&str, Convert)] = &[
    ("alibabacloud", alibabacloud::convert),
    ("aws", aws::convert),
    ("azure", azure::convert),
    ("byom", byom::convert),
    ("gcp", gcp::convert),
    ("ibmcloud", ibmcloud::convert),
    ("ibmcloud-powervs", powervs::convert),
    ("libvirt", libvirt::convert),
    ("vsphere", vsphere::convert),
];

/// Returns the providers with a table.
pub fn known() -> Vec<&'static str> {
    TABLE.iter().map(|(name, _)| *name).collect()
}

/// Converts the variables of `provider`. `None`: there is no table for it.
pub fn convert(provider: &str, variables: &Variables) -> Option<Converted> {
    let (_, convert) = TABLE.iter().find(|(name, _)| *name == provider)?;
    Some(convert(variables))
}

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
enum Form {
    /// Text.
    Text,
    /// Texts, separated by commas.
    List,
    /// Boolean.
    Flag,
    /// Number.
    Number,
}

/// Reason and remedy for a variable that our daemon reads from its own environment.
const STAYS: &str = "it is read from the environment; set it on our daemon, too";

/// Variable, key of the provider, form of the value.
type Row = (&'static str, &'static str, Form);

/// Variables by name.
pub type Variables = BTreeMap<String, String>;

/// Returns the value of a variable, if it has one.
fn get<'v>(variables: &'v Variables, name: &str) -> Option<&'v str> {
    variables.get(name).map(|value| value.trim()).filter(|value| !value.is_empty())
}

/// Parses a flag as the cloud-api-adaptor does: `1` and `true` are true, all other texts are false.
fn is_true(text: &str) -> bool {
    text == "1" || text.eq_ignore_ascii_case("true")
}

impl Converted {
    /// Converts the variables of a table for the provider of this section; ignores all other variables.
    fn by_table(section: &str, table: &[Row], variables: &Variables) -> Converted {
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
    fn recognise(&mut self, variables: &Variables, name: &str) {
        if variables.contains_key(name) {
            self.known.push(name.to_owned());
        }
    }

    /// Records that a variable has no counterpart. The second argument names the reason and the remedy.
    fn lose(&mut self, name: &str, why: impl Into<String>) {
        self.lost.push((name.to_owned(), why.into()));
    }

    /// Records variables that have no counterpart, each with the reason and the remedy.
    fn lose_all(&mut self, variables: &Variables, lost: &[(&str, &str)]) {
        for (name, why) in lost {
            self.recognise(variables, name);
            if get(variables, name).is_some() {
                self.lose(name, *why);
            }
        }
    }

    /// Removes the entries of a setting that are not key=value, or that `refusal` refuses; reports them as lost `TAGS`.
    fn keep_tags(&mut self, key: &str, refusal: impl Fn(&str, &str) -> Option<String>) {
        let Some(Value::Array(tags)) = self.settings.get_mut(key) else { return };
        let mut lost = Vec::new();
        tags.retain(|tag| {
            let tag = tag.as_str().unwrap_or_default();
            let why = match tag.split_once('=').map(|(key, value)| (key.trim(), value.trim())) {
                None | Some(("", _)) => Some("is not key=value; correct it".to_owned()),
                Some((key, value)) => refusal(key, value),
            };
            lost.extend(why.as_ref().map(|why| ("TAGS".to_owned(), format!("`{tag}`: {why}"))));
            why.is_none()
        });
        if tags.is_empty() {
            self.settings.remove(key);
        }
        self.lost.extend(lost);
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
