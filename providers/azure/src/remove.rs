//! Deletes VMs, and the interfaces, disks and public addresses that a failure left without their VM. Azure deletes them
//! with the VM (`deleteOption`); a failure in between leaves them. May call Azure.
//!
//! Nothing is deleted that a fresh read has not shown to carry the owner's mark: a VM by its tags, a part by its name.

use std::collections::HashSet;

use peerpod_provider_api::{Error, Owner};
use peerpod_provider_cloud::refusal::together;
use peerpod_provider_cloud::{ApiCall, Strays, until};
use peerpod_provider_rest::{Method, read};
use serde_json::Value;
use tokio::time::Instant;

use crate::client::{Arm, COMPUTE, DISKS, NETWORK};
use crate::ids::{DISK, ResourceId, vm_of_part};
use crate::vms;

/// Kind of network interfaces.
const NIC: &str = "microsoft.network/networkinterfaces";
/// Kind of public addresses.
const PUBLIC: &str = "microsoft.network/publicipaddresses";
/// Stray parts that one search returns at most; the next search finds the others.
const MOST_STRAY: usize = 1000;

/// Requests the deletion of a VM. A VM that is gone is as good.
pub(crate) async fn vm(arm: &Arm, id: &ResourceId, what: &str, until: Instant) -> Result<(), Error> {
    let request = arm.request(Method::DELETE, &id.text(), COMPUTE).query("forceDeletion", "true");
    match arm.call(ApiCall::new("VirtualMachines_Delete", id.name(), what).until(until), &request).await {
        Ok(_) => Ok(()),
        Err(failure) if matches!(failure.error, Error::NotFound { .. }) => Ok(()),
        // Azure does the same work twice.
        Err(failure) if failure.message().contains("marked for deletion") => Ok(()),
        Err(failure) => Err(failure.error),
    }
}

/// Deletes the interfaces of a VM that does not exist any more.
pub(crate) async fn nics_of(
    arm: &Arm,
    owner: &Owner,
    id: &ResourceId,
    what: &str,
    until: Instant,
) -> Result<(), Error> {
    let nics = vms::nics(arm, what, until).await?;
    let of_vm = |nic: &vms::AzureNic| vm_of_part(owner, nic.id.name()).is_some_and(|vm| vm == id.name());
    for nic in nics.into_iter().filter(|nic| nic.vm.is_none()).filter(of_vm) {
        part(arm, &nic.id, what, until).await?;
    }
    Ok(())
}

/// Searches, and deletes the parts that had no VM at the last search, either. Returns their number.
pub(crate) async fn clean_again(strays: &Strays, arm: &Arm, owner: &Owner) -> Result<usize, Error> {
    let found = strays.again(stray(arm, owner).await?);
    delete(arm, owner, found).await
}

/// Deletes all parts without a VM at once. Returns their number.
pub(crate) async fn clean(arm: &Arm, owner: &Owner) -> Result<usize, Error> {
    let found = stray(arm, owner).await?;
    delete(arm, owner, found).await
}

/// Returns the ids of this owner's parts whose VM does not exist.
async fn stray(arm: &Arm, owner: &Owner) -> Result<Vec<String>, Error> {
    let (what, until) = ("look for parts without a VM", until());
    let nics = vms::nics(arm, what, until).await?;
    let mut parts: Vec<ResourceId> =
        nics.into_iter().filter(|nic| nic.vm.is_none()).map(|nic| nic.id).collect();
    let disks = arm.get(&format!("{}/providers/Microsoft.Compute/disks", arm.group()), DISKS);
    let disk = |value: &Value| {
        let id = ResourceId::of_kind(read::text(value, "/id")?, DISK)?;
        read::text(value, "/managedBy").is_none().then_some(id)
    };
    parts.extend(
        arm.list(ApiCall::new("Disks_ListByResourceGroup", "stray", what).until(until), &disks, disk).await?,
    );
    let addresses =
        arm.get(&format!("{}/providers/Microsoft.Network/publicIPAddresses", arm.group()), NETWORK);
    let address = |value: &Value| {
        let id = ResourceId::of_kind(read::text(value, "/id")?, PUBLIC)?;
        value.pointer("/properties/ipConfiguration").is_none_or(Value::is_null).then_some(id)
    };
    parts.extend(
        arm.list(ApiCall::new("PublicIPAddresses_List", "stray", what).until(until), &addresses, address)
            .await?,
    );
    // The VMs last: a part whose VM this list lacks has lost it.
    let vms = vms::list(arm, what, until).await?;
    let existing: HashSet<&str> = vms.iter().map(|vm| vm.id.name()).collect();
    let is_stray =
        |id: &ResourceId| vm_of_part(owner, id.name()).is_some_and(|vm| !existing.contains(vm.as_str()));
    Ok(parts.iter().filter(|id| is_stray(id)).take(MOST_STRAY).map(ResourceId::text).collect())
}

/// Deletes these parts; the failure of one does not keep the others.
async fn delete(arm: &Arm, owner: &Owner, found: Vec<String>) -> Result<usize, Error> {
    let (mut deleted, mut errors) = (0, Vec::new());
    for id in found.iter().filter_map(|text| ResourceId::parse(text)) {
        let Some(vm) = vm_of_part(owner, id.name()) else { continue };
        let what = format!("delete of the unused {}", id.name());
        // A list may be late; this read is not.
        let done = async {
            match vms::one(arm, &arm.vm(&vm), &what, until()).await? {
                Some(_) => Ok(false),
                None => part(arm, &id, &what, until()).await,
            }
        };
        match done.await {
            Ok(is_gone) => deleted += usize::from(is_gone),
            Err(error) => errors.push(error),
        }
    }
    if errors.is_empty() { Ok(deleted) } else { Err(together(errors)) }
}

/// Deletes a part; `false`: Azure keeps it for now.
async fn part(arm: &Arm, id: &ResourceId, what: &str, until: Instant) -> Result<bool, Error> {
    let (action, version) = match id.kind.as_str() {
        NIC => ("NetworkInterfaces_Delete", NETWORK),
        PUBLIC => ("PublicIPAddresses_Delete", NETWORK),
        DISK => ("Disks_Delete", DISKS),
        _ => return Ok(false),
    };
    let request = arm.request(Method::DELETE, &id.text(), version);
    match arm.call(ApiCall::new(action, "stray", what).until(until), &request).await {
        Ok(_) => Ok(true),
        Err(failure) if matches!(failure.error, Error::NotFound { .. }) => Ok(true),
        // It has a VM after all, or Azure reserves it for a VM that failed, for three minutes. The next search finds it.
        Err(failure)
            if matches!(failure.error, Error::Transient { .. }) && (400..500).contains(&failure.status()) =>
        {
            tracing::debug!("a part without a VM stays for now: {}", failure.error);
            Ok(false)
        }
        Err(failure) => Err(failure.error),
    }
}
