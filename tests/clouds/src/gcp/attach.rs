//! Disks, and their attachment to instances.

use std::time::Duration;

use serde_json::{Value, json};

use super::instances::{Instance, State};
use super::operations::Operation;
use super::route::Route;
use super::{BASE, Gcp, REGION, check};
use crate::body::{at, last, list, text};
use crate::clock::stamp;
use crate::fake::{Answer, Refused, Request, World, refused};

/// Zones of a disk of the region.
const REPLICAS: [&str; 2] = [super::ZONES[0], super::ZONES[1]];

/// Attachment of a disk to an instance.
#[derive(Debug, Clone)]
pub struct Use {
    /// Key of the instance.
    pub instance: String,
    /// Name that the guest reads.
    pub device: String,
    /// Whether the instance may only read.
    pub read_only: bool,
    /// Whether it goes with the instance.
    pub goes: bool,
}

/// Persistent disk.
#[derive(Debug, Clone)]
pub struct Disk {
    /// Name.
    pub name: String,
    /// Zone; empty for one of the region.
    pub zone: String,
    /// Size in GiB.
    pub size: u64,
    /// Whether instances start from it.
    pub boots: bool,
    /// Attachments.
    pub users: Vec<Use>,
    made: Duration,
}

impl Gcp {
    /// Adds an empty disk of 1 GiB in a zone, or in the region, as a CSI driver makes it. Returns the driver's handle.
    pub fn add_disk(&mut self, name: &str, zone: &str, now: Duration) -> String {
        let (key, place) = if zone.is_empty() {
            (format!("{REGION}/{name}"), format!("regions/{REGION}"))
        } else {
            (format!("{zone}/{name}"), format!("zones/{zone}"))
        };
        let disk = Disk {
            name: name.to_owned(),
            zone: zone.to_owned(),
            size: 1,
            boots: false,
            users: Vec::new(),
            made: now,
        };
        self.disks.add(&key, disk, now);
        format!("projects/{}/{place}/disks/{name}", super::PROJECT)
    }

    pub(super) fn new_boot_disk(&mut self, key: &str, instance: &Instance, now: Duration) {
        let boot = at(&instance.body, "/disks/0");
        let size = at(boot, "/initializeParams/diskSizeGb");
        let size = size.as_str().and_then(|size| size.parse().ok()).or(size.as_u64()).unwrap_or(4);
        let device = match text(boot, "/deviceName") {
            "" => "persistent-disk-0",
            name => name,
        };
        let used = Use {
            instance: key.to_owned(),
            device: device.to_owned(),
            read_only: false,
            goes: at(boot, "/autoDelete").as_bool() == Some(true),
        };
        let disk = Disk {
            name: instance.name.clone(),
            zone: instance.zone.clone(),
            size,
            boots: true,
            users: vec![used],
            made: now,
        };
        self.disks.add(key, disk, now);
    }

    /// Ends the attachments of an instance that is gone.
    pub(super) fn release_disks(&mut self, instance: &str, now: Duration) {
        let mut gone = Vec::new();
        for (key, disk) in self.disks.all_mut() {
            let goes = disk.users.iter().any(|one| one.instance == instance && one.goes);
            disk.users.retain(|one| one.instance != instance);
            gone.extend(goes.then(|| key.to_owned()));
        }
        self.disks.remove_all(&gone, now);
    }

    /// Returns the key of the disk that a path or URL names.
    fn source(path: &str) -> Option<String> {
        let parts: Vec<&str> = path.rsplit('/').collect();
        match &parts[..] {
            [name, "disks", place, "zones" | "regions", ..] => Some(format!("{place}/{name}")),
            _ => None,
        }
    }

    fn attach(&mut self, instance: &str, zone: &str, disk: &Value) -> Result<(), Box<Refused>> {
        check::mode(disk)?;
        let path = text(disk, "/source");
        let device = text(disk, "/deviceName");
        let device = if device.is_empty() { last(path) } else { device.to_owned() };
        let is_it = |one: &Use| one.instance == instance && one.device == device;
        if self.disks.all().any(|(_, disk)| disk.users.iter().any(is_it)) {
            return check::invalid("deviceName", &format!("{device} is already in use"));
        }
        let read_only = text(disk, "/mode") == "READ_ONLY";
        let Some(found) = Gcp::source(path).and_then(|key| self.disks.get_mut(&key)) else {
            return refused(404, "notFound", format!("The resource '{path}' was not found"));
        };
        let is_here = if found.zone.is_empty() { REPLICAS.contains(&zone) } else { found.zone == zone };
        if !is_here {
            return check::invalid("source", &format!("The disk is not in the instance's zone {zone}."));
        }
        if found.users.iter().any(|one| !read_only || !one.read_only) {
            let message = format!(
                "The disk resource '{path}' is already being used by '{BASE}/zones/{zone}/instances'"
            );
            return refused(400, "resourceInUseByAnotherResource", message);
        }
        let goes = at(disk, "/autoDelete").as_bool() == Some(true);
        found.users.push(Use { instance: instance.to_owned(), device, read_only, goes });
        Ok(())
    }

