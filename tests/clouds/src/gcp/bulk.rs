//! Several instances by one call, in one zone or in a region.

use std::collections::BTreeMap;

use serde_json::Value;

use super::instances::{Making, exhausted};
use super::machines::Machine;
use super::operations::Operation;
use super::route::Route;
use super::{Gcp, ZONES, check};
use crate::body::{at, text};
use crate::fake::{Answer, Refused, Request, World};

/// Returns an `int64`, which JSON has as a text.
fn number(value: &Value) -> Option<u32> {
    value
        .as_str()
        .and_then(|text| text.parse().ok())
        .or_else(|| value.as_u64().and_then(|one| one.try_into().ok()))
}

impl Gcp {
    pub(super) fn bulk_insert(
        &mut self,
        request: &Request,
        route: &Route,
        world: &mut World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let body = request.json();
        let properties = at(&body, "/instanceProperties");
        let Some(count) = number(at(&body, "/count")).filter(|count| (1..=1_000).contains(count)) else {
            return check::invalid("count", &at(&body, "/count").to_string());
        };
        let least =
            if at(&body, "/minCount").is_null() { Some(count) } else { number(at(&body, "/minCount")) };
        let Some(least) = least.filter(|least| (1..=count).contains(least)) else {
            return check::invalid("minCount", &at(&body, "/minCount").to_string());
        };
        let names = names(&body, count)?;
        let zones: Vec<&str> =
            if route.zone.is_empty() { allowed(&body)? } else { vec![route.zone.as_str()] };
        // A region's call goes to the first zone that has the machine type.
        let mut checked: Result<(&str, Machine), Box<Refused>> = check::invalid("locationPolicy", "no zone");
        for zone in zones {
            checked = check::instance(self, properties, zone, true).map(|machine| (zone, machine.clone()));
            if checked.is_ok() {
                break;
            }
        }
        let (zone, machine) = checked?;
        if count > 1 && crate::body::list(properties, "/disks").len() > 1 {
            return check::invalid("instanceProperties.disks", "an existing disk is for one instance");
        }
        self.concurrent(world.now)?;
        // Google accepts the call, and refuses names that exist in its operation.
        let taken = names.iter().try_for_each(|name| self.is_free(&format!("{zone}/{name}"))).err();
        if let Some(taken) = taken {
            let error = ("RESOURCE_ALREADY_EXISTS".to_owned(), taken.message.clone());
            let counts = BTreeMap::from([(zone.to_owned(), (count, count))]);
            let operation = Operation::of("bulkInsert", route, format!("zones/{zone}"), request);
            return Ok(self.begin(operation.until(world.now, Some(error)).counting(counts), world));
        }
        let market = Gcp::market(properties);
        let quota = self.over_quota(machine.vcpus * count);
        let has_room = quota.is_none() && world.late.is_none();
        let granted =
            names.iter().take_while(|_| has_room && world.take_stock([machine.name, zone, market])).count()
                as u32;
        let is_refused = granted < least;
        let refusal = is_refused.then(|| {
            quota
                .or_else(|| world.late.take())
                .unwrap_or_else(|| ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS".to_owned(), exhausted(zone)))
        });
        let making = Making { zone, machine: machine.name, cores: machine.vcpus, body: properties };
        for (place, name) in (0..).zip(&names) {
            self.attach_at_creation(&format!("{zone}/{name}"), zone, properties)?;
            self.make(&making, name, is_refused || place >= granted, world);
        }
        let (decision, boot) = world.times();
        let ends = world.now + if is_refused { decision } else { decision + boot };
        let counts = BTreeMap::from([(zone.to_owned(), (count, count - granted))]);
        let target =
            if route.zone.is_empty() { format!("regions/{}", route.region) } else { format!("zones/{zone}") };
        let operation =
            Operation::of("bulkInsert", route, target, request).until(ends, refusal).counting(counts);
        Ok(self.begin(operation, world))
    }
}

/// Returns the names of the instances.
fn names(body: &Value, count: u32) -> Result<Vec<String>, Box<Refused>> {
    let given = at(body, "/perInstanceProperties").as_object();
    let mut names: Vec<String> = Vec::new();
    for (key, one) in given.into_iter().flatten() {
        // The key is a name; a name inside replaces it.
        let inside = text(one, "/name");
        names.push(if inside.is_empty() { key.clone() } else { inside.to_owned() });
    }
    if names.len() as u64 > u64::from(count) {
        return check::invalid("perInstanceProperties", "more than count");
    }
    let pattern = text(body, "/namePattern");
    if (names.len() as u64) < u64::from(count) {
        let (before, digits) = pattern.split_at(pattern.find('#').unwrap_or(pattern.len()));
        if digits.is_empty() || !digits.chars().all(|one| one == '#') {
            return check::invalid("namePattern", pattern);
        }
        let width = digits.len();
        let missing = count as usize - names.len();
        names.extend((1..=missing).map(|number| format!("{before}{number:0width$}")));
    }
    names.iter().try_for_each(|name| check::name(name))?;
    names.sort_unstable();
    names.dedup();
    Ok(names)
}

/// Returns the zones of a region's call.
fn allowed(body: &Value) -> Result<Vec<&'static str>, Box<Refused>> {
    let Some(locations) = at(body, "/locationPolicy/locations").as_object() else {
        return Ok(ZONES.to_vec());
    };
    let mut zones = Vec::new();
    for (location, policy) in locations {
        let name = location.strip_prefix("zones/").unwrap_or_default();
        let Some(zone) = ZONES.into_iter().find(|zone| *zone == name) else {
            return check::invalid("locationPolicy.locations", location);
        };
        if text(policy, "/preference") != "DENY" {
            zones.push(zone);
        }
    }
    Ok(zones)
}
