//! Instances: their creation, states and deletion.

use std::time::Duration;

use serde_json::Value;

use super::profiles::Profile;
use super::volumes::prefix;
use super::{IbmCloud, check, facts, not_found};
use crate::body::{list, text};
use crate::fake::{Answer, Refused, Request, World, refused};

/// State of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// IBM makes its volume and interface.
    Pending,
    /// IBM starts it.
    Starting,
    /// It runs.
    Running,
    /// It powered itself off, or IBM stopped it.
    Stopped,
    /// IBM could not start it.
    Failed,
    /// It is going.
    Deleting,
}

/// Virtual server instance.
#[derive(Debug, Clone)]
pub struct Instance {
    /// Name, unique in the region.
    pub name: String,
    /// Body, as it was sent, without its user-data.
    pub body: Value,
    /// User-data.
    pub user_data: String,
    /// Time of its creation.
    pub made: Duration,
    /// State.
    pub state: State,
    /// Code and text of the refusal after acceptance, which takes effect at the decision.
    pub refusal: Option<(String, String)>,
    /// Addresses of its interfaces.
    pub addresses: Vec<String>,
    /// Times of the decision, and of the end of its start.
    times: (Duration, Duration),
    /// Time of its end, once it is being deleted.
    ends: Option<Duration>,
    id: String,
    vcpus: u32,
}

impl Instance {
    /// Returns its zone.
    pub fn zone(&self) -> &str {
        text(&self.body, "/zone/name")
    }

    /// Returns its CRN.
    pub fn crn(&self) -> String {
        facts::crn("instance", &self.id)
    }

    /// Whether IBM has decided on it, so that it has a volume and an address.
    pub(super) fn is_decided(&self) -> bool {
        !matches!(self.state, State::Pending)
    }
}

impl IbmCloud {
    /// Moves all instances to this time.
    pub(super) fn tick_instances(&mut self, now: Duration) {
        let (mut gone, mut decided) = (Vec::new(), Vec::new());
        let refused = if self.stops_refused { State::Stopped } else { State::Failed };
        for (id, one) in self.instances.all_mut() {
            if one.ends.is_some_and(|end| end <= now) {
                gone.push(id.to_owned());
            }
            if one.state == State::Pending && one.times.0 <= now {
                one.state = if one.refusal.is_some() { refused } else { State::Starting };
                decided.push((id.to_owned(), one.body.clone()));
            }
            if one.state == State::Starting && one.times.1 <= now {
                one.state = State::Running;
            }
        }
        for (id, body) in decided {
            self.new_boot_volume(&body, &id, now);
        }
        gone.iter().for_each(|id| self.end(id, now));
    }

    /// Removes an instance, and what goes with it.
    fn end(&mut self, id: &str, now: Duration) {
        self.instances.remove(id, now);
        let keeps = self.keeps_volumes;
        let mut gone = Vec::new();
        for (name, volume) in self.volumes.all_mut().filter(|(_, one)| one.instance.as_deref() == Some(id)) {
            volume.instance = None;
            gone.extend((volume.goes && !keeps).then(|| name.to_owned()));
        }
        self.volumes.remove_all(&gone, now);
    }

    pub(super) fn create(
        &mut self,
        request: &Request,
        world: &mut World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let mut body = request.json();
        let profile = check::instance(self, &body)?;
        self.take_quota(&profile)?;
        let zone = text(&body, "/zone/name").to_owned();
        let number = self.number();
        let id = format!("{}_{number:08}-0000-4000-8000-instance", prefix(&zone));
        self.take_volumes(&id, &zone, &body, world)?;
        let refusal = scarce(&profile, &body, world);
        let user_data = text(&body, "/user_data").to_owned();
        body.as_object_mut().into_iter().for_each(|body| drop(body.remove("user_data")));
        let nics = 1 + list(&body, "/network_attachments").len() as u32;
        let address = |nic: u32| {
            format!("10.{}.{}.{}", 240 + (number >> 16) + 4 * nic, (number >> 8) & 255, number & 255)
        };
        let (decision, boot) = world.times();
        let decided = world.now + decision;
        let instance = Instance {
            name: text(&body, "/name").to_owned(),
            body,
            user_data,
            made: world.now,
            state: State::Pending,
            refusal,
            addresses: (0..nics).map(address).collect(),
            times: (decided, decided + boot),
            ends: None,
            id: id.clone(),
            vcpus: profile.vcpus,
        };
        self.instances.add(&id, instance, world.now);
        let view = self.instances.get(&id).map(|one| self.instance_view(&id, one, world));
        Ok(Answer::json(201, &view.unwrap_or_default()))
    }

