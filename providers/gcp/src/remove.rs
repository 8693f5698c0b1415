//! Deletes VMs. A look that many callers share proves the owner. May call `delete` of instances, and the look's calls.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use peerpod_provider_api::{Error, InstanceId};
use peerpod_provider_cloud::{ApiCall, VmState, until};
use tokio::time::Instant;

use crate::Gcp;
use crate::links::VmId;
use crate::vms::is_missing;

/// Time for which a delete is remembered; longer than Google needs to stop a VM.
const REMEMBERED: Duration = Duration::from_secs(600);
/// Most remembered deletes. Without its record, a VM that is being deleted is listed as ended, and deleted again.
const MOST: usize = 10_000;

/// VMs that this process asked to delete. Google shows them like VMs that stop by themselves.
#[derive(Debug, Default)]
pub(crate) struct Deleted(Mutex<HashMap<VmId, Instant>>);

impl Deleted {
    /// Records that Google has accepted the delete of a VM.
    pub(crate) fn accepted(&self, id: &VmId, now: Instant) {
        let mut all = self.0.lock();
        if all.len() >= MOST {
            all.retain(|_, at| now.saturating_duration_since(*at) < REMEMBERED);
        }
        if all.len() < MOST {
            all.insert(id.clone(), now);
        }
    }

    /// Whether Google has accepted the delete of the VM.
    pub(crate) fn has(&self, id: &VmId, now: Instant) -> bool {
        let all = self.0.lock();
        all.get(id).is_some_and(|at| now.saturating_duration_since(*at) < REMEMBERED)
    }

    /// Drops the record of a VM that is gone: another one may get its name.
    pub(crate) fn gone(&self, id: &VmId) {
        self.0.lock().remove(id);
    }
}

/// Deletes a VM of this owner. One that is gone or has another owner is `Ok`.
pub(crate) async fn delete(gcp: &Gcp, id: &InstanceId) -> Result<(), Error> {
    let Some(vm) = VmId::parse(id.as_str()) else { return Ok(()) };
    let what = format!("delete of VM {id}");
    let connected = gcp.connected()?;
    let Some(seen) = connected.vms.ask(vm.to_string(), until(), &what).await? else {
        if gcp.recent.may_be_denied(id, Instant::now()) {
            return Err(Error::transient(format!(
                "{what}: Google does not know it yet, it was made a moment ago; it is tried again"
            )));
        }
        gcp.deleted.gone(&vm);
        return Ok(());
    };
    if !seen.marks.are_of(&gcp.owner) {
        tracing::warn!(vm = %id, "the VM has no marks of this cluster, node and installation: it is left alone");
        return Ok(());
    }
    let is_going = match seen.state {
        VmState::Deleting => true,
        VmState::Stopping => gcp.deleted.has(&vm, Instant::now()),
        _ => false,
    };
    if is_going {
        return Ok(());
    }
    // Google has shown it. A repeated call need not wait for it when this one is dropped.
    gcp.recent.seen(id);
    let call = ApiCall::new("instances.delete", id.as_str(), &what);
    match connected.compute.delete(call, &vm).await {
        Ok(_) => gcp.deleted.accepted(&vm, Instant::now()),
        Err(failure) if is_missing(&failure) => gcp.deleted.gone(&vm),
        Err(failure) => return Err(failure.into()),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delete_is_remembered_for_a_time_or_until_the_vm_is_gone() {
        let (deleted, now) = (Deleted::default(), Instant::now());
        let id = |name: &str| VmId { zone: "z-1-a".into(), name: name.into() };
        deleted.accepted(&id("a"), now);
        deleted.accepted(&id("b"), now);
        deleted.gone(&id("b"));
        assert!(deleted.has(&id("a"), now) && !deleted.has(&id("b"), now));
        assert!(!deleted.has(&id("a"), now + REMEMBERED));
    }
}
