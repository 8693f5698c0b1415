//! Managed disks, and their attachment to a VM that runs.

use std::time::Duration;

use serde_json::{Value, json};

use super::route::Route;
use super::vms::State;
use super::{Azure, REGION};
use crate::body::{at, last, list, text};
use crate::clock::stamp;
use crate::fake::{Answer, Refused, Request, World, refused};

/// Managed disk.
#[derive(Debug, Clone)]
pub struct Disk {
    /// Name, as it was written.
    pub name: String,
    /// Zone; empty for a disk of the region.
    pub zone: String,
    /// Size in GiB.
    pub size: u64,
    /// Key of the VM that has it.
    pub vm: Option<String>,
    /// Logical unit in the VM; `None`: the OS disk.
    pub lun: Option<u64>,
    /// Whether it goes with its VM.
    pub goes: bool,
    /// Tags.
    pub tags: Value,
    made: Duration,
}

impl Azure {
    /// Adds an empty disk of 1 GiB, as a CSI driver makes it. Returns its id.
    pub fn add_disk(&mut self, name: &str, zone: &str, now: Duration) -> String {
        self.new_disk(Disk {
            name: name.to_owned(),
            zone: zone.to_owned(),
            size: 1,
            vm: None,
            lun: None,
            goes: false,
            tags: Value::Null,
            made: now,
        });
        Azure::id("Microsoft.Compute/disks", name)
    }

    fn new_disk(&mut self, disk: Disk) {
        let (key, made) = (disk.name.to_ascii_lowercase(), disk.made);
        self.disks.add(&key, disk, made);
    }

    /// Adds a VM's OS disk.
    pub(super) fn new_os_disk(&mut self, name: &str, body: &Value, vm: &str, now: Duration) {
        let os = at(body, "/properties/storageProfile/osDisk");
        self.new_disk(Disk {
            name: name.to_owned(),
            zone: text(body, "/zones/0").to_owned(),
            size: at(os, "/diskSizeGB").as_u64().unwrap_or(4),
            vm: Some(vm.to_owned()),
            lun: None,
            goes: text(os, "/deleteOption") == "Delete",
            tags: at(body, "/tags").clone(),
            made: now,
        });
    }

    fn disk_view(&self, disk: &Disk) -> Value {
        let state = if disk.vm.is_some() { "Attached" } else { "Unattached" };
        let mut view = json!({"name": disk.name, "id": Azure::id("Microsoft.Compute/disks", &disk.name),
            "type": "Microsoft.Compute/disks", "location": REGION, "sku": {"name": "Premium_LRS", "tier": "Premium"},
            "properties": {"diskSizeGB": disk.size, "diskState": state, "provisioningState": "Succeeded",
                "timeCreated": stamp(disk.made), "creationData": {"createOption": "Empty"}}});
        if !disk.zone.is_empty() {
            view["zones"] = json!([disk.zone]);
        }
        if disk.tags.is_object() {
            view["tags"] = disk.tags.clone();
        }
        if let Some(vm) = disk.vm.as_ref().and_then(|vm| self.vms.get(vm)) {
            view["managedBy"] = json!(Azure::id("Microsoft.Compute/virtualMachines", &vm.name));
        }
        view
    }

    pub(super) fn put_disk(
        &mut self,
        request: &Request,
        route: &Route,
        world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let body = request.json();
        if self.disks.get(&route.key()).is_none() {
            self.add_disk(route.name(), text(&body, "/zones/0"), world.now);
        }
        if let Some(disk) = self.disks.get_mut(&route.key()) {
            disk.size = at(&body, "/properties/diskSizeGB").as_u64().unwrap_or(disk.size);
        }
        self.get_disk(route)
    }

    pub(super) fn get_disk(&self, route: &Route) -> Result<Answer, Box<Refused>> {
        let Some(disk) = self.disks.get(&route.key()) else { return route.not_found() };
        Ok(Answer::json(200, &self.disk_view(disk)))
    }

    pub(super) fn list_disks(&self, request: &Request, world: &World<'_>) -> Result<Answer, Box<Refused>> {
        let disks: Vec<Value> =
            self.disks.listed(world.now, world.lag).map(|(_, disk)| self.disk_view(disk)).collect();
        Ok(self.page(request, &disks, world))
    }

