//! Makes a VM by one PUT and waits for Azure's decision.
//!
//! **Exactly once per key.** The name follows from owner and key, and the PUT has `If-None-Match: *`, so Azure makes no
//! second VM and changes none. If the VM exists, its marks show whether the same request made it. A call may be dropped
//! at any await: the next one with the key finds the VM, also one that Azure refused late and that must go.

use std::time::Duration;

use peerpod_provider_api::{CreateRequest, Created, DiskIdentity, Error, IdempotencyKey, InstanceId, Market};
use peerpod_provider_cloud::exhausted::Scope;
use peerpod_provider_cloud::refusal::{Meaning, clip};
use peerpod_provider_cloud::{ApiCall, MachineType, Offering, VmState, Wait, names};
use peerpod_provider_rest::header::IF_NONE_MATCH;
use peerpod_provider_rest::{Decision, Failure, Method, Said, decide, end_of_wait};
use tokio::time::Instant;

use crate::Azure;
use crate::body::Body;
use crate::client::{Arm, COMPUTE};
use crate::config::ALPHABET;
use crate::facts::AzureFacts;
use crate::ids::ResourceId;
use crate::image::AzureImageFacts;
use crate::refusal::{REFUSALS, standing};
use crate::vms;
use crate::{operations, remove};

/// Pauses between two looks at a VM that Azure has not decided on. Azure accepts twelve looks at one VM in a minute, and
/// 36 in a burst.
static DECISIONS: Wait = Wait::learning(Duration::from_secs(1), Duration::from_secs(2));
/// Time after which the looks are further apart.
const LONG: Duration = Duration::from_secs(30);
static LATE_DECISIONS: Wait = Wait::new(Duration::from_secs(5), Duration::from_secs(5));

/// Create that is ready to be sent.
pub(crate) struct AzureLaunch<'l> {
    pub azure: &'l Azure,
    pub arm: &'l Arm,
    pub request: &'l CreateRequest,
    pub key: &'l IdempotencyKey,
    pub offering: &'l Offering,
    pub facts: &'l AzureFacts,
    pub image: &'l AzureImageFacts,
    pub until: Instant,
}

/// Fate of a VM that Azure did not refuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Placed,
    Going,
}

