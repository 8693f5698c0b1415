//! Attaches existing managed disks as disks of a pod. May call Azure.
//!
//! The guest finds a disk by its logical unit, which the provider chooses. Disks of the request are in the body of the
//! create; others are attached to the VM that runs.

use futures_util::future::try_join_all;
use peerpod_provider_api::{DiskIdentity, DiskRequest, Error, InstanceId};
use peerpod_provider_cloud::{ApiCall, VmState, until};
use peerpod_provider_rest::{Method, read};
use serde_json::{Value, json};

use crate::Azure;
use crate::client::{Arm, COMPUTE, DISKS};
use crate::ids::{DISK, ResourceId};
use crate::operations;
use crate::provider::LOOKS;
use crate::refusal::REFUSALS;
use crate::vms::{self, AzureVm};

/// Action that attaches and detaches.
const CHANGE: &str = "VirtualMachines_AttachDetachDataDisks";
/// Logical units that Azure gives at most.
const MOST_LUNS: u32 = 64;

/// Reads the id of a disk, as Azure's CSI driver names it.
fn disk_id(arm: &Arm, volume: &str, what: &str) -> Result<ResourceId, Error> {
    ResourceId::of_kind(volume, DISK).filter(|id| arm.has(id)).ok_or_else(|| {
        let shown: String = volume.chars().take(40).collect();
        Error::invalid(format!(
            "{what}: `{shown}` is not the id of a managed disk of this subscription; they look like \
             /subscriptions/…/resourceGroups/…/providers/Microsoft.Compute/disks/…"
        ))
    })
}

/// Checks, before any cost arises, that the disks exist and are free. Returns the zone of each, in the planner's words;
/// `None`: it attaches to VMs in all zones.
pub(crate) async fn zones(
    azure: &Azure,
    disks: &[DiskRequest],
    what: &str,
) -> Result<Vec<Option<String>>, Error> {
    try_join_all(disks.iter().map(|disk| zone(azure, disk, what))).await
}

async fn zone(azure: &Azure, disk: &DiskRequest, what: &str) -> Result<Option<String>, Error> {
    let arm = azure.arm()?;
    let id = disk_id(arm, &disk.volume, what)?;
    let missing = || {
        let volume = &disk.volume;
        Error::invalid(format!(
            "{what}: there is no disk {volume} in the subscription; correct the pod's volume"
        ))
    };
    let found = get(arm, &id, what).await?.ok_or_else(missing)?;
    if let Some(vm) = read::text(&found, "/managedBy") {
        return Err(in_use(what, vm));
    }
    if let Some(zone) = read::text(&found, "/zones/0") {
        return Ok(Some(zone.to_owned()));
    }
    // A disk with copies in all zones attaches everywhere; another one without a zone only to VMs without a zone.
    let is_zone_redundant = read::text(&found, "/sku/name").is_some_and(|name| name.ends_with("_ZRS"));
    Ok((!is_zone_redundant).then(|| azure.config.region.clone()))
}

fn in_use(what: &str, vm: &str) -> Error {
    let vm = ResourceId::parse(vm).map_or_else(|| "another VM".to_owned(), |id| id.name().to_owned());
    Error::invalid(format!(
        "{what}: the disk is in use by {vm}; end the pod or VM that has it, it attaches to one VM only"
    ))
}

async fn get(arm: &Arm, id: &ResourceId, what: &str) -> Result<Option<Value>, Error> {
    let request = arm.get(&id.text(), DISKS);
    match arm.call(ApiCall::new("Disks_Get", id.name(), what), &request).await {
        Ok(answer) => Ok(Some(answer.json())),
        Err(failure) if matches!(failure.error, Error::NotFound { .. }) => Ok(None),
        Err(failure) => Err(failure.error),
    }
}

