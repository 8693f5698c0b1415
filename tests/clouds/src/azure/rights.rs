//! Lists the rights and the limits of each call.

use serde_json::Value;

use super::route::Route;
use crate::body::{at, text};
use crate::fake::Request;
use crate::rates::Rate;

const VM: &str = "Microsoft.Compute/virtualMachines";
const NIC: &str = "Microsoft.Network/networkInterfaces";
const PUBLIC: &str = "Microsoft.Network/publicIPAddresses";
const DISK: &str = "Microsoft.Compute/disks";

/// Returns the actions that a role must contain for this call, those on linked resources included.
pub(super) fn of(request: &Request, action: &str) -> Vec<String> {
    let one = |right: &str| vec![right.to_owned()];
    match action {
        "VirtualMachines_CreateOrUpdate" => create(&request.json()),
        "VirtualMachines_Update" => vec![format!("{VM}/write")],
        "VirtualMachines_Get" | "VirtualMachines_List" | "VirtualMachines_ListAll" => {
            vec![format!("{VM}/read")]
        }
        "VirtualMachines_InstanceView" => vec![format!("{VM}/instanceView/read")],
        "VirtualMachines_Delete" => {
            vec![format!("{VM}/delete"), format!("{NIC}/delete"), format!("{DISK}/delete")]
        }
        "VirtualMachines_AttachDetachDataDisks" => {
            vec![format!("{VM}/attachDetachDataDisks/action"), format!("{DISK}/write")]
        }
        "VirtualMachines_RetrieveBootDiagnosticsData" => {
            vec![format!("{VM}/retrieveBootDiagnosticsData/action")]
        }
        "NetworkInterfaces_CreateOrUpdate" => nic(&request.json()),
        "NetworkInterfaces_UpdateTags" => vec![format!("{NIC}/write")],
        "NetworkInterfaces_Get" | "NetworkInterfaces_List" => vec![format!("{NIC}/read")],
        "NetworkInterfaces_Delete" => vec![format!("{NIC}/delete")],
        "PublicIPAddresses_Get" | "PublicIPAddresses_List" => vec![format!("{PUBLIC}/read")],
        "PublicIPAddresses_Delete" => vec![format!("{PUBLIC}/delete")],
        "Disks_CreateOrUpdate" => vec![format!("{DISK}/write")],
        "Disks_Get" | "Disks_ListByResourceGroup" => vec![format!("{DISK}/read")],
        "Disks_Delete" => vec![format!("{DISK}/delete")],
        "Operations_Get" => one("Microsoft.Compute/locations/operations/read"),
        "ResourceSkus_List" => one("Microsoft.Compute/skus/read"),
        "Usage_List" => one("Microsoft.Compute/locations/usages/read"),
        "GalleryImages_Get" => one("Microsoft.Compute/galleries/images/read"),
        "GalleryImageVersions_Get" => one("Microsoft.Compute/galleries/images/versions/read"),
        "Images_Get" => one("Microsoft.Compute/images/read"),
        "CommunityGalleryImages_Get" => one("Microsoft.Compute/locations/communityGalleries/images/read"),
        "CommunityGalleryImageVersions_Get" => {
            one("Microsoft.Compute/locations/communityGalleries/images/versions/read")
        }
        "Subnets_Get" => one("Microsoft.Network/virtualNetworks/subnets/read"),
        "NetworkSecurityGroups_Get" => one("Microsoft.Network/networkSecurityGroups/read"),
        "Permissions_ListForResourceGroup" => one("Microsoft.Authorization/permissions/read"),
        "Subscriptions_Get" => one("Microsoft.Resources/subscriptions/read"),
        "ResourceGroups_Get" => one("Microsoft.Resources/subscriptions/resourceGroups/read"),
        _ => Vec::new(),
    }
}

