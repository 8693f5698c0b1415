//! Block-storage volumes, and their attachment to an instance.

use std::time::Duration;

use serde_json::{Value, json};

use super::instances::State;
use super::{IbmCloud, facts, not_found};
use crate::body::text;
use crate::clock::stamp;
use crate::fake::{Answer, Refused, Request, World, refused};

/// Most data volumes of an instance.
const MOST: usize = 12;

/// Block-storage volume.
#[derive(Debug, Clone)]
pub struct Volume {
    /// Name, unique in the region.
    pub name: String,
    /// Zone.
    pub zone: String,
    /// User tags, in small letters.
    pub tags: Vec<String>,
    /// Instance that has it.
    pub instance: Option<String>,
    /// Whether it is a boot volume.
    pub is_boot: bool,
    /// Whether it goes with its instance.
    pub goes: bool,
    /// Size in GB.
    pub capacity: u64,
    /// Number of its attachment.
    attachment: u32,
    /// Name of its attachment.
    attachment_name: String,
    /// Time at which the instance has the device.
    attached: Duration,
    made: Duration,
}

impl Volume {
    /// Returns the id of its attachment.
    pub(super) fn attachment_id(&self) -> String {
        format!("{}-attachment-{}", prefix(&self.zone), self.attachment)
    }

    /// Returns the id of its device; `None`: it is not attached yet.
    pub(super) fn device(&self, now: Duration) -> Option<String> {
        (self.attached <= now)
            .then(|| format!("{}-{:08}-0000-4000-8000-device", prefix(&self.zone), self.attachment))
    }
}

/// Returns the begin of ids of a zone's resources.
pub(super) fn prefix(zone: &str) -> String {
    format!("07{}7", super::zone_number(zone))
}

impl IbmCloud {
    /// Adds an empty volume of 10 GB, as a CSI driver makes it. Returns its id.
    pub fn add_volume(&mut self, name: &str, zone: &str, now: Duration) -> String {
        self.new_volume(name, zone, now)
    }

    fn new_volume(&mut self, name: &str, zone: &str, now: Duration) -> String {
        let number = self.number();
        let id = format!("r006-{number:08}-0000-4000-8000-volume");
        let volume = Volume {
            name: name.to_owned(),
            zone: zone.to_owned(),
            tags: Vec::new(),
            instance: None,
            is_boot: false,
            goes: false,
            capacity: 10,
            attachment: number,
            attachment_name: String::new(),
            attached: now,
            made: now,
        };
        self.volumes.add(&id, volume, now);
        id
    }

    /// Adds an instance's boot volume.
    pub(super) fn new_boot_volume(&mut self, body: &Value, instance: &str, now: Duration) {
        let zone = text(body, "/zone/name").to_owned();
        let number = self.next;
        let id = self.new_volume(&format!("boot-{number}"), &zone, now);
        let boot = "/boot_volume_attachment";
        let tags = crate::body::list(body, &format!("{boot}/volume/user_tags"));
        let name = text(body, &format!("{boot}/name")).to_owned();
        let goes = crate::body::at(body, &format!("{boot}/delete_volume_on_instance_delete"));
        if let Some(volume) = self.volumes.get_mut(&id) {
            volume.tags = tags.iter().filter_map(Value::as_str).map(str::to_lowercase).collect();
            volume.instance = Some(instance.to_owned());
            volume.is_boot = true;
            volume.goes = goes.as_bool() == Some(true);
            volume.attachment_name = name;
        }
    }

    /// Gives a volume to an instance in this zone, or refuses.
    pub(super) fn take_volume(
        &mut self,
        instance: &str,
        zone: &str,
        id: &str,
        attached: Duration,
    ) -> Result<(), Box<Refused>> {
        let number = self.number();
        let has =
            self.volumes.all().filter(|(_, one)| one.instance.as_deref() == Some(instance) && !one.is_boot);
        if has.count() >= MOST {
            return refused(
                400,
                "volume_attachment_limit_exceeded",
                format!("An instance takes {MOST} volumes."),
            );
        }
        let Some(volume) = self.volumes.get_mut(id) else { return not_found("Volume", id) };
        if let Some(other) = &volume.instance {
            return refused(409, "volume_in_use", format!("Volume {id} is attached to {other}"));
        }
        if volume.zone != zone {
            return refused(400, "bad_field", format!("Volume {id} is in another zone"));
        }
        volume.instance = Some(instance.to_owned());
        volume.attachment = number;
        volume.attachment_name = format!("words-{number}");
        volume.attached = attached;
        Ok(())
    }

    pub(super) fn attach(
        &mut self,
        request: &Request,
        instance: &str,
        world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let body = request.json();
        let Some(one) = self.instances.get(instance) else { return not_found("Instance", instance) };
        if one.state != State::Running {
            return refused(409, "instance_not_running", "The instance is not running");
        }
        let zone = one.zone().to_owned();
        let id = text(&body, "/volume/id").to_owned();
        self.take_volume(instance, &zone, &id, world.now + self.attach_time)?;
        let goes = crate::body::at(&body, "/delete_volume_on_instance_delete").as_bool() == Some(true);
        self.volumes.get_mut(&id).into_iter().for_each(|volume| volume.goes = goes);
        let view = self.volumes.get(&id).map(|volume| self.attachment_view(&id, volume, world));
        Ok(Answer::json(201, &view.unwrap_or_default()))
    }

