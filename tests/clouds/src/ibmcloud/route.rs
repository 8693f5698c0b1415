//! Reads which call of the VPC API a request is, and the rights that it needs.

use serde_json::Value;

use crate::body::{at, list, text};
use crate::fake::{Refused, Request, refused};

/// Returns the operation's name in IBM's SDK.
pub(super) fn action(request: &Request) -> &'static str {
    let parts = request.parts();
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    match (request.method.as_str(), &parts[..]) {
        ("POST", ["identity", "token"]) => "token",
        ("POST", ["v3", "tags", "attach"]) => "attach_tag",
        ("POST", ["v1", "instances"]) => "create_instance",
        ("GET", ["v1", "instances"]) => "list_instances",
        ("GET", ["v1", "instances", _]) => "get_instance",
        ("DELETE", ["v1", "instances", _]) => "delete_instance",
        ("GET", ["v1", "instances", _, "volume_attachments"]) => "list_instance_volume_attachments",
        ("POST", ["v1", "instances", _, "volume_attachments"]) => "create_instance_volume_attachment",
        ("DELETE", ["v1", "instances", _, "volume_attachments", _]) => "delete_instance_volume_attachment",
        ("GET", ["v1", "instance", "profiles"]) => "list_instance_profiles",
        ("GET", ["v1", "volumes"]) => "list_volumes",
        ("GET", ["v1", "volumes", _]) => "get_volume",
        ("DELETE", ["v1", "volumes", _]) => "delete_volume",
        ("GET", ["v1", "images", _]) => "get_image",
        ("GET", ["v1", "subnets", _]) => "get_subnet",
        ("GET", ["v1", "security_groups", _]) => "get_security_group",
        ("GET", ["v1", "dedicated_hosts", _]) => "get_dedicated_host",
        ("GET", ["v1", "dedicated_host", "groups", _]) => "get_dedicated_host_group",
        _ => "unknown",
    }
}

/// Returns the id of the resource: the third part of the path.
pub(super) fn id(request: &Request) -> String {
    request.parts().get(2).cloned().unwrap_or_default()
}

/// Returns the last part of the path.
pub(super) fn last(request: &Request) -> String {
    request.parts().last().cloned().unwrap_or_default()
}

/// Refuses a call without the version and the generation of the API.
pub(super) fn check(request: &Request) -> Result<(), Box<Refused>> {
    let version = request.query("version");
    let is_date = version.len() == 10 && version.split('-').all(|part| part.parse::<u32>().is_ok());
    if !is_date {
        return refused(400, "missing_version", "A version query parameter is required.");
    }
    match request.query("generation") {
        "2" => Ok(()),
        _ => refused(400, "invalid_generation", "The generation query parameter must be 2."),
    }
}

/// Returns the actions that a role must contain for this call ("Required permissions for VPC resources").
pub(super) fn rights(request: &Request, action: &str) -> Vec<String> {
    let one = |right: &str| vec![format!("is.{right}")];
    match action {
        "create_instance" => create(&request.json()),
        "list_instances" => one("instance.instance.list"),
        "get_instance" | "list_instance_volume_attachments" => one("instance.instance.read"),
        "delete_instance" => {
            ["instance.instance.delete", "volume.volume.delete"].map(|right| format!("is.{right}")).to_vec()
        }
        "create_instance_volume_attachment" | "delete_instance_volume_attachment" => {
            ["instance.instance.update", "volume.volume.operate"].map(|right| format!("is.{right}")).to_vec()
        }
        "list_volumes" => one("volume.volume.list"),
        "get_volume" => one("volume.volume.read"),
        "delete_volume" => one("volume.volume.delete"),
        "get_image" => one("image.image.read"),
        "get_subnet" => one("subnet.subnet.read"),
        "get_security_group" => one("security-group.security-group.read"),
        "get_dedicated_host" => one("dedicated-host.dedicated-host.read"),
        "get_dedicated_host_group" => one("dedicated-host.dedicated-host-group.read"),
        // Profiles need no right, and tags need one on the instance.
        "attach_tag" => one("instance.instance.update"),
        _ => Vec::new(),
    }
}

fn create(body: &Value) -> Vec<String> {
    let mut rights = vec![
        "instance.instance.create",
        "vpc.vpc.operate",
        "subnet.subnet.operate",
        "image.image.operate",
        "volume.volume.create",
        "virtual-network-interface.virtual-network-interface.create",
    ];
    let nic = "/primary_network_attachment/virtual_network_interface/security_groups";
    if !list(body, nic).is_empty() {
        rights.push("security-group.security-group.operate");
    }
    if !list(body, "/keys").is_empty() {
        rights.push("key.key.operate");
    }
    if !list(body, "/volume_attachments").is_empty() {
        rights.push("volume.volume.operate");
    }
    if !at(body, "/placement_target").is_null() && !text(body, "/placement_target/id").is_empty() {
        rights.push("dedicated-host.dedicated-host.operate");
    }
    rights.into_iter().map(|right| format!("is.{right}")).collect()
}