    pub(super) fn delete_disk(&mut self, route: &Route, world: &World<'_>) -> Result<Answer, Box<Refused>> {
        let Some(disk) = self.disks.get(&route.key()) else { return Ok(Answer::empty(204)) };
        if disk.vm.is_some() {
            return refused(409, "OperationNotAllowed", format!("Disk {} is attached to VM.", disk.name));
        }
        self.disks.remove(&route.key(), world.now);
        Ok(self.begin(Answer::empty(202), world.now, None, None, world))
    }

    /// Attaches a disk to a VM in this zone at this logical unit, or refuses.
    pub(super) fn attach(&mut self, vm: &str, zone: &str, id: &str, lun: u64) -> Result<(), Box<Refused>> {
        let key = last(id);
        let taken = self.disks.all().any(|(_, disk)| disk.vm.as_deref() == Some(vm) && disk.lun == Some(lun));
        if taken {
            return refused(400, "InvalidParameter", format!("A disk at LUN {lun} already exists."));
        }
        let is_disk = id.to_ascii_lowercase().contains("/providers/microsoft.compute/disks/");
        let Some(disk) = self.disks.get_mut(&key).filter(|_| is_disk) else {
            return refused(404, "ResourceNotFound", format!("Disk '{key}' not found."));
        };
        if let Some(other) = &disk.vm {
            let message =
                format!("Disk '{id}' cannot be attached as the disk is already owned by VM '{other}'.");
            return refused(409, "ConflictingUserInput", message);
        }
        if disk.zone != zone {
            return refused(
                400,
                "BadRequest",
                format!(
                    "Disk {key} cannot be attached to the VM because it is not in the same zone as the VM."
                ),
            );
        }
        disk.vm = Some(vm.to_owned());
        disk.lun = Some(lun);
        Ok(())
    }

    fn detach(&mut self, vm: &str, id: &str) -> Result<(), Box<Refused>> {
        let disk = self.disks.get_mut(&last(id)).filter(|disk| disk.vm.as_deref() == Some(vm));
        let Some(disk) = disk.filter(|disk| disk.lun.is_some()) else {
            return refused(400, "InvalidParameter", format!("Disk '{id}' is not attached to the VM."));
        };
        disk.vm = None;
        disk.lun = None;
        Ok(())
    }

    /// `POST …/attachDetachDataDisks`.
    pub(super) fn attach_detach(
        &mut self,
        request: &Request,
        route: &Route,
        world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let body = request.json();
        let key = route.key();
        let Some(vm) = self.vms.get(&key) else { return route.not_found() };
        let size = vm.size().to_owned();
        let zone = vm.zone().to_owned();
        if matches!(vm.state, State::Creating | State::Deleting) {
            let message = "The operation is not allowed since another operation is in progress on the VM.";
            return refused(409, "AnotherOperationInProgress", message);
        }
        for one in list(&body, "/dataDisksToDetach") {
            self.detach(&key, text(one, "/diskId"))?;
        }
        let most = self.sizes.iter().find(|one| one.name == size).map_or(0, |one| u64::from(one.disks));
        for one in list(&body, "/dataDisksToAttach") {
            let luns: Vec<u64> = self.luns(&key);
            if luns.len() as u64 >= most {
                let message = format!(
                    "The maximum number of data disks allowed to be attached to a VM of this size is {most}."
                );
                return refused(409, "OperationNotAllowed", message);
            }
            let free = (0..most).find(|lun| !luns.contains(lun)).unwrap_or(0);
            let lun = at(one, "/lun").as_u64().unwrap_or(free);
            self.attach(&key, &zone, text(one, "/diskId"), lun)?;
            if text(one, "/deleteOption") == "Delete" {
                self.disks.get_mut(&last(text(one, "/diskId"))).into_iter().for_each(|disk| disk.goes = true);
            }
        }
        let profile = self.storage_profile(&key);
        Ok(self.begin(Answer::empty(202), world.now, None, Some(profile), world))
    }

    /// Returns the logical units in use.
    fn luns(&self, vm: &str) -> Vec<u64> {
        let of_vm = self.disks.all().filter(|(_, disk)| disk.vm.as_deref() == Some(vm));
        of_vm.filter_map(|(_, disk)| disk.lun).collect()
    }
}
