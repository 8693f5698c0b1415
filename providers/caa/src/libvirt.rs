//! Table of the variables for libvirt.

use peerpod_provider_libvirt::rpc::link::Address;

use crate::{Converted, Form, Row, Value, Variables, get, is_true};

pub(crate) const TABLE: &[Row] = &[
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
pub(crate) fn convert(variables: &Variables) -> Converted {
    let mut converted = Converted::by_table("provider.libvirt", TABLE, variables);
    // Its `-data-dir` has no variable.
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
