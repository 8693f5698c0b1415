//! Answers questions about objects that no test changes: images, networks, systems, DHCP servers.

use serde_json::{Value, json};

use super::{DHCP, IMAGE, NETWORK, PUBLIC, SECOND, not_found};
use crate::fake::{Answer, Refused};

/// DHCP server of the network [`DHCP`].
pub(super) const SERVER: &str = "cccccccc-0000-4000-8000-000000000001";

pub(super) fn is_image(id: &str) -> bool {
    id == IMAGE
}

/// Returns name, type and range of a network.
pub(super) fn network(id: &str) -> Option<(&'static str, &'static str, &'static str)> {
    match id {
        NETWORK => Some(("pods", "vlan", "192.168.0.0/16")),
        SECOND => Some(("second", "vlan", "192.169.0.0/16")),
        DHCP => Some(("dhcp", "vlan", "192.170.0.0/16")),
        PUBLIC => Some(("public", "pub-vlan", "192.171.0.0/16")),
        _ => None,
    }
}

/// Answers about objects that no test changes.
pub(super) fn answer(action: &str, id: &str) -> Result<Answer, Box<Refused>> {
    let time = "2026-01-01T00:00:00.000Z";
    let found = match action {
        "images.get" => is_image(id).then(|| {
            json!({"imageID": id, "name": "peerpod", "state": "active", "size": 4, "maxImageVolumeSize": 4,
                "storagePool": "Tier3-Flash-1", "storageType": "tier3", "creationDate": time, "lastUpdateDate": time,
                "specifications": {"architecture": "ppc64", "operatingSystem": "rhel", "endianness": "little-endian"}})
        }),
        "networks.get" => network(id).map(|found| network_view(id, found)),
        "systempools.get" => Some(json!({"s922": pool("s922", 12.5), "e980": pool("e980", 0.0)})),
        "dhcp.getall" => Some(json!([{"id": SERVER, "network": {"id": DHCP, "name": "dhcp"}, "status": "ACTIVE"}])),
        _ => None,
    };
    match found {
        Some(found) => Ok(Answer::json(200, &found)),
        None => not_found("resource", id),
    }
}

fn network_view(id: &str, (name, kind, range): (&str, &str, &str)) -> Value {
    let mut view = json!({"networkID": id, "name": name, "type": kind, "cidr": range, "vlanID": 7, "dnsServers": ["9.9.9.9"],
        "gateway": "192.168.0.1",
        "ipAddressMetrics": {"available": 65_000, "total": 65_533, "used": 533, "utilization": 1},
        "ipAddressRanges": [{"startingIPAddress": "192.168.0.2", "endingIPAddress": "192.168.255.254"}]});
    if id == DHCP {
        view["dhcpManaged"] = json!(true);
    }
    view
}

fn pool(kind: &str, cores: f64) -> Value {
    let system = json!({"cores": cores, "memory": 512});
    json!({"type": kind, "coreIncrement": 0.25, "coreMemoryRatio": 0.1, "capacity": {"cores": 15, "memory": 1_024},
        "maxAvailable": system, "maxCoresAvailable": system, "maxMemoryAvailable": system, "systems": []})
}
