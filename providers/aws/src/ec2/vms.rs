//! Lists and looks up VMs, with one call for many concurrent callers. May call DescribeInstances.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::SystemTime;

use aws_sdk_ec2::operation::describe_instances::builders::DescribeInstancesFluentBuilder;
use aws_sdk_ec2::types::{Filter, Instance, InstanceLifecycleType, InstanceStateName, Reservation};
use peerpod_provider_api::{Error, IdempotencyKey, InstanceId, Owned, Owner};
use peerpod_provider_cloud::batch::{self, what};
use peerpod_provider_cloud::marks::{CLUSTER, INSTALLATION, KEY, NODE};
use peerpod_provider_cloud::{Lookup, Marks, VmState, Window, addresses};
use tokio::time::Instant;

use crate::ec2::client::Ec2;
use crate::ec2::lookup;
use crate::ec2::refusal::AwsFailure;
use crate::ec2::shape::marks;

/// Maximum number of VMs in a page.
const PAGE: i32 = 1000;
/// Maximum number of pages in a list; no node has a million VMs.
const MAX_PAGES: usize = 1000;

/// A VM as EC2 shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AwsVm {
    pub id: String,
    pub state: VmState,
    pub machine: Option<String>,
    pub zone: Option<String>,
    pub private: Vec<IpAddr>,
    pub public: Option<IpAddr>,
    pub devices: Vec<String>,
    pub marks: Marks,
    pub launched: Option<SystemTime>,
    /// Whether EC2 may take the VM back.
    pub is_spot: bool,
    /// Reason of the state, if EC2 gives one.
    pub reason: Option<String>,
}

impl AwsVm {
    fn of(vm: Instance) -> Option<AwsVm> {
        let address = |text: Option<&String>| text.and_then(|text| text.parse::<IpAddr>().ok());
        let nics = vm.network_interfaces.unwrap_or_default();
        let public = address(vm.public_ip_address.as_ref()).or_else(|| {
            nics.iter()
                .find_map(|nic| address(nic.association.as_ref().and_then(|one| one.public_ip.as_ref())))
        });
        let mut private: Vec<IpAddr> = address(vm.private_ip_address.as_ref()).into_iter().collect();
        private.extend(address(vm.ipv6_address.as_ref()));
        let state = match vm.state.and_then(|state| state.name)? {
            InstanceStateName::Pending => VmState::Pending,
            InstanceStateName::Running => VmState::Running,
            InstanceStateName::Stopping | InstanceStateName::Stopped => VmState::Ended,
            InstanceStateName::ShuttingDown => VmState::Deleting,
            InstanceStateName::Terminated => VmState::Deleted,
            // State that EC2 may add later. The VM exists, so it must be listed to be deleted.
            _ => VmState::Pending,
        };
        let devices = vm.block_device_mappings.unwrap_or_default();
        Some(AwsVm {
            id: vm.instance_id?,
            state,
            machine: vm.instance_type.map(|machine| machine.as_str().to_owned()),
            zone: vm.placement.and_then(|placement| placement.availability_zone),
            private,
            public,
            devices: devices.into_iter().filter_map(|device| device.device_name).collect(),
            marks: marks(vm.tags),
            launched: vm.launch_time.and_then(|at| SystemTime::try_from(at).ok()),
            is_spot: vm.instance_lifecycle == Some(InstanceLifecycleType::Spot),
            reason: vm.state_reason.and_then(|reason| reason.message.or(reason.code)),
        })
    }

    /// Returns the addresses, the preferred one first; empty if there are none yet.
    pub(crate) fn addresses(&self, public: bool) -> Vec<IpAddr> {
        addresses(&self.private, self.public, public)
    }

    /// Returns the VM's entry in a list; `None` if it is terminated.
    pub(crate) fn owned(&self, public: bool) -> Option<Owned> {
        let id = InstanceId::new(self.id.clone()).ok()?;
        Some(self.marks.owned(id, self.state.owned()?, self.addresses(public), self.launched))
    }
}

/// Returns the batcher that looks up single VMs. `None`: EC2 does not know the VM (any more, or yet).
pub(crate) fn inspect(ec2: Ec2, window: Window) -> Lookup<AwsVm> {
    batch::lookup(window, move |ids, until| {
        let found = by_ids(ec2.clone(), ids, until);
        async move { Ok(found.await?.0) }
    })
}

