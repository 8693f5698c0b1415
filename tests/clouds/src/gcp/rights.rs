//! Lists the rights and the limits of each call.

use serde_json::Value;

use crate::body::{at, list, text};
use crate::fake::Request;
use crate::rates::Rate;

/// Returns the permissions that a role must contain for this call. Source: the pages of the methods.
pub(super) fn of(request: &Request, action: &str) -> Vec<String> {
    let words: Vec<&str> = match action {
        "compute.instances.insert" => return create(&request.json()),
        "compute.instances.bulkInsert" | "compute.regionInstances.bulkInsert" => {
            return create(at(&request.json(), "/instanceProperties"));
        }
        "compute.instances.aggregatedList" => vec!["compute.instances.list"],
        "compute.instances.attachDisk" => {
            let reads = text(&request.json(), "/mode") == "READ_ONLY";
            let used = if reads { "compute.disks.useReadOnly" } else { "compute.disks.use" };
            vec!["compute.instances.attachDisk", used]
        }
        "compute.instances.detachDisk" => vec!["compute.instances.detachDisk", "compute.disks.use"],
        "compute.regionDisks.get" => vec!["compute.disks.get"],
        "compute.zoneOperations.wait" => vec!["compute.zoneOperations.get"],
        "compute.regionOperations.wait" => vec!["compute.regionOperations.get"],
        action if action.starts_with("compute.") => vec![action],
        "token.impersonate" => vec!["iam.serviceAccounts.getAccessToken"],
        _ => Vec::new(),
    };
    words.into_iter().map(str::to_owned).collect()
}

fn create(body: &Value) -> Vec<String> {
    let mut rights = vec![
        "compute.instances.create",
        "compute.disks.create",
        "compute.images.useReadOnly",
        "compute.subnetworks.use",
    ];
    let present = |pointer: &str| !at(body, pointer).is_null();
    let has_public =
        list(body, "/networkInterfaces").iter().any(|one| !list(one, "/accessConfigs").is_empty());
    rights.extend(has_public.then_some("compute.subnetworks.useExternalIp"));
    rights.extend(present("/metadata").then_some("compute.instances.setMetadata"));
    rights.extend(present("/labels").then_some("compute.instances.setLabels"));
    let has_labels = list(body, "/disks").iter().any(|disk| at(disk, "/initializeParams/labels").is_object());
    rights.extend(has_labels.then_some("compute.disks.setLabels"));
    rights.extend(present("/tags").then_some("compute.instances.setTags"));
    if !list(body, "/serviceAccounts").is_empty() {
        rights.extend(["compute.instances.setServiceAccount", "iam.serviceAccounts.actAs"]);
    }
    for disk in list(body, "/disks").iter().skip(1) {
        let reads = text(disk, "/mode") == "READ_ONLY";
        rights.push(if reads { "compute.disks.useReadOnly" } else { "compute.disks.use" });
    }
    let has_tags = present("/params/resourceManagerTags") || present("/resourceManagerTags");
    rights.extend(has_tags.then_some("resourcemanager.tagValueBindings.create"));
    rights.sort_unstable();
    rights.dedup();
    rights.into_iter().map(str::to_owned).collect()
}

/// Returns the counter of this call. Figures: cloud.google.com, "Rate quotas" of Compute Engine: per project and minute.
pub(super) fn rates(action: &str) -> Vec<(String, Rate)> {
    let verb = action.rsplit('.').next().unwrap_or_default();
    let counter = match verb {
        _ if !action.starts_with("compute.") => return Vec::new(),
        _ if action.contains("Operations.") => "Operation read requests",
        "list" | "aggregatedList" => "List requests",
        "getSerialPortOutput" => "Get serial port output requests",
        "get" | "getFromFamily" => "Read requests",
        _ => "Queries",
    };
    vec![(counter.to_owned(), Rate::Minute { calls: 1_500 })]
}