fn create(body: &Value) -> Vec<String> {
    let mut rights = vec![format!("{VM}/write"), format!("{DISK}/write")];
    let image = text(body, "/properties/storageProfile/imageReference/id").to_ascii_lowercase();
    if image.contains("/galleries/") {
        rights.push("Microsoft.Compute/galleries/images/versions/read".to_owned());
    } else if image.contains("/images/") {
        rights.push("Microsoft.Compute/images/read".to_owned());
    }
    let network = at(body, "/properties/networkProfile");
    for one in at(network, "/networkInterfaceConfigurations").as_array().into_iter().flatten() {
        rights.push(format!("{NIC}/write"));
        rights.extend(nic(one));
    }
    rights.push(format!("{NIC}/join/action"));
    rights.sort_unstable();
    rights.dedup();
    rights
}

/// Returns the rights of a network interface with these properties.
fn nic(body: &Value) -> Vec<String> {
    let mut rights =
        vec![format!("{NIC}/write"), "Microsoft.Network/virtualNetworks/subnets/join/action".to_owned()];
    if !at(body, "/properties/networkSecurityGroup").is_null() {
        rights.push("Microsoft.Network/networkSecurityGroups/join/action".to_owned());
    }
    let configurations = at(body, "/properties/ipConfigurations").as_array();
    if configurations
        .into_iter()
        .flatten()
        .any(|one| !at(one, "/properties/publicIPAddressConfiguration").is_null())
    {
        rights.push(format!("{PUBLIC}/write"));
        rights.push(format!("{PUBLIC}/join/action"));
    }
    rights
}

/// Returns the counters of this call. Figures: learn.microsoft.com, "Throttling limits for Azure Compute" and
/// "Request limits and throttling" (of Microsoft.Network, in five minutes).
pub(super) fn rates(request: &Request, action: &str) -> Vec<(String, Rate)> {
    let bucket = |per_minute: f64, burst: f64| Rate::Bucket { per_minute, burst };
    let shared = |name: &str, per_minute, burst| {
        vec![(format!("Microsoft.Compute/{name}SubscriptionMaximum"), bucket(per_minute, burst))]
    };
    let mut counters = match action {
        "VirtualMachines_CreateOrUpdate" => shared("PutVM", 500.0, 1_500.0),
        "VirtualMachines_Update" | "VirtualMachines_AttachDetachDataDisks" => {
            shared("UpdateVM", 500.0, 1_500.0)
        }
        "VirtualMachines_Delete" => shared("DeleteVM", 500.0, 1_500.0),
        "VirtualMachines_Get" | "VirtualMachines_InstanceView" => shared("LowCostGet", 8_000.0, 24_000.0),
        "VirtualMachines_List" | "VirtualMachines_ListAll" => shared("HighCostGet", 300.0, 900.0),
        "Operations_Get" => shared("GetOperation", 5_000.0, 15_000.0),
        "NetworkInterfaces_Get" | "NetworkInterfaces_List" => {
            vec![("Microsoft.Network/Reads".to_owned(), bucket(2_000.0, 10_000.0))]
        }
        _ if action.starts_with("NetworkInterfaces_") => {
            vec![("Microsoft.Network/Writes".to_owned(), bucket(200.0, 1_000.0))]
        }
        _ => Vec::new(),
    };
    let route = Route::of(request);
    let name = route.key();
    let own = match action {
        "VirtualMachines_CreateOrUpdate" => Some(("PutVM", 4.0, 12.0)),
        "VirtualMachines_Update" | "VirtualMachines_AttachDetachDataDisks" => Some(("UpdateVM", 4.0, 12.0)),
        "VirtualMachines_Delete" => Some(("DeleteVM", 4.0, 12.0)),
        "VirtualMachines_Get" | "VirtualMachines_InstanceView" => Some(("GetVM", 12.0, 36.0)),
        "Operations_Get" => Some(("GetOperation", 15.0, 45.0)),
        _ => None,
    };
    if let Some((group, per_minute, burst)) = own {
        counters.push((format!("Microsoft.Compute/{group}Resource.{name}"), bucket(per_minute, burst)));
    }
    counters
}
