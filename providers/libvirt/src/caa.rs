//! Converts the settings of a cloud-api-adaptor for libvirt into settings of this provider. Pure.
//!
//! Names and defaults: `libvirt/manager.go` of cloud-api-adaptor at `fbdde756`. Its `-data-dir` has no variable.

use std::collections::BTreeMap;

/// Result of a conversion.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Converted {
    /// Keys below `provider.libvirt`, with their values as text.
    pub settings: BTreeMap<String, String>,
    /// Variables that have no counterpart, or have a value without one, each with its remedy.
    pub lost: Vec<(String, String)>,
    /// All recognised variables, converted or not.
    pub known: Vec<String>,
}

/// Variable, key of this provider, whether it is a number.
const TABLE: &[(&str, &str, bool)] = &[
    ("LIBVIRT_URI", "uri", false),
    ("LIBVIRT_POOL", "pool", false),
    ("LIBVIRT_NET", "network", false),
    ("LIBVIRT_VOL_NAME", "volume", false),
    ("LIBVIRT_EFI_FIRMWARE", "firmware", false),
    ("LIBVIRT_CPU", "vcpus", true),
    ("LIBVIRT_MEMORY", "memory-mib", true),
    ("LIBVIRT_CPUSET", "cpuset", false),
    ("LIBVIRT_ROOT_DISK_SIZE", "root-disk-gib", true),
];
/// Defaults of a cloud-api-adaptor that differ from those of this provider.
const DEFAULTS: &[(&str, &str)] = &[
    ("volume", "podvm-base.qcow2"),
    ("memory-mib", "8192"),
    ("root-disk-gib", "10"),
    ("user-data", "nocloud"),
];

/// Converts the variables of a cloud-api-adaptor for libvirt; ignores all other variables.
pub fn convert(variables: &BTreeMap<String, String>) -> Converted {
    let mut converted = Converted::default();
    let get = |name: &str| variables.get(name).map(|value| value.trim()).filter(|value| !value.is_empty());
    for (key, value) in DEFAULTS {
        converted.settings.insert((*key).to_owned(), (*value).to_owned());
    }
    for (name, key, number) in TABLE {
        if variables.contains_key(*name) {
            converted.known.push((*name).to_owned());
        }
        let Some(text) = get(name) else { continue };
        if *number && text.parse::<u64>().is_err() {
            let why =
                format!("`{text}` is no number and was ignored; set provider.libvirt.{key} if you want one");
            converted.lost.push(((*name).to_owned(), why));
            continue;
        }
        // In a cloud-api-adaptor, 0 means the default.
        if *key == "root-disk-gib" && text == "0" {
            continue;
        }
        if *key == "uri"
            && let Err(why) = crate::rpc::link::Address::parse(text)
        {
            converted.lost.push(((*name).to_owned(), format!("`{text}`: {why}")));
            continue;
        }
        converted.settings.insert((*key).to_owned(), text.to_owned());
    }
    security(get("DISABLECVM"), get("LIBVIRT_LAUNCH_SECURITY"), &mut converted);
    for name in ["DISABLECVM", "LIBVIRT_LAUNCH_SECURITY"] {
        if variables.contains_key(name) {
            converted.known.push(name.to_owned());
        }
    }
    converted
}

/// Reports the variables for confidential VMs instead of converting them. A cloud-api-adaptor makes an ordinary VM when
/// a confidential one is not available. Here that is an error, so the setting must be explicit.
fn security(disabled: Option<&str>, launch: Option<&str>, converted: &mut Converted) {
    if disabled.is_some_and(|text| text != "1" && !text.eq_ignore_ascii_case("true")) {
        let why = "on x86 it never made a confidential VM; set provider.libvirt.confidential to sev, sev_snp or tdx";
        converted.lost.push(("DISABLECVM".to_owned(), why.to_owned()));
    }
    if let Some(kind) = launch {
        let why =
            format!("`{kind}` is not supported; set provider.libvirt.confidential to sev, sev_snp or tdx");
        converted.lost.push(("LIBVIRT_LAUNCH_SECURITY".to_owned(), why));
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
            .map(|(name, _, number)| (*name, if *number { "7" } else { "/x" }))
            .chain([("DISABLECVM", "false"), ("LIBVIRT_LAUNCH_SECURITY", "s390-pv"), ("AWS_REGION", "x")])
            .collect();
        let converted = of(&all);
        assert_eq!(converted.known.len(), all.len() - 1);
        assert_eq!(converted.settings["memory-mib"], "7");
        assert_eq!(converted.settings["cpuset"], "/x");
        let lost: Vec<&str> = converted.lost.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(lost, ["LIBVIRT_URI", "DISABLECVM", "LIBVIRT_LAUNCH_SECURITY"]);
    }

    #[test]
    fn its_default_uri_is_not_dialled_and_a_hint_is_given() {
        let converted = of(&[("LIBVIRT_URI", "qemu+ssh://root@192.168.122.1/system?no_verify=1")]);
        assert!(converted.lost[0].1.contains("ssh -L"), "{converted:?}");
        assert!(!converted.settings.contains_key("uri"));
        assert_eq!(of(&[("LIBVIRT_ROOT_DISK_SIZE", "0")]).settings["root-disk-gib"], "10");
        assert_eq!(of(&[("LIBVIRT_CPU", "two")]).lost.len(), 1);
    }
}
