//! Makes one VM, exactly once per key, and waits until Google has decided on it. May call `insert`, `get` and `list` of
//! instances and `get` of zoneOperations.
//!
//! **Exactly once per key.** The VM's name and the call's `requestId` follow from owner and key, and the placement has
//! one offering. A repeated call gets the operation of the first one, or `alreadyExists` after Google has forgotten it.
//! Both lead to the VM of that name. Its description has the digest of its request.
//!
//! **Decision.** Google accepts an insert and may refuse it seconds later, in the operation. A VM that has left
//! `PROVISIONING` has its resources. After a refusal nothing is left.

use std::time::Duration;

use parking_lot::Mutex;
use peerpod_provider_api::{
    CreateRequest, Created, DiskIdentity, Error, IdempotencyKey, InstanceId, Market, Owner,
};
use peerpod_provider_cloud::exhausted::Scope;
use peerpod_provider_cloud::{ApiCall, MachineType, Meaning, Offering, VmState, names};
use peerpod_provider_rest::{Decision, Failure, Said, decide, end_of_wait, read};
use serde_json::Value;
use tokio::time::Instant;

use crate::Gcp;
use crate::body::{DataDisk, GcpVmSpec};
use crate::facts::GcpImageFacts;
use crate::links::{self, VmId};
use crate::provider::GcpConnection;
use crate::refusal::{REFUSALS, said_of_operation, status_of_operation};
use crate::vms::{GcpVm, is_missing};

/// Time for which Google may not show a VM whose operation has ended.
const UNSEEN: Duration = Duration::from_secs(10);
/// Shortest and longest pause before another attempt after a late refusal that has nothing to do with the offering.
const PAUSE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(6));
/// Time for which an offering is not tried again after a lack of quota. Quotas change more slowly than capacity.
const QUOTA_STANDS: Duration = Duration::from_secs(600);

/// Quotas that all families of machine types share.
const OF_ALL_FAMILIES: [&str; 4] = ["CPUS_ALL_REGIONS", "'INSTANCES'", "_GB'", "IN_USE_ADDRESSES"];
/// Beginning of the codes for a subnetwork without free addresses.
const NO_ADDRESS: &str = "IP_SPACE_EXHAUSTED";

/// Create that is ready to be sent.
pub(crate) struct GcpLaunch<'l> {
    pub gcp: &'l Gcp,
    pub connected: &'l GcpConnection,
    pub request: &'l CreateRequest,
    pub key: &'l IdempotencyKey,
    pub offering: &'l Offering,
    pub image: &'l GcpImageFacts,
    pub disks: &'l [DataDisk],
    pub until: Instant,
}

/// State of a VM that was asked for.
enum Seen {
    Vm(Box<GcpVm>),
    /// The operation has ended without a fault, and there is no VM: it was deleted since.
    Gone,
}

/// Time of the first look that missed a VM whose operation has ended.
#[derive(Default)]
struct Missed(Mutex<Option<Instant>>);

impl Missed {
    /// Returns the decision on a VM that a look misses although its operation has ended.
    fn again(&self, now: Instant) -> Decision<Seen> {
        let since = *self.0.lock().get_or_insert(now);
        if now.saturating_duration_since(since) < UNSEEN {
            Decision::Open
        } else {
            Decision::Made(Seen::Gone)
        }
    }
}

/// Returns the pause of an attempt. Attempts that failed at once are repeated at different times.
fn pause_of(key: &IdempotencyKey) -> Duration {
    let part = names::digest(&[key.as_str(), "pause"]).first().copied().unwrap_or_default();
    PAUSE.0 + (PAUSE.1 - PAUSE.0).mul_f64(f64::from(part) / 256.0)
}

/// Returns the `requestId` of a call: a UUID that follows from owner, key and kind of call.
pub(crate) fn request_id(owner: &Owner, key: &IdempotencyKey, kind: &str) -> String {
    let Owner { cluster_id, node_name, installation } = owner;
    let hash = names::digest(&[cluster_id, node_name, installation, key.as_str(), kind]);
    names::uuid_text(&names::version_8(&hash))
}

