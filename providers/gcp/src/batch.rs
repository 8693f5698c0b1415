//! Makes many VMs by one call. May call `bulkInsert` and `list` of instances and `get` of zoneOperations.
//!
//! All VMs are in the zone of the placement's offering. Their names follow from owner, key and number, so that no
//! repeated call makes more of them. The call's `requestId` follows from owner and key, and its operation reports how many
//! VMs there are. They carry the key in a label, by which one list finds all of them.

use std::time::Duration;

use peerpod_provider_api::{Created, CreatedMany, Error, IdempotencyKey, Owner};
use peerpod_provider_cloud::{ApiCall, VmState, names};
use peerpod_provider_rest::{Decision, Failure, Said, decide, end_of_wait, read};
use serde_json::{Map, Value};
use tokio::time::Instant;

use crate::create::{GcpLaunch, is_done, is_of_an_earlier, request_id};
use crate::links::VmId;
use crate::refusal::{REFUSALS, said_of_operation, status_of_operation};
use crate::vms::{self, GcpVm};

/// Longest time that a list may lack VMs that the operation counts.
const UNSEEN: Duration = Duration::from_secs(10);

/// State of an operation that makes many VMs.
#[derive(Default)]
struct Counted {
    /// Whether it goes on.
    is_open: bool,
    /// Number of VMs that it made, if the operation reports it.
    made: Option<usize>,
    /// Refusal of the others, with its status.
    refused: Option<(Said, u16)>,
}

