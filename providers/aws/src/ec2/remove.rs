//! Deletes VMs, with one DescribeInstances and one TerminateInstances for many concurrent callers. The first call
//! proves by the tags that the VMs have this owner. The NICs and the root disk of a launch are deleted with its VM. NICs
//! that EC2 left behind are deleted at preflight and every ten minutes. May call those two, DescribeNetworkInterfaces,
//! DeleteNetworkInterface.

use std::collections::HashMap;

use aws_sdk_ec2::types::Filter;
use peerpod_provider_api::{Error, Owner};
use peerpod_provider_cloud::batch::{self, what};
use peerpod_provider_cloud::{Lookup, Strays, VmState, Window, until};
use tokio::time::Instant;

use crate::ec2::client::Ec2;
use crate::ec2::lookup;
use crate::ec2::shape::marks;
use crate::ec2::vms;

/// Batcher that terminates VMs. `None`: EC2 does not know the VM, or shows it without the tags of this owner.
pub(crate) type Terminate = Lookup<()>;

pub(crate) fn terminate(ec2: Ec2, owner: Owner) -> Terminate {
    batch::lookup(Window::LIST, move |ids, until| by_ids(ec2.clone(), owner.clone(), ids, until))
}

/// Requests the termination of this owner's VMs among these; returns those that EC2 knows.
async fn by_ids(
    ec2: Ec2,
    owner: Owner,
    ids: Vec<String>,
    until: Instant,
) -> Result<HashMap<String, ()>, Error> {
    let (mut found, unknown) = vms::by_ids(ec2.clone(), ids.clone(), until).await?;
    if let Some(id) = ids.iter().find(|id| !found.contains_key(*id) && !unknown.contains(*id)) {
        // Such a VM may exist, and must not count as deleted.
        let what = what("delete of", "VM", &ids);
        return Err(Error::transient(format!(
            "{what}: EC2's DescribeInstances neither shows VM {id} nor calls it unknown; it is tried again"
        )));
    }
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
    let (ended, ids): (Vec<_>, Vec<_>) =
        found.into_iter().partition(|(_, vm)| matches!(vm.state, VmState::Deleting | VmState::Deleted));
    let ids: Vec<String> = ids.into_iter().map(|(id, _)| id).collect();
    let ec2 = &ec2;
    let terminate = |ids: Vec<String>| async move {
        let what = what("delete of", "VM", &ids);
        let ask = ec2.client.terminate_instances().set_instance_ids(Some(ids));
        ec2.call("TerminateInstances", "terminate", &what, until, || ask.clone().send()).await
    };
    let is_unknown = |code: &str| code.starts_with("InvalidInstanceID");
    let (_, unknown) = lookup::of_known(ids.clone(), "i-", is_unknown, terminate).await?;
    let known = ids.into_iter().filter(|id| !unknown.contains(id));
    Ok(known.chain(ended.into_iter().map(|(id, _)| id)).map(|id| (id, ())).collect())
}

/// Searches, and deletes the NICs that had no VM at the last search, either. Returns their number.
pub(crate) async fn clean_again(strays: &Strays, ec2: &Ec2, owner: &Owner) -> Result<usize, Error> {
    let nics = strays.again(stray_nics(ec2, owner).await?);
    delete_nics(ec2, nics).await
}

/// Deletes all NICs without a VM at once; for use before any launch. Returns their number.
pub(crate) async fn clean(ec2: &Ec2, owner: &Owner) -> Result<usize, Error> {
    delete_nics(ec2, stray_nics(ec2, owner).await?).await
}

/// Stray NICs that one search returns at most; the next search finds the others.
const MOST_STRAY: usize = 10_000;

/// Returns the NICs of this owner without a VM. EC2 leaves one when a launch breaks off half-way.
async fn stray_nics(ec2: &Ec2, owner: &Owner) -> Result<Vec<String>, Error> {
    let mut filters = vms::of_owner(owner);
    filters.push(Filter::builder().name("status").values("available").build());
    let what = "look for our unattached NICs";
    let (mut nics, mut next) = (Vec::new(), None);
    loop {
        let ask =
            ec2.client.describe_network_interfaces().set_filters(Some(filters.clone())).max_results(100);
        let ask = ask.set_next_token(next);
        let page =
            ec2.call("DescribeNetworkInterfaces", "stray", what, until(), || ask.clone().send()).await?;
        let found = page.network_interfaces.unwrap_or_default().into_iter();
        let ours = found.filter(|nic| marks(nic.tag_set.clone()).are_of(owner));
        nics.extend(ours.filter_map(|nic| nic.network_interface_id));
        next = page.next_token.filter(|token| !token.is_empty());
        if next.is_none() || nics.len() >= MOST_STRAY {
            return Ok(nics);
        }
    }
}

async fn delete_nics(ec2: &Ec2, nics: Vec<String>) -> Result<usize, Error> {
    let mut deleted = 0;
    for id in nics {
        let what = format!("delete of the unattached NIC {id}");
        let ask = ec2.client.delete_network_interface().network_interface_id(&id);
        match ec2.call("DeleteNetworkInterface", "stray", &what, until(), || ask.clone().send()).await {
            Ok(_) => deleted += 1,
            Err(failure) if failure.code().starts_with("InvalidNetworkInterfaceID.NotFound") => {}
            Err(failure) => return Err(failure.into()),
        }
    }
    Ok(deleted)
}