impl AzureLaunch<'_> {
    /// Makes the VM, or finds that of an earlier call.
    pub(crate) async fn go(&self) -> Result<Created, Error> {
        let name = names::unique(&self.azure.owner, self.key);
        let id = self.arm.vm(&name);
        let operation = match self.put(&name, &id).await {
            Ok(operation) => operation,
            Err(failure) if matches!(failure.error, Error::KeyReused { .. }) => {
                self.earlier(&id).await?;
                None
            }
            Err(failure) => return Err(self.refused(failure)),
        };
        self.decided(&id, operation.as_deref()).await
    }

    /// Sends the PUT. Returns the path of the operation, if the answer has one.
    async fn put(&self, name: &str, id: &ResourceId) -> Result<Option<String>, Failure> {
        let Azure { config, owner, ssh_key, .. } = self.azure;
        let tags = ALPHABET.marks(self.request, self.key, owner, &config.tags)?;
        let body = Body {
            config,
            owner,
            name,
            request: self.request,
            offering: self.offering,
            image: self.image,
            tags: &tags,
            ssh_key: config.ssh_key.as_ref().unwrap_or(ssh_key),
        };
        let request =
            self.arm.request(Method::PUT, &id.text(), COMPUTE).header(IF_NONE_MATCH, "*").json(&body.whole());
        let what = self.what();
        let call = ApiCall::new("VirtualMachines_CreateOrUpdate", self.key.as_str(), &what).until(self.until);
        let answer = self.arm.call(call, &request).await?;
        Ok(answer.header("azure-asyncoperation").map(str::to_owned))
    }

    /// Checks that the VM of this name was made by the same request.
    async fn earlier(&self, id: &ResourceId) -> Result<(), Error> {
        let what = self.what();
        let Some(vm) = vms::one(self.arm, id, &what, self.until).await? else {
            return Err(Error::transient(format!("{what}: its VM has just gone; the same call is repeated")));
        };
        if vm.marks.are_of(&self.azure.owner) && vm.marks.digest.as_ref() == Some(&self.request.digest()) {
            return Ok(());
        }
        Err(Error::key_reused(format!(
            "{what}: its key was used before with another request, which made {}; this is a bug in Peerpod, report it",
            id.name()
        )))
    }

    /// Waits until Azure has decided on the VM, or shortly before the deadline.
    async fn decided(&self, id: &ResourceId, operation: Option<&str>) -> Result<Created, Error> {
        let what = self.what();
        let look = || self.look(id, operation, &what);
        let end = end_of_wait(self.until);
        let soon = end.min(Instant::now() + LONG);
        let mut decision = decide(&DECISIONS, soon, look).await?;
        if decision == Decision::Open && soon < end {
            decision = decide(&LATE_DECISIONS, end, look).await?;
        }
        match decision {
            Decision::Refused(said) => return Err(self.refused_late(id, &said).await),
            // No pod may join it. The caller repeats the call until it is gone.
            Decision::Made(Fate::Going) => {
                return Err(Error::transient(format!(
                    "{what}: its VM is being deleted; the same call is repeated"
                )));
            }
            Decision::Made(Fate::Placed) | Decision::Open => {}
        }
        let vm = InstanceId::new(id.text()).map_err(|error| Error::invalid(format!("{what}: {error}")))?;
        self.azure.recent.made(&vm, self.key, &self.request.name, Instant::now());
        let disks = self.request.disks.iter().zip(0..);
        Ok(Created {
            id: vm,
            addresses: Vec::new(),
            chosen: self.azure.planner.priced(self.offering.chosen(Some(self.image.id.name().to_owned()))),
            disks: disks.map(|(disk, lun)| (disk.volume.clone(), DiskIdentity::Lun(lun))).collect(),
        })
    }

    async fn look(
        &self,
        id: &ResourceId,
        operation: Option<&str>,
        what: &str,
    ) -> Result<Decision<Fate>, Failure> {
        let vm = vms::one(self.arm, id, what, self.until).await?;
        let Some(vm) = vm else {
            let said = operations::failure(self.arm, operation, (self.key.as_str(), what), self.until).await;
            return Ok(said.map_or(Decision::Open, Decision::Refused));
        };
        Ok(match vm.state {
            // A VM that Azure started and could not keep shows a power state beside its refusal.
            VmState::Placed | VmState::Running | VmState::Stopping | VmState::Ended => match vm.refusal {
                Some(said) if vm.state == VmState::Ended || is_shortage(&said) => Decision::Refused(said),
                _ => Decision::Made(Fate::Placed),
            },
            VmState::Deleting | VmState::Deleted => Decision::Made(Fate::Going),
            VmState::Pending => Decision::Open,
            VmState::Failed => {
                let said = match vm.refusal {
                    Some(said) => Some(said),
                    None => {
                        operations::failure(self.arm, operation, (self.key.as_str(), what), self.until).await
                    }
                };
                Decision::Refused(said.unwrap_or_else(|| Said {
                    code: "ProvisioningFailed".to_owned(),
                    message: "Azure gives no reason".to_owned(),
                }))
            }
        })
    }

    /// Handles a PUT that Azure refused, or did not answer.
    fn refused(&self, failure: Failure) -> Error {
        let (code, message) = (failure.code().to_owned(), failure.message().to_owned());
        match failure.error {
            Error::Capacity { text, .. } => self.exhausted(&code, &message, Meaning::Capacity, text),
            Error::Quota { text } => self.exhausted(&code, &message, Meaning::Quota, text),
            // A missing subnet or image is no missing VM: nothing would come of a repetition.
            Error::NotFound { text } => Error::Invalid { text },
            error => error,
        }
    }

    /// Handles a VM that Azure refused after it had accepted the create: it goes, with its interface and disk.
    async fn refused_late(&self, id: &ResourceId, said: &Said) -> Error {
        let what = self.what();
        if let Err(error) = remove::vm(self.arm, id, &what, self.until).await {
            // The same call finds the refused VM again.
            return Error::transient(format!(
                "{what}: Azure refused it ({}: {}), and its rest is not deleted yet: {error}",
                said.code,
                clip(&said.message)
            ));
        }
        let error = REFUSALS.refused("VirtualMachines_CreateOrUpdate", &said.code, &said.message, 200, None);
        match error.during(&what) {
            Error::Capacity { text, .. } => {
                self.exhausted(&said.code, &said.message, Meaning::Capacity, text)
            }
            Error::Quota { text } => self.exhausted(&said.code, &said.message, Meaning::Quota, text),
            error => error,
        }
    }

    /// Marks the offering. Returns a lack of capacity while another offering is left: the quota of one family or market
    /// says nothing about the others.
    fn exhausted(&self, code: &str, message: &str, meaning: Meaning, text: String) -> Error {
        let planner = &self.azure.planner;
        let is_spot = self.offering.market == Market::Spot;
        let remedy = REFUSALS.remedy("VirtualMachines_CreateOrUpdate", code, message, 409);
        let (why, time) = (format!("{code}: {remedy}"), standing(code, meaning, is_spot));
        let scopes = self.scopes(message, meaning);
        let has_scope = !scopes.is_empty();
        for scope in scopes {
            planner.exhausted_for(scope, &why, time);
        }
        // Without a mark the next attempt would get the same offering.
        if meaning == Meaning::Quota && (!has_scope || self.azure.planned(self.request).is_err()) {
            return Error::Quota { text };
        }
        match planner.capacity_error(&self.request.name, &[(self.offering.clone(), code.to_owned())]) {
            Error::Capacity { offering, rejected, .. } => Error::Capacity { offering, rejected, text },
            other => other,
        }
    }

    /// Returns the offerings that a refusal concerns. Quotas of cores are those of the region. Another limit (addresses of
    /// the subnet, public addresses, disks of the request) concerns no offering.
    fn scopes(&self, message: &str, meaning: Meaning) -> Vec<Scope> {
        let (machine, market) = (&self.offering.machine, self.offering.market);
        if meaning != Meaning::Quota {
            return vec![self.offering.into()];
        }
        if message.contains("LowPriorityCores") || message.contains("Total Regional Cores") {
            return vec![Scope::Market(market)];
        }
        if !message.contains("Cores quota") {
            return Vec::new();
        }
        let families = &self.facts.families;
        let is_same = |one: &&MachineType| families.get(&one.name) == families.get(machine);
        let catalogue = &self.facts.catalogue;
        let types = catalogue.types.iter().filter(is_same);
        let everywhere = types.flat_map(|one| {
            catalogue.places.iter().map(|place| Scope::Offering(market, one.name.clone(), place.zone.clone()))
        });
        everywhere.collect()
    }

    fn what(&self) -> String {
        format!("create of {}", self.request.name)
    }
}

/// Whether Azure refused for lack of capacity or quota.
fn is_shortage(said: &Said) -> bool {
    matches!(REFUSALS.meaning(&said.code, &said.message, 200), Meaning::Capacity | Meaning::Quota)
}
