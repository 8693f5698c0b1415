//! Refuses bodies that Azure refuses.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;

use super::facts::{self, Image};
use super::sizes::Size;
use super::{Azure, REGION};
use crate::body::{at, list, text};
use crate::fake::{Refused, refused};

type Checked = Result<(), Box<Refused>>;

fn invalid(target: &str, why: &str) -> Checked {
    refused(400, "InvalidParameter", format!("The value of parameter {target} is invalid: {why}"))
}

/// Characters of resource names that both kinds allow.
fn is_word(name: &str, most: usize) -> bool {
    let fits = |one: char| one.is_ascii_alphanumeric() || matches!(one, '-' | '_' | '.');
    let ends = |one: Option<char>| one.is_some_and(|one| one.is_ascii_alphanumeric() || one == '_');
    name.len() <= most
        && name.chars().all(fits)
        && name.chars().next().is_some_and(|one| one.is_ascii_alphanumeric())
        && ends(name.chars().last())
}

pub(super) fn nic_name(name: &str) -> Checked {
    if is_word(name, 80) { Ok(()) } else { invalid("networkInterfaceName", name) }
}

pub(super) fn located(body: &Value) -> Checked {
    if text(body, "/location").eq_ignore_ascii_case(REGION) {
        return Ok(());
    }
    refused(400, "LocationRequired", "The location property is required for this definition.")
}

/// Checks a resource's tags.
pub(super) fn tags(tags: &Value) -> Checked {
    let Some(tags) = tags.as_object() else {
        return if tags.is_null() { Ok(()) } else { invalid("tags", "no object") };
    };
    if tags.len() > 50 {
        return refused(400, "InvalidTags", "The maximum number of tags allowed on a resource is 50.");
    }
    for (name, value) in tags {
        let Some(value) = value.as_str() else { return invalid("tags", "a value that is no text") };
        if name.is_empty() || name.len() > 512 || name.contains(['<', '>', '%', '&', '\\', '?', '/']) {
            return refused(400, "InvalidTagNameCharacters", format!("The tag name '{name}' is invalid."));
        }
        if value.len() > 256 {
            return refused(400, "InvalidTags", format!("The value of tag '{name}' is too long."));
        }
    }
    Ok(())
}

/// Checks the properties of a network interface, or of its configuration in a VM.
pub(super) fn nic(nic: &Value) -> Checked {
    let configurations = list(nic, "/properties/ipConfigurations");
    if configurations.is_empty() {
        return invalid("ipConfigurations", "a network interface needs one");
    }
    for one in configurations {
        if text(one, "/name").is_empty() {
            return invalid("ipConfiguration.name", "required");
        }
        let subnet = text(one, "/properties/subnet/id");
        let parts: Vec<&str> = subnet.rsplit('/').collect();
        let is_known =
            matches!(&parts[..], [subnet, "subnets", network, ..] if facts::is_subnet(network, subnet));
        if !is_known {
            let message = format!("Resource {subnet} referenced by resource was not found.");
            return refused(400, "InvalidResourceReference", message);
        }
    }
    let group = text(nic, "/properties/networkSecurityGroup/id");
    if !group.is_empty() && !group.eq_ignore_ascii_case(&Azure::security_group()) {
        let message = format!("Resource {group} referenced by resource was not found.");
        return refused(400, "InvalidResourceReference", message);
    }
    Ok(())
}

/// Checks a VM's body; returns its size.
pub(super) fn vm(azure: &Azure, name: &str, body: &Value) -> Result<Size, Box<Refused>> {
    if !is_word(name, 64) {
        return refused(400, "InvalidParameter", format!("The VM name '{name}' is not valid."));
    }
    located(body)?;
    tags(at(body, "/tags"))?;
    user_data(at(body, "/properties/userData"))?;
    let size = text(body, "/properties/hardwareProfile/vmSize");
    let Some(size) = azure.sizes.iter().find(|one| one.name.eq_ignore_ascii_case(size)) else {
        return refused(
            400,
            "InvalidParameter",
            format!("The value {size} provided for the VM size is not valid."),
        );
    };
    let zones = list(body, "/zones");
    let zone = text(body, "/zones/0");
    if zones.len() > 1 || !zones.is_empty() && !["1", "2", "3"].contains(&zone) {
        return refused(400, "InvalidAvailabilityZone", "The zone(s) are not supported.");
    }
    if !size.is_sold(zone) {
        return refused(409, "SkuNotAvailable", sold_out(size.name));
    }
    let image = at(body, "/properties/storageProfile/imageReference");
    let Some(image) = facts::image(image) else {
        return refused(
            404,
            "PlatformImageNotFound",
            "The platform image is not available, or the gallery image was not found.",
        );
    };
    if image.arch != size.arch {
        return refused(400, "BadRequest", format!("The CPU architecture of the image is {}.", image.arch));
    }
    login(&image, body)?;
    network(size, body)?;
    storage(size, body)?;
    security(size, &image, body)?;
    market(size, body)?;
    Ok(size.clone())
}

/// Returns Azure's text for a size that a zone does not have.
pub(super) fn sold_out(size: &str) -> String {
    format!(
        "The requested VM size for resource 'Following SKUs have failed for Capacity Restrictions: {size}' is currently \
         not available in location '{REGION}'. Please try another size or deploy to a different location or different \
         zone."
    )
}

fn user_data(data: &Value) -> Checked {
    if data.is_null() {
        return Ok(());
    }
    let data = data.as_str().unwrap_or("(none)");
    if data.len() > 64 << 10 {
        return invalid("userData", "longer than 65536 characters");
    }
    if STANDARD.decode(data).is_err() {
        return invalid("userData", "no Base64");
    }
    Ok(())
}

