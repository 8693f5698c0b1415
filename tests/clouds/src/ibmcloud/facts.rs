//! Answers questions about objects that no test changes: images, subnets, security groups, dedicated hosts.

use serde_json::{Value, json};

use super::{IbmCloud, REGION, RESOURCE_GROUP, SECURITY_GROUP, VPC, ZONES, not_found};
use crate::fake::{Answer, Refused};
use crate::iam::ACCOUNT;

/// Image that instances start from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Image {
    name: &'static str,
    /// Architecture, in the words of profiles.
    pub(super) arch: &'static str,
    format: &'static str,
    pub(super) status: &'static str,
}

const IMAGES: [Image; 4] = [
    Image { name: "peerpod", arch: "amd64", format: "cloud_init", status: "available" },
    Image { name: "peerpod-z", arch: "s390x", format: "cloud_init", status: "available" },
    Image { name: "ipxe", arch: "amd64", format: "ipxe", status: "available" },
    Image { name: "pending", arch: "amd64", format: "cloud_init", status: "pending" },
];

/// Returns the image of this id.
pub(super) fn image(id: &str) -> Option<Image> {
    IMAGES.into_iter().find(|one| IbmCloud::image(one.name) == id)
}

/// Returns the zone of a subnet, and whether it is one for second interfaces.
pub(super) fn subnet(id: &str) -> Option<(&'static str, bool)> {
    let of = |name: &str| ZONES.into_iter().find(|zone| IbmCloud::subnet(zone, name) == id);
    of("pods").map(|zone| (zone, false)).or_else(|| of("second").map(|zone| (zone, true)))
}

/// Returns the zone of a dedicated host or group.
pub(super) fn dedicated(id: &str) -> Option<&'static str> {
    ZONES.into_iter().find(|zone| [false, true].iter().any(|group| IbmCloud::dedicated(zone, *group) == id))
}

/// Returns a CRN of this kind.
pub(super) fn crn(kind: &str, id: &str) -> String {
    format!("crn:v1:bluemix:public:is:{REGION}:a/{ACCOUNT}::{kind}:{id}")
}

pub(super) fn zone(name: &str, endpoint: &str) -> Value {
    json!({"name": name, "href": format!("{endpoint}/v1/regions/{REGION}/zones/{name}")})
}

pub(super) fn resource_group() -> Value {
    json!({"id": RESOURCE_GROUP, "name": "pods",
        "href": format!("https://resource-controller.cloud.ibm.com/v2/resource_groups/{RESOURCE_GROUP}")})
}

pub(super) fn vpc(endpoint: &str) -> Value {
    json!({"id": VPC, "crn": crn("vpc", VPC), "href": format!("{endpoint}/v1/vpcs/{VPC}"), "name": "pods",
        "resource_type": "vpc"})
}

/// Returns the reference to a subnet.
pub(super) fn subnet_reference(id: &str, endpoint: &str) -> Value {
    let name = if subnet(id).is_some_and(|(_, second)| second) { "second" } else { "pods" };
    json!({"id": id, "crn": crn("subnet", id), "href": format!("{endpoint}/v1/subnets/{id}"), "name": name,
        "resource_type": "subnet"})
}

/// Answers about objects that no test changes.
pub(super) fn answer(action: &str, id: &str, endpoint: &str) -> Result<Answer, Box<Refused>> {
    let found = match action {
        "get_image" => image(id).map(|image| image_view(id, image, endpoint)),
        "get_subnet" => subnet(id).map(|(place, _)| subnet_view(id, place, endpoint)),
        "get_security_group" => (id == SECURITY_GROUP).then(|| {
            json!({"id": id, "crn": crn("security-group", id), "href": format!("{endpoint}/v1/security_groups/{id}"),
                "name": "pods", "created_at": "2026-01-01T00:00:00Z", "resource_group": resource_group(), "rules": [],
                "targets": [], "vpc": vpc(endpoint)})
        }),
        "get_dedicated_host" | "get_dedicated_host_group" => {
            let is_group = action == "get_dedicated_host_group";
            let place = dedicated(id).filter(|zone| IbmCloud::dedicated(zone, is_group) == id);
            place.map(|place| dedicated_view(id, place, is_group, endpoint))
        }
        _ => None,
    };
    match found {
        Some(found) => Ok(Answer::json(200, &found)),
        None => not_found("Resource", id),
    }
}