    pub(super) fn attachments(&self, instance: &str, world: &World<'_>) -> Result<Answer, Box<Refused>> {
        let of = self.volumes.all().filter(|(_, one)| one.instance.as_deref() == Some(instance));
        let all: Vec<Value> = of.map(|(id, one)| self.attachment_view(id, one, world)).collect();
        Ok(Answer::json(200, &json!({"volume_attachments": all})))
    }

    pub(super) fn detach(
        &mut self,
        instance: &str,
        attachment: &str,
        world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let mut of = self.volumes.all_mut().filter(|(_, one)| one.instance.as_deref() == Some(instance));
        let found = of.find(|(_, one)| one.attachment_id() == attachment && !one.is_boot);
        let Some((_, volume)) = found else { return not_found("Volume attachment", attachment) };
        volume.instance = None;
        volume.attached = world.now;
        Ok(Answer::empty(202))
    }

    fn attachment_view(&self, id: &str, volume: &Volume, world: &World<'_>) -> Value {
        let instance = volume.instance.clone().unwrap_or_default();
        let mut view = self.attachment_reference(id, volume, world);
        let device = volume.device(world.now);
        view["bandwidth"] = json!(250);
        view["created_at"] = json!(stamp(volume.made));
        view["delete_volume_on_instance_delete"] = json!(volume.goes);
        view["status"] = json!(if device.is_some() { "attached" } else { "attaching" });
        view["type"] = json!(if volume.is_boot { "boot" } else { "data" });
        view["href"] = json!(format!(
            "{}/v1/instances/{instance}/volume_attachments/{}",
            world.endpoint,
            volume.attachment_id()
        ));
        view
    }

    /// Returns an attachment as an instance shows it.
    pub(super) fn attachment_reference(&self, id: &str, volume: &Volume, world: &World<'_>) -> Value {
        let instance = volume.instance.clone().unwrap_or_default();
        let attachment = volume.attachment_id();
        let mut view = json!({"id": attachment, "name": volume.attachment_name,
            "href": format!("{}/v1/instances/{instance}/volume_attachments/{attachment}", world.endpoint),
            "volume": {"id": id, "crn": facts::crn("volume", id), "name": volume.name, "resource_type": "volume",
                "href": format!("{}/v1/volumes/{id}", world.endpoint)}});
        if let Some(device) = volume.device(world.now) {
            view["device"] = json!({"id": device});
        }
        view
    }

    fn volume_view(&self, id: &str, volume: &Volume, world: &World<'_>) -> Value {
        let mut attachments = Vec::new();
        if let Some((of, instance)) =
            volume.instance.as_ref().and_then(|of| Some((of, self.instances.get(of)?)))
        {
            let mut one = self.attachment_reference(id, volume, world);
            one.as_object_mut().into_iter().for_each(|one| drop(one.remove("volume")));
            one["delete_volume_on_instance_delete"] = json!(volume.goes);
            one["type"] = json!(if volume.is_boot { "boot" } else { "data" });
            one["instance"] = json!({"id": of, "crn": instance.crn(), "name": instance.name,
                "href": format!("{}/v1/instances/{of}", world.endpoint)});
            attachments.push(one);
        }
        let profile = "general-purpose";
        json!({"id": id, "crn": facts::crn("volume", id), "href": format!("{}/v1/volumes/{id}", world.endpoint),
            "name": volume.name, "active": !attachments.is_empty(), "adjustable_capacity_states": ["attached"],
            "adjustable_iops_states": [], "attachment_state": if attachments.is_empty() { "unattached" } else { "attached" },
            "bandwidth": 250, "busy": false, "capacity": volume.capacity, "created_at": stamp(volume.made),
            "encryption": "provider_managed", "health_reasons": [], "health_state": "ok", "iops": 3_000,
            "profile": {"name": profile, "href": format!("{}/v1/volume/profiles/{profile}", world.endpoint)},
            "resource_group": facts::resource_group(), "resource_type": "volume", "software_attachments": [],
            "status": "available", "status_reasons": [], "storage_generation": 1, "user_tags": volume.tags,
            "volume_attachments": attachments, "zone": facts::zone(&volume.zone, world.endpoint)})
    }

    pub(super) fn list_volumes(&self, request: &Request, world: &World<'_>) -> Result<Answer, Box<Refused>> {
        let tag = request.query("tag").to_lowercase();
        let fits = |one: &Volume| tag.is_empty() || one.tags.contains(&tag);
        let listed = self.volumes.listed(world.now, world.lag).filter(|(_, one)| fits(one));
        let all: Vec<Value> = listed.map(|(id, one)| self.volume_view(id, one, world)).collect();
        Ok(self.listed(request, "volumes", &all, world))
    }

    pub(super) fn get_volume(&self, id: &str, world: &World<'_>) -> Result<Answer, Box<Refused>> {
        let Some(volume) = self.volumes.get(id) else { return not_found("Volume", id) };
        Ok(Answer::json(200, &self.volume_view(id, volume, world)))
    }

    pub(super) fn delete_volume(&mut self, id: &str, world: &World<'_>) -> Result<Answer, Box<Refused>> {
        let Some(volume) = self.volumes.get(id) else { return not_found("Volume", id) };
        if volume.instance.is_some() {
            return refused(409, "volume_in_use", format!("Volume {id} is attached"));
        }
        self.volumes.remove(id, world.now);
        Ok(Answer::empty(202))
    }
}