/// Returns those of these VMs that EC2 shows, and the ids that it does not know. An id may be in neither.
pub(crate) async fn by_ids(
    ec2: Ec2,
    ids: Vec<String>,
    until: Instant,
) -> Result<(HashMap<String, AwsVm>, Vec<String>), Error> {
    let ec2 = &ec2;
    let inspect = |ids: Vec<String>| async move {
        let what = what("look at", "VM", &ids);
        let ask = ec2.client.describe_instances().set_instance_ids(Some(ids));
        pages(ec2, ask, "look", &what, until).await
    };
    let (found, unknown) =
        lookup::of_known(ids, "i-", |code| code.starts_with("InvalidInstanceID"), inspect).await?;
    let found = found.into_iter().flatten().map(|seen| (seen.id.clone(), seen));
    Ok((found.collect(), unknown))
}

fn of_reservations(reservations: Option<Vec<Reservation>>) -> impl Iterator<Item = AwsVm> {
    let vms = reservations.unwrap_or_default().into_iter().flat_map(|one| one.instances.unwrap_or_default());
    vms.filter_map(AwsVm::of)
}

/// Returns every VM of this owner that is not terminated, from all pages.
pub(crate) async fn all_of(ec2: &Ec2, owner: &Owner, until: Instant) -> Result<Vec<AwsVm>, Error> {
    let mut filters = of_owner(owner);
    filters.push(not_gone());
    let mut found = list(ec2, filters, "list our VMs", until).await?;
    found.retain(|vm| vm.marks.are_of(owner));
    Ok(found)
}

/// Returns the filters of lists for the objects of this owner.
pub(crate) fn of_owner(owner: &Owner) -> Vec<Filter> {
    let mut filters = vec![tag(CLUSTER, &owner.cluster_id), tag(INSTALLATION, &owner.installation)];
    if !owner.node_name.is_empty() {
        filters.push(tag(NODE, &owner.node_name));
    }
    filters
}

/// Returns the VMs that were made with this key and are not terminated.
pub(crate) async fn by_key(
    ec2: &Ec2,
    key: &IdempotencyKey,
    what: &str,
    until: Instant,
) -> Result<Vec<AwsVm>, Error> {
    let mut found = list(ec2, vec![tag(KEY, key.as_str()), not_gone()], what, until).await?;
    found.sort_by(|a, b| a.id.cmp(&b.id));
    Ok(found)
}

/// Returns the VMs with these properties.
pub(crate) async fn list(
    ec2: &Ec2,
    filters: Vec<Filter>,
    what: &str,
    until: Instant,
) -> Result<Vec<AwsVm>, Error> {
    let ask = ec2.client.describe_instances().set_filters(Some(filters)).max_results(PAGE);
    Ok(pages(ec2, ask, "list", what, until).await?)
}

/// Returns the VMs of all pages of the answer. EC2 may also divide the answer to a request without a page size.
async fn pages(
    ec2: &Ec2,
    mut ask: DescribeInstancesFluentBuilder,
    subject: &str,
    what: &str,
    until: Instant,
) -> Result<Vec<AwsVm>, AwsFailure> {
    let mut seen = Vec::new();
    for _ in 0..MAX_PAGES {
        let page = ec2.call("DescribeInstances", subject, what, until, || ask.clone().send()).await?;
        seen.extend(of_reservations(page.reservations));
        match page.next_token.filter(|token| !token.is_empty()) {
            Some(next) => ask = ask.next_token(next),
            None => return Ok(seen),
        }
    }
    Err(Error::transient(format!("{what}: more than {MAX_PAGES} pages; one node cannot have so many")).into())
}

fn tag(key: &str, value: &str) -> Filter {
    Filter::builder().name(format!("tag:{key}")).values(value).build()
}

/// Returns the filter for VMs that are not terminated.
pub(crate) fn not_gone() -> Filter {
    let states = ["pending", "running", "stopping", "stopped", "shutting-down"].map(str::to_owned);
    Filter::builder().name("instance-state-name").set_values(Some(states.to_vec())).build()
}