    /// Attaches the disks of a create; all or none.
    pub(super) fn attach_at_creation(
        &mut self,
        key: &str,
        zone: &str,
        body: &Value,
    ) -> Result<(), Box<Refused>> {
        for disk in list(body, "/disks").iter().skip(1) {
            if let Err(refusal) = self.attach(key, zone, disk) {
                self.disks.all_mut().for_each(|(_, disk)| disk.users.retain(|one| one.instance != key));
                return Err(refusal);
            }
        }
        Ok(())
    }

    /// Returns the key of an instance that can change.
    fn changing(&self, route: &Route) -> Result<String, Box<Refused>> {
        let key = route.key();
        let Some(one) = self.instances.get(&key) else { return route.not_found() };
        if one.state == State::Provisioning {
            let message = format!("The resource 'instances/{}' is not ready", one.name);
            return refused(400, "resourceNotReady", message);
        }
        Ok(key)
    }

    pub(super) fn attach_disk(
        &mut self,
        request: &Request,
        route: &Route,
        world: &mut World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let key = self.changing(route)?;
        let refusal = world.late.take();
        if refusal.is_none() {
            self.attach(&key, &route.zone, &request.json())?;
        }
        let target = format!("zones/{}/instances/{}", route.zone, route.name);
        let operation = Operation::of("attachDisk", route, target, request).until(world.now, refusal);
        Ok(self.begin(operation, world))
    }

    pub(super) fn detach_disk(
        &mut self,
        request: &Request,
        route: &Route,
        world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let key = self.changing(route)?;
        let device = request.query("deviceName");
        let mut found = false;
        for (_, disk) in self.disks.all_mut() {
            let before = disk.users.len();
            let is_it = |one: &Use| one.instance == key && one.device == device;
            if !disk.boots {
                disk.users.retain(|one| !is_it(one));
            }
            found |= disk.users.len() < before;
        }
        if !found {
            let message = format!(
                "Invalid value for field 'disk': '{device}'. No attached disk found with device name '{device}'"
            );
            return refused(400, "invalid", message);
        }
        let target = format!("zones/{}/instances/{}", route.zone, route.name);
        Ok(self.begin(Operation::of("detachDisk", route, target, request).until(world.now, None), world))
    }

    fn disk_view(disk: &Disk) -> Value {
        let (scope, place) = if disk.zone.is_empty() {
            ("region", format!("regions/{REGION}"))
        } else {
            ("zone", format!("zones/{}", disk.zone))
        };
        let users: Vec<String> = disk
            .users
            .iter()
            .filter_map(|one| one.instance.split_once('/'))
            .map(|(zone, name)| format!("{BASE}/zones/{zone}/instances/{name}"))
            .collect();
        let mut view = json!({"kind": "compute#disk", "id": "1", "name": disk.name, "sizeGb": disk.size.to_string(),
            "status": "READY", "type": format!("{BASE}/{place}/diskTypes/pd-balanced"),
            "creationTimestamp": stamp(disk.made), "selfLink": format!("{BASE}/{place}/disks/{}", disk.name)});
        view[scope] = json!(format!("{BASE}/{place}"));
        if disk.zone.is_empty() {
            view["replicaZones"] = json!(REPLICAS.map(|zone| format!("{BASE}/zones/{zone}")));
        }
        if !users.is_empty() {
            view["users"] = json!(users);
        }
        view
    }

    pub(super) fn get_disk(&self, route: &Route) -> Result<Answer, Box<Refused>> {
        match self.disks.get(&route.key()) {
            Some(disk) => Ok(Answer::json(200, &Gcp::disk_view(disk))),
            None => route.not_found(),
        }
    }

    pub(super) fn list_disks(
        &self,
        request: &Request,
        route: &Route,
        world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let here = self.disks.listed(world.now, world.lag).filter(|(_, disk)| disk.zone == route.zone);
        self.page(request, "diskList", here.map(|(_, disk)| Gcp::disk_view(disk)).collect())
    }
}
