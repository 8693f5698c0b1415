//! Attaches existing EBS volumes as disks of a pod, as soon as the VM runs. May call DescribeVolumes, AttachVolume,
//! DetachVolume.
//!
//! The guest finds a disk by the serial number of its NVMe controller, which is the volume's id without the dash (EC2
//! User Guide, "Identify NVMe devices"). The device name that EC2 requires has no meaning on such machines.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};

use aws_sdk_ec2::types::{Volume, VolumeAttachmentState, VolumeState};
use futures_util::future::try_join_all;
use parking_lot::Mutex;
use peerpod_provider_api::{DiskIdentity, DiskRequest, Error, InstanceId};
use peerpod_provider_cloud::batch::{self, what};
use peerpod_provider_cloud::{Lookup, VmState, Window, until};
use tokio::time::Instant;

use crate::config::is_id;
use crate::ec2::Aws;
use crate::ec2::client::Ec2;
use crate::ec2::lookup;
use crate::ec2::provider::LOOKS;

/// A volume as EC2 shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EbsVolume {
    pub zone: String,
    pub is_available: bool,
    /// VMs that have the volume, each with whether its guest can already use it.
    pub on: Vec<(String, bool)>,
    /// EC2's name of the state.
    pub state: String,
}

/// Batcher that looks up single volumes. `None`: there is no such volume.
pub(crate) type VolumeLookup = Lookup<EbsVolume>;

pub(crate) fn inspect(ec2: Ec2) -> VolumeLookup {
    batch::lookup(Window::LIST, move |ids, until| by_ids(ec2.clone(), ids, until))
}

async fn by_ids(ec2: Ec2, ids: Vec<String>, until: Instant) -> Result<HashMap<String, EbsVolume>, Error> {
    let ec2 = &ec2;
    let inspect = |ids: Vec<String>| async move {
        let what = what("look at", "volume", &ids);
        let ask = ec2.client.describe_volumes().set_volume_ids(Some(ids));
        ec2.call("DescribeVolumes", "volumes", &what, until, || ask.clone().send()).await
    };
    let (found, _) = lookup::of_known(ids, "vol-", |code| code == "InvalidVolume.NotFound", inspect).await?;
    Ok(found.and_then(|found| found.volumes).unwrap_or_default().into_iter().filter_map(seen).collect())
}

fn seen(volume: Volume) -> Option<(String, EbsVolume)> {
    let attachments = volume.attachments.unwrap_or_default().into_iter();
    let on = attachments
        .filter(|one| one.state != Some(VolumeAttachmentState::Detached))
        .filter_map(|one| Some((one.instance_id?, one.state == Some(VolumeAttachmentState::Attached))));
    let state = volume.state.unwrap_or(VolumeState::Error);
    let seen = EbsVolume {
        zone: volume.availability_zone.unwrap_or_default(),
        is_available: state == VolumeState::Available,
        on: on.collect(),
        state: state.as_str().to_owned(),
    };
    Some((volume.volume_id?, seen))
}

/// Returns the identity by which the guest finds the disk.
pub(crate) fn identity(volume: &str) -> DiskIdentity {
    DiskIdentity::Serial(volume.replacen("vol-", "vol", 1))
}

/// Checks that the text has the form of a volume id.
fn checked(volume: &str, what: &str) -> Result<(), Error> {
    if is_id(volume, "vol-") {
        return Ok(());
    }
    let shown: String = volume.chars().take(40).collect();
    Err(Error::invalid(format!(
        "{what}: `{shown}` is not the id of an EBS volume; they look like vol-0123456789abcdef0"
    )))
}

/// Device names of attachments on each VM, apart from those that the VM started with.
#[derive(Debug, Default)]
pub(crate) struct Names(Mutex<HashMap<String, HashSet<String>>>);

