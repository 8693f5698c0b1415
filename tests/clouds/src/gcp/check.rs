//! Refuses bodies that Google refuses.

use serde_json::Value;

use super::facts::{self, Image};
use super::machines::Machine;
use super::{Gcp, PROJECT};
use crate::body::{at, list, text};
use crate::fake::{Refused, refused};

type Checked = Result<(), Box<Refused>>;

/// Most bytes of a metadata value, and of all together.
const MAX_METADATA: (usize, usize) = (256 << 10, 512 << 10);

/// Refuses the value of a field.
pub(super) fn invalid<T>(field: &str, value: &str) -> Result<T, Box<Refused>> {
    // Google repeats the value; a long one is cut.
    let value: String = value.chars().take(200).collect();
    refused(400, "invalid", format!("Invalid value for field 'resource.{field}': '{value}'. Invalid."))
}

/// Checks a resource's name.
pub(super) fn name(name: &str) -> Checked {
    let is_word = |one: char| one.is_ascii_lowercase() || one.is_ascii_digit() || one == '-';
    let fits = name.len() <= 63
        && name.chars().all(is_word)
        && name.chars().next().is_some_and(|one| one.is_ascii_lowercase())
        && !name.ends_with('-');
    if fits {
        return Ok(());
    }
    let message = format!(
        "Invalid value for field 'resource.name': '{name}'. Must be a match of regex \
         '(?:[a-z](?:[-a-z0-9]{{0,61}}[a-z0-9])?)'"
    );
    refused(400, "invalid", message)
}

/// Reads a path of the zone, `zones/<zone>/<collection>/<name>`, or a URL that ends so. With `bare`: a name alone.
fn in_zone<'a>(
    field: &str,
    value: &'a str,
    zone: &str,
    collection: &str,
    bare: bool,
) -> Result<&'a str, Box<Refused>> {
    if bare {
        // Properties of several instances have no zone yet.
        return if value.is_empty() || value.contains('/') { invalid(field, value) } else { Ok(value) };
    }
    match value.rsplit_once(&format!("zones/{zone}/{collection}/")) {
        Some((before, name)) if before.is_empty() || before.ends_with('/') => Ok(name),
        _ => {
            let message =
                format!("Invalid value for field 'resource.{field}': '{value}'. The URL is malformed.");
            refused(400, "invalid", message)
        }
    }
}

/// Checks an instance's body, or the properties of several (`bare`); returns its machine type.
pub(super) fn instance<'a>(
    gcp: &'a Gcp,
    body: &Value,
    zone: &str,
    bare: bool,
) -> Result<&'a Machine, Box<Refused>> {
    let kind = in_zone("machineType", text(body, "/machineType"), zone, "machineTypes", bare)?;
    let machine = gcp.machines.iter().find(|one| one.name == kind && one.is_in(zone));
    let Some(machine) = machine else {
        let message = format!(
            "Invalid value for field 'resource.machineType': '{kind}'. Machine type with name '{kind}' does not exist in \
             zone '{zone}'."
        );
        return refused(400, "invalid", message);
    };
    labels(at(body, "/labels"))?;
    metadata(list(body, "/metadata/items"))?;
    if text(body, "/description").len() > 2_048 {
        return invalid("description", "longer than 2048 characters");
    }
    let image = disks(body, zone, bare)?;
    if image.arch != machine.arch {
        let message = format!(
            "Requested boot disk architecture ({}) is not compatible with machine type architecture ({}).",
            image.arch, machine.arch
        );
        return refused(400, "invalid", message);
    }
    interfaces(body, &image)?;
    scheduling(body, machine)?;
    confidential(body, machine, &image)?;
    Ok(machine)
}

fn labels(labels: &Value) -> Checked {
    let Some(labels) = labels.as_object() else {
        return if labels.is_null() { Ok(()) } else { invalid("labels", "no object") };
    };
    let is_word =
        |one: char| one.is_lowercase() && one.is_alphabetic() || one.is_numeric() || matches!(one, '_' | '-');
    if labels.len() > 64 {
        return invalid("labels", "more than 64");
    }
    for (name, value) in labels {
        let Some(value) = value.as_str() else { return invalid("labels", name) };
        let fits = |text: &str| text.chars().count() <= 63 && text.chars().all(is_word);
        if !fits(name) || !fits(value) || !name.chars().next().is_some_and(char::is_lowercase) {
            return invalid(&format!("labels.{name}"), value);
        }
    }
    Ok(())
}

fn metadata(items: &[Value]) -> Checked {
    let mut all = 0;
    for item in items {
        let (key, value) = (text(item, "/key"), text(item, "/value"));
        let is_word = |one: char| one.is_ascii_alphanumeric() || matches!(one, '-' | '_');
        if key.is_empty() || key.len() > 128 || !key.chars().all(is_word) {
            return invalid("metadata.items.key", key);
        }
        all += value.len();
        if value.len() > MAX_METADATA.0 || all > MAX_METADATA.1 {
            let message = format!(
                "Value for field 'resource.metadata.items.{key}' is too large: maximum size 262144 character(s)."
            );
            return refused(413, "fieldSizeTooLarge", message);
        }
    }
    let keys: std::collections::BTreeSet<&str> = items.iter().map(|item| text(item, "/key")).collect();
    if keys.len() < items.len() {
        return invalid("metadata", "Metadata has duplicate keys");
    }
    Ok(())
}