impl GcpLaunch<'_> {
    /// Makes up to `count` VMs, or finds those of an earlier call.
    pub(crate) async fn many(&self, count: u32) -> Result<CreatedMany, Error> {
        let names = names_of(&self.gcp.owner, self.key, count);
        let body = self.shape().bulk_insert(&names)?;
        let what = self.what();
        let zone = &self.offering.zone;
        let call = ApiCall::new("instances.bulkInsert", self.key.as_str(), &what).until(self.until);
        let path = self.connected.compute.own(&format!("zones/{zone}/instances/bulkInsert"));
        let id = request_id(&self.gcp.owner, self.key, "bulkInsert");
        let sent = self.connected.compute.post(call, &path, &[("requestId", &id)], Some(&body)).await;
        let counted = match sent {
            Ok(operation) => self.counted(&operation).await?,
            // Google has forgotten the id, but not the VMs.
            Err(failure) if matches!(failure.error, Error::KeyReused { .. }) => Counted::default(),
            Err(failure) => return Err(self.refused(failure).await),
        };
        let seen = self.seen(counted.made, count).await?;
        if counted.made == Some(0) {
            // A list may still show them.
            for name in names {
                let vm = VmId { zone: zone.clone(), name };
                self.gcp.deleted.accepted(&vm, Instant::now());
            }
        }
        self.conclude(&seen, counted, count).await
    }

    /// Waits for the end of the operation, or of the caller's time. A repeated call gets the same operation.
    async fn counted(&self, first: &Value) -> Result<Counted, Error> {
        let end = end_of_wait(self.until);
        let decided = decide(&self.gcp.batches, end, || self.look_at(first)).await;
        match decided.map_err(|failure| failure.error)? {
            Decision::Made(counted) => Ok(counted),
            Decision::Refused(_) | Decision::Open => Ok(Counted { is_open: true, ..Counted::default() }),
        }
    }

    async fn look_at(&self, first: &Value) -> Result<Decision<Counted>, Failure> {
        if let Some(counted) = counted(first) {
            return Ok(Decision::Made(counted));
        }
        let what = self.what();
        let name = read::text(first, "/name");
        let name = name.ok_or_else(|| Error::transient(format!("{what}: the answer has no operation")))?;
        let call = ApiCall::new("zoneOperations.get", self.key.as_str(), &what).until(self.until);
        let latest = self.connected.compute.operation(call, &self.offering.zone, name).await?;
        Ok(counted(&latest).map_or(Decision::Open, Decision::Made))
    }

    /// Returns the VMs with this key, as soon as the list has as many as the operation counts.
    async fn seen(&self, made: Option<usize>, count: u32) -> Result<Vec<GcpVm>, Error> {
        if made == Some(0) {
            return Ok(Vec::new());
        }
        let expected = made.unwrap_or(count as usize);
        let (compute, owner, what) = (&self.connected.compute, &self.gcp.owner, self.what());
        let end = end_of_wait(self.until).min(Instant::now() + UNSEEN);
        let latest = parking_lot::Mutex::new(Vec::new());
        let enough = self.gcp.looks.until(Some(end), || async {
            let seen = vms::by_key(compute, &self.offering.zone, owner, self.key, &what, self.until).await?;
            let is_enough = seen.len() >= expected;
            *latest.lock() = seen;
            Ok::<_, Failure>(is_enough.then_some(()))
        });
        enough.await?;
        Ok(latest.into_inner())
    }

    async fn conclude(&self, seen: &[GcpVm], counted: Counted, count: u32) -> Result<CreatedMany, Error> {
        for vm in seen {
            self.check_marks(vm)?;
        }
        let is_decided = |vm: &GcpVm| vm.state != VmState::Pending;
        if counted.is_open && seen.iter().filter(|vm| is_decided(vm)).count() < count as usize {
            return Err(Error::transient(format!(
                "{}: Google has not decided on all {count} VMs yet; the same call is repeated",
                self.what()
            )));
        }
        let lives = seen.iter().filter(|vm| vm.state.lives());
        let made: Vec<Created> = lives.map(|vm| self.created(&vm.id, Some(vm))).collect::<Result<_, _>>()?;
        match made.len() {
            0 => Err(self.rest(counted, count).await),
            all if all >= count as usize => Ok(CreatedMany { made, rest: None }),
            _ => Ok(CreatedMany { made, rest: Some(self.rest(counted, count).await) }),
        }
    }

    /// Returns the reason why there are fewer VMs than asked for.
    async fn rest(&self, counted: Counted, count: u32) -> Error {
        match (counted.refused, counted.made) {
            (Some((said, status)), _) => self.refused_later("instances.bulkInsert", &said, status).await,
            // Google gives no reason for VMs that it could not make, if it made some.
            (None, Some(made)) if made < count as usize => {
                let why = format!("{made} of {count} VMs");
                let remedy = REFUSALS.remedy("instances.bulkInsert", "STOCKOUT", "", 400);
                let text = format!("{}: Google had capacity for {why} only; {remedy}", self.what());
                self.exhausted(&why, "", Error::capacity("", text))
            }
            (None, _) => self.gone(),
        }
    }
}

/// Returns the names of the VMs of a batch, in the order of their ids.
fn names_of(owner: &Owner, key: &IdempotencyKey, count: u32) -> Vec<String> {
    let name = |number: u32| {
        let hash = names::digest(&[key.as_str(), "bulkInsert", &number.to_string()]);
        let own = IdempotencyKey::parse(hex::encode(hash)).ok();
        names::unique(owner, own.as_ref().unwrap_or(key))
    };
    let mut names: Vec<String> = (0..count).map(name).collect();
    names.sort();
    names
}

/// Whether an operation failed, also among other reasons, because VMs have its names.
fn has_earlier(operation: &Value) -> bool {
    let each = read::list(operation, "/error/errors").iter();
    each.filter_map(|one| read::text(one, "/code"))
        .any(|code| is_of_an_earlier(&Said { code: code.to_owned(), message: String::new() }))
}