impl GcpLaunch<'_> {
    /// Makes the VM, or finds that of an earlier call.
    pub(crate) async fn one(&self) -> Result<Created, Error> {
        let vm = VmId { zone: self.offering.zone.clone(), name: names::unique(&self.gcp.owner, self.key) };
        let body = self.shape().insert(&vm.name)?;
        let what = self.what();
        let call = ApiCall::new("instances.insert", self.key.as_str(), &what).until(self.until);
        let path = self.connected.compute.own(&format!("zones/{}/instances", vm.zone));
        let id = request_id(&self.gcp.owner, self.key, "insert");
        let sent = self.connected.compute.post(call, &path, &[("requestId", &id)], Some(&body)).await;
        let operation = match sent {
            Ok(operation) => Some(operation),
            Err(failure) if matches!(failure.error, Error::KeyReused { .. }) => None,
            Err(failure) => return Err(self.refused(failure).await),
        };
        let (end, missed) = (end_of_wait(self.until), Missed::default());
        let decided = decide(&self.gcp.decisions, end, || self.look(&vm, operation.as_ref(), &missed)).await;
        match decided.map_err(|failure| failure.error)? {
            Decision::Made(Seen::Vm(seen)) => self.created(&vm, Some(&seen)),
            Decision::Made(Seen::Gone) => Err(self.gone()),
            Decision::Refused(said) => {
                // A list may still show it.
                self.gcp.deleted.accepted(&vm, Instant::now());
                Err(self.refused_later("instances.insert", &said, 400).await)
            }
            // The id is known; a later refusal is `NotFound` of `addresses`.
            Decision::Open => self.created(&vm, None),
        }
    }

    /// Returns the VM that is to be made.
    pub(crate) fn shape(&self) -> GcpVmSpec<'_> {
        let catalogue = self.gcp.planner.catalogue();
        let machine = catalogue.types.iter().find(|one| one.name == self.offering.machine);
        GcpVmSpec {
            config: &self.gcp.config,
            owner: &self.gcp.owner,
            request: self.request,
            key: self.key,
            offering: self.offering,
            image: self.image,
            has_gpus: machine.is_some_and(|machine| machine.gpus > 0),
            disks: self.disks,
        }
    }

    pub(crate) fn what(&self) -> String {
        format!("create of {}", self.request.name)
    }

    /// Looks whether Google has decided on the VM.
    async fn look(
        &self,
        vm: &VmId,
        operation: Option<&Value>,
        missed: &Missed,
    ) -> Result<Decision<Seen>, Failure> {
        let what = self.what();
        let refused = operation.filter(|one| is_done(one)).and_then(said_of_operation);
        // The VM of an earlier call has the name: it is looked up below.
        let has_earlier = refused.as_ref().is_some_and(is_of_an_earlier);
        if let Some(said) = refused.filter(|_| !has_earlier) {
            return Ok(Decision::Refused(said));
        }
        if let Some(seen) = self.connected.vms.ask(vm.to_string(), self.until, &what).await? {
            self.check_marks(&seen)?;
            return Ok(match seen.state {
                // One that stops is being deleted, or has ended: it vanishes, or has no addresses.
                VmState::Pending | VmState::Stopping | VmState::Deleting | VmState::Deleted => Decision::Open,
                VmState::Placed | VmState::Running | VmState::Ended | VmState::Failed => {
                    Decision::Made(Seen::Vm(Box::new(seen)))
                }
            });
        }
        let operation = operation.filter(|_| !has_earlier);
        let Some(name) = operation.and_then(|one| read::text(one, "/name")) else {
            return Ok(missed.again(Instant::now()));
        };
        let call = ApiCall::new("zoneOperations.get", self.key.as_str(), &what).until(self.until);
        let latest = match self.connected.compute.operation(call, &vm.zone, name).await {
            Ok(latest) => latest,
            // Google forgets operations after some days.
            Err(failure) if is_missing(&failure) => return Ok(missed.again(Instant::now())),
            Err(failure) => return Err(failure),
        };
        Ok(match said_of_operation(&latest) {
            _ if !is_done(&latest) => Decision::Open,
            Some(said) if !is_of_an_earlier(&said) => Decision::Refused(said),
            // Also a VM that Google does not show yet.
            _ => missed.again(Instant::now()),
        })
    }

    /// Refuses a VM of another owner or of another request.
    pub(crate) fn check_marks(&self, vm: &GcpVm) -> Result<(), Error> {
        let what = self.what();
        if !vm.marks.are_of(&self.gcp.owner) {
            return Err(Error::key_reused(format!(
                "{what}: {} has its name and another owner; delete it, or give this cluster another name",
                vm.id
            )));
        }
        if vm.marks.digest.as_deref() != Some(self.request.digest().as_str()) {
            return Err(Error::key_reused(format!(
                "{what}: its key was used before with another request, which made {}; this is a bug in Peerpod, report it",
                vm.id
            )));
        }
        Ok(())
    }

    /// Returns the error of a call that Google refused at once.
    pub(crate) async fn refused(&self, failure: Failure) -> Error {
        let (code, message) = (failure.code().to_owned(), failure.message().to_owned());
        match &failure.error {
            Error::Capacity { .. } | Error::Quota { .. } => {
                return self.exhausted(&code, &message, failure.error);
            }
            // The cached facts may be out of date; the next create loads them again.
            Error::Invalid { .. } if code == "notFound" => self.gcp.facts.forget().await,
            _ => {}
        }
        failure.error
    }

    /// Returns the error of a call that Google accepted and refused later.
    pub(crate) async fn refused_later(&self, action: &str, said: &Said, status: u16) -> Error {
        let Said { code, message } = said;
        let error = REFUSALS.refused(action, code, message, status, None).during(self.what());
        match error {
            Error::Capacity { .. } | Error::Quota { .. } => self.exhausted(code, message, error),
            // A refused operation has no effect. The same call would get the same operation again, and the next attempt
            // follows at once.
            Error::Transient { text } | Error::Throttled { text, .. } => {
                let end = Instant::now() + pause_of(self.key);
                tokio::time::sleep_until(end.min(end_of_wait(self.until))).await;
                self.spent(text)
            }
            error => error,
        }
    }

    /// Marks the offerings without capacity or quota. Returns the error with Google's words and the remedy: a lack of
    /// capacity while another offering is left, because a quota limits one family or market alone.
    pub(crate) fn exhausted(&self, code: &str, message: &str, error: Error) -> Error {
        let planner = &self.gcp.planner;
        let (text, is_quota) = match error {
            Error::Capacity { text, .. } => (text, false),
            // All offerings have these addresses.
            Error::Quota { text } if code.starts_with(NO_ADDRESS) => return Error::Quota { text },
            Error::Quota { text } => (text, true),
            error => return error,
        };
        if is_quota {
            for scope in self.scopes(message) {
                planner.exhausted_for(scope, code, QUOTA_STANDS);
            }
        } else {
            planner.exhausted(self.offering, code);
        }
        if is_quota && !self.has_another() {
            return Error::Quota { text };
        }
        match planner.capacity_error(&self.request.name, &[(self.offering.clone(), code.to_owned())]) {
            Error::Capacity { offering, rejected, .. } => Error::Capacity { offering, rejected, text },
            other => other,
        }
    }

    /// Returns the offerings that a refusal by a quota concerns. Quotas are those of the region.
    fn scopes(&self, message: &str) -> Vec<Scope> {
        if message.contains("PREEMPTIBLE_") {
            return vec![Scope::Market(Market::Spot)];
        }
        let market = self.offering.market;
        if OF_ALL_FAMILIES.iter().any(|metric| message.contains(metric)) {
            return vec![Scope::Market(market)];
        }
        let family = links::family(&self.offering.machine);
        let catalogue = self.gcp.planner.catalogue();
        let is_same = |one: &&MachineType| links::family(&one.name) == family;
        let types = catalogue.types.iter().filter(is_same);
        let everywhere = types.flat_map(|one| {
            catalogue.places.iter().map(|place| Scope::Offering(market, one.name.clone(), place.zone.clone()))
        });
        everywhere.collect()
    }

    /// Whether an offering is left for the request.
    fn has_another(&self) -> bool {
        let mut wanted = CreateRequest { user_data: String::new(), ..self.request.clone() };
        // The disk of a zone holds the VM there.
        if self.disks.iter().any(|one| !one.disk.is_regional) {
            wanted.zones = vec![self.offering.zone.clone()];
        }
        self.gcp.planner.place(&wanted, 1).is_ok()
    }

    /// Returns the error for an attempt whose `requestId` is used up: only another attempt, with another key, helps.
    fn spent(&self, text: String) -> Error {
        Error::capacity(self.offering.to_string(), format!("{text}; another attempt is needed"))
    }

    /// Returns the error for a key whose VM was deleted.
    pub(crate) fn gone(&self) -> Error {
        self.spent(format!("{}: the VM of an earlier call with its key was deleted", self.what()))
    }

    /// Returns the answer for a VM, and records that it was made.
    pub(crate) fn created(&self, vm: &VmId, seen: Option<&GcpVm>) -> Result<Created, Error> {
        let id = vm.id().ok_or_else(|| Error::transient(format!("{}: its name is no id", self.what())))?;
        self.gcp.recent.made(&id, self.key, &self.request.name, Instant::now());
        Ok(self.answer(id, seen))
    }

    fn answer(&self, id: InstanceId, seen: Option<&GcpVm>) -> Created {
        let public = self.gcp.config.use_public_ip;
        let addresses = seen.filter(|vm| vm.state.lives()).map(|vm| vm.addresses(public));
        let identity = |disk: &DataDisk| identity(&DataDisk::device_name(&disk.disk));
        let volumes = self.request.disks.iter().map(|disk| disk.volume.clone());
        Created {
            id,
            addresses: addresses.unwrap_or_default(),
            chosen: self.gcp.planner.priced(self.offering.chosen(Some(self.image.path.clone()))),
            disks: volumes.zip(self.disks.iter().map(identity)).collect(),
        }
    }
}

