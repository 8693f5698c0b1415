//! Makes a VM, or finds that of an earlier call.
//!
//! **One VM per key**, on a cloud without idempotent calls and unique names. The VM's name follows from owner and key.
//! Before a POST the list must lack the name: twice, some seconds apart, if an earlier POST for it may be on its way. That
//! is so after an answer that was lost or not awaited, and in the first minute of a process. After the POST the list must
//! show the VM; it then shows each earlier one, too. Of several, the oldest counts, and the others go (`duplicates.rs`). The
//! tags show whether the same request made the VM.
//!
//! **Decision.** PowerVS accepts a POST and builds the VM for minutes. A VM in the status `ERROR` is refused.

use std::collections::HashSet;

use parking_lot::Mutex;
use peerpod_provider_api::{Chosen, CreateRequest, Created, Error, IdempotencyKey, InstanceId};
use peerpod_provider_cloud::refusal::clip;
use peerpod_provider_cloud::{ApiCall, VmState, names, until};
use peerpod_provider_rest::{Decision, Failure, Method, Said, decide, end_of_wait, ibm, read};
use tokio::time::Instant;

use crate::PowerVs;
use crate::body::body;
use crate::client::Power;
use crate::config::is_name;
use crate::duplicates;
use crate::refusal::REFUSALS;
use crate::size::VmSize;
use crate::vms::{self, PowerVsVm};

/// Action that makes a VM.
const CREATE: &str = "pvminstances.post";
/// Most names whose POST may be on its way. Beyond that all names count as such.
const MOST: usize = 10_000;

/// Names for which a POST of this process may be on its way.
#[derive(Debug, Default)]
pub(crate) struct Unclear(Mutex<HashSet<String>>);

impl Unclear {
    fn begin(&self, name: &str) {
        let mut all = self.0.lock();
        if all.len() < MOST {
            all.insert(name.to_owned());
        }
    }

    fn end(&self, name: &str) {
        self.0.lock().remove(name);
    }

    fn has(&self, name: &str) -> bool {
        let all = self.0.lock();
        all.len() >= MOST || all.contains(name)
    }
}

/// Create that is ready to be sent.
pub(crate) struct PowerVsLaunch<'l> {
    pub power_vs: &'l PowerVs,
    pub power: &'l Power,
    pub request: &'l CreateRequest,
    pub key: &'l IdempotencyKey,
    pub size: &'l VmSize,
    pub image: &'l str,
    pub until: Instant,
}