/// Reads an operation that has ended, or has made all of its VMs; `None`: neither.
fn counted(operation: &Value) -> Option<Counted> {
    let zones = operation.pointer("/instancesBulkInsertOperationMetadata/perLocationStatus");
    let zones = zones.and_then(Value::as_object).filter(|zones| !zones.is_empty());
    let number = |zone: &Value, pointer| read::number(zone, pointer).and_then(|n| usize::try_from(n).ok());
    // VMs of a batch that was rolled back are counted in both numbers.
    let of_zone = |zone: &Value| {
        let deleted = number(zone, "/deletedVmCount").unwrap_or(0);
        number(zone, "/createdVmCount").unwrap_or(0).saturating_sub(deleted)
    };
    let is_complete = |zones: &Map<String, Value>| {
        zones
            .values()
            .all(|zone| number(zone, "/targetVmCount").is_some_and(|target| target == of_zone(zone)))
    };
    if !is_done(operation) && !zones.is_some_and(is_complete) {
        return None;
    }
    let made = zones.map(|zones| zones.values().map(of_zone).fold(0, usize::saturating_add));
    Some(Counted {
        is_open: false,
        // Google has forgotten the id. It does not count the VMs of the first call, which have the names.
        made: made.filter(|_| !has_earlier(operation)),
        refused: said_of_operation(operation)
            .filter(|said| !is_of_an_earlier(said))
            .map(|said| (said, status_of_operation(operation))),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_names_of_a_batch_follow_from_its_key_and_differ() {
        let owner = Owner { cluster_id: "c".into(), node_name: "n".into(), installation: "i".into() };
        let key = IdempotencyKey::derive("c", "s", 0);
        let names = names_of(&owner, &key, 500);
        assert_eq!(names, names_of(&owner, &key, 500));
        let mut distinct = names.clone();
        distinct.dedup();
        assert_eq!(distinct.len(), 500);
        assert!(names.iter().all(|name| crate::links::is_name(name)));
        assert!(!names.contains(&names::unique(&owner, &key)), "a VM alone has another name");
    }

    #[test]
    fn an_operation_counts_its_vms_when_it_has_ended() {
        assert!(counted(&json!({"status": "RUNNING"})).is_none());
        let done = |status: &Value| json!({"status": "DONE", "instancesBulkInsertOperationMetadata": {"perLocationStatus": {"zones/z-1-a": status}}});
        let all = json!({"zones/z-1-a": {"createdVmCount": 3, "targetVmCount": 3}});
        let running = |zones: &Value| json!({"status": "RUNNING", "instancesBulkInsertOperationMetadata": {"perLocationStatus": zones}});
        assert_eq!(counted(&running(&all)).unwrap().made, Some(3), "all are there before the end");
        assert!(
            counted(&running(&json!({"zones/z-1-a": {"createdVmCount": 2, "targetVmCount": 3}}))).is_none()
        );
        assert!(counted(&running(&json!({}))).is_none());
        let some = counted(&done(&json!({"createdVmCount": 3, "targetVmCount": 5}))).unwrap();
        assert!(some.made == Some(3) && some.refused.is_none());
        let back = json!({"createdVmCount": 3, "deletedVmCount": 3, "status": "DONE"});
        let mut operation = done(&back);
        operation["error"] = json!({"errors": [{"code": "VM_MIN_COUNT_NOT_REACHED", "message": "none"}]});
        let none = counted(&operation).unwrap();
        assert_eq!((none.made, none.refused.unwrap().0.code.as_str()), (Some(0), "VM_MIN_COUNT_NOT_REACHED"));
        operation["error"] = json!({"errors": [{"code": "RESOURCE_ALREADY_EXISTS", "message": "x"}]});
        let earlier = counted(&operation).unwrap();
        assert!(earlier.refused.is_none() && earlier.made.is_none(), "an earlier call made them");
        let errors = operation["error"]["errors"].as_array_mut().unwrap();
        errors.insert(0, json!({"code": "STOCKOUT", "message": "none"}));
        assert!(counted(&operation).unwrap().made.is_none());
        assert!(counted(&json!({"status": "DONE"})).unwrap().made.is_none());
    }
}