fn disks(body: &Value, zone: &str, bare: bool) -> Result<Image, Box<Refused>> {
    let disks = list(body, "/disks");
    let Some(boot) = disks.first().filter(|disk| at(disk, "/boot").as_bool() == Some(true)) else {
        return invalid("disks", "At least one boot disk is required");
    };
    let source = text(boot, "/initializeParams/sourceImage");
    let Some(image) = facts::image(source) else {
        let message = format!("The resource '{source}' was not found");
        return refused(404, "notFound", message);
    };
    let kind = text(boot, "/initializeParams/diskType");
    if !kind.is_empty() {
        let kind = in_zone("disks[0].initializeParams.diskType", kind, zone, "diskTypes", bare)?;
        if !["pd-standard", "pd-balanced", "pd-ssd", "hyperdisk-balanced"].contains(&kind) {
            return invalid("disks[0].initializeParams.diskType", kind);
        }
    }
    let size = at(boot, "/initializeParams/diskSizeGb");
    let gib = size.as_str().and_then(|size| size.parse::<u64>().ok()).or(size.as_u64());
    if !size.is_null() && gib.is_none_or(|gib| gib < 4) {
        return invalid("disks[0].initializeParams.diskSizeGb", &size.to_string());
    }
    let mut names: Vec<&str> =
        disks.iter().map(|disk| text(disk, "/deviceName")).filter(|name| !name.is_empty()).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    if names.len() < count {
        return invalid("disks.deviceName", "a duplicate");
    }
    for disk in disks.iter().skip(1) {
        if text(disk, "/source").is_empty() || at(disk, "/boot").as_bool() == Some(true) {
            return invalid("disks.source", "required for a disk that exists");
        }
        mode(disk)?;
    }
    Ok(image)
}

/// Checks how a disk is attached.
pub(super) fn mode(disk: &Value) -> Checked {
    if !["", "READ_WRITE", "READ_ONLY"].contains(&text(disk, "/mode")) {
        return invalid("mode", text(disk, "/mode"));
    }
    let device = text(disk, "/deviceName");
    if device.is_empty() { Ok(()) } else { name(device) }
}

fn interfaces(body: &Value, image: &Image) -> Checked {
    let interfaces = list(body, "/networkInterfaces");
    if interfaces.is_empty() {
        return invalid("networkInterfaces", "At least one network interface is required.");
    }
    let mut networks = Vec::new();
    for interface in interfaces {
        let Some(network) = facts::network_of(interface) else {
            let path = text(interface, "/subnetwork");
            let message = format!("The resource '{path}' of project '{PROJECT}' was not found");
            return refused(404, "notFound", message);
        };
        if networks.contains(&network) {
            return invalid(
                "networkInterfaces",
                "Network interfaces must be connected to distinct networks.",
            );
        }
        networks.push(network);
        if !["", "GVNIC", "VIRTIO_NET"].contains(&text(interface, "/nicType")) {
            return invalid("networkInterfaces.nicType", text(interface, "/nicType"));
        }
        if text(interface, "/nicType") == "GVNIC" && !image.features.contains(&"GVNIC") {
            return invalid("networkInterfaces.nicType", "The image lacks GVNIC.");
        }
        for access in list(interface, "/accessConfigs") {
            if !["", "ONE_TO_ONE_NAT"].contains(&text(access, "/type")) {
                return invalid("networkInterfaces.accessConfigs.type", text(access, "/type"));
            }
        }
    }
    Ok(())
}

fn scheduling(body: &Value, machine: &Machine) -> Checked {
    let scheduling = at(body, "/scheduling");
    let model = text(scheduling, "/provisioningModel");
    if !["", "STANDARD", "SPOT"].contains(&model) {
        return invalid("scheduling.provisioningModel", model);
    }
    let stays = text(scheduling, "/onHostMaintenance") == "TERMINATE";
    let restarts = at(scheduling, "/automaticRestart").as_bool() != Some(false);
    if model == "SPOT" && (restarts || !stays) {
        return invalid(
            "scheduling",
            "Scheduling must have automaticRestart be false and onHostMaintenance TERMINATE when provisioningModel is SPOT.",
        );
    }
    let action = text(scheduling, "/instanceTerminationAction");
    let is_bounded = model == "SPOT" || at(scheduling, "/maxRunDuration").is_object();
    if !action.is_empty() && (!["DELETE", "STOP"].contains(&action) || !is_bounded) {
        return invalid("scheduling.instanceTerminationAction", action);
    }
    let has_gpus = machine.gpus.is_some() || !list(body, "/guestAccelerators").is_empty();
    if has_gpus && !stays {
        return invalid(
            "scheduling.onHostMaintenance",
            "Instances with guest accelerators do not support live migration.",
        );
    }
    Ok(())
}

fn confidential(body: &Value, machine: &Machine, image: &Image) -> Checked {
    let config = at(body, "/confidentialInstanceConfig");
    let kind =
        match (text(config, "/confidentialInstanceType"), at(config, "/enableConfidentialCompute").as_bool())
        {
            ("", Some(true)) => "SEV",
            (kind, _) => kind,
        };
    if kind.is_empty() {
        return Ok(());
    }
    if !["SEV", "SEV_SNP", "TDX"].contains(&kind) {
        return invalid("confidentialInstanceConfig.confidentialInstanceType", kind);
    }
    if !machine.confidential.contains(&kind) {
        return invalid("confidentialInstanceConfig", &format!("{} does not support {kind}", machine.name));
    }
    if !image.features.contains(&format!("{kind}_CAPABLE").as_str()) {
        return invalid("confidentialInstanceConfig", &format!("The image lacks {kind}_CAPABLE."));
    }
    if text(body, "/scheduling/onHostMaintenance") != "TERMINATE" {
        return invalid("scheduling.onHostMaintenance", "Confidential instances need TERMINATE.");
    }
    Ok(())
}
