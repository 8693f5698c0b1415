//! Table of the cloud-api-adaptor settings that can be converted, one row per provider. Pure. The table is part of
//! every build, independently of its providers.

use std::collections::BTreeMap;

pub use peerpod_provider_api::caa::{Converted, Value};

/// Converts the variables of one provider.
type Convert = fn(&BTreeMap<String, String>) -> Converted;

/// `CLOUD_PROVIDER` values, each with its converter.
const TABLE: &[(&str, Convert)] = &[
    ("aws", peerpod_provider_aws::caa::convert),
    ("azure", peerpod_provider_azure::caa::convert),
    ("gcp", peerpod_provider_gcp::caa::convert),
    ("libvirt", peerpod_provider_libvirt::caa::convert),
];

/// Returns the providers with a row in the table.
pub fn known() -> Vec<&'static str> {
    TABLE.iter().map(|(name, _)| *name).collect()
}

/// Converts the variables of `provider`. `None`: the table has no such provider.
pub fn convert(provider: &str, variables: &BTreeMap<String, String>) -> Option<Converted> {
    let (_, convert) = TABLE.iter().find(|(name, _)| *name == provider)?;
    Some(convert(variables))
}
