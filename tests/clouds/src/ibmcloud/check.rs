//! Refuses bodies that the VPC API refuses.

use serde_json::Value;

use super::profiles::Profile;
use super::{IbmCloud, KEY, RESOURCE_GROUP, SECURITY_GROUP, VPC, ZONES, facts};
use crate::body::{at, list, text};
use crate::fake::{Refused, refused};

type Checked = Result<(), Box<Refused>>;

fn bad(field: &str, why: &str) -> Checked {
    refused(400, "bad_field", format!("The field {field} is not valid: {why}"))
}

/// Whether a text is a name of a resource: at most 63 characters of `[a-z0-9-]`, a letter first.
fn is_name(name: &str) -> bool {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    name.len() <= 63
        && name.chars().all(fits)
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && !name.ends_with('-')
}

/// Checks the tags of a volume.
fn tags(tags: &[Value]) -> Checked {
    if tags.len() > 1000 {
        return bad("user_tags", "more than 1000");
    }
    let fits = |c: char| c.is_ascii_alphanumeric() || ":_ .-".contains(c);
    let is_tag =
        |tag: &Value| tag.as_str().is_some_and(|tag| (1..=128).contains(&tag.len()) && tag.chars().all(fits));
    match tags.iter().find(|tag| !is_tag(tag)) {
        Some(tag) => bad("user_tags", &tag.to_string()),
        None => Ok(()),
    }
}

/// Checks a network attachment.
fn nic(nic: &Value, zone: &str) -> Checked {
    if !is_name(text(nic, "/name")) {
        return bad("network_attachment.name", text(nic, "/name"));
    }
    let interface = at(nic, "/virtual_network_interface");
    let id = text(interface, "/subnet/id");
    match facts::subnet(id) {
        None => return refused(404, "subnet_not_found", format!("Subnet {id} not found")),
        Some((place, _)) if place != zone => return bad("subnet", "it is in another zone"),
        Some(_) => {}
    }
    if at(interface, "/auto_delete").as_bool() != Some(true) {
        return bad("virtual_network_interface.auto_delete", "the interface would stay");
    }
    let unknown = |group: &&Value| text(group, "/id") != SECURITY_GROUP;
    match list(interface, "/security_groups").iter().find(unknown) {
        Some(group) => refused(404, "security_group_not_found", format!("Security group {group} not found")),
        None => Ok(()),
    }
}

/// Checks an instance's body; returns its profile.
pub(super) fn instance(ibm: &IbmCloud, body: &Value) -> Result<Profile, Box<Refused>> {
    let name = text(body, "/name");
    if !is_name(name) {
        bad("name", name)?;
    }
    if ibm.instances.all().any(|(_, one)| one.name == name) {
        return refused(400, "validation_unique_failed", format!("Provided Name ({name}) is not unique"));
    }
    let zone = text(body, "/zone/name");
    if !ZONES.contains(&zone) {
        bad("zone", zone)?;
    }
    let wanted = text(body, "/profile/name");
    let Some(profile) = ibm.profiles.iter().find(|one| one.name == wanted) else {
        return refused(404, "instance_profile_not_found", format!("Profile {wanted} not found"));
    };
    if !profile.zones.contains(&zone) {
        bad("profile", "the zone does not support it")?;
    }
    let Some(image) = facts::image(text(body, "/image/id")) else {
        return refused(404, "image_not_found", "Image not found");
    };
    if image.status != "available" {
        bad("image", "it is not available")?;
    }
    if image.arch != profile.arch {
        bad("image", "its architecture is not the profile's")?;
    }
    if text(body, "/user_data").len() > 64 << 10 {
        bad("user_data", "longer than 64 KB")?;
    }
    place(body)?;
    interfaces(body, zone, profile)?;
    boot(body)?;
    market(body, profile)?;
    Ok(profile.clone())
}

fn place(body: &Value) -> Checked {
    if text(body, "/vpc/id") != VPC {
        return refused(404, "vpc_not_found", "VPC not found");
    }
    let group = text(body, "/resource_group/id");
    if !group.is_empty() && group != RESOURCE_GROUP {
        return refused(404, "resource_group_not_found", "Resource group not found");
    }
    if let Some(key) = list(body, "/keys").iter().find(|key| text(key, "/id") != KEY) {
        return refused(404, "key_not_found", format!("Key {key} not found"));
    }
    let target = text(body, "/placement_target/id");
    if !target.is_empty() {
        match facts::dedicated(target) {
            None => {
                return refused(
                    404,
                    "dedicated_host_not_found",
                    format!("Dedicated host {target} not found"),
                );
            }
            Some(zone) if zone != text(body, "/zone/name") => {
                return bad("placement_target", "it is in another zone");
            }
            Some(_) => {}
        }
    }
    if at(body, "/metadata_service/enabled").as_bool() == Some(true) {
        return bad("metadata_service", "a pod could read the VM's user-data");
    }
    Ok(())
}

fn interfaces(body: &Value, zone: &str, profile: &Profile) -> Checked {
    let others = list(body, "/network_attachments");
    if others.len() as u32 + 1 > profile.nics {
        return bad("network_attachments", "the profile allows fewer");
    }
    nic(at(body, "/primary_network_attachment"), zone)?;
    others.iter().try_for_each(|one| nic(one, zone))
}

fn boot(body: &Value) -> Checked {
    let boot = at(body, "/boot_volume_attachment");
    if !is_name(text(boot, "/name")) {
        return bad("boot_volume_attachment.name", text(boot, "/name"));
    }
    if text(boot, "/volume/profile/name") != "general-purpose" {
        return bad("boot_volume_attachment.volume.profile", "unknown");
    }
    let capacity = at(boot, "/volume/capacity");
    if !capacity.is_null() && capacity.as_u64().is_none_or(|size| !(10..=250).contains(&size)) {
        return bad("boot_volume_attachment.volume.capacity", "not between 10 and 250");
    }
    tags(list(boot, "/volume/user_tags"))
}

fn market(body: &Value, profile: &Profile) -> Checked {
    let mode = text(body, "/confidential_compute_mode");
    if mode == "tdx" && !profile.tdx || !["", "disabled", "tdx"].contains(&mode) {
        return bad("confidential_compute_mode", "the profile does not support it");
    }
    let class = text(body, "/availability/class");
    if !["", "standard", "spot"].contains(&class) {
        return bad("availability.class", class);
    }
    let policy = text(body, "/availability_policy/preemption");
    if !["", "delete", "stop"].contains(&policy) {
        return bad("availability_policy.preemption", policy);
    }
    if class != "spot" {
        return match policy {
            "" => Ok(()),
            _ => bad("availability_policy.preemption", "only for spot instances"),
        };
    }
    if !profile.spot {
        return bad("availability.class", "the profile has no spot instances");
    }
    match at(body, "/placement_target").is_null() {
        true => Ok(()),
        false => bad("placement_target", "a dedicated host has no spot instances"),
    }
}
