//! Disks, and their attachment to instances.

use std::time::Duration;

use serde_json::{Value, json};

use super::instances::State;
use super::{Alibaba, Parameters, REGION, answer, check, get, missing};
use crate::fake::{Answer, Refused, World, refused};

/// Cloud disk.
#[derive(Debug, Clone)]
pub struct Disk {
    /// Zone.
    pub zone: String,
    /// Instance that has it.
    pub on: Option<String>,
    /// Whether the answers have its serial number, as for younger disks.
    pub shows_serial: bool,
    /// Time at which its attachment is there.
    ready: Duration,
    is_ready: bool,
}

impl Alibaba {
    /// Adds an empty disk in a zone, as a CSI driver makes it. Returns the driver's handle.
    pub fn add_disk(&mut self, zone: &str, now: Duration) -> String {
        let number = self.number();
        let id = format!("d-2ze{number:017}");
        let shows_serial = number.is_multiple_of(2);
        let disk = Disk { zone: zone.to_owned(), on: None, shows_serial, ready: now, is_ready: false };
        self.disks.add(&id, disk, now);
        id
    }

    pub(super) fn tick_disks(&mut self, now: Duration) {
        for (_, disk) in self.disks.all_mut() {
            disk.is_ready = disk.on.is_some() && disk.ready <= now;
        }
    }

    /// Ends the attachments of an instance that is gone.
    pub(super) fn release_disks(&mut self, instance: &str) {
        for (_, disk) in self.disks.all_mut() {
            if disk.on.as_deref() == Some(instance) {
                disk.on = None;
            }
        }
    }

    fn disk_view(id: &str, disk: &Disk) -> Value {
        let state = match (&disk.on, disk.is_ready) {
            (None, _) => "Available",
            (Some(_), false) => "Attaching",
            (Some(_), true) => "In_use",
        };
        let on: Vec<Value> =
            disk.on.iter().map(|vm| json!({"InstanceId": vm, "Device": "/dev/xvdb"})).collect();
        let serial = if disk.shows_serial { id.trim_start_matches("d-") } else { "" };
        json!({"DiskId": id, "ZoneId": disk.zone, "RegionId": REGION, "Status": state, "Size": 20, "Type": "data",
            "Category": "cloud_essd", "InstanceId": disk.on.as_deref().unwrap_or_default(), "SerialNumber": serial,
            "Attachments": {"Attachment": on}, "DeleteWithInstance": false, "Portable": true})
    }

    pub(super) fn describe_disks(
        &self,
        parameters: &Parameters,
        world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let Ok(ids) = serde_json::from_str::<Vec<String>>(get(parameters, "DiskIds")) else {
            return check::invalid("DiskIds", "list");
        };
        if ids.len() > 100 {
            return check::invalid("DiskIds", "list");
        }
        let found =
            self.disks.listed(world.now, Duration::ZERO).filter(|(id, _)| ids.iter().any(|one| one == id));
        let found: Vec<Value> = found.map(|(id, disk)| Alibaba::disk_view(id, disk)).collect();
        let (page, next) = self.cut(parameters, found, 10)?;
        answer(
            json!({"Disks": {"Disk": page}, "NextToken": next, "TotalCount": 0, "PageNumber": 0, "PageSize": 0}),
        )
    }

    /// Returns the zone and the state of the instance of a call.
    fn target(&self, parameters: &Parameters) -> Result<(String, State), Box<Refused>> {
        match self.instances.get(get(parameters, "InstanceId")) {
            Some(one) => Ok((one.zone.clone(), one.state)),
            None => missing("InvalidInstanceId.NotFound", "InstanceId"),
        }
    }

    pub(super) fn attach(
        &mut self,
        parameters: &Parameters,
        world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let (zone, state) = self.target(parameters)?;
        let ready = world.now + self.attach_time;
        let Some(disk) = self.disks.get_mut(get(parameters, "DiskId")) else {
            return missing("InvalidDiskId.NotFound", "DiskId");
        };
        if !matches!(state, State::Running | State::Stopped) {
            return refused(
                403,
                "IncorrectInstanceStatus",
                "The current status of the resource does not support this operation.",
            );
        }
        if disk.on.is_some() {
            return refused(
                403,
                "IncorrectDiskStatus",
                "The current disk status does not support this operation.",
            );
        }
        if disk.zone != zone {
            return refused(
                403,
                "ResourcesNotInSameZone",
                "The specified instance and disk are not in the same zone.",
            );
        }
        disk.on = Some(get(parameters, "InstanceId").to_owned());
        (disk.ready, disk.is_ready) = (ready, ready <= world.now);
        answer(json!({}))
    }

    pub(super) fn detach(&mut self, parameters: &Parameters) -> Result<Answer, Box<Refused>> {
        self.target(parameters)?;
        let Some(disk) = self.disks.get_mut(get(parameters, "DiskId")) else {
            return missing("InvalidDiskId.NotFound", "DiskId");
        };
        if disk.on.as_deref() != Some(get(parameters, "InstanceId")) {
            return refused(403, "DiskNotAttached", "The specified disk is not attached to the instance.");
        }
        disk.on = None;
        answer(json!({}))
    }
}