impl Names {
    /// Reserves a device name that is free on this VM. EC2 recommends `/dev/sd[f-p]`; `/dev/xvd[b-c][a-z]` is as good
    /// and is enough for every type.
    fn take(&self, vm: &str, used: &[String]) -> Option<String> {
        let mut all = self.0.lock();
        // The names of a VM matter for a short time only, so the table is cleared instead of growing.
        if all.len() > 10_000 {
            all.clear();
        }
        let taken = all.entry(vm.to_owned()).or_default();
        let names = ('b'..='c').flat_map(|a| ('a'..='z').map(move |b| format!("/dev/xvd{a}{b}")));
        let free = names.into_iter().find(|name| !taken.contains(name) && !used.contains(name))?;
        taken.insert(free.clone());
        Some(free)
    }

    fn give_back(&self, vm: &str, name: &str) {
        let mut all = self.0.lock();
        if let Some(taken) = all.get_mut(vm) {
            taken.remove(name);
        }
    }

    /// Drops all names of a VM.
    pub(crate) fn forget(&self, vm: &str) {
        self.0.lock().remove(vm);
    }
}

/// Checks, before any cost arises, that the volumes exist and are free. Returns the zone of each.
pub(crate) async fn zones(aws: &Aws, disks: &[DiskRequest], what: &str) -> Result<Vec<String>, Error> {
    try_join_all(disks.iter().map(|disk| zone(aws, disk, what))).await
}

async fn zone(aws: &Aws, DiskRequest { volume, .. }: &DiskRequest, what: &str) -> Result<String, Error> {
    checked(volume, what)?;
    let seen = aws.ec2().await?.volumes.ask(volume.clone(), until(), what).await?;
    let seen = seen.ok_or_else(|| {
        Error::invalid(format!(
            "{what}: there is no volume {volume} in this region; correct the pod's volume"
        ))
    })?;
    if let Some((vm, _)) = seen.on.first() {
        return Err(Error::invalid(format!(
            "{what}: volume {volume} is in use by {vm}; end the pod or instance that has it, it attaches to one VM only"
        )));
    }
    if !seen.is_available {
        return Err(Error::invalid(format!(
            "{what}: volume {volume} is {}, not available; wait until it is, or repair it",
            seen.state
        )));
    }
    Ok(seen.zone)
}

/// Attaches a volume, or finds it attached. Returns when the guest can use it.
pub(crate) async fn attach(aws: &Aws, id: &InstanceId, disk: &DiskRequest) -> Result<DiskIdentity, Error> {
    let volume = &disk.volume;
    let what = format!("attach of {volume} to {id}");
    checked(volume, &what)?;
    let ec2 = aws.ec2().await?;
    let is_asked = AtomicBool::new(false);
    let attached = LOOKS.until(None, || async {
        let seen = ec2.volumes.ask(volume.clone(), until(), &what).await?;
        let seen = seen.ok_or_else(|| Error::not_found(format!("{what}: there is no such volume")))?;
        match seen.on.iter().find(|(vm, _)| vm == id.as_str()) {
            Some((_, true)) => {
                // An attachment that this call did not request proves no owner.
                if !is_asked.load(Ordering::Relaxed) {
                    aws.wait_for(id, &what, |_| true).await?;
                }
                return Ok(Some(identity(volume)));
            }
            Some((_, false)) => {}
            None if !is_asked.load(Ordering::Relaxed) || seen.is_available => {
                if let Some((other, _)) = seen.on.first() {
                    return Err(Error::invalid(format!(
                        "{what}: it is in use by {other}; end the pod or instance that has it, it attaches \
                         to one VM only"
                    )));
                }
                is_asked.store(ask(aws, id, volume, &seen, &what).await?, Ordering::Relaxed);
            }
            None => {}
        }
        Ok(None)
    });
    attached.await?.ok_or_else(|| Error::transient(format!("{what}: the wait ended")))
}

