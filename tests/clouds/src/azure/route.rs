//! Reads which call of Azure a request is.

use super::{GROUP, REGION, SUBSCRIPTION};
use crate::fake::{Refused, Request, refused};

/// Parts of a path that matter.
#[derive(Debug, Default, Clone)]
pub(super) struct Route {
    /// Subscription.
    pub(super) subscription: String,
    /// Resource group; empty where the path has none.
    pub(super) group: String,
    /// Kinds of the resource, in lower case: `microsoft.compute/virtualmachines`.
    pub(super) kind: String,
    /// Names of the resource, one per kind.
    pub(super) names: Vec<String>,
    /// Call on the resource, in lower case.
    pub(super) verb: String,
    /// Path of a service that is not Resource Manager.
    other: Vec<String>,
}

impl Route {
    pub(super) fn of(request: &Request) -> Route {
        let parts = request.parts();
        let is =
            |place: usize, word: &str| parts.get(place).is_some_and(|part| part.eq_ignore_ascii_case(word));
        if !is(0, "subscriptions") {
            return Route { other: parts, ..Route::default() };
        }
        let mut route = Route { subscription: parts.get(1).cloned().unwrap_or_default(), ..Route::default() };
        let mut rest = 2;
        if is(2, "resourceGroups") {
            route.group = parts.get(3).cloned().unwrap_or_default();
            rest = 4;
        }
        if !is(rest, "providers") {
            return route;
        }
        route.kind = parts.get(rest + 1).map(|part| part.to_ascii_lowercase()).unwrap_or_default();
        for pair in parts.get(rest + 2..).unwrap_or_default().chunks(2) {
            match pair {
                [kind, name] => {
                    route.kind = format!("{}/{}", route.kind, kind.to_ascii_lowercase());
                    route.names.push(name.clone());
                }
                [verb] => route.verb = verb.to_ascii_lowercase(),
                _ => {}
            }
        }
        route
    }

    /// Returns the last name, as it is written.
    pub(super) fn name(&self) -> &str {
        self.names.last().map_or("", String::as_str)
    }

    /// Returns the last name as the key of a store.
    pub(super) fn key(&self) -> String {
        self.name().to_ascii_lowercase()
    }

