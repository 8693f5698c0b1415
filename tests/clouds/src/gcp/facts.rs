//! Answers questions about images, networks and zones, which no test changes.

use serde_json::{Value, json};

use super::route::Route;
use super::{BASE, PROJECT, REGION, ZONES};
use crate::body;
use crate::fake::{Answer, Refused};

/// Networks, each with a subnetwork of its name.
pub(super) const NETWORKS: [&str; 2] = ["pods", "second"];

/// Image.
#[derive(Debug, Clone, Copy)]
pub(super) struct Image {
    name: &'static str,
    family: &'static str,
    /// Architecture.
    pub(super) arch: &'static str,
    /// Features of the guest's system.
    pub(super) features: &'static [&'static str],
}

const IMAGES: [Image; 3] = [
    Image {
        name: "peerpod",
        family: "pods",
        arch: "X86_64",
        features: &[
            "UEFI_COMPATIBLE",
            "GVNIC",
            "SEV_CAPABLE",
            "SEV_SNP_CAPABLE",
            "TDX_CAPABLE",
            "VIRTIO_SCSI_MULTIQUEUE",
        ],
    },
    Image { name: "peerpod-arm", family: "pods-arm", arch: "ARM64", features: &["UEFI_COMPATIBLE", "GVNIC"] },
    Image { name: "plain", family: "plain", arch: "X86_64", features: &["UEFI_COMPATIBLE"] },
];

/// Returns the image of a `sourceImage`: a path or URL with `global/images/<name>` or `global/images/family/<family>`.
pub(super) fn image(source: &str) -> Option<Image> {
    let (before, rest) = source.rsplit_once("global/images/")?;
    let is_place = before.is_empty() || before.ends_with(&format!("projects/{PROJECT}/"));
    let found = match rest.strip_prefix("family/") {
        Some(family) => IMAGES.into_iter().find(|image| image.family == family),
        None => IMAGES.into_iter().find(|image| image.name == rest),
    };
    found.filter(|_| is_place)
}

fn image_view(image: Image) -> Value {
    let features: Vec<Value> = image.features.iter().map(|feature| json!({"type": feature})).collect();
    json!({"kind": "compute#image", "id": "1", "name": image.name, "family": image.family, "status": "READY",
        "architecture": image.arch, "diskSizeGb": "4", "archiveSizeBytes": "1000000", "sourceType": "RAW",
        "guestOsFeatures": features, "selfLink": format!("{BASE}/global/images/{}", image.name)})
}

pub(super) fn answer(action: &str, route: &Route) -> Result<Answer, Box<Refused>> {
    let name = route.name.as_str();
    let network = || NETWORKS.contains(&name);
    let found = match action {
        "compute.projects.get" => Some(json!({"kind": "compute#project", "id": "123456789012", "name": PROJECT,
            "defaultServiceAccount": super::EMAIL, "selfLink": BASE})),
        "compute.images.get" => IMAGES.into_iter().find(|image| image.name == name).map(image_view),
        "compute.images.getFromFamily" => IMAGES.into_iter().find(|image| image.family == name).map(image_view),
        "compute.networks.get" => network().then(|| {
            json!({"kind": "compute#network", "id": "1", "name": name, "autoCreateSubnetworks": false, "mtu": 1460,
                "selfLink": format!("{BASE}/global/networks/{name}"),
                "subnetworks": [format!("{BASE}/regions/{REGION}/subnetworks/{name}")]})
        }),
        "compute.subnetworks.get" => network().then(|| {
            json!({"kind": "compute#subnetwork", "id": "1", "name": name, "ipCidrRange": "10.0.0.0/16",
                "network": format!("{BASE}/global/networks/{name}"), "region": format!("{BASE}/regions/{REGION}"),
                "gatewayAddress": "10.0.0.1", "privateIpGoogleAccess": true, "stackType": "IPV4_ONLY",
                "selfLink": format!("{BASE}/regions/{REGION}/subnetworks/{name}")})
        }),
        "compute.zones.get" => ZONES.contains(&name).then(|| zone_view(name)),
        "compute.zones.list" => Some(json!({"kind": "compute#zoneList", "id": "zones",
            "items": ZONES.map(zone_view), "selfLink": format!("{BASE}/zones")})),
        _ => None,
    };
    match found {
        Some(found) => Ok(Answer::json(200, &found)),
        None => route.not_found(),
    }
}

fn zone_view(zone: &str) -> Value {
    json!({"kind": "compute#zone", "id": "1", "name": zone, "description": zone, "status": "UP",
        "region": format!("{BASE}/regions/{REGION}"), "selfLink": format!("{BASE}/zones/{zone}")})
}

/// Returns the network of a network interface, by its subnetwork or its own name.
pub(super) fn network_of(interface: &Value) -> Option<&'static str> {
    let (network, subnetwork) = (body::text(interface, "/network"), body::text(interface, "/subnetwork"));
    let named = |path: &str, collection: &str| {
        let (before, name) = path.rsplit_once('/')?;
        NETWORKS.into_iter().find(|one| *one == name && before.ends_with(collection))
    };
    let by_network = named(network, "global/networks");
    let by_subnetwork = named(subnetwork, &format!("regions/{REGION}/subnetworks"));
    match (network, subnetwork) {
        ("", "") => None,
        (_, "") => by_network,
        ("", _) => by_subnetwork,
        _ => by_subnetwork.filter(|_| by_network == by_subnetwork),
    }
}