/// Requests the attachment as soon as the VM runs. `false`: it must be requested again.
async fn ask(aws: &Aws, id: &InstanceId, volume: &str, seen: &EbsVolume, what: &str) -> Result<bool, Error> {
    let ec2 = aws.ec2().await?;
    let vm = aws.wait_for(id, what, |vm| vm.state != VmState::Pending).await?;
    if matches!(vm.state, VmState::Deleting | VmState::Deleted) {
        return Err(Error::not_found(format!("{what}: the VM has ended")));
    }
    if vm.zone.as_ref().is_some_and(|zone| *zone != seen.zone) {
        return Err(Error::invalid(format!(
            "{what}: the volume is in {} and the VM in {}; give a subnet in the volume's zone",
            seen.zone,
            vm.zone.unwrap_or_default()
        )));
    }
    let Some(name) = aws.names.take(id.as_str(), &vm.devices) else {
        return Err(Error::Quota {
            text: format!("{what}: the VM has no device name left; use fewer volumes"),
        });
    };
    let ask = ec2.ec2.client.attach_volume().volume_id(volume).instance_id(id.as_str()).device(&name);
    let asked = ec2.ec2.call("AttachVolume", id.as_str(), what, until(), || ask.clone().send()).await;
    let Err(failure) = asked else { return Ok(true) };
    let in_use = failure.error.to_string().contains("already in use");
    match failure.code() {
        // An attachment that EC2 does not list yet has the name. The name stays reserved, and the next one is tried.
        "InvalidParameterValue" | "InvalidDevice.InUse" if in_use => return Ok(false),
        _ => aws.names.give_back(id.as_str(), &name),
    }
    match failure.code() {
        // The volume is being attached, or is on another VM; the next lookup shows it. Or EC2 listed the VM as running
        // a moment ago; its answers are not consistent yet.
        "VolumeInUse" | "IncorrectState" | "IncorrectInstanceState" => Ok(false),
        _ => Err(failure.into()),
    }
}

/// Detaches a volume. Succeeds also if the volume does not exist, or is on no VM or on another one, and if the VM has
/// another owner.
pub(crate) async fn detach(aws: &Aws, id: &InstanceId, volume: &str) -> Result<(), Error> {
    let what = format!("detach of {volume} from {id}");
    checked(volume, &what)?;
    let connected = aws.ec2().await?;
    let vm = connected.inspect.ask(id.as_str().to_owned(), until(), &what).await?;
    if !vm.is_some_and(|vm| vm.marks.are_of(&aws.owner)) {
        return Ok(());
    }
    let ec2 = &connected.ec2;
    let ask = ec2.client.detach_volume().volume_id(volume).instance_id(id.as_str());
    match ec2.call("DetachVolume", id.as_str(), &what, until(), || ask.clone().send()).await {
        Ok(_) => Ok(()),
        Err(failure) => match failure.code() {
            "IncorrectState" | "InvalidAttachment.NotFound" | "InvalidVolume.NotFound" => Ok(()),
            code if code.starts_with("InvalidInstanceID") => Ok(()),
            _ => Err(failure.into()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_finds_the_volume_by_its_id_without_dash() {
        assert_eq!(identity("vol-01234567890abcdef"), DiskIdentity::Serial("vol01234567890abcdef".into()));
        for bad in ["", "vol-", "vol-xyz", "ebs-01234567", "vol-0123456789ABCDEF", "vol-1; x"] {
            let error = checked(bad, "attach").unwrap_err();
            assert!(error.to_string().contains("they look like vol-"), "{error}");
        }
        checked("vol-01234567890abcdef", "attach").unwrap();
    }

    #[test]
    fn no_two_disks_of_a_vm_get_one_name() {
        let names = Names::default();
        let used = vec!["/dev/xvda".to_owned(), "/dev/xvdba".to_owned()];
        let taken: HashSet<String> = (0..51).map(|_| names.take("i-1", &used).unwrap()).collect();
        assert!(taken.len() == 51 && !taken.contains("/dev/xvdba"));
        assert_eq!(names.take("i-1", &used), None);
        assert!(names.take("i-2", &used).is_some());
        names.give_back("i-1", "/dev/xvdbb");
        assert_eq!(names.take("i-1", &used).as_deref(), Some("/dev/xvdbb"));
        names.forget("i-1");
        assert!(names.take("i-1", &used).is_some());
    }
}
