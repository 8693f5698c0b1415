//! Makes one VM, exactly once per key, and waits until the vCenter has decided on it. May call `CloneVM_Task`,
//! `PowerOnVM_Task`, `CreateFolder`, and the looks.
//!
//! **Exactly once per key.** The VM's name follows from owner and key, and is unique in the folder: another clone of the
//! name fails with `DuplicateName`. Its variables have the digest of the request.
//!
//! **Decision.** The vCenter accepts a clone and may refuse it later, in its task: before the VM is made, or when it is
//! switched on. A VM that is off without a mark of a delete is switched on, because its creator may have died between.

use std::time::Duration;

use peerpod_provider_api::{Chosen, CreateRequest, Created, Error, IdempotencyKey, InstanceId};
use peerpod_provider_cloud::{ApiCall, Offering, names};
use peerpod_provider_rest::{Decision, Failure, Said, decide, end_of_wait};
use tokio::time::Instant;

use crate::Vsphere;
use crate::body::VsphereVmSpec;
use crate::client::{FULL, LINKED};
use crate::provider::VsphereConnection;
use crate::refusal;
use crate::remove;
use crate::soap::{self, Method, Moref, text};
use crate::tasks;
use crate::vms::{Power, VsphereVm};

/// Longest wait for a VM whose name is taken and that is not shown: it is being made or deleted.
const UNSEEN: Duration = Duration::from_secs(5);

/// Create that is ready to be sent.
pub(crate) struct VsphereLaunch<'l> {
    pub vsphere: &'l Vsphere,
    pub connected: &'l VsphereConnection,
    pub request: &'l CreateRequest,
    pub key: &'l IdempotencyKey,
    pub offering: &'l Offering,
    pub shape: VsphereVmSpec<'l>,
    pub until: Instant,
}

impl VsphereLaunch<'_> {
    /// Makes the VM, or finds that of an earlier call.
    pub(crate) async fn one(&self) -> Result<Created, Error> {
        let name = names::unique(&self.vsphere.owner, self.key);
        let id = InstanceId::new(name.clone());
        let id = id.map_err(|_| Error::transient(format!("{}: its name is no id", self.what())))?;
        match self.cloned(&name).await {
            Ok(Decision::Made(())) => self.started(&id).await,
            Ok(Decision::Refused(said)) if said.code == "DuplicateName" => self.started(&id).await,
            Ok(Decision::Refused(said)) => {
                let failure = tasks::refused(self.call("CloneVM_Task"), said);
                Err(self.refused_late(&name, failure).await)
            }
            // The id is known; a later refusal is `NotFound` of `addresses`.
            Ok(Decision::Open) => Ok(self.created(id, None)),
            Err(failure) if failure.code() == "DuplicateName" => self.started(&id).await,
            Err(failure) => Err(self.refused(failure).await),
        }
    }

    fn what(&self) -> String {
        format!("create of {}", self.request.name)
    }

    fn call(&self, action: &'static str) -> ApiCall<'_> {
        ApiCall { action, owner: self.key.as_str(), what: &self.request.name, deadline: self.until }
    }

    /// Sends the clone when it is its turn, and keeps the turn until its task has ended: a host makes a limited number
    /// at a time.
    async fn cloned(&self, name: &str) -> Result<Decision<()>, Failure> {
        let method = self.shape.clone_of(name)?;
        let what = self.what();
        let action = if self.shape.template.snapshot.is_some() { LINKED } else { FULL };
        let call = ApiCall { what: &what, ..self.call(action) };
        let vcenter = &self.connected.vcenter;
        let make = || async {
            let task = vcenter.start(&what, &method).await?;
            let ended = self.vsphere.ended(&self.vsphere.clones, &task, self.until, &what).await?;
            if matches!(ended, Decision::Open) {
                self.vsphere.making.lock().insert(name.to_owned(), task);
            }
            Ok::<_, Failure>(ended)
        };
        vcenter.scheduler.run(call, make).await
    }

    /// Finds the VM of this name, and switches it on if it is off.
    async fn started(&self, id: &InstanceId) -> Result<Created, Error> {
        let what = self.what();
        let end = end_of_wait(self.until).min(Instant::now() + UNSEEN);
        let look = || async {
            let seen = self.connected.vms.ask(id.as_str().to_owned(), self.until, &what).await?;
            Ok::<_, Failure>(seen.map_or(Decision::Open, Decision::Made))
        };
        let decided = decide(&self.vsphere.looks, end, look).await.map_err(|failure| failure.error)?;
        let Decision::Made(vm) = decided else {
            let text =
                format!("{what}: its name is that of a VM which is being made or deleted; it is tried again");
            return Err(Error::transient(text));
        };
        self.check_marks(&vm)?;
        if vm.is_deleting {
            return Err(Error::transient(format!(
                "{what}: the VM {id} of its key is being deleted; it is tried again"
            )));
        }
        if vm.power == Power::On {
            return Ok(self.created(id.clone(), Some(&vm)));
        }
        let method = Method { name: "PowerOnVM_Task", this: vm.moref.clone(), arguments: String::new() };
        let call = ApiCall { what: &what, ..self.call(method.name) };
        match self.vsphere.run(call, &method).await {
            Ok(()) => Ok(self.created(id.clone(), None)),
            // The clone's own power-on was faster.
            Err(failure) if failure.code() == "InvalidPowerState" => Ok(self.created(id.clone(), None)),
            Err(failure) => Err(self.refused_late(&vm.name, failure).await),
        }
    }

    /// Refuses a VM of another owner or of another request.
    fn check_marks(&self, vm: &VsphereVm) -> Result<(), Error> {
        let (what, name) = (self.what(), &vm.name);
        if !vm.is_of(&self.vsphere.owner) {
            return Err(Error::key_reused(format!(
                "{what}: {name} has its name and another owner; delete it, or give this cluster another name"
            )));
        }
        if vm.marks.digest.as_deref() != Some(self.request.digest().as_str()) {
            return Err(Error::key_reused(format!(
                "{what}: its key was used before with another request, which made {name}; this is a bug in Peerpod, \
                 report it"
            )));
        }
        Ok(())
    }

    /// Returns the error of a call that the vCenter refused.
    async fn refused(&self, failure: Failure) -> Error {
        match &failure.error {
            Error::Capacity { .. } => self.exhausted(failure),
            Error::Invalid { .. } | Error::NotFound { .. } => {
                // The cached facts may be out of date; the next create loads them again.
                self.vsphere.facts.forget().await;
                self.connected.folder.forget();
                match failure.error {
                    // Not of the VM: of the template, the host or the datastore.
                    Error::NotFound { text } => Error::invalid(text),
                    error => error,
                }
            }
            _ => failure.error,
        }
    }

    /// Returns the error of a call that the vCenter accepted and refused later. Deletes what is left of the VM.
    async fn refused_late(&self, name: &str, failure: Failure) -> Error {
        let is_final = !matches!(failure.error, Error::Transient { .. } | Error::Throttled { .. });
        if is_final && let Err(error) = self.clear(name).await {
            return Error::transient(format!("{}; the rest is still there: {error}", failure.error));
        }
        self.refused(failure).await
    }

    async fn clear(&self, name: &str) -> Result<(), Error> {
        let what = self.what();
        match self.connected.vms.ask(name.to_owned(), self.until, &what).await? {
            Some(vm) if self.check_marks(&vm).is_ok() => remove::remove(self.vsphere, &vm, &what).await,
            _ => Ok(()),
        }
    }

    /// Marks the offering as exhausted. Returns the error with the vCenter's words and the remedy.
    fn exhausted(&self, failure: Failure) -> Error {
        let (planner, code) = (&self.vsphere.planner, failure.code().to_owned());
        planner.exhausted(self.offering, &code);
        let tried = planner.capacity_error(&self.request.name, &[(self.offering.clone(), code)]);
        match (tried, failure.error) {
            (Error::Capacity { offering, rejected, .. }, Error::Capacity { text, .. }) => {
                Error::Capacity { offering, rejected, text }
            }
            (_, error) => error,
        }
    }

    /// Returns the answer for a VM, and records that it was made.
    fn created(&self, id: InstanceId, seen: Option<&VsphereVm>) -> Created {
        let now = Instant::now();
        self.vsphere.recent.made(&id, self.key, &self.request.name, now);
        if seen.is_some() {
            self.vsphere.recent.seen(&id);
        }
        let addresses = seen.map(|vm| vm.addresses.clone()).unwrap_or_default();
        let (vcpus, memory) = self.shape.size();
        let chosen = Chosen {
            instance_type: Some(format!("{vcpus} CPUs, {memory} MiB")),
            zone: Some(self.shape.place.name.clone()),
            market: None,
            image: Some(self.shape.template.path.clone()),
            price: None,
        };
        Created { id, addresses, chosen, disks: Vec::new() }
    }
}

