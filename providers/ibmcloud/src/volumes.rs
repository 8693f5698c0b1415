//! Attaches existing block-storage volumes as disks of a pod. May call `get_volume`, `get_instance`, and `create` and
//! `delete_instance_volume_attachment`.
//!
//! The guest finds a disk by its virtio serial number: the first 20 characters of the device's id, which IBM chooses when
//! it attaches the volume. Disks of the request are in the body of the create; others are attached to the VM that runs.

use futures_util::future::try_join_all;
use peerpod_provider_api::{DiskIdentity, DiskRequest, Error, InstanceId};
use peerpod_provider_cloud::{ApiCall, VmState, until};
use peerpod_provider_rest::{Method, read};
use serde_json::{Value, json};

use crate::IbmCloud;
use crate::ids;
use crate::vms::{self, DataVolume, IbmCloudVm};

/// Characters of a virtio serial number.
const SERIAL: usize = 20;

/// Returns the identity by which the guest finds a disk with this device.
pub(crate) fn identity(device: &str) -> DiskIdentity {
    DiskIdentity::Serial(device.chars().take(SERIAL).collect())
}

/// Checks the id of a volume, as IBM's CSI driver names it.
fn checked<'v>(volume: &'v str, what: &str) -> Result<&'v str, Error> {
    if ids::is_id(volume) {
        return Ok(volume);
    }
    let shown: String = volume.chars().take(40).collect();
    Err(Error::invalid(format!(
        "{what}: `{shown}` is not the id of a volume; they look like r006-1e09281b-f177-46fb-baf1-bc152b2e391a"
    )))
}

/// Checks, before any cost arises, that the disks exist and are free. Returns the zone of each.
pub(crate) async fn zones(ibm: &IbmCloud, disks: &[DiskRequest], what: &str) -> Result<Vec<String>, Error> {
    let zone = async |disk: &DiskRequest| {
        let volume = checked(&disk.volume, what)?;
        let missing = || {
            Error::invalid(format!(
                "{what}: there is no volume {volume} in the region; correct the pod's volume"
            ))
        };
        let found = get(ibm, volume, what).await?.ok_or_else(missing)?;
        if let Some(vm) = user(&found) {
            return Err(in_use(what, volume, vm));
        }
        let zone = read::text(&found, "/zone/name").map(str::to_owned);
        zone.ok_or_else(|| Error::transient(format!("{what}: IBM does not tell the zone of volume {volume}")))
    };
    try_join_all(disks.iter().map(zone)).await
}

async fn get(ibm: &IbmCloud, volume: &str, what: &str) -> Result<Option<Value>, Error> {
    let vpc = ibm.vpc()?;
    Ok(vpc.find(ApiCall::new("get_volume", volume, what), &vpc.get(["volumes", volume])).await?)
}

/// Returns the instance that has a volume.
fn user(volume: &Value) -> Option<&str> {
    read::text(volume, "/volume_attachments/0/instance/id")
}

/// A VM that is being deleted may still have the volume, so a later attempt may work.
fn in_use(what: &str, volume: &str, vm: &str) -> Error {
    Error::transient(format!(
        "{what}: volume {volume} is in use by {vm}; end the pod or VM that has it, it is tried again"
    ))
}

/// Attaches a disk, or finds it attached. Returns when IBM shows its device.
pub(crate) async fn attach(
    ibm: &IbmCloud,
    id: &InstanceId,
    disk: &DiskRequest,
) -> Result<DiskIdentity, Error> {
    let what = format!("attach of {} to {id}", disk.volume);
    let volume = checked(&disk.volume, &what)?;
    let gone = || Error::not_found(format!("{what}: there is no such VM of this node"));
    // IBM makes one change of a VM at a time.
    let _alone = ibm.changes.lock(id).await;
    let Some(vm) = ours(ibm, id, &what).await? else { return Err(gone()) };
    if disk_of(&vm, volume).is_none() {
        let found = get(ibm, volume, &what).await?;
        let found = found.ok_or_else(|| Error::not_found(format!("{what}: there is no such volume")))?;
        if let Some(other) = user(&found).filter(|other| *other != vm.id) {
            return Err(in_use(&what, volume, other));
        }
        let body = json!({"volume": {"id": volume}, "delete_volume_on_instance_delete": false});
        let vpc = ibm.vpc()?;
        let request = vpc.request(Method::POST, ["instances", &vm.id, "volume_attachments"]).json(&body);
        let call = ApiCall::new("create_instance_volume_attachment", &vm.id, &what);
        vpc.call(call, &request).await?;
    }
    let attached = ibm.looks.until(None, || async {
        let Some(vm) = ours(ibm, id, &what).await? else { return Err(gone()) };
        Ok(disk_of(&vm, volume).and_then(|disk| disk.device.as_deref()).map(identity))
    });
    attached.await?.ok_or_else(|| Error::transient(format!("{what}: the wait ended")))
}

/// Detaches a disk. Succeeds also if the disk or the VM does not exist, or the VM has another owner.
pub(crate) async fn detach(ibm: &IbmCloud, id: &InstanceId, volume: &str) -> Result<(), Error> {
    let what = format!("detach of {volume} from {id}");
    let volume = checked(volume, &what)?;
    let _alone = ibm.changes.lock(id).await;
    let attachment = async || {
        let vm = ours(ibm, id, &what).await?;
        Ok::<_, Error>(vm.and_then(|vm| Some((disk_of(&vm, volume)?.attachment.clone(), vm.id))))
    };
    let Some((attached, vm)) = attachment().await? else { return Ok(()) };
    let vpc = ibm.vpc()?;
    let request = vpc.request(Method::DELETE, ["instances", &vm, "volume_attachments", &attached]);
    let call = ApiCall::new("delete_instance_volume_attachment", &vm, &what);
    match vpc.call(call, &request).await {
        Ok(_) => {}
        Err(failure) if matches!(failure.error, Error::NotFound { .. }) => return Ok(()),
        Err(failure) => return Err(failure.error),
    }
    let detached =
        ibm.looks.until(None, || async { Ok::<_, Error>(attachment().await?.is_none().then_some(())) });
    detached.await?.ok_or_else(|| Error::transient(format!("{what}: the wait ended")))
}

/// Returns the VM if it is this owner's and can have disks. The read is fresh: a list may be late.
async fn ours(ibm: &IbmCloud, id: &InstanceId, what: &str) -> Result<Option<IbmCloudVm>, Error> {
    if !ids::is_id(id.as_str()) {
        return Ok(None);
    }
    let vm = vms::one(ibm.vpc()?, id.as_str(), what, until()).await?;
    let has_ended = |vm: &IbmCloudVm| matches!(vm.state, VmState::Deleting | VmState::Failed);
    Ok(vm.filter(|vm| ids::is_of(&ibm.owner, &vm.name) && !has_ended(vm)))
}

fn disk_of<'v>(vm: &'v IbmCloudVm, volume: &str) -> Option<&'v DataVolume> {
    vm.disks.iter().find(|disk| disk.volume == volume)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_serial_number_is_the_begin_of_the_devices_id() {
        let device = "0717-80b3e36e-41f4-40e9-bd56-beae81792a68-mqpzs";
        assert_eq!(identity(device), DiskIdentity::Serial("0717-80b3e36e-41f4-4".to_owned()));
        assert_eq!(identity("short"), DiskIdentity::Serial("short".to_owned()));
        assert!(checked("r006-a", "w").is_ok() && checked("projects/x", "w").is_err());
    }
}
