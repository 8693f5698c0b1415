//! Deletes VMs, with one DescribeInstances and one DeleteInstances for many concurrent callers. The first call proves by
//! the tags that the VMs have this owner. System disk and NICs are deleted with their VM; disks of pods are detached.

use std::collections::HashMap;
use std::sync::Arc;

use peerpod_provider_api::{Error, InstanceId, Owner};
use peerpod_provider_cloud::batch::{Answers, what};
use peerpod_provider_cloud::{ApiCall, Batcher, Recent, VmState};
use tokio::time::Instant;

use crate::client::{Ecs, Parameters};
use crate::vms::{self, AlibabaCloudVm, WINDOW};

/// Batcher that deletes VMs. False: the cloud does not know the VM, or shows it without the tags of this owner.
pub(crate) type Terminate = Batcher<String, bool>;

/// Reason for which a delete is repeated.
const NOT_YET: &str = "Alibaba Cloud does not delete a VM in its present state";

pub(crate) fn terminate(ecs: Ecs, owner: Owner, recent: Arc<Recent>) -> Terminate {
    let cloud = (ecs, owner, recent);
    Batcher::new(WINDOW, move |ids, until| by_ids(cloud.clone(), ids, until))
}

/// Requests the deletion of this owner's VMs among these; answers for each.
async fn by_ids(
    (ecs, owner, recent): (Ecs, Owner, Arc<Recent>),
    ids: Vec<String>,
    until: Instant,
) -> Answers<bool> {
    let mut each = ids.clone();
    each.sort();
    each.dedup();
    let mut found = vms::by_ids(ecs.clone(), each, until).await?;
    found.retain(|id, vm| {
        let ours = vm.marks.are_of(&owner);
        if !ours {
            tracing::warn!(
                vm = id,
                "the VM has no tags of this cluster, node and installation: it is left alone"
            );
        }
        ours
    });
    // The cloud has shown them. A repeated call need not wait for them when this one is dropped.
    found.keys().filter_map(|id| InstanceId::new(id.clone()).ok()).for_each(|id| recent.seen(&id));
    // The cloud refuses the deletion of a VM that it still makes.
    let ready: Vec<String> =
        found.values().filter(|vm| vm.state != VmState::Pending).map(|vm| vm.id.clone()).collect();
    let refused = delete(&ecs, ready, until).await?;
    Ok(ids.iter().map(|id| answer(id, &found, &refused)).collect())
}

/// Returns the answer for one VM.
fn answer(
    id: &str,
    found: &HashMap<String, AlibabaCloudVm>,
    refused: &HashMap<String, Error>,
) -> Result<bool, Error> {
    match (found.get(id), refused.get(id)) {
        (None, _) => Ok(false),
        (Some(_), Some(error)) => Err(error.clone()),
        (Some(vm), None) if vm.state == VmState::Pending => {
            Err(Error::transient(format!("delete of VM {id}: {NOT_YET}; it is tried again")))
        }
        (Some(_), None) => Ok(true),
    }
}

/// Requests the deletion of these VMs, together or, if the cloud refuses that because of one of them, one by one. Returns
/// the errors of those that it refused.
async fn delete(ecs: &Ecs, ids: Vec<String>, until: Instant) -> Result<HashMap<String, Error>, Error> {
    let mut refused = HashMap::new();
    let mut parts = vec![ids];
    while let Some(part) = parts.pop() {
        let [first, ..] = &part[..] else { continue };
        let what = what("delete of", "VM", &part);
        let asked = Parameters::default().with("Force", "true").list("InstanceId", &part);
        let call = ApiCall::new("DeleteInstances", "delete", &what).until(until);
        let Err(failure) = ecs.ask(call, asked).await else { continue };
        let is_of_one = failure.code().starts_with("IncorrectInstanceStatus")
            || matches!(failure.error, Error::NotFound { .. });
        match part.len() {
            1 if matches!(failure.error, Error::NotFound { .. }) => {}
            1 => drop(refused.insert(first.clone(), failure.error)),
            _ if is_of_one => parts.extend(part.chunks(part.len().div_ceil(2)).map(<[String]>::to_vec)),
            _ => return Err(failure.error),
        }
    }
    Ok(refused)
}
