//! Reads which call of Google's a request is.

use super::{PROJECT, REGION, ZONES};
use crate::fake::{Refused, Request, refused};

/// Parts of a path that matter.
#[derive(Debug, Default, Clone)]
pub(super) struct Route {
    /// Project.
    pub(super) project: String,
    /// Zone; empty where the path has none.
    pub(super) zone: String,
    /// Region; empty where the path has none.
    pub(super) region: String,
    /// Collection: `instances`.
    pub(super) collection: String,
    /// Name of the resource; empty for the collection itself.
    pub(super) name: String,
    /// Call on the resource or the collection.
    pub(super) verb: String,
    /// Whether the list is of all zones.
    aggregated: bool,
    /// Path of another service.
    other: Vec<String>,
}

impl Route {
    pub(super) fn of(request: &Request) -> Route {
        let parts = request.parts();
        let words: Vec<&str> = parts.iter().map(String::as_str).collect();
        let ["compute", "v1", "projects", project, rest @ ..] = &words[..] else {
            return Route { other: parts, ..Route::default() };
        };
        let mut route = Route { project: (*project).to_owned(), ..Route::default() };
        let rest = match rest {
            ["zones", zone, rest @ ..] if !rest.is_empty() => {
                (*zone).clone_into(&mut route.zone);
                rest
            }
            ["regions", region, rest @ ..] if !rest.is_empty() => {
                (*region).clone_into(&mut route.region);
                rest
            }
            ["aggregated", rest @ ..] => {
                route.aggregated = true;
                rest
            }
            ["global", rest @ ..] => rest,
            rest => rest,
        };
        let (collection, name, verb) = match rest {
            [] => ("", "", ""),
            [collection] => (*collection, "", ""),
            ["instances", "bulkInsert"] => ("instances", "", "bulkInsert"),
            ["images", "family", name] => ("images", *name, "family"),
            [collection, name] => (*collection, *name, ""),
            [collection, name, verb] => (*collection, *name, *verb),
            _ => ("unknown", "", ""),
        };
        (route.collection, route.name, route.verb) =
            (collection.to_owned(), name.to_owned(), verb.to_owned());
        route
    }

    /// Returns `<zone or region>/<name>`.
    pub(super) fn key(&self) -> String {
        let place = if self.zone.is_empty() { &self.region } else { &self.zone };
        format!("{place}/{}", self.name)
    }

    /// Returns the call's id in the discovery document.
    pub(super) fn action(&self, method: &str) -> String {
        let other: Vec<&str> = self.other.iter().map(String::as_str).collect();
        match (method, &other[..]) {
            ("POST", ["token"]) => return "token.jwt".to_owned(),
            ("POST", ["sts", "v1", "token"]) => return "token.exchange".to_owned(),
            ("GET", ["computeMetadata", "v1", "instance", "service-accounts", _, "token"]) => {
                return "token.metadata".to_owned();
            }
            ("POST", ["v1", "projects", "-", "serviceAccounts", call])
                if call.ends_with(":generateAccessToken") =>
            {
                return "token.impersonate".to_owned();
            }
            (_, []) => {}
            _ => return "unknown".to_owned(),
        }
        let is_one = !self.name.is_empty();
        let verb = match (method, self.verb.as_str(), is_one) {
            ("GET", "", true) => "get",
            ("GET", "", false) if self.aggregated => "aggregatedList",
            ("GET", "", false) if self.collection.is_empty() => "get",
            ("GET", "", false) => "list",
            ("POST", "", false) => "insert",
            ("POST", "bulkInsert", false) => "bulkInsert",
            ("DELETE", "", true) => "delete",
            ("POST", "attachDisk", true) => "attachDisk",
            ("POST", "detachDisk", true) => "detachDisk",
            ("POST", "wait", true) => "wait",
            ("GET", "serialPort", true) => "getSerialPortOutput",
            ("GET", "family", true) => "getFromFamily",
            _ => return "unknown".to_owned(),
        };
        let collection = match (self.collection.as_str(), self.region.is_empty(), self.zone.is_empty()) {
            ("", ..) => "projects",
            ("instances", false, _) => "regionInstances",
            ("disks", false, _) => "regionDisks",
            ("operations", false, _) => "regionOperations",
            ("operations", _, false) => "zoneOperations",
            ("operations", true, true) => "globalOperations",
            (collection, ..) => collection,
        };
        format!("compute.{collection}.{verb}")
    }

    /// Refuses a foreign project, zone or region.
    pub(super) fn check(&self) -> Result<(), Box<Refused>> {
        if self.project != PROJECT {
            let message = format!("The resource 'projects/{}' was not found", self.project);
            return refused(404, "notFound", message);
        }
        if !self.zone.is_empty() && !ZONES.contains(&self.zone.as_str()) {
            let message = format!("Invalid value for field 'zone': '{}'. Unknown zone.", self.zone);
            return refused(400, "invalid", message);
        }
        if !self.region.is_empty() && self.region != REGION {
            let message = format!("Invalid value for field 'region': '{}'. Unknown region.", self.region);
            return refused(400, "invalid", message);
        }
        Ok(())
    }

    /// Returns the refusal of a resource that does not exist.
    pub(super) fn not_found<T>(&self) -> Result<T, Box<Refused>> {
        let place = match (self.zone.as_str(), self.region.as_str()) {
            ("", "") => "global".to_owned(),
            ("", region) => format!("regions/{region}"),
            (zone, _) => format!("zones/{zone}"),
        };
        let message = format!(
            "The resource 'projects/{}/{place}/{}/{}' was not found",
            self.project, self.collection, self.name
        );
        refused(404, "notFound", message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_names_a_call_of_the_discovery_document() {
        let at = |method: &str, rest: &str| {
            let target = format!("/compute/v1/projects/{PROJECT}{rest}");
            Route::of(&Request::new(method, &target, &[], None)).action(method)
        };
        assert_eq!(at("POST", "/zones/europe-west4-a/instances"), "compute.instances.insert");
        assert_eq!(at("POST", "/zones/europe-west4-a/instances/bulkInsert"), "compute.instances.bulkInsert");
        assert_eq!(
            at("POST", "/regions/europe-west4/instances/bulkInsert"),
            "compute.regionInstances.bulkInsert"
        );
        assert_eq!(at("GET", "/aggregated/instances"), "compute.instances.aggregatedList");
        assert_eq!(
            at("GET", "/zones/europe-west4-a/instances/i/serialPort"),
            "compute.instances.getSerialPortOutput"
        );
        assert_eq!(at("GET", "/zones/europe-west4-a/operations/o"), "compute.zoneOperations.get");
        assert_eq!(at("GET", "/global/images/family/f"), "compute.images.getFromFamily");
        assert_eq!(at("GET", "/regions/europe-west4"), "compute.regions.get");
        assert_eq!(at("GET", "/zones"), "compute.zones.list");
        assert_eq!(at("GET", ""), "compute.projects.get");
    }
}