/// Attaches a disk, or finds it attached. Returns when Azure shows it on the VM.
pub(crate) async fn attach(
    azure: &Azure,
    id: &InstanceId,
    disk: &DiskRequest,
) -> Result<DiskIdentity, Error> {
    let what = format!("attach of {} to {}", short(&disk.volume), short(id.as_str()));
    let arm = azure.arm()?;
    let volume = disk_id(arm, &disk.volume, &what)?;
    let gone = || Error::not_found(format!("{what}: there is no such VM of this node"));
    let vm_id = azure.vm_id(id)?.ok_or_else(gone)?;
    // Azure makes one change of a VM at a time, and two changes must not choose one logical unit.
    let _alone = azure.changes.lock(id).await;
    let Some(vm) = ours(azure, &vm_id, &what).await? else { return Err(gone()) };
    if let Some(lun) = lun_of(&vm, &volume) {
        return Ok(DiskIdentity::Lun(lun));
    }
    let found = get(arm, &volume, &what).await?;
    let found = found.ok_or_else(|| Error::not_found(format!("{what}: there is no such disk")))?;
    if let Some(other) =
        read::text(&found, "/managedBy").filter(|other| !other.eq_ignore_ascii_case(&vm_id.text()))
    {
        return Err(in_use(&what, other));
    }
    let lun = free_lun(&vm).ok_or_else(|| Error::Quota {
        text: format!("{what}: the VM has no logical unit left; use fewer volumes"),
    })?;
    let body = json!({"dataDisksToAttach": [
        {"diskId": volume.text(), "lun": lun, "caching": "None", "deleteOption": "Detach"}]});
    let operation = change(arm, &vm_id, &body, &what).await?;
    let attached = LOOKS.until(None, || async {
        let Some(vm) = ours(azure, &vm_id, &what).await? else { return Err(gone()) };
        match lun_of(&vm, &volume) {
            Some(lun) => Ok(Some(lun)),
            None => failed(arm, &vm_id, operation.as_deref(), &what).await,
        }
    });
    let lun = attached.await?.ok_or_else(|| Error::transient(format!("{what}: the wait ended")))?;
    Ok(DiskIdentity::Lun(lun))
}

/// Detaches a disk. Succeeds also if the disk or the VM does not exist, or the VM has another owner.
pub(crate) async fn detach(azure: &Azure, id: &InstanceId, volume: &str) -> Result<(), Error> {
    let what = format!("detach of {} from {}", short(volume), short(id.as_str()));
    let arm = azure.arm()?;
    let volume = disk_id(arm, volume, &what)?;
    let Some(vm_id) = azure.vm_id(id)? else { return Ok(()) };
    let _alone = azure.changes.lock(id).await;
    let is_attached = async || {
        let vm = ours(azure, &vm_id, &what).await?;
        Ok::<_, Error>(vm.is_some_and(|vm| lun_of(&vm, &volume).is_some()))
    };
    if !is_attached().await? {
        return Ok(());
    }
    let body = json!({"dataDisksToDetach": [{"diskId": volume.text()}]});
    let operation = change(arm, &vm_id, &body, &what).await?;
    let detached = LOOKS.until(None, || async {
        match is_attached().await? {
            false => Ok(Some(())),
            true => failed(arm, &vm_id, operation.as_deref(), &what).await,
        }
    });
    detached.await?.ok_or_else(|| Error::transient(format!("{what}: the wait ended")))
}

/// Returns the VM if it is this owner's and can have disks.
async fn ours(azure: &Azure, id: &ResourceId, what: &str) -> Result<Option<AzureVm>, Error> {
    let vm = vms::one(azure.arm()?, id, what, until()).await.map_err(|failure| failure.error)?;
    let has_ended = |vm: &AzureVm| matches!(vm.state, VmState::Deleting | VmState::Failed);
    Ok(vm.filter(|vm| vm.marks.are_of(&azure.owner) && !has_ended(vm)))
}

/// Requests a change of a VM's disks. Returns the link of the operation, if the answer has one.
async fn change(arm: &Arm, vm: &ResourceId, body: &Value, what: &str) -> Result<Option<String>, Error> {
    let path = format!("{}/attachDetachDataDisks", vm.text());
    let request = arm.request(Method::POST, &path, COMPUTE).json(body);
    let answer = arm.call(ApiCall::new(CHANGE, vm.name(), what), &request).await?;
    Ok(answer.header("azure-asyncoperation").map(str::to_owned))
}

/// Fails if the operation has failed; otherwise the change is still open.
async fn failed<T>(
    arm: &Arm,
    vm: &ResourceId,
    operation: Option<&str>,
    what: &str,
) -> Result<Option<T>, Error> {
    match operations::failure(arm, operation, (vm.name(), what), until()).await {
        None => Ok(None),
        Some(said) => Err(REFUSALS.refused(CHANGE, &said.code, &said.message, 200, None).during(what)),
    }
}

fn lun_of(vm: &AzureVm, disk: &ResourceId) -> Option<u32> {
    let id = disk.text();
    vm.disks.iter().find(|(_, other)| *other == id).map(|(lun, _)| *lun)
}

fn free_lun(vm: &AzureVm) -> Option<u32> {
    (0..MOST_LUNS).find(|lun| !vm.disks.iter().any(|(used, _)| used == lun))
}

/// Returns the name at the end of an id, for texts.
pub(crate) fn short(id: &str) -> &str {
    id.rsplit('/').next().unwrap_or(id)
}
