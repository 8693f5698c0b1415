//! Converts the settings of a cloud-api-adaptor for libvirt into settings of this provider. Pure.
//!
//! Names and defaults: `libvirt/manager.go` of cloud-api-adaptor at `fbdde756`. Its `-data-dir` has no variable.

use peerpod_provider_api::caa::{Converted, Form, Row, Value, Variables, get, is_true};

use crate::rpc::link::Address;

const TABLE: &[Row] = &[
    ("LIBVIRT_URI", "uri", Form::Text),
    ("LIBVIRT_POOL", "pool", Form::Text),
    ("LIBVIRT_NET", "network", Form::Text),
    ("LIBVIRT_VOL_NAME", "volume", Form::Text),
    ("LIBVIRT_EFI_FIRMWARE", "firmware", Form::Text),
    ("LIBVIRT_CPU", "vcpus", Form::Number),
    ("LIBVIRT_MEMORY", "memory-mib", Form::Number),
    ("LIBVIRT_CPUSET", "cpuset", Form::Text),
    ("LIBVIRT_ROOT_DISK_SIZE", "root-disk-gib", Form::Number),
];
const DISABLED: &str = "DISABLECVM";
const LAUNCH_SECURITY: &str = "LIBVIRT_LAUNCH_SECURITY";

/// Converts the variables of a cloud-api-adaptor for libvirt; ignores all other variables.
pub fn convert(variables: &Variables) -> Converted {
    let mut converted = Converted::by_table("provider.libvirt", TABLE, variables);
    if let Some(Value::String(uri)) = converted.settings.get("uri")
        && let Err(why) = Address::parse(uri)
    {
        let why = format!("`{uri}`: {why}");
        converted.settings.remove("uri");
        converted.lose("LIBVIRT_URI", why);
    }
    // In a cloud-api-adaptor, 0 means the default.
    converted.settings.retain(|key, value| key != "root-disk-gib" || *value != 0);
    security(variables, &mut converted);
    // Defaults of a cloud-api-adaptor that differ from those of this provider.
    for (key, value) in [
        ("volume", Value::from("podvm-base.qcow2")),
        ("memory-mib", Value::from(8192)),
        ("root-disk-gib", Value::from(10)),
        ("user-data", Value::from("nocloud")),
    ] {
        converted.settings.entry(key.to_owned()).or_insert(value);
    }
    converted
}

/// Reports the variables for confidential VMs instead of converting them. A cloud-api-adaptor makes an ordinary VM when
/// a confidential one is not available. Here that is an error, so the setting must be explicit.
fn security(variables: &Variables, converted: &mut Converted) {
    const REMEDY: &str = "set provider.libvirt.confidential to sev, sev_snp or tdx";
    converted.recognise(variables, DISABLED);
    converted.recognise(variables, LAUNCH_SECURITY);
    if get(variables, DISABLED).is_some_and(|text| !is_true(text)) {
        converted.lose(DISABLED, format!("on x86 it never made a confidential VM; {REMEDY}"));
    }
    if let Some(kind) = get(variables, LAUNCH_SECURITY) {
        converted.lose(LAUNCH_SECURITY, format!("`{kind}` is not supported; {REMEDY}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Converted {
        convert(&pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn every_variable_maps_to_a_setting_or_a_hint() {
        let all: Vec<(&str, &str)> = TABLE
            .iter()
            .map(|(name, _, form)| (*name, if *form == Form::Number { "7" } else { "/x" }))
            .chain([("DISABLECVM", "false"), ("LIBVIRT_LAUNCH_SECURITY", "s390-pv"), ("AWS_REGION", "x")])
            .collect();
        let converted = of(&all);
        assert_eq!(converted.known.len(), all.len() - 1);
        assert_eq!(converted.settings["memory-mib"], 7);
        assert_eq!(converted.settings["cpuset"], "/x");
        let lost: Vec<&str> = converted.lost.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(lost, ["LIBVIRT_URI", "DISABLECVM", "LIBVIRT_LAUNCH_SECURITY"]);
    }

    #[test]
    fn its_default_uri_is_not_dialled_and_a_hint_is_given() {
        let converted = of(&[("LIBVIRT_URI", "qemu+ssh://root@192.168.122.1/system?no_verify=1")]);
        assert!(converted.lost[0].1.contains("ssh -L"), "{converted:?}");
        assert!(!converted.settings.contains_key("uri"));
        assert_eq!(of(&[("LIBVIRT_ROOT_DISK_SIZE", "0")]).settings["root-disk-gib"], 10);
        assert_eq!(of(&[("LIBVIRT_CPU", "two")]).lost.len(), 1);
    }

    #[test]
    fn a_number_with_a_unit_has_the_value_that_caa_read_and_is_reported() {
        let converted = of(&[("LIBVIRT_MEMORY", "8Gi")]);
        assert_eq!(converted.settings["memory-mib"], 8);
        assert!(converted.lost.iter().any(|(name, _)| name == "LIBVIRT_MEMORY"), "{converted:?}");
    }
}
