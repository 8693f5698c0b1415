//! Makes a VM by one POST and waits for IBM's decision.
//!
//! **Exactly once per key.** The name follows from owner and key, and names are unique in a region, so IBM makes no second
//! VM. If the VM exists, the name of its first network attachment shows whether the same request made it. A call may be
//! dropped at any await: the next one with the key finds the VM, also one that IBM refused late and that must go.
//!
//! **Decision.** IBM accepts a POST and may refuse the VM seconds later, in its status reasons. A VM that runs has its
//! place.

use std::collections::HashMap;
use std::sync::Arc;

use peerpod_provider_api::{CreateRequest, Created, DiskIdentity, Error, IdempotencyKey, InstanceId, Market};
use peerpod_provider_cloud::exhausted::Scope;
use peerpod_provider_cloud::refusal::{Meaning, clip};
use peerpod_provider_cloud::{ApiCall, Offering, VmState, until};
use peerpod_provider_rest::{Decision, Failure, Method, Said, decide, end_of_wait, ibm, read};
use tokio::time::Instant;

use crate::IbmCloud;
use crate::body::Body;
use crate::client::Vpc;
use crate::ids::{self, IbmCloudPlace};
use crate::refusal::{REFUSALS, is_of_the_subnet, standing};
use crate::vms::{self, IbmCloudVm};
use crate::volumes::identity;
use crate::{remove, tags};

/// Action that makes a VM.
const CREATE: &str = "create_instance";

/// Create that is ready to be sent.
pub(crate) struct IbmCloudLaunch<'l> {
    pub ibm: &'l Arc<IbmCloud>,
    pub vpc: &'l Vpc,
    pub request: &'l CreateRequest,
    pub key: &'l IdempotencyKey,
    pub offering: &'l Offering,
    pub place: &'l IbmCloudPlace,
    /// Subnets of second NICs, by zone.
    pub second_subnets: &'l HashMap<String, String>,
    pub image: &'l str,
    pub until: Instant,
}

/// Fate of a VM that IBM did not refuse.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Fate {
    Placed(Box<IbmCloudVm>),
    Going,
}