fn login(image: &Image, body: &Value) -> Checked {
    let profile = at(body, "/properties/osProfile");
    if image.specialized {
        if profile.is_null() {
            return Ok(());
        }
        return refused(400, "InvalidParameter", "Parameter 'osProfile' is not allowed.");
    }
    for field in ["/computerName", "/adminUsername"] {
        if text(profile, field).is_empty() {
            return refused(
                400,
                "InvalidParameter",
                format!("Required parameter 'osProfile{field}' is missing."),
            );
        }
    }
    let has_password = !text(profile, "/adminPassword").is_empty();
    let key = text(profile, "/linuxConfiguration/ssh/publicKeys/0/keyData");
    let is_key = key.starts_with("ssh-rsa ") || key.starts_with("ssh-ed25519 ");
    if !has_password && !is_key {
        return invalid("linuxConfiguration.ssh.publicKeys.keyData", "one RSA or Ed25519 key is required");
    }
    Ok(())
}

fn network(size: &Size, body: &Value) -> Checked {
    let profile = at(body, "/properties/networkProfile");
    let made = list(profile, "/networkInterfaceConfigurations");
    let given = list(profile, "/networkInterfaces");
    if made.is_empty() == given.is_empty() {
        return invalid("networkProfile", "it needs either interfaces or configurations of interfaces");
    }
    let version = text(profile, "/networkApiVersion");
    if !made.is_empty() && !["2020-11-01", "2022-11-01"].contains(&version) {
        return invalid("networkProfile.networkApiVersion", version);
    }
    if made.len() + given.len() > size.nics as usize {
        return invalid("networkProfile", "the size allows fewer network interfaces");
    }
    let all = || made.iter().chain(given);
    let primary = all().filter(|one| at(one, "/properties/primary").as_bool() == Some(true)).count();
    if all().count() > 1 && primary != 1 {
        return refused(
            400,
            "VirtualMachineMustHaveOneNetworkInterfaceAsPrimary",
            "Exactly one must be primary.",
        );
    }
    for one in made {
        nic_name(text(one, "/name"))?;
        nic(one)?;
    }
    for one in all() {
        one_of("deleteOption", text(one, "/properties/deleteOption"), &["", "Delete", "Detach"])?;
    }
    Ok(())
}

fn one_of(target: &str, word: &str, words: &[&str]) -> Checked {
    if words.contains(&word) { Ok(()) } else { invalid(target, word) }
}

fn storage(size: &Size, body: &Value) -> Checked {
    let profile = at(body, "/properties/storageProfile");
    one_of("osDisk.createOption", text(profile, "/osDisk/createOption"), &["FromImage"])?;
    one_of("osDisk.deleteOption", text(profile, "/osDisk/deleteOption"), &["", "Delete", "Detach"])?;
    let disks = list(profile, "/dataDisks");
    if disks.len() > size.disks as usize {
        let message = format!(
            "The maximum number of data disks allowed to be attached to a VM of this size is {}.",
            size.disks
        );
        return refused(409, "OperationNotAllowed", message);
    }
    for disk in disks {
        one_of("dataDisk.createOption", text(disk, "/createOption"), &["Attach"])?;
        one_of("dataDisk.deleteOption", text(disk, "/deleteOption"), &["", "Delete", "Detach"])?;
        if at(disk, "/lun").as_u64().is_none_or(|lun| lun >= 64) {
            return invalid("dataDisk.lun", "required, below 64");
        }
    }
    Ok(())
}

fn security(size: &Size, image: &Image, body: &Value) -> Checked {
    let profile = at(body, "/properties/securityProfile");
    let kind = text(profile, "/securityType");
    one_of("securityProfile.securityType", kind, &["", "Standard", "TrustedLaunch", "ConfidentialVM"])?;
    let encryption = "/properties/storageProfile/osDisk/managedDisk/securityProfile/securityEncryptionType";
    let encryption = text(body, encryption);
    let words = ["", "VMGuestStateOnly", "DiskWithVMGuestState", "NonPersistedTPM"];
    one_of("securityEncryptionType", encryption, &words)?;
    if kind != "ConfidentialVM" {
        if !encryption.is_empty() {
            return invalid("securityEncryptionType", "only with securityType ConfidentialVM");
        }
        if !size.confidential.is_empty() {
            let message =
                format!("The VM size '{}' is supported only with securityType ConfidentialVM.", size.name);
            return refused(400, "BadRequest", message);
        }
        return Ok(());
    }
    if size.confidential.is_empty() {
        let message =
            format!("The VM size '{}' is not supported for creation of Confidential VM.", size.name);
        return refused(400, "BadRequest", message);
    }
    if !image.confidential {
        return refused(400, "BadRequest", "The given image is not supported for Confidential VM.");
    }
    if encryption.is_empty() || at(profile, "/uefiSettings/vTpmEnabled").as_bool() != Some(true) {
        return invalid("securityProfile", "a confidential VM needs securityEncryptionType and vTpmEnabled");
    }
    Ok(())
}

fn market(size: &Size, body: &Value) -> Checked {
    let priority = text(body, "/properties/priority");
    one_of("priority", priority, &["", "Regular", "Spot"])?;
    if priority == "Spot" {
        if !size.spot {
            return refused(
                400,
                "InvalidParameter",
                format!("The VM size '{}' cannot be a Spot VM.", size.name),
            );
        }
        return one_of(
            "evictionPolicy",
            text(body, "/properties/evictionPolicy"),
            &["", "Deallocate", "Delete"],
        );
    }
    for field in ["/properties/evictionPolicy", "/properties/billingProfile"] {
        if !at(body, field).is_null() {
            return invalid(field, "only for Spot VMs");
        }
    }
    Ok(())
}
