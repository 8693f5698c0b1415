//! Answers questions about what the region and the group have: sizes, quotas, images, subnets, rights.

use serde_json::{Value, json};

use super::route::Route;
use super::{Azure, GROUP, REGION, SUBSCRIPTION};
use crate::body::text;
use crate::fake::{Answer, Refused, Request, refused};

/// Image of a gallery.
#[derive(Debug, Clone, Copy)]
pub(super) struct Image {
    name: &'static str,
    /// Whether it contains no state that a first boot replaces.
    pub(super) specialized: bool,
    /// Architecture, in the words of the list of sizes.
    pub(super) arch: &'static str,
    /// Whether confidential VMs can start from it.
    pub(super) confidential: bool,
}

const IMAGES: [Image; 4] = [
    Image { name: "peerpod", specialized: true, arch: "x64", confidential: true },
    Image { name: "peerpod-arm", specialized: true, arch: "Arm64", confidential: false },
    Image { name: "generalized", specialized: false, arch: "x64", confidential: true },
    Image { name: "plain", specialized: true, arch: "x64", confidential: false },
];

/// Returns the image of a VM's `imageReference`.
pub(super) fn image(reference: &Value) -> Option<Image> {
    let keys = ["/id", "/communityGalleryImageId", "/sharedGalleryImageId"];
    let given: Vec<(&str, String)> = keys
        .iter()
        .map(|key| (*key, text(reference, key).to_ascii_lowercase()))
        .filter(|(_, id)| !id.is_empty())
        .collect();
    let [(key, id)] = &given[..] else { return None };
    let fits = match *key {
        "/id" => id.starts_with("/subscriptions/"),
        "/communityGalleryImageId" => id.starts_with("/communitygalleries/"),
        _ => id.starts_with("/sharedgalleries/"),
    };
    let mut parts = id.split('/').skip_while(|part| *part != "images").skip(1);
    let name = parts.next()?;
    let version = match (parts.next(), parts.next()) {
        (None, None) => "latest",
        (Some("versions"), Some(version)) => version,
        _ => return None,
    };
    if !fits || !matches!(version, "latest" | "1.0.0") {
        return None;
    }
    named(name)
}

fn named(name: &str) -> Option<Image> {
    IMAGES.into_iter().find(|image| image.name.eq_ignore_ascii_case(name))
}

impl Azure {
    pub(super) fn skus(&self, request: &Request) -> Result<Answer, Box<Refused>> {
        // The service knows this one filter.
        let filter = request.query("$filter");
        let wanted = filter.strip_prefix("location eq '").and_then(|rest| rest.strip_suffix('\''));
        if !filter.is_empty() && wanted.is_none() {
            return refused(400, "InvalidFilterInQueryString", "Invalid $filter in the query string.");
        }
        let is_here = wanted.is_none_or(|region| region.eq_ignore_ascii_case(REGION));
        let mut value: Vec<Value> =
            self.sizes.iter().filter(|_| is_here).map(super::sizes::Size::sku).collect();
        value.push(json!({"resourceType": "disks", "name": "Premium_LRS", "tier": "Premium", "size": "P10",
            "locations": [REGION], "locationInfo": [{"location": REGION, "zones": [], "zoneDetails": []}],
            "capabilities": [], "restrictions": []}));
        Ok(Answer::json(200, &json!({"value": value})))
    }

    pub(super) fn usages(&self) -> Result<Answer, Box<Refused>> {
        let used = self.cores();
        let usage = |name: &str, local: &str, now: u32, limit: u32| {
            json!({"unit": "Count", "currentValue": now, "limit": limit,
                "name": {"value": name, "localizedValue": local}})
        };
        let limit = self.quota.map_or(1_000, |left| used + left);
        let mut value = vec![
            usage("cores", "Total Regional vCPUs", used, limit),
            usage("virtualMachines", "Virtual Machines", 0, 25_000),
            usage("lowPriorityCores", "Total Regional Low-priority vCPUs", 0, 100),
        ];
        let mut families: Vec<&str> = self.sizes.iter().map(|size| size.family).collect();
        families.dedup();
        value.extend(families.into_iter().map(|family| usage(family, family, 0, 100)));
        Ok(Answer::json(200, &json!({"value": value})))
    }
}

