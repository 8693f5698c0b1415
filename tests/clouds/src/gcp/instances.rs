//! Instances: their creation, states and deletion.

use std::time::Duration;

use serde_json::{Value, json};

use super::operations::Operation;
use super::route::Route;
use super::{Gcp, PROJECT, ZONES, check};
use crate::body::text;
use crate::fake::{Answer, Refused, Request, World, refused};

/// State of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Google has not decided.
    Provisioning,
    /// Google has a place for it, and it boots.
    Staging,
    /// It runs.
    Running,
    /// It is stopping, or going.
    Stopping,
    /// It powered itself off, or was preempted.
    Terminated,
}

/// Instance.
#[derive(Debug, Clone)]
pub struct Instance {
    /// Name.
    pub name: String,
    /// Zone.
    pub zone: String,
    /// Body of its creation, with a full machine type.
    pub body: Value,
    /// Time of its creation.
    pub made: Duration,
    /// State.
    pub state: State,
    /// Whether Google refuses it when it decides.
    pub is_refused: bool,
    /// Output of its first serial port.
    pub console: String,
    /// Times of the decision, and of the end of its boot.
    times: (Duration, Duration),
    /// Time of its end, once it is being deleted.
    ends: Option<Duration>,
    /// Unique number, which is its address, too.
    pub(super) number: u32,
    cores: u32,
}

/// Common parts of instances that one call makes.
pub(super) struct Making<'a> {
    pub(super) zone: &'a str,
    pub(super) machine: &'a str,
    pub(super) cores: u32,
    pub(super) body: &'a Value,
}

/// Text of a shortage.
pub(super) fn exhausted(zone: &str) -> String {
    format!(
        "The zone 'projects/{PROJECT}/zones/{zone}' does not have enough resources available to fulfill the request.  Try a \
         different zone, or try again later."
    )
}

impl Gcp {
    /// Moves all instances to this time.
    pub(super) fn tick_instances(&mut self, now: Duration) {
        let mut gone = Vec::new();
        for (key, one) in self.instances.all_mut() {
            let (decided, boots) = one.times;
            let is_undone = one.is_refused && decided <= now;
            if is_undone || one.ends.is_some_and(|end| end <= now) {
                gone.push(key.to_owned());
            }
            if one.state == State::Provisioning && decided <= now {
                one.state = State::Staging;
            }
            if one.state == State::Staging && boots <= now {
                one.state = State::Running;
            }
        }
        self.instances.remove_all(&gone, now);
        gone.iter().for_each(|key| self.release_disks(key, now));
    }

    /// Returns the number of vCPUs in use.
    pub(super) fn cores(&self) -> u32 {
        self.instances.all().map(|(_, one)| one.cores).sum()
    }

    /// Stores a new instance.
    pub(super) fn make(&mut self, making: &Making<'_>, name: &str, is_refused: bool, world: &World<'_>) {
        let (decision, boot) = world.times();
        let decided = world.now + decision;
        let mut body = making.body.clone();
        body["machineType"] =
            json!(format!("{}/zones/{}/machineTypes/{}", super::BASE, making.zone, making.machine));
        let instance = Instance {
            name: name.to_owned(),
            zone: making.zone.to_owned(),
            body,
            made: world.now,
            state: State::Provisioning,
            is_refused,
            console: format!("{name} boots\n"),
            times: (decided, decided + boot),
            ends: None,
            number: self.number(),
            cores: making.cores,
        };
        let key = format!("{}/{name}", making.zone);
        self.new_boot_disk(&key, &instance, world.now);
        self.instances.add(&key, instance, world.now);
    }

    /// Takes quota; returns the refusal that follows the acceptance.
    pub(super) fn over_quota(&mut self, cores: u32) -> Option<(String, String)> {
        let left = self.quota.as_mut()?;
        if *left < cores {
            let message = format!("Quota 'CPUS' exceeded.  Limit: 24.0 in region {}.", super::REGION);
            return Some(("QUOTA_EXCEEDED".to_owned(), message));
        }
        *left -= cores;
        None
    }

    /// Refuses a create beyond the number of those in progress.
    pub(super) fn concurrent(&self, now: Duration) -> Result<(), Box<Refused>> {
        if self.most_operations.is_some_and(|most| self.in_progress(now) >= most) {
            let message = format!("Quota exceeded for concurrent operations: {}.", super::CONCURRENT);
            return refused(403, "quotaExceeded", message);
        }
        Ok(())
    }

