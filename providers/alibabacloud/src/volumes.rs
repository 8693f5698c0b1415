//! Attaches existing cloud disks as disks of a pod, as soon as the VM runs: RunInstances takes no existing disk. May call
//! DescribeDisks, AttachDisk, DetachDisk.
//!
//! The guest finds a disk by its serial number, which the cloud shows, or which is the disk's id without `d-` ("Query the
//! serial number of a disk").

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::try_join_all;
use peerpod_provider_api::{DiskIdentity, DiskRequest, Error, InstanceId};
use peerpod_provider_cloud::batch::{self, what};
use peerpod_provider_cloud::refusal::clip;
use peerpod_provider_cloud::{ApiCall, Lookup, VmState, until};
use peerpod_provider_rest::read;
use serde_json::Value;
use tokio::time::Instant;

use crate::Alibaba;
use crate::client::{Ecs, PAGE, Parameters};
use crate::config::is_id;
use crate::vms::WINDOW;

/// Number of characters of its serial number that a virtio disk shows.
const VIRTIO: usize = 20;

/// A disk as Alibaba Cloud shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AlibabaCloudDisk {
    pub zone: String,
    /// The cloud's word for the state.
    pub state: String,
    /// VMs that have the disk.
    pub on: Vec<String>,
    /// Serial number; `None`: the cloud does not show it.
    serial: Option<String>,
}

impl AlibabaCloudDisk {
    fn of(body: &Value) -> Option<(String, AlibabaCloudDisk)> {
        let text = |pointer| read::text(body, pointer).map(str::to_owned);
        let attachments = read::list(body, "/Attachments/Attachment").iter();
        let mut on: Vec<String> =
            attachments.filter_map(|one| read::text(one, "/InstanceId")).map(str::to_owned).collect();
        on.extend(text("/InstanceId"));
        on.sort();
        on.dedup();
        let disk = AlibabaCloudDisk {
            zone: text("/ZoneId").unwrap_or_default(),
            state: text("/Status").unwrap_or_default(),
            on,
            serial: text("/SerialNumber"),
        };
        Some((text("/DiskId")?, disk))
    }

    /// Returns the identity by which the guest finds the disk.
    fn identity(&self, volume: &str) -> DiskIdentity {
        let by_id = || volume.strip_prefix("d-").unwrap_or(volume).chars().take(VIRTIO).collect();
        DiskIdentity::Serial(self.serial.clone().unwrap_or_else(by_id))
    }

    fn in_use(&self, volume: &str, what: &str) -> Result<(), Error> {
        match self.on.first() {
            Some(vm) => Err(Error::invalid(format!(
                "{what}: disk {volume} is in use by {vm}; end the pod or instance that has it, it attaches to one \
                 VM only"
            ))),
            None => Ok(()),
        }
    }
}

/// Batcher that looks up single disks. `None`: there is no such disk.
pub(crate) type DiskLookup = Lookup<AlibabaCloudDisk>;

pub(crate) fn inspect(ecs: Ecs) -> DiskLookup {
    batch::lookup(WINDOW, move |ids, until| by_ids(ecs.clone(), ids, until))
}

async fn by_ids(
    ecs: Ecs,
    ids: Vec<String>,
    until: Instant,
) -> Result<HashMap<String, AlibabaCloudDisk>, Error> {
    let what = what("look at", "disk", &ids);
    let mut found = HashMap::new();
    let call = ApiCall::new("DescribeDisks", "disks", &what).until(until);
    let asked = Parameters::default().ids("DiskIds", &ids).with(PAGE.0, PAGE.1);
    ecs.pages(call, asked, |page| {
        found.extend(read::list(page, "/Disks/Disk").iter().filter_map(AlibabaCloudDisk::of));
        Ok(())
    })
    .await?;
    Ok(found)
}

/// Checks that the text has the form of a disk's id.
fn checked(volume: &str, what: &str) -> Result<(), Error> {
    if is_id(volume, "d-") {
        return Ok(());
    }
    let shown: String = volume.chars().take(40).collect();
    Err(Error::invalid(format!(
        "{what}: `{}` is not the id of a cloud disk; they look like d-2ze0123456789abcdefg",
        clip(&shown)
    )))
}

/// Checks, before any cost arises, that the disks exist and are free. Returns the zone of each.
pub(crate) async fn zones(
    alibaba: &Alibaba,
    disks: &[DiskRequest],
    what: &str,
) -> Result<Vec<String>, Error> {
    try_join_all(disks.iter().map(|DiskRequest { volume, .. }| async move {
        checked(volume, what)?;
        let seen = alibaba.connected()?.disks.ask(volume.clone(), until(), what).await?;
        let seen = seen.ok_or_else(|| {
            Error::invalid(format!(
                "{what}: there is no disk {volume} in this region; correct the pod's volume"
            ))
        })?;
        seen.in_use(volume, what)?;
        if seen.state != "Available" {
            return Err(Error::invalid(format!(
                "{what}: disk {volume} is {}, not Available; wait until it is, or repair it",
                clip(&seen.state)
            )));
        }
        Ok(seen.zone)
    }))
    .await
}