/// Answers about objects that no test changes.
pub(super) fn answer(action: &str, route: &Route) -> Result<Answer, Box<Refused>> {
    let name = |place: usize| route.names.get(place).map_or("", String::as_str);
    let found = match action {
        "Subscriptions_Get" => Some(json!({"id": format!("/subscriptions/{SUBSCRIPTION}"),
            "subscriptionId": SUBSCRIPTION, "tenantId": super::TENANT, "displayName": "pods", "state": "Enabled"})),
        "ResourceGroups_Get" => Some(json!({"id": format!("/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}"),
            "name": GROUP, "type": "Microsoft.Resources/resourceGroups", "location": REGION,
            "properties": {"provisioningState": "Succeeded"}})),
        "Permissions_ListForResourceGroup" => Some(json!({"value": [{"actions": ["*"], "notActions": [],
            "dataActions": [], "notDataActions": []}]})),
        "GalleryImages_Get" if name(0).eq_ignore_ascii_case("pods") => definition(name(1), ""),
        "GalleryImageVersions_Get" if name(0).eq_ignore_ascii_case("pods") => version(name(1), name(2)),
        "CommunityGalleryImages_Get" if name(1).eq_ignore_ascii_case("pods-0000") => definition(name(2), name(1)),
        "CommunityGalleryImageVersions_Get" if name(1).eq_ignore_ascii_case("pods-0000") => {
            community_version(name(1), name(2), name(3))
        }
        "Subnets_Get" => is_subnet(name(0), name(1)).then(|| {
            json!({"id": Azure::subnet(name(1)), "name": name(1), "type": "Microsoft.Network/virtualNetworks/subnets",
                "properties": {"provisioningState": "Succeeded", "addressPrefix": "10.0.0.0/16", "delegations": []}})
        }),
        "NetworkSecurityGroups_Get" => name(0).eq_ignore_ascii_case("pods").then(|| {
            json!({"id": Azure::security_group(), "name": "pods", "location": REGION,
                "type": "Microsoft.Network/networkSecurityGroups",
                "properties": {"provisioningState": "Succeeded", "securityRules": []}})
        }),
        _ => None,
    };
    match found {
        Some(found) => Ok(Answer::json(200, &found)),
        None => route.not_found(),
    }
}

/// Whether the network has this subnet.
pub(super) fn is_subnet(network: &str, subnet: &str) -> bool {
    network.eq_ignore_ascii_case("pods")
        && ["default", "second"].contains(&subnet.to_ascii_lowercase().as_str())
}

/// Returns an image's definition; `community` is the public name of its gallery.
fn definition(name: &str, community: &str) -> Option<Value> {
    let image = named(name)?;
    let state = if image.specialized { "Specialized" } else { "Generalized" };
    let mut features = vec![json!({"name": "DiskControllerTypes", "value": "SCSI, NVMe"})];
    if image.confidential {
        features.push(json!({"name": "SecurityType", "value": "ConfidentialVmSupported"}));
    }
    let properties = json!({"osType": "Linux", "osState": state, "hyperVGeneration": "V2", "architecture": image.arch,
        "features": features, "identifier": {"publisher": "peerpod", "offer": "peerpod", "sku": name}});
    let path = if community.is_empty() {
        Azure::id("Microsoft.Compute/galleries", &format!("pods/images/{}", image.name))
    } else {
        format!("/CommunityGalleries/{community}/Images/{}", image.name)
    };
    let mut answer = json!({"name": image.name, "location": REGION, "properties": properties});
    let id = json!(path);
    if community.is_empty() {
        answer["id"] = id;
        answer["properties"]["provisioningState"] = json!("Succeeded");
    } else {
        answer["identifier"] = json!({"uniqueId": id});
    }
    Some(answer)
}

fn version(name: &str, version: &str) -> Option<Value> {
    let image = named(name).filter(|_| version == "1.0.0")?;
    let target = json!([{"name": REGION, "regionalReplicaCount": 1, "storageAccountType": "Standard_LRS"}]);
    Some(json!({"id": Azure::image(image.name), "name": version, "location": REGION, "properties": {
        "provisioningState": "Succeeded", "publishingProfile": {"targetRegions": target},
        "storageProfile": {"osDiskImage": {"sizeInGB": 4, "hostCaching": "None"}}}}))
}

fn community_version(gallery: &str, name: &str, version: &str) -> Option<Value> {
    let image = named(name).filter(|_| version == "1.0.0")?;
    let id = format!("/CommunityGalleries/{gallery}/Images/{}/Versions/{version}", image.name);
    Some(
        json!({"name": version, "location": REGION, "type": "Microsoft.Compute/locations/communityGalleries/images/versions",
        "identifier": {"uniqueId": id}, "properties": {"excludeFromLatest": false,
        "storageProfile": {"osDiskImage": {"diskSizeGB": 4, "hostCaching": "None"}}}}),
    )
}