    fn take_quota(&mut self, profile: &Profile) -> Result<(), Box<Refused>> {
        let used: u32 = self.instances.all().map(|(_, one)| one.vcpus).sum();
        match self.quota {
            Some(quota) if used + profile.vcpus > quota => {
                let message = format!("The request exceeds the quota of {quota} vCPUs in the region.");
                refused(400, "over_quota", message)
            }
            _ => Ok(()),
        }
    }

    /// Takes the volumes of the body; all or none.
    fn take_volumes(
        &mut self,
        instance: &str,
        zone: &str,
        body: &Value,
        world: &World<'_>,
    ) -> Result<(), Box<Refused>> {
        let mut taken: Vec<String> = Vec::new();
        let attached = world.now + self.attach_time;
        for one in list(body, "/volume_attachments") {
            let id = text(one, "/volume/id");
            if let Err(refusal) = self.take_volume(instance, zone, id, attached) {
                let undo = |volume: &mut super::Volume| volume.instance = None;
                taken.iter().for_each(|id| self.volumes.get_mut(id).into_iter().for_each(undo));
                return Err(refusal);
            }
            taken.push(id.to_owned());
        }
        Ok(())
    }

    pub(super) fn list_instances(
        &self,
        request: &Request,
        world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let (name, vpc) = (request.query("name"), request.query("vpc.id"));
        let fits = |one: &Instance| {
            (name.is_empty() || one.name == name) && (vpc.is_empty() || text(&one.body, "/vpc/id") == vpc)
        };
        let listed = self.instances.listed(world.now, world.lag).filter(|(_, one)| fits(one));
        let all: Vec<Value> = listed.map(|(id, one)| self.instance_view(id, one, world)).collect();
        Ok(self.listed(request, "instances", &all, world))
    }

    pub(super) fn get_instance(&self, id: &str, world: &World<'_>) -> Result<Answer, Box<Refused>> {
        let Some(one) = self.instances.get(id) else { return not_found("Instance", id) };
        Ok(Answer::json(200, &self.instance_view(id, one, world)))
    }

    pub(super) fn delete_instance(&mut self, id: &str, world: &World<'_>) -> Result<Answer, Box<Refused>> {
        let (now, time, early) = (world.now, self.delete_time, self.refuses_early_deletes);
        let Some(one) = self.instances.get_mut(id) else { return not_found("Instance", id) };
        if early && matches!(one.state, State::Pending) {
            return refused(409, "instance_conflict", "The instance is being created");
        }
        one.state = State::Deleting;
        let end = *one.ends.get_or_insert(now + time);
        if end <= now {
            self.end(id, now);
        }
        Ok(Answer::empty(204))
    }
}

/// Takes stock; returns the refusal that follows the acceptance.
fn scarce(profile: &Profile, body: &Value, world: &mut World<'_>) -> Option<(String, String)> {
    let is_spot = text(body, "/availability/class") == "spot";
    let market = if is_spot { "spot" } else { "on-demand" };
    // A dedicated host or group has a stock of its own.
    let target = text(body, "/placement_target/id");
    let place = if target.is_empty() { text(body, "/zone/name") } else { target };
    if world.take_stock([profile.name, place, market]) {
        return world.late.take();
    }
    let message = "Can't start instance because resource capacity is unavailable.";
    Some(("cannot_start_capacity".to_owned(), message.to_owned()))
}