impl PowerVsLaunch<'_> {
    pub(crate) async fn go(&self) -> Result<Created, Error> {
        let name = names::unique(&self.power_vs.owner, self.key);
        // Two calls of this process must not both send a POST.
        let alone = self.power_vs.creates.lock(self.key).await;
        let vm = match self.earlier(&name).await? {
            Some(vm) => vm.id,
            None => self.make(&name).await?,
        };
        drop(alone);
        let vm = InstanceId::new(vm).map_err(|error| Error::invalid(format!("{}: {error}", self.what())))?;
        self.decided(&vm).await
    }

    /// Returns the VM of this name that an earlier call made; `None`: there is none, and none is on its way.
    async fn earlier(&self, name: &str) -> Result<Option<PowerVsVm>, Error> {
        let may_be_on_its_way = self.power_vs.is_young() || self.power_vs.unclear.has(name);
        for is_last in [!may_be_on_its_way, true] {
            if let Some(vm) = self.chosen(name).await? {
                self.power_vs.unclear.end(name);
                return Ok(Some(vm));
            }
            if is_last {
                break;
            }
            tokio::time::sleep(self.power_vs.config.settle).await;
        }
        Ok(None)
    }

    /// Looks for the VMs of this name. Returns the one that counts, and requests the deletion of the others.
    async fn chosen(&self, name: &str) -> Result<Option<PowerVsVm>, Error> {
        let what = self.what();
        let seen = self.power_vs.vms()?.ask(name.to_owned(), self.until, &what).await?.unwrap_or_default();
        let count = seen.len();
        let found = self.power_vs.tags.of_all(self.power, seen, &what, self.until).await?;
        let is_clear = found.len() == count && found.iter().all(|(_, marks)| marks.key.is_some());
        let ours = found.into_iter().filter(|(_, marks)| marks.are_of(&self.power_vs.owner)).collect();
        let Some(((vm, marks), others)) = duplicates::choose(ours) else {
            return if is_clear {
                Ok(None)
            } else {
                Err(Error::transient(format!(
                    "{what}: its VM has just gone, or shows no tags yet; the same call is repeated"
                )))
            };
        };
        if marks.digest.as_ref() != Some(&self.request.digest()) {
            return Err(Error::key_reused(format!(
                "{what}: its key was used before with another request, which made {name}; this is a bug in Peerpod, report it"
            )));
        }
        duplicates::remove(self.power, &others).await?;
        Ok(Some(vm))
    }

    /// Sends the POST, and waits until the list shows the VM. Returns the id of the VM that counts.
    async fn make(&self, name: &str) -> Result<String, Error> {
        let PowerVs { config, owner, unclear, .. } = self.power_vs;
        let what = self.what();
        let tags = ibm::TAGS.marks(self.request, self.key, owner, &config.tags)?;
        let body = body(config, name, self.request, self.image, self.size, &tags);
        let request = self.power.request(Method::POST, ["pvm-instances"]).json(&body);
        unclear.begin(name);
        let answer =
            self.power.call(ApiCall::new(CREATE, self.key.as_str(), &what).until(self.until), &request).await;
        let answer = match answer {
            Ok(answer) => answer.json(),
            Err(failure) => {
                // A refusal by a text has no effect; another one may have.
                if (400..500).contains(&failure.status()) && failure.status() != 408 {
                    unclear.end(name);
                }
                return Err(match failure.error {
                    // A missing image or network is no missing VM: nothing would come of a repetition.
                    Error::NotFound { text } => Error::Invalid { text },
                    error => error,
                });
            }
        };
        let id = read::text(&answer, "/0/pvmInstanceID").filter(|id| is_name(id));
        let id = id.ok_or_else(|| {
            Error::transient(format!("{what}: the answer has no VM; the same call is repeated"))
        })?;
        let vm = InstanceId::new(id).map_err(|error| Error::invalid(format!("{what}: {error}")))?;
        self.power_vs.recent.made(&vm, self.key, &self.request.name, Instant::now());
        let shown = self.power_vs.looks.until(Some(end_of_wait(self.until)), || async {
            let seen = self.power_vs.vms()?.ask(name.to_owned(), self.until, &what).await?;
            Ok::<_, Error>(seen.is_some_and(|vms| vms.iter().any(|vm| vm.id == id)).then_some(()))
        });
        if shown.await?.is_none() {
            return Err(Error::transient(format!(
                "{what}: PowerVS has accepted its VM and does not show it; the same call is repeated"
            )));
        }
        unclear.end(name);
        Ok(self.chosen(name).await?.map_or_else(|| id.to_owned(), |vm| vm.id))
    }

    /// Waits until PowerVS has built the VM or could not, or shortly before the deadline.
    async fn decided(&self, id: &InstanceId) -> Result<Created, Error> {
        let what = self.what();
        let look = || async {
            let seen = self.power_vs.look(id, self.until, &what).await?;
            Ok::<_, Failure>(match seen {
                None if self.power_vs.recent.may_be_denied(id, Instant::now()) => Decision::Open,
                None => Decision::Made(false),
                Some(vm) => match (vm.state, vm.fault) {
                    (VmState::Pending, _) => Decision::Open,
                    (VmState::Placed | VmState::Running | VmState::Stopping | VmState::Ended, _) => {
                        Decision::Made(true)
                    }
                    (VmState::Deleting | VmState::Deleted, _) => Decision::Made(false),
                    (VmState::Failed, fault) => Decision::Refused(fault.unwrap_or_default()),
                },
            })
        };
        match decide(&self.power_vs.decisions, end_of_wait(self.until), look).await? {
            Decision::Refused(said) => return Err(self.refused_late(id, &said).await),
            // No pod may join it. The caller repeats the call until it is gone.
            Decision::Made(false) => {
                return Err(Error::transient(format!(
                    "{what}: its VM is being deleted, or is gone; the same call is repeated"
                )));
            }
            // A build takes minutes. The id is known; a later refusal is `NotFound` of `addresses`.
            Decision::Made(true) | Decision::Open => {}
        }
        let chosen = Chosen {
            instance_type: Some(self.size.to_string()),
            zone: Some(self.power_vs.config.zone.clone()),
            market: None,
            image: Some(self.image.to_owned()),
            price: None,
        };
        Ok(Created { id: id.clone(), addresses: Vec::new(), chosen, disks: Vec::new() })
    }

    /// Handles a VM that PowerVS could not make: it goes.
    async fn refused_late(&self, id: &InstanceId, said: &Said) -> Error {
        let what = self.what();
        if let Err(error) = vms::delete(self.power, id.as_str(), &what, until()).await {
            // The same call finds the refused VM again.
            return Error::transient(format!(
                "{what}: PowerVS could not make it ({}), and its rest is not deleted yet: {error}",
                clip(&said.message)
            ));
        }
        self.power_vs.recent.seen(id);
        REFUSALS.refused(CREATE, &said.code, &said.message, 200, None).during(&what)
    }

    fn what(&self) -> String {
        format!("create of {}", self.request.name)
    }
}
