//! Deletes VMs. A look that many callers share proves the owner. May call `ReconfigVM_Task`, `PowerOffVM_Task`,
//! `DetachDisk_Task` and `Destroy_Task`, and the look's calls.
//!
//! **A destroy deletes the files of all disks that the VM and its snapshots have.** Each disk that was not made with the
//! VM is therefore detached first, and the destroy follows a look that shows no such disk. A VM with such a disk in a
//! snapshot stays. The mark of the delete comes before all other steps: a create and an attach refuse a VM that has it,
//! also after a crash.

use peerpod_provider_api::{Error, InstanceId};
use peerpod_provider_cloud::{ApiCall, until};
use tokio::time::Instant;

use crate::Vsphere;
use crate::body::{DELETING, reconfigure};
use crate::soap::Method;
use crate::vms::{Power, VsphereVm};
use crate::volumes;

/// Most looks for disks before a destroy.
const LOOKS: usize = 3;

/// Deletes a VM of this owner. One that is gone or has another owner is `Ok`.
pub(crate) async fn delete(vsphere: &Vsphere, id: &InstanceId) -> Result<(), Error> {
    let what = format!("delete of VM {id}");
    let Some(seen) = vsphere.connected()?.vms.ask(id.as_str().to_owned(), until(), &what).await? else {
        if vsphere.recent.may_be_denied(id, Instant::now()) || vsphere.is_being_made(id, &what).await? {
            return Err(Error::transient(format!(
                "{what}: the vCenter does not show it yet, it was made a moment ago; it is tried again"
            )));
        }
        return Ok(());
    };
    if !seen.is_of(&vsphere.owner) {
        tracing::warn!(vm = %id, "the VM has no marks of this cluster, node and installation: it is left alone");
        return Ok(());
    }
    vsphere.recent.seen(id);
    remove(vsphere, &seen, &what).await
}

/// Deletes a VM whose owner is proven.
pub(crate) async fn remove(vsphere: &Vsphere, vm: &VsphereVm, what: &str) -> Result<(), Error> {
    match steps(vsphere, vm, what).await {
        // Another call was faster.
        Err(Error::NotFound { .. }) => Ok(()),
        other => other,
    }
}

async fn steps(vsphere: &Vsphere, vm: &VsphereVm, what: &str) -> Result<(), Error> {
    if !vm.is_deleting {
        let method = reconfigure(&vm.moref, "", &[(DELETING, "true")]);
        vsphere.run(ApiCall::new(method.name, &vm.name, what), &method).await?;
    }
    if vm.power != Power::Off {
        call(vsphere, vm, "PowerOffVM_Task", what).await?;
    }
    for _ in 0..LOOKS {
        let Some(devices) = volumes::devices(vsphere, vm, what).await? else { return Ok(()) };
        let foreign: Vec<_> = devices.disks.iter().filter(|disk| !disk.is_own(vm)).collect();
        if foreign.is_empty() {
            volumes::check_snapshots(vsphere, vm, &devices, what).await?;
            return call(vsphere, vm, "Destroy_Task", what).await;
        }
        for disk in foreign {
            volumes::release(vsphere, vm, disk, what).await?;
        }
    }
    Err(Error::transient(format!("{what}: disks that were detached are attached again; it is tried again")))
}

async fn call(vsphere: &Vsphere, vm: &VsphereVm, name: &'static str, what: &str) -> Result<(), Error> {
    let method = Method { name, this: vm.moref.clone(), arguments: String::new() };
    match vsphere.run(ApiCall::new(name, &vm.name, what), &method).await {
        // It is off already.
        Err(failure) if name == "PowerOffVM_Task" && failure.code() == "InvalidPowerState" => Ok(()),
        other => Ok(other?),
    }
}
