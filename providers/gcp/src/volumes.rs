//! Attaches existing persistent disks as disks of a pod. May call `get` of disks and regionDisks, `attachDisk` and
//! `detachDisk` of instances, and `get` of zoneOperations.
//!
//! The guest finds a disk by its device name, which this provider chooses: page 0x83 of a SCSI disk and the vendor's
//! bytes of an NVMe namespace hold it.

use futures_util::future::try_join_all;
use peerpod_provider_api::{CreateRequest, DiskIdentity, DiskRequest, Error, InstanceId};
use peerpod_provider_cloud::refusal::clip;
use peerpod_provider_cloud::{ApiCall, VmState, until};
use peerpod_provider_rest::{Decision, Failure, decide, end_of_wait, read};
use serde_json::Value;

use crate::Gcp;
use crate::body::DataDisk;
use crate::create::{failure_of, identity, is_done};
use crate::links::{self, PersistentDisk, VmId};
use crate::vms::{GcpVm, is_missing};

/// Disk as Google shows it.
struct Found {
    zones: Vec<String>,
    /// Paths of the VMs that have the disk.
    users: Vec<String>,
}

/// Returns the disk that a volume handle names.
fn parse(gcp: &Gcp, volume: &str, what: &str) -> Result<PersistentDisk, Error> {
    PersistentDisk::parse(volume, &gcp.config.project).ok_or_else(|| {
        Error::invalid(format!(
            "{what}: `{}` is not a persistent disk; they look like projects/my-project-1/zones/us-central1-a/disks/pvc-1",
            clip(&volume.chars().take(80).collect::<String>())
        ))
    })
}

/// Returns the disks of a request, as the call for its VM takes them.
pub(crate) fn disks_of(gcp: &Gcp, request: &CreateRequest) -> Result<Vec<DataDisk>, Error> {
    let what = format!("create of {}", request.name);
    let disk = |disk: &DiskRequest| {
        Ok(DataDisk { disk: parse(gcp, &disk.volume, &what)?, read_only: disk.read_only })
    };
    request.disks.iter().map(disk).collect()
}

/// Checks, before any cost arises, that the disks exist and are free. Returns the zones that have all of them; `None`:
/// there are no disks.
pub(crate) async fn zones(gcp: &Gcp, request: &CreateRequest) -> Result<Option<Vec<String>>, Error> {
    let what = format!("create of {}", request.name);
    let each = try_join_all(request.disks.iter().map(|disk| async {
        let found = find(gcp, &parse(gcp, &disk.volume, &what)?, &what).await?;
        let found = found.ok_or_else(|| {
            let text = format!("{what}: there is no disk {}; correct the pod's volume", clip(&disk.volume));
            Error::invalid(text)
        })?;
        if let Some(user) = found.users.first().filter(|_| !disk.read_only) {
            return Err(in_use(&what, &disk.volume, user));
        }
        Ok(found.zones)
    }));
    let mut each = each.await?.into_iter();
    let Some(first) = each.next() else { return Ok(None) };
    Ok(Some(
        each.fold(first, |common, zones| common.into_iter().filter(|zone| zones.contains(zone)).collect()),
    ))
}

fn in_use(what: &str, volume: &str, user: &str) -> Error {
    Error::transient(format!(
        "{what}: disk {} is in use by {}; end the pod or VM that has it, it is tried again",
        clip(volume),
        links::last(user)
    ))
}

/// Looks at a disk; `None`: there is none.
async fn find(gcp: &Gcp, disk: &PersistentDisk, what: &str) -> Result<Option<Found>, Error> {
    let action = if disk.is_regional { "regionDisks.get" } else { "disks.get" };
    let path = disk.path();
    let body = match gcp.connected()?.compute.get(ApiCall::new(action, &path, what), &path, &[]).await {
        Ok(body) => body,
        Err(failure) if is_missing(&failure) => return Ok(None),
        Err(failure) => return Err(failure.into()),
    };
    let texts = |pointer| read::list(&body, pointer).iter().filter_map(Value::as_str).map(str::to_owned);
    let zones = match disk.is_regional {
        true => texts("/replicaZones").map(|link| links::last(&link).to_owned()).collect(),
        false => vec![disk.place.clone()],
    };
    Ok(Some(Found { zones, users: texts("/users").collect() }))
}

