//! Where the settings of a cloud-api-adaptor for libvirt stand in ours. Pure.
//!
//! Names and defaults: `libvirt/manager.go` of cloud-api-adaptor at `fbdde756`. Its `-data-dir` has no variable.

use std::collections::BTreeMap;

/// What came of a conversion.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Converted {
    /// Keys below `provider.libvirt`, with their values as text.
    pub settings: BTreeMap<String, String>,
    /// Variables that have no place, or not with their value, and what to do about each.
    pub lost: Vec<(String, String)>,
    /// The variables that were understood, whatever became of them.
    pub known: Vec<String>,
}

/// Variable, our key, whether it is a number.
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
/// What a cloud-api-adaptor does where nothing is said, and we do differently.
const DEFAULTS: &[(&str, &str)] = &[
    ("volume", "podvm-base.qcow2"),
    ("memory-mib", "8192"),
    ("root-disk-gib", "10"),
    ("user-data", "nocloud"),
];

/// Takes the variables of a cloud-api-adaptor for libvirt; the others it leaves alone.
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
        // There, 0 means the default.
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

/// There, a confidential VM that is not to be had is an ordinary one; here it is an error, so nothing is asked unsaid.
fn security(disabled: Option<&str>, launch: Option<&str>, converted: &mut Converted) {
    if disabled.is_some_and(|text| text != "1" && !text.eq_ignore_ascii_case("true")) {
        let why = "on x86 it never made a confidential VM; set provider.libvirt.confidential to sev, sev_snp or tdx";
        converted.lost.push(("DISABLECVM".to_owned(), why.to_owned()));
    }
    if let Some(kind) = launch {
        let why =
            format!("`{kind}` is not made here; set provider.libvirt.confidential to sev, sev_snp or tdx");
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
    fn every_variable_is_known_and_finds_its_place_or_a_word() {
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
    fn its_default_uri_is_not_ours_to_dial_and_says_how() {
        let converted = of(&[("LIBVIRT_URI", "qemu+ssh://root@192.168.122.1/system?no_verify=1")]);
        assert!(converted.lost[0].1.contains("ssh -L"), "{converted:?}");
        assert!(!converted.settings.contains_key("uri"));
        assert_eq!(of(&[("LIBVIRT_ROOT_DISK_SIZE", "0")]).settings["root-disk-gib"], "10");
        assert_eq!(of(&[("LIBVIRT_CPU", "two")]).lost.len(), 1);
    }
}