/// Attaches a disk, or finds it attached. Returns when the guest can use it.
pub(crate) async fn attach(
    alibaba: &Alibaba,
    id: &InstanceId,
    disk: &DiskRequest,
) -> Result<DiskIdentity, Error> {
    let volume = &disk.volume;
    let what = format!("attach of {} to {id}", clip(volume));
    checked(volume, &what)?;
    let connected = alibaba.connected()?;
    let is_asked = AtomicBool::new(false);
    let attached = alibaba.looks.until(None, || async {
        let seen = connected.disks.ask(volume.clone(), until(), &what).await?;
        let seen = seen.ok_or_else(|| Error::not_found(format!("{what}: there is no such disk")))?;
        let is_on_it = seen.on.iter().any(|vm| vm == id.as_str());
        match (is_on_it, seen.state.as_str()) {
            (true, "In_use") => {
                // An attachment that this call did not request proves no owner.
                if !is_asked.load(Ordering::Relaxed) {
                    alibaba.wait_for(id, &what, |_| true).await?;
                }
                return Ok(Some(seen.identity(volume)));
            }
            (true, _) => {}
            (false, state) if !is_asked.load(Ordering::Relaxed) || state == "Available" => {
                seen.in_use(volume, &what)?;
                is_asked.store(ask(alibaba, id, volume, &seen, &what).await?, Ordering::Relaxed);
            }
            (false, _) => {}
        }
        Ok::<_, Error>(None)
    });
    attached.await?.ok_or_else(|| Error::transient(format!("{what}: the wait ended")))
}

/// Requests the attachment as soon as the VM runs. `false`: it must be requested again.
async fn ask(
    alibaba: &Alibaba,
    id: &InstanceId,
    volume: &str,
    seen: &AlibabaCloudDisk,
    what: &str,
) -> Result<bool, Error> {
    let vm = alibaba.wait_for(id, what, |vm| vm.state == VmState::Running).await?;
    if !vm.state.lives() {
        return Err(Error::not_found(format!("{what}: the VM has ended")));
    }
    if let Some(zone) = vm.zone.filter(|zone| *zone != seen.zone) {
        return Err(Error::invalid(format!(
            "{what}: the disk is in {} and the VM in {zone}; give a vSwitch in the disk's zone",
            seen.zone
        )));
    }
    let asked = Parameters::default()
        .with("InstanceId", id.as_str())
        .with("DiskId", volume)
        .with("DeleteWithInstance", "false");
    let call = ApiCall::new("AttachDisk", id.as_str(), what);
    let Err(failure) = alibaba.connected()?.ecs.ask(call, asked).await else { return Ok(true) };
    // The disk is being attached, or is on another VM, which the next look shows. Or the cloud listed the VM as running a
    // moment ago; its answers are not consistent yet.
    let is_early = ["IncorrectDiskStatus", "IncorrectInstanceStatus", "InvalidOperation.Conflict"]
        .iter()
        .any(|code| failure.code().starts_with(code));
    if is_early { Ok(false) } else { Err(failure.into()) }
}

/// Detaches a disk. Succeeds also if the disk does not exist, or is on no VM or on another one, and if the VM has another
/// owner.
pub(crate) async fn detach(alibaba: &Alibaba, id: &InstanceId, volume: &str) -> Result<(), Error> {
    let what = format!("detach of {} from {id}", clip(volume));
    checked(volume, &what)?;
    if !is_id(id.as_str(), "i-") {
        return Ok(());
    }
    let connected = alibaba.connected()?;
    let vm = connected.vms.ask(id.as_str().to_owned(), until(), &what).await?;
    if !vm.is_some_and(|vm| vm.marks.are_of(&alibaba.owner)) {
        return Ok(());
    }
    let seen = connected.disks.ask(volume.to_owned(), until(), &what).await?;
    if !seen.is_some_and(|seen| seen.on.iter().any(|vm| vm == id.as_str())) {
        return Ok(());
    }
    let asked = Parameters::default().with("InstanceId", id.as_str()).with("DiskId", volume);
    match connected.ecs.ask(ApiCall::new("DetachDisk", id.as_str(), &what), asked).await {
        Ok(_) => Ok(()),
        // The disk or the VM is gone, or another call has detached it.
        Err(failure) if matches!(failure.error, Error::NotFound { .. }) => Ok(()),
        Err(failure) if failure.code() == "DiskNotAttached" => Ok(()),
        Err(failure) => Err(failure.into()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_guest_finds_the_disk_by_its_serial_number() {
        let body = json!({"DiskId": "d-2ze0123456789abcdefg", "ZoneId": "z", "Status": "In_use", "InstanceId": "i-1",
            "Attachments": {"Attachment": [{"InstanceId": "i-1"}, {"InstanceId": "i-2"}]}});
        let (id, disk) = AlibabaCloudDisk::of(&body).unwrap();
        assert_eq!(disk.on, ["i-1", "i-2"]);
        assert_eq!(disk.identity(&id), DiskIdentity::Serial("2ze0123456789abcdefg".into()));
        let mut shown = body;
        shown["SerialNumber"] = json!("bp18um4r4f2fve24");
        let (id, disk) = AlibabaCloudDisk::of(&shown).unwrap();
        assert_eq!(disk.identity(&id), DiskIdentity::Serial("bp18um4r4f2fve24".into()));
    }

    #[test]
    fn a_volume_that_is_no_disk_is_named() {
        for bad in ["", "d-", "d-XYZ01234567", "vol-0123456789", "d-1; x"] {
            let error = checked(bad, "attach").unwrap_err();
            assert!(error.to_string().contains("they look like d-"), "{error}");
        }
        checked("d-2ze0123456789abcdefg", "attach").unwrap();
    }
}