impl IbmCloudLaunch<'_> {
    /// Makes the VM, or finds that of an earlier call.
    pub(crate) async fn go(&self) -> Result<Created, Error> {
        let name = ids::name(&self.ibm.owner, self.key);
        let (id, is_new) = match self.post(&name).await {
            Ok(id) => (id, true),
            Err(failure) if matches!(failure.error, Error::KeyReused { .. }) => {
                (self.earlier(&name).await?, false)
            }
            Err(failure) => return Err(self.refused(failure)),
        };
        let vm = InstanceId::new(id).map_err(|error| Error::invalid(format!("{}: {error}", self.what())))?;
        if is_new {
            // Before the decision: a list may be late, and many creates share their looks.
            self.ibm.recent.made(&vm, self.key, &self.request.name, Instant::now());
        }
        self.decided(&vm).await
    }

    /// Sends the POST. Returns the id of the VM.
    async fn post(&self, name: &str) -> Result<String, Failure> {
        let config = &self.ibm.config;
        let marks = ibm::TAGS.marks(self.request, self.key, &self.ibm.owner, &config.tags)?;
        let body = Body {
            config,
            name,
            request: self.request,
            key: self.key,
            offering: self.offering,
            place: self.place,
            second_subnet: self.second_subnets.get(&self.offering.zone).map(String::as_str),
            image: self.image,
            tags: &marks,
        };
        let what = self.what();
        let request = self.vpc.request(Method::POST, ["instances"]).json(&body.whole());
        let answer = self
            .vpc
            .call(ApiCall::new(CREATE, self.key.as_str(), &what).until(self.until), &request)
            .await?
            .json();
        if let Some(crn) = read::text(&answer, "/crn").filter(|_| !config.tags.is_empty()) {
            let (ibm, crn, name) = (Arc::clone(self.ibm), crn.to_owned(), name.to_owned());
            tokio::spawn(async move { tags::attach(&ibm, &crn, &name).await });
        }
        let id = read::text(&answer, "/id").filter(|id| ids::is_id(id)).map(str::to_owned);
        let odd =
            || Error::transient(format!("{what}: the answer has no instance; the same call is repeated"));
        id.ok_or_else(|| odd().into())
    }

    /// Checks that the VM of this name was made by the same request. Returns its id.
    async fn earlier(&self, name: &str) -> Result<String, Error> {
        let what = self.what();
        let Some(vm) = vms::named(self.vpc, name, &what, self.until).await? else {
            return Err(Error::transient(format!(
                "{what}: IBM does not show the VM that has its name; the same call is repeated"
            )));
        };
        if vm.digest.as_ref() == Some(&self.request.digest()) {
            return Ok(vm.id);
        }
        Err(Error::key_reused(format!(
            "{what}: its key was used before with another request, which made {name}; this is a bug in Peerpod, report it"
        )))
    }

    /// Waits until IBM has decided on the VM, or shortly before the deadline.
    async fn decided(&self, id: &InstanceId) -> Result<Created, Error> {
        let what = self.what();
        let look = || async {
            let seen = self.ibm.look(id, self.until, &what).await?;
            Ok::<_, Failure>(match seen {
                None if self.ibm.recent.may_be_denied(id, Instant::now()) => Decision::Open,
                None => Decision::Made(Fate::Going),
                Some(vm) => match vm.state {
                    VmState::Pending => Decision::Open,
                    VmState::Placed | VmState::Running | VmState::Stopping | VmState::Ended => {
                        Decision::Made(Fate::Placed(Box::new(vm)))
                    }
                    VmState::Deleting | VmState::Deleted => Decision::Made(Fate::Going),
                    VmState::Failed => Decision::Refused(vm.reason.unwrap_or_else(|| Said {
                        code: "cannot_start".to_owned(),
                        message: "IBM gives no reason".to_owned(),
                    })),
                },
            })
        };
        let seen = match decide(&self.ibm.decisions, end_of_wait(self.until), look).await? {
            Decision::Refused(said) => return Err(self.refused_late(id, &said).await),
            // No pod may join it. The caller repeats the call until it is gone.
            Decision::Made(Fate::Going) => {
                let text = format!("{what}: its VM is being deleted, or is gone; the same call is repeated");
                return Err(Error::transient(text));
            }
            Decision::Made(Fate::Placed(vm)) => Some(vm),
            // The id is known; a later refusal is `NotFound` of `addresses`.
            Decision::Open => None,
        };
        let disks = seen.map(|vm| vm.disks).unwrap_or_default();
        let attached = |volume: &String| -> Option<(String, DiskIdentity)> {
            let device = disks.iter().find(|disk| disk.volume == *volume)?.device.as_ref()?;
            Some((volume.clone(), identity(device)))
        };
        Ok(Created {
            id: id.clone(),
            addresses: Vec::new(),
            chosen: self.ibm.planner.priced(self.offering.chosen(Some(self.image.to_owned()))),
            disks: self.request.disks.iter().filter_map(|disk| attached(&disk.volume)).collect(),
        })
    }

    /// Handles a POST that IBM refused, or did not answer.
    fn refused(&self, failure: Failure) -> Error {
        let said = Said { code: failure.code().to_owned(), message: failure.message().to_owned() };
        match failure.error {
            error @ (Error::Capacity { .. } | Error::Quota { .. }) => self.exhausted(&said, error),
            // A missing subnet or image is no missing VM: nothing would come of a repetition.
            Error::NotFound { text } => Error::Invalid { text },
            error => error,
        }
    }

    /// Handles a VM that IBM refused after it had accepted the create: it goes, with its volume and interface.
    async fn refused_late(&self, id: &InstanceId, said: &Said) -> Error {
        let what = self.what();
        // A call that was dropped may come here again, so the deletion has the time of a call of its own.
        if let Err(error) = remove::vm(self.vpc, id.as_str(), &what, until()).await {
            // The same call finds the refused VM again.
            return Error::transient(format!(
                "{what}: IBM Cloud refused it ({}: {}), and its rest is not deleted yet: {error}",
                said.code,
                clip(&said.message)
            ));
        }
        self.ibm.recent.seen(id);
        let error = REFUSALS.refused(CREATE, &said.code, &said.message, 200, None).during(&what);
        match error {
            Error::Capacity { .. } | Error::Quota { .. } => self.exhausted(said, error),
            error => error,
        }
    }

    /// Marks the offering. Returns a lack of capacity while another offering is left: the quota of one market says
    /// nothing about the other.
    fn exhausted(&self, said: &Said, error: Error) -> Error {
        let planner = &self.ibm.planner;
        let meaning = REFUSALS.meaning(&said.code, &said.message, 409);
        let remedy = REFUSALS.remedy(CREATE, &said.code, &said.message, 409);
        planner.exhausted_for(
            self.scope(&said.code, meaning),
            &format!("{}: {remedy}", said.code),
            standing(meaning),
        );
        let text = match error {
            Error::Quota { text } if self.ibm.planned(self.request).is_err() => return Error::Quota { text },
            Error::Quota { text } | Error::Capacity { text, .. } => text,
            other => return other,
        };
        match planner.capacity_error(&self.request.name, &[(self.offering.clone(), said.code.clone())]) {
            Error::Capacity { offering, rejected, .. } => Error::Capacity { offering, rejected, text },
            other => other,
        }
    }

    /// Returns the offerings that a refusal concerns: a market, a place (a subnet without addresses, or a dedicated host
    /// without room), or this offering.
    fn scope(&self, code: &str, meaning: Meaning) -> Scope {
        let place = self.offering.subnet.clone().unwrap_or_default();
        match meaning {
            Meaning::Quota if self.offering.market == Market::Spot => Scope::Market(Market::Spot),
            Meaning::Quota => Scope::Market(Market::OnDemand),
            _ if is_of_the_subnet(code) || self.place.target.is_some() => Scope::Subnet(place),
            _ => self.offering.into(),
        }
    }

    fn what(&self) -> String {
        format!("create of {}", self.request.name)
    }
}