/// Attaches a disk, or finds it attached. Returns when the guest can use it.
pub(crate) async fn attach(gcp: &Gcp, id: &InstanceId, disk: &DiskRequest) -> Result<DiskIdentity, Error> {
    let what = format!("attach of {} to {id}", clip(&disk.volume));
    let parsed = parse(gcp, &disk.volume, &what)?;
    let vm = gcp.wait_for(id, &what, |vm| vm.state != VmState::Pending).await?;
    if !vm.state.lives() {
        return Err(Error::not_found(format!("{what}: the VM has ended")));
    }
    if let Some(name) = name_on(&vm, &parsed) {
        return Ok(identity(name));
    }
    let found = find(gcp, &parsed, &what).await?;
    let found = found.ok_or_else(|| Error::not_found(format!("{what}: there is no such disk")))?;
    if !found.zones.contains(&vm.id.zone) {
        return Err(Error::invalid(format!(
            "{what}: the disk is in {} and the VM in {}; give a zone of the disk",
            found.zones.join(" and "),
            vm.id.zone
        )));
    }
    let others = found.users.iter().find(|user| !user.ends_with(&vm.id.path()));
    if let Some(user) = others.filter(|_| !disk.read_only) {
        return Err(in_use(&what, &disk.volume, user));
    }
    let body = DataDisk { disk: parsed.clone(), read_only: disk.read_only }.attached(vm.is_nvme);
    let path = format!("{}/attachDisk", vm.id.path());
    done(gcp, "instances.attachDisk", &vm.id, &path, &[], Some(&body), &what).await?;
    Ok(identity(&DataDisk::device_name(&parsed)))
}

/// Detaches a disk. Succeeds also if it does not exist, or is on no VM or on another one, and if the VM has another
/// owner.
pub(crate) async fn detach(gcp: &Gcp, id: &InstanceId, volume: &str) -> Result<(), Error> {
    let what = format!("detach of {} from {id}", clip(volume));
    let disk = parse(gcp, volume, &what)?;
    let Some(vm) = VmId::parse(id.as_str()) else { return Ok(()) };
    let seen = gcp.connected()?.vms.ask(vm.to_string(), until(), &what).await?;
    let Some(seen) = seen.filter(|seen| seen.marks.are_of(&gcp.owner)) else { return Ok(()) };
    let Some(name) = name_on(&seen, &disk) else { return Ok(()) };
    let path = format!("{}/detachDisk", vm.path());
    let query = [("deviceName", name)];
    match done(gcp, "instances.detachDisk", &vm, &path, &query, None, &what).await {
        Err(Error::NotFound { .. }) => Ok(()),
        // A VM that is being deleted gives its disks back itself.
        Err(Error::Transient { .. }) if !seen.state.lives() => Ok(()),
        other => other,
    }
}

/// Returns the device name of a disk that the VM has.
fn name_on<'v>(vm: &'v GcpVm, disk: &PersistentDisk) -> Option<&'v str> {
    let path = disk.path();
    vm.disks.iter().find(|(source, _)| *source == path).map(|(_, name)| name.as_str())
}

/// Makes a call on a VM's disks, and waits until it is done or the time ends.
async fn done(
    gcp: &Gcp,
    action: &'static str,
    vm: &VmId,
    path: &str,
    query: &[(&str, &str)],
    body: Option<&Value>,
    what: &str,
) -> Result<(), Error> {
    let owner = vm.to_string();
    let compute = &gcp.connected()?.compute;
    let call = ApiCall::new(action, &owner, what);
    let first = compute.post(call, &compute.own(path), query, body).await?;
    let look = || async {
        let latest = match (is_done(&first), read::text(&first, "/name")) {
            (true, _) | (_, None) => first.clone(),
            (false, Some(name)) => {
                let call = ApiCall::new("zoneOperations.get", &owner, what);
                compute.operation(call, &vm.zone, name).await?
            }
        };
        Ok::<_, Failure>(if is_done(&latest) { Decision::Made(latest) } else { Decision::Open })
    };
    match decide(&gcp.disks, end_of_wait(call.deadline), look).await? {
        Decision::Made(operation) => failure_of(action, what, &operation).map_or(Ok(()), Err),
        Decision::Refused(_) | Decision::Open => {
            Err(Error::transient(format!("{what}: Google has not finished it yet; it is tried again")))
        }
    }
}