/// Returns the identity by which the guest finds a disk with this device name.
pub(crate) fn identity(device_name: &str) -> DiskIdentity {
    DiskIdentity::ById(format!("google-{device_name}"))
}

/// Whether an operation failed because there is a VM of that name.
pub(crate) fn is_of_an_earlier(said: &Said) -> bool {
    REFUSALS.meaning(&said.code, &said.message, 400) == Meaning::KeyReused
}

/// Whether an operation has ended, with or without an error.
pub(crate) fn is_done(operation: &Value) -> bool {
    read::text(operation, "/status") == Some("DONE")
}

/// Returns the failure of an operation that has ended with an error.
pub(crate) fn failure_of(action: &str, what: &str, operation: &Value) -> Option<Error> {
    let Said { code, message } = said_of_operation(operation)?;
    let status = status_of_operation(operation);
    Some(REFUSALS.refused(action, &code, &message, status, None).during(what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_may_be_missed_for_a_time_from_the_first_look_after_the_end_of_its_operation() {
        let (missed, now) = (Missed::default(), Instant::now() + UNSEEN * 3);
        assert!(matches!(missed.again(now), Decision::Open), "the operation has only now ended");
        assert!(matches!(missed.again(now + UNSEEN / 2), Decision::Open));
        assert!(matches!(missed.again(now + UNSEEN), Decision::Made(Seen::Gone)));
    }

    #[test]
    fn attempts_that_failed_together_pause_for_different_times() {
        let pauses: std::collections::BTreeSet<Duration> =
            (0..500).map(|attempt| pause_of(&IdempotencyKey::derive("c", "s", attempt))).collect();
        assert!(pauses.len() > 100, "{}", pauses.len());
        assert!(pauses.iter().all(|pause| (PAUSE.0..PAUSE.1).contains(pause)), "{pauses:?}");
    }

    #[test]
    fn a_request_id_follows_from_owner_key_and_call() {
        let owner =
            |node: &str| Owner { cluster_id: "c".into(), node_name: node.into(), installation: "i".into() };
        let key = |attempt| IdempotencyKey::derive("c", "s", attempt);
        let one = request_id(&owner("n"), &key(0), "insert");
        assert_eq!(one, request_id(&owner("n"), &key(0), "insert"));
        assert!(one.len() == 36 && one != "00000000-0000-0000-0000-000000000000");
        for other in [
            request_id(&owner("m"), &key(0), "insert"),
            request_id(&owner("n"), &key(1), "insert"),
            request_id(&owner("n"), &key(0), "bulkInsert"),
        ] {
            assert_ne!(one, other);
        }
    }
}