fn image_view(id: &str, image: Image, endpoint: &str) -> Value {
    let system = json!({"name": "debian-13-amd64", "href": format!("{endpoint}/v1/operating_systems/debian"),
        "display_name": "Generic", "family": "Debian GNU/Linux", "vendor": "Debian", "version": "13",
        "architecture": image.arch, "allow_user_image_creation": true, "dedicated_host_only": false,
        "user_data_format": image.format});
    let zones: Vec<Value> = match image.status {
        "available" => ZONES.iter().map(|name| zone(name, endpoint)).collect(),
        _ => Vec::new(),
    };
    json!({"id": id, "crn": crn("image", id), "href": format!("{endpoint}/v1/images/{id}"), "name": image.name,
        "allowed_use": {"api_version": "2026-10-06", "bare_metal_server": "true", "instance": "true"},
        "catalog_offering": {"managed": false}, "created_at": "2026-01-01T00:00:00Z", "encryption": "none",
        "file": {"size": 1}, "minimum_provisioned_size": 10, "operating_system": system,
        "resource_group": resource_group(), "resource_type": "image", "status": image.status, "status_reasons": [],
        "user_data_format": image.format, "visibility": "private", "zones": zones})
}

fn subnet_view(id: &str, place: &str, endpoint: &str) -> Value {
    let mut view = subnet_reference(id, endpoint);
    let acl = "r006-acl";
    let table = "r006-table";
    view["available_ipv4_address_count"] = json!(200);
    view["created_at"] = json!("2026-01-01T00:00:00Z");
    view["ip_version"] = json!("ipv4");
    view["ipv4_cidr_block"] = json!("10.240.0.0/24");
    view["network_acl"] = json!({"id": acl, "crn": crn("network-acl", acl), "name": "pods",
        "href": format!("{endpoint}/v1/network_acls/{acl}")});
    view["resource_group"] = resource_group();
    view["routing_table"] = json!({"id": table, "name": "pods", "resource_type": "routing_table",
        "crn": crn("vpc", &format!("{VPC}/{table}")), "href": format!("{endpoint}/v1/vpcs/{VPC}/routing_tables/{table}")});
    view["status"] = json!("available");
    view["total_ipv4_address_count"] = json!(256);
    view["vpc"] = vpc(endpoint);
    view["zone"] = zone(place, endpoint);
    view
}

fn dedicated_view(id: &str, place: &str, is_group: bool, endpoint: &str) -> Value {
    let group = IbmCloud::dedicated(place, true);
    let path = |id: &str| format!("{endpoint}/v1/dedicated_host/groups/{id}");
    let crn_of = |id: &str| crn("dedicated-host-group", id);
    if is_group {
        return json!({"id": id, "crn": crn_of(id), "href": path(id), "name": "pods", "class": "bx3d",
            "created_at": "2026-01-01T00:00:00Z", "dedicated_hosts": [], "family": "balanced",
            "resource_group": resource_group(), "resource_type": "dedicated_host_group",
            "supported_instance_profiles": [], "zone": zone(place, endpoint)});
    }
    let vcpu = json!({"architecture": "amd64", "count": 96, "manufacturer": "intel"});
    json!({"id": id, "crn": crn("dedicated-host", id), "href": format!("{endpoint}/v1/dedicated_hosts/{id}"),
        "name": "pods", "available_memory": 480, "available_vcpu": vcpu, "created_at": "2026-01-01T00:00:00Z",
        "disks": [], "group": {"id": group, "crn": crn_of(&group), "href": path(&group), "name": "pods",
            "resource_type": "dedicated_host_group"},
        "instance_placement_enabled": true, "instances": [], "lifecycle_state": "stable", "memory": 480,
        "numa": {"count": 2, "nodes": []},
        "profile": {"name": "bx3d-host-96x480", "href": format!("{endpoint}/v1/dedicated_host/profiles/bx3d")},
        "provisionable": true, "resource_group": resource_group(), "resource_type": "dedicated_host",
        "socket_count": 2, "state": "available", "supported_instance_profiles": [], "vcpu": vcpu,
        "zone": zone(place, endpoint)})
}
