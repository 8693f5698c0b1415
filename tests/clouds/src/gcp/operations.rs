//! Holds operations: what an accepted call comes to.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};

use super::route::Route;
use super::{BASE, Gcp, REGION};
use crate::clock::stamp;
use crate::fake::{Answer, Refused, Request, World, refused};

/// Operation on an instance, or on several.
#[derive(Debug, Clone)]
pub struct Operation {
    /// Name.
    pub name: String,
    /// Kind of the call: `insert`, `bulkInsert`, `delete`.
    pub kind: String,
    /// Zone; empty for one of the region.
    pub zone: String,
    /// `requestId` of the call.
    pub request: String,
    /// Path of its resource below the project.
    target: String,
    began: Duration,
    /// Time of its end.
    pub ends: Duration,
    /// Code and text of its failure.
    pub error: Option<(String, String)>,
    /// Zones of a bulk insert: targets, and failures at its end.
    counts: BTreeMap<String, (u32, u32)>,
    number: u32,
}

impl Operation {
    pub(super) fn of(kind: &str, route: &Route, target: String, request: &Request) -> Operation {
        Operation {
            name: String::new(),
            kind: kind.to_owned(),
            zone: route.zone.clone(),
            request: request.query("requestId").to_owned(),
            target,
            began: Duration::ZERO,
            ends: Duration::ZERO,
            error: None,
            counts: BTreeMap::new(),
            number: 0,
        }
    }

    pub(super) fn until(mut self, ends: Duration, error: Option<(String, String)>) -> Operation {
        (self.ends, self.error) = (ends, error);
        self
    }

    pub(super) fn counting(mut self, counts: BTreeMap<String, (u32, u32)>) -> Operation {
        self.counts = counts;
        self
    }

    pub(super) fn view(&self, now: Duration) -> Value {
        let is_done = self.ends <= now;
        let place =
            if self.zone.is_empty() { format!("regions/{REGION}") } else { format!("zones/{}", self.zone) };
        let mut view = json!({
            "kind": "compute#operation", "id": format!("{}", 7_000_000_000_u64 + u64::from(self.number)),
            "name": self.name, "operationType": self.kind, "user": super::EMAIL,
            "status": if is_done { "DONE" } else { "RUNNING" }, "progress": if is_done { 100 } else { 0 },
            "insertTime": stamp(self.began), "startTime": stamp(self.began),
            "targetId": format!("{}", 8_000_000_000_u64 + u64::from(self.number)),
            "targetLink": format!("{BASE}/{}", self.target),
            "selfLink": format!("{BASE}/{place}/operations/{}", self.name),
        });
        let scope = if self.zone.is_empty() { "region" } else { "zone" };
        view[scope] = json!(format!("{BASE}/{place}"));
        if !self.request.is_empty() {
            view["clientOperationId"] = json!(self.request);
        }
        if is_done {
            view["endTime"] = json!(stamp(self.ends));
        }
        if let (true, Some((code, message))) = (is_done, &self.error) {
            view["error"] = json!({"errors": [{"code": code, "message": message}]});
            let (status, text) = match code.as_str() {
                "RESOURCE_ALREADY_EXISTS" => (409, "CONFLICT"),
                code if code.starts_with("QUOTA") => (403, "FORBIDDEN"),
                _ => (503, "SERVICE UNAVAILABLE"),
            };
            view["httpErrorStatusCode"] = json!(status);
            view["httpErrorMessage"] = json!(text);
        }
        if !self.counts.is_empty() {
            view["instancesBulkInsertOperationMetadata"] =
                json!({"perLocationStatus": self.zones(is_done, self.part(now))});
            view["operationGroupId"] = json!(format!("group-{}", self.number));
        }
        view
    }

    /// Returns the part of the operation's time that has passed: 0 to 1.
    fn part(&self, now: Duration) -> f64 {
        let whole = self.ends.saturating_sub(self.began);
        let passed = now.saturating_sub(self.began);
        if whole.is_zero() { 1.0 } else { (passed.as_secs_f64() / whole.as_secs_f64()).min(1.0) }
    }

    /// Returns the progress of a bulk insert by zone. The number of VMs grows with the part of the time.
    fn zones(&self, is_done: bool, part: f64) -> BTreeMap<String, Value> {
        let undone = self.error.is_some();
        let status = |(target, failed): (u32, u32)| {
            let made = (f64::from(target - failed) * part).floor() as u32;
            let failed = if is_done { failed } else { 0 };
            json!({"targetVmCount": target, "createdVmCount": made, "failedToCreateVmCount": failed,
                "deletedVmCount": if is_done && undone { made } else { 0 },
                "status": if is_done { "DONE" } else { "CREATING" }})
        };
        self.counts.iter().map(|(zone, counts)| (format!("zones/{zone}"), status(*counts))).collect()
    }
}

impl Gcp {
    /// Starts an operation, and answers with it.
    pub(super) fn begin(&mut self, mut operation: Operation, world: &World<'_>) -> Answer {
        operation.number = self.number();
        operation.name = format!("operation-{:06}", operation.number);
        operation.began = world.now;
        if !operation.request.is_empty() {
            self.requests.insert(operation.request.clone(), operation.name.clone());
        }
        let view = operation.view(world.now);
        self.operations.insert(operation.name.clone(), operation);
        Answer::json(200, &view)
    }

    /// Returns the answer to a call whose `requestId` came before: its first operation, whatever the call.
    pub(super) fn repeated(
        &self,
        request: &Request,
        world: &World<'_>,
    ) -> Result<Option<Answer>, Box<Refused>> {
        let id = request.query("requestId");
        if id.is_empty() {
            return Ok(None);
        }
        let is_hex = |one: char| one.is_ascii_hexdigit();
        let groups: Vec<&str> = id.split('-').collect();
        let lengths: Vec<usize> = groups.iter().map(|group| group.len()).collect();
        let is_uuid = lengths == [8, 4, 4, 4, 12] && groups.iter().all(|group| group.chars().all(is_hex));
        if !is_uuid || id.chars().all(|one| matches!(one, '0' | '-')) {
            let message = format!("Invalid value for field 'requestId': '{id}'. It must be a valid UUID.");
            return refused(400, "invalid", message);
        }
        let known = self.requests.get(id).and_then(|name| self.operations.get(name));
        Ok(known.map(|operation| Answer::json(200, &operation.view(world.now))))
    }

    /// Returns the number of creates in progress.
    pub(super) fn in_progress(&self, now: Duration) -> usize {
        self.operations.values().filter(|one| one.ends > now && one.kind.ends_with("nsert")).count()
    }

    pub(super) fn get_operation(&self, route: &Route, world: &World<'_>) -> Result<Answer, Box<Refused>> {
        match self.operations.get(&route.name).filter(|one| one.zone == route.zone) {
            Some(operation) => Ok(Answer::json(200, &operation.view(world.now))),
            None => route.not_found(),
        }
    }

    pub(super) fn list_operations(
        &self,
        request: &Request,
        route: &Route,
        world: &World<'_>,
    ) -> Result<Answer, Box<Refused>> {
        let here = self.operations.values().filter(|one| one.zone == route.zone);
        let operations = here.map(|one| one.view(world.now)).collect();
        self.page(request, "operationList", operations)
    }
}