    pub(super) fn market(body: &Value) -> &'static str {
        if text(body, "/scheduling/provisioningModel") == "SPOT" { "spot" } else { "on-demand" }
    }

    pub(super) fn insert(
        &mut self,
        request: &Request,
        route: &Route,
        world: &mut World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let body = request.json();
        let (name, zone) = (text(&body, "/name"), route.zone.as_str());
        check::name(name)?;
        let machine = check::instance(self, &body, zone, false)?.clone();
        let key = format!("{zone}/{name}");
        self.is_free(&key)?;
        self.concurrent(world.now)?;
        let refusal = match self.over_quota(machine.vcpus) {
            Some(refusal) => Some(refusal),
            None if world.take_stock([machine.name, zone, Gcp::market(&body)]) => world.late.take(),
            None => Some(("ZONE_RESOURCE_POOL_EXHAUSTED".to_owned(), exhausted(zone))),
        };
        self.attach_at_creation(&key, zone, &body)?;
        let making = Making { zone, machine: machine.name, cores: machine.vcpus, body: &body };
        self.make(&making, name, refusal.is_some(), world);
        let (decision, boot) = world.times();
        let ends = world.now + if refusal.is_some() { decision } else { decision + boot };
        let target = format!("zones/{zone}/instances/{name}");
        let operation = Operation::of("insert", route, target, request).until(ends, refusal);
        Ok(self.begin(operation, world))
    }

    /// Refuses a name that an instance, or a disk, has.
    pub(super) fn is_free(&self, key: &str) -> Result<(), Box<Refused>> {
        let (zone, name) = key.split_once('/').unwrap_or_default();
        let collection = match (self.instances.get(key), self.disks.get(key)) {
            (Some(_), _) => "instances",
            (None, Some(_)) => "disks",
            (None, None) => return Ok(()),
        };
        let message =
            format!("The resource 'projects/{PROJECT}/zones/{zone}/{collection}/{name}' already exists");
        refused(409, "alreadyExists", message)
    }

    pub(super) fn get_instance(&self, route: &Route, world: &World<'_>) -> Result<Answer, Box<Refused>> {
        let is_seen = |one: &&Instance| world.is_witness || one.made + self.hidden <= world.now;
        match self.instances.get(&route.key()).filter(is_seen) {
            Some(one) => Ok(Answer::json(200, &self.view(one))),
            None => route.not_found(),
        }
    }

    fn listed(&self, zone: &str, world: &World<'_>) -> Vec<Value> {
        let all = self.instances.listed(world.now, world.lag);
        all.filter(|(_, one)| one.zone == zone).map(|(_, one)| self.view(one)).collect()
    }

    pub(super) fn list_instances(
        &self,
        request: &Request,
        route: &Route,
        world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        self.page(request, "instanceList", self.listed(&route.zone, world))
    }

    pub(super) fn aggregated_instances(
        &self,
        request: &Request,
        world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let answering = ZONES.iter().filter(|zone| !self.unreachable.contains(**zone));
        let all: Vec<Value> = answering.flat_map(|zone| self.listed(zone, world)).collect();
        let (page, next) = self.cut(request, all)?;
        let mut items = json!({});
        for zone in ZONES {
            let here = |one: &&Value| text(one, "/zone").ends_with(&format!("/{zone}"));
            let found: Vec<&Value> = page.iter().filter(here).collect();
            let scope = format!("zones/{zone}");
            items[&scope] = if found.is_empty() {
                let code = if self.unreachable.contains(zone) { "UNREACHABLE" } else { "NO_RESULTS_ON_PAGE" };
                json!({"warning": {"code": code, "data": [{"key": "scope", "value": scope}],
                    "message": format!("There are no results for scope '{scope}' on this page.")}})
            } else {
                json!({"instances": found})
            };
        }
        let mut body = json!({"kind": "compute#instanceAggregatedList", "items": items,
            "id": format!("projects/{PROJECT}/aggregated/instances"),
            "selfLink": format!("{}/aggregated/instances", super::BASE)});
        if let Some(next) = next {
            body["nextPageToken"] = json!(next);
        }
        if !self.unreachable.is_empty() {
            let zones: Vec<String> = self.unreachable.iter().map(|zone| format!("zones/{zone}")).collect();
            body["unreachables"] = json!(zones);
        }
        Ok(Answer::json(200, &body))
    }

    pub(super) fn delete_instance(
        &mut self,
        request: &Request,
        route: &Route,
        world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let ends = world.now + self.delete_time;
        let Some(one) = self.instances.get_mut(&route.key()) else { return route.not_found() };
        one.state = State::Stopping;
        let ends = *one.ends.get_or_insert(ends);
        let target = format!("zones/{}/instances/{}", one.zone, one.name);
        let operation = Operation::of("delete", route, target, request).until(ends, None);
        Ok(self.begin(operation, world))
    }

    pub(super) fn serial_port(&self, request: &Request, route: &Route) -> Result<Answer, Box<Refused>> {
        let Some(one) = self.instances.get(&route.key()) else { return route.not_found() };
        if !matches!(request.query("port"), "" | "1") {
            return check::invalid("port", request.query("port"));
        }
        let all = one.console.len();
        let start = match request.query("start") {
            "" => 0,
            number => match number.parse::<i64>() {
                // The last bytes.
                Ok(back) if back < 0 => all.saturating_sub(usize::try_from(-back).unwrap_or(usize::MAX)),
                Ok(start) => usize::try_from(start).unwrap_or(0).min(all),
                Err(_) => return check::invalid("start", number),
            },
        };
        let contents = one.console.get(start..).unwrap_or_default();
        Ok(Answer::json(
            200,
            &json!({"kind": "compute#serialPortOutput", "contents": contents,
            "start": start.to_string(), "next": all.to_string(),
            "selfLink": format!("{}/zones/{}/instances/{}/serialPort", super::BASE, one.zone, one.name)}),
        ))
    }
}
