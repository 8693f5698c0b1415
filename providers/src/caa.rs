//! The settings of a cloud-api-adaptor, provider by provider: the second table, of what can be converted. Pure, and
//! part of every build, whatever providers it has.

use std::collections::BTreeMap;

pub use peerpod_provider_aws::caa::{Converted, Value};

/// Takes a provider's variables.
type Convert = fn(&BTreeMap<String, String>) -> Converted;

/// What `CLOUD_PROVIDER` says, and who knows its variables.
const TABLE: &[(&str, Convert)] = &[("aws", peerpod_provider_aws::caa::convert), ("libvirt", libvirt)];

/// In the words of the first.
fn libvirt(variables: &BTreeMap<String, String>) -> Converted {
    let peerpod_provider_libvirt::caa::Converted { settings, lost, known } =
        peerpod_provider_libvirt::caa::convert(variables);
    let value = |text: String| text.parse().map_or(Value::Text(text), Value::Number);
    Converted { settings: settings.into_iter().map(|(key, text)| (key, value(text))).collect(), lost, known }
}

/// The providers whose settings can be converted.
pub fn known() -> Vec<&'static str> {
    TABLE.iter().map(|(name, _)| *name).collect()
}

/// Takes the provider's variables; `None`: we do not know that provider's.
pub fn convert(provider: &str, variables: &BTreeMap<String, String>) -> Option<Converted> {
    let (_, convert) = TABLE.iter().find(|(name, _)| *name == provider)?;
    Some(convert(variables))
}