/// Finds the folder of the VMs; makes it, and those above it, if it is missing.
pub(crate) async fn folder(vsphere: &Vsphere, what: &str) -> Result<Moref, Error> {
    let connected = vsphere.connected()?;
    if let Some(known) = connected.folder.known() {
        return Ok(known);
    }
    let _alone = vsphere.folder.lock().await;
    if let Some(found) = connected.folder.find(what).await? {
        return Ok(found);
    }
    let unknown = |path: &str| {
        Error::invalid(format!("{what}: there is no {path}; correct provider.vsphere.datacenter"))
    };
    let mut path = vsphere.config.vm_root();
    let mut parent = connected.vcenter.by_path(what, &path).await?.ok_or_else(|| unknown(&path))?;
    for name in vsphere.config.folder.split('/') {
        path = format!("{path}/{name}");
        parent = match connected.vcenter.by_path(what, &path).await? {
            Some(found) => found,
            None => make_folder(connected, &parent, name, &path, what).await?,
        };
    }
    connected.folder.found(&parent);
    Ok(parent)
}

async fn make_folder(
    connected: &VsphereConnection,
    parent: &Moref,
    name: &str,
    path: &str,
    what: &str,
) -> Result<Moref, Error> {
    let method = Method { name: "CreateFolder", this: parent.clone(), arguments: text("name", name) };
    match connected.vcenter.call(ApiCall::new(method.name, path, what), &method, soap::returned).await {
        Ok(Some(made)) => return Ok(made),
        Ok(None) => {}
        // Another node was faster.
        Err(failure) if failure.code() == "DuplicateName" => {}
        Err(failure) => return Err(failure.error),
    }
    let found = connected.vcenter.by_path(what, path).await?;
    found.ok_or_else(|| {
        Error::transient(format!("{what}: the folder {path} is not shown yet; it is tried again"))
    })
}

/// Returns the reason why a clone has failed, if it has.
pub(crate) fn failed(said: &Said) -> Error {
    refusal::error("CloneVM_Task", said, 200)
}