    /// Returns the call's name in Azure's descriptions.
    pub(super) fn action(&self, method: &str) -> &'static str {
        let other: Vec<&str> = self.other.iter().map(String::as_str).collect();
        match (method, &other[..]) {
            ("POST", [_, "oauth2", "v2.0", "token"]) => return "Token",
            ("GET", ["metadata", "identity", "oauth2", "token"]) => return "ManagedIdentity",
            ("GET", ["console", _]) => return "Console",
            (_, []) => {}
            _ => return "Unknown",
        }
        match (method, self.kind.as_str(), self.verb.as_str()) {
            ("GET", "", "") if self.group.is_empty() => "Subscriptions_Get",
            ("GET", "", "") => "ResourceGroups_Get",
            (_, "microsoft.compute" | "microsoft.compute/virtualmachines", _) => self.compute(method),
            ("PUT", "microsoft.network/networkinterfaces", "") => "NetworkInterfaces_CreateOrUpdate",
            ("GET", "microsoft.network/networkinterfaces", "") => "NetworkInterfaces_Get",
            ("DELETE", "microsoft.network/networkinterfaces", "") => "NetworkInterfaces_Delete",
            ("PATCH", "microsoft.network/networkinterfaces", "") => "NetworkInterfaces_UpdateTags",
            ("GET", "microsoft.network", "networkinterfaces") => "NetworkInterfaces_List",
            ("GET", "microsoft.network/publicipaddresses", "") => "PublicIPAddresses_Get",
            ("DELETE", "microsoft.network/publicipaddresses", "") => "PublicIPAddresses_Delete",
            ("GET", "microsoft.network", "publicipaddresses") => "PublicIPAddresses_List",
            ("PUT", "microsoft.compute/disks", "") => "Disks_CreateOrUpdate",
            ("GET", "microsoft.compute/disks", "") => "Disks_Get",
            ("DELETE", "microsoft.compute/disks", "") => "Disks_Delete",
            ("GET", "microsoft.compute/locations/operations", "") => "Operations_Get",
            ("GET", "microsoft.compute/locations", "usages") => "Usage_List",
            ("GET", "microsoft.compute/galleries/images", "") => "GalleryImages_Get",
            ("GET", "microsoft.compute/galleries/images/versions", "") => "GalleryImageVersions_Get",
            ("GET", "microsoft.compute/images", "") => "Images_Get",
            ("GET", "microsoft.compute/locations/communitygalleries/images", "") => {
                "CommunityGalleryImages_Get"
            }
            ("GET", "microsoft.compute/locations/communitygalleries/images/versions", "") => {
                "CommunityGalleryImageVersions_Get"
            }
            ("GET", "microsoft.network/virtualnetworks/subnets", "") => "Subnets_Get",
            ("GET", "microsoft.network/networksecuritygroups", "") => "NetworkSecurityGroups_Get",
            ("GET", "microsoft.authorization", "permissions") => "Permissions_ListForResourceGroup",
            _ => "Unknown",
        }
    }

    fn compute(&self, method: &str) -> &'static str {
        let is_one = self.kind == "microsoft.compute/virtualmachines";
        match (method, self.verb.as_str(), is_one) {
            ("PUT", "", true) => "VirtualMachines_CreateOrUpdate",
            ("GET", "", true) => "VirtualMachines_Get",
            ("PATCH", "", true) => "VirtualMachines_Update",
            ("DELETE", "", true) => "VirtualMachines_Delete",
            ("GET", "instanceview", true) => "VirtualMachines_InstanceView",
            ("POST", "attachdetachdatadisks", true) => "VirtualMachines_AttachDetachDataDisks",
            ("POST", "retrievebootdiagnosticsdata", true) => "VirtualMachines_RetrieveBootDiagnosticsData",
            ("GET", "virtualmachines", false) if self.group.is_empty() => "VirtualMachines_ListAll",
            ("GET", "virtualmachines", false) => "VirtualMachines_List",
            ("GET", "skus", false) => "ResourceSkus_List",
            ("GET", "disks", false) if !self.group.is_empty() => "Disks_ListByResourceGroup",
            _ => "Unknown",
        }
    }

    /// Refuses what no resource can be at: a foreign subscription, group, region, or no version of the API.
    pub(super) fn check(&self, request: &Request) -> Result<(), Box<Refused>> {
        let version = request.query("api-version");
        let is_date = version.len() >= 10 && version.chars().take(4).all(|one| one.is_ascii_digit());
        if !is_date {
            return refused(
                400,
                "MissingApiVersionParameter",
                "The api-version query parameter (?api-version=) is required for all requests.",
            );
        }
        if self.subscription != SUBSCRIPTION {
            let message = format!("The subscription '{}' could not be found.", self.subscription);
            return refused(404, "SubscriptionNotFound", message);
        }
        if !self.group.is_empty() && !self.group.eq_ignore_ascii_case(GROUP) {
            let message = format!("Resource group '{}' could not be found.", self.group);
            return refused(404, "ResourceGroupNotFound", message);
        }
        let is_regional = self.kind.starts_with("microsoft.compute/locations");
        if is_regional && !self.names.first().is_some_and(|name| name.eq_ignore_ascii_case(REGION)) {
            return refused(
                400,
                "NoRegisteredProviderFound",
                "No registered resource provider found for location.",
            );
        }
        Ok(())
    }

    /// Returns the refusal of a resource that does not exist.
    pub(super) fn not_found<T>(&self) -> Result<T, Box<Refused>> {
        let message = format!(
            "The Resource '{}/{}' under resource group '{GROUP}' was not found. For more details please go to \
             https://aka.ms/ARMResourceNotFoundFix",
            self.kind,
            self.names.join("/")
        );
        refused(404, "ResourceNotFound", message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn action(method: &str, path: &str) -> &'static str {
        let request = Request {
            method: method.to_owned(),
            path: path.to_owned(),
            query: Default::default(),
            headers: Default::default(),
            body: Default::default(),
        };
        Route::of(&request).action(method)
    }

    #[test]
    fn a_path_names_a_call_whatever_its_case() {
        let group = "/subscriptions/s/RESOURCEGROUPS/g/providers/";
        let at = |method, rest: &str| action(method, &format!("{group}{rest}"));
        assert_eq!(at("PUT", "microsoft.compute/VirtualMachines/v"), "VirtualMachines_CreateOrUpdate");
        assert_eq!(at("GET", "Microsoft.Compute/virtualMachines"), "VirtualMachines_List");
        assert_eq!(
            at("POST", "Microsoft.Compute/virtualMachines/v/attachDetachDataDisks"),
            "VirtualMachines_AttachDetachDataDisks"
        );
        assert_eq!(at("GET", "Microsoft.Network/virtualNetworks/n/subnets/s"), "Subnets_Get");
        assert_eq!(at("GET", "Microsoft.Network/networkInterfaces"), "NetworkInterfaces_List");
        assert_eq!(action("GET", "/subscriptions/s/providers/Microsoft.Compute/skus"), "ResourceSkus_List");
        assert_eq!(
            action("GET", "/subscriptions/s/providers/Microsoft.Compute/locations/l/usages"),
            "Usage_List"
        );
        assert_eq!(action("POST", "/t/oauth2/v2.0/token"), "Token");
    }
}
