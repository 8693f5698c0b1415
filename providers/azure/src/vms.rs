//! Lists and looks up VMs and their interfaces, with one call for many concurrent callers. May call Azure.
//!
//! A list has no power states. A look at one or two VMs asks for each, which shows them; a look at more reads the list.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::time::SystemTime;

use futures_util::future::try_join_all;
use peerpod_provider_api::{Error, InstanceId, Owned, OwnedState, Owner};
use peerpod_provider_cloud::batch::{self, what};
use peerpod_provider_cloud::{ApiCall, Lookup, Marks, VmState, Window, names};
use peerpod_provider_rest::{Failure, Said, read};
use serde_json::Value;
use tokio::time::Instant;

use crate::client::{Arm, COMPUTE, NETWORK};
use crate::config::ALPHABET;
use crate::ids::{ResourceId, VM, vm_of_part};

/// Most VMs that are looked at one by one.
const FEW: usize = 2;
/// Begin of the statuses that explain a failed creation.
const FAILED: &str = "ProvisioningState/failed";

/// A VM as Azure shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AzureVm {
    /// Id in lower case.
    pub id: ResourceId,
    pub state: VmState,
    pub machine: Option<String>,
    /// Zone; `None`: it is in none.
    pub zone: Option<String>,
    pub marks: Marks,
    pub made: Option<SystemTime>,
    /// Data disks: logical unit, and id in lower case.
    pub disks: Vec<(u32, String)>,
    /// Code and message of a failed creation, where Azure shows them.
    pub refusal: Option<Said>,
}

impl AzureVm {
    /// Reads a VM; `None`: the value is none.
    pub(crate) fn of(value: &Value) -> Option<AzureVm> {
        let text = |pointer: &str| read::text(value, pointer).map(str::to_owned);
        let statuses = read::list(value, "/properties/instanceView/statuses");
        let power = statuses.iter().find_map(|one| read::text(one, "/code")?.strip_prefix("PowerState/"));
        let disk = |disk: &Value| {
            // Such a disk is on its way off the VM.
            if read::flag(disk, "/toBeDetached") == Some(true) {
                return None;
            }
            let lun = u32::try_from(read::number(disk, "/lun")?).ok()?;
            Some((lun, read::text(disk, "/managedDisk/id")?.to_ascii_lowercase()))
        };
        let state = state(read::text(value, "/properties/provisioningState")?, power);
        Some(AzureVm {
            id: ResourceId::of_kind(read::text(value, "/id")?, VM)?,
            state,
            machine: text("/properties/hardwareProfile/vmSize"),
            zone: text("/zones/0"),
            marks: ALPHABET.read(&read::texts(value, "/tags")),
            made: read::time(value, "/properties/timeCreated"),
            disks: read::list(value, "/properties/storageProfile/dataDisks")
                .iter()
                .filter_map(disk)
                .collect(),
            refusal: refusal(statuses),
        })
    }

    /// Returns the VM's entry in a list.
    fn owned(&self, addresses: Vec<IpAddr>) -> Option<Owned> {
        let id = InstanceId::new(self.id.text()).ok()?;
        Some(self.marks.owned(id, self.state.owned()?, addresses, self.made))
    }
}

fn state(provisioning: &str, power: Option<&str>) -> VmState {
    match (provisioning.to_ascii_lowercase().as_str(), power) {
        ("deleting", _) => VmState::Deleting,
        (_, Some("stopped" | "stopping" | "deallocated" | "deallocating")) => VmState::Ended,
        ("creating", Some(_)) => VmState::Placed,
        ("creating", None) => VmState::Pending,
        // A failed attach of a disk, or an agent that never reported, leaves a VM that runs.
        ("failed", Some(_)) => VmState::Running,
        ("failed" | "canceled", None) => VmState::Failed,
        _ => VmState::Running,
    }
}

fn refusal(statuses: &[Value]) -> Option<Said> {
    let mut failed = statuses.iter().filter_map(|one| {
        let code = read::text(one, "/code")?.strip_prefix(FAILED)?;
        let message = read::text(one, "/message").unwrap_or_default().to_owned();
        Some(Said { code: code.trim_start_matches('/').to_owned(), message })
    });
    failed.find(|said| !said.code.is_empty())
}

/// Looks at one VM, with its power state; `None`: it does not exist.
pub(crate) async fn one(
    arm: &Arm,
    id: &ResourceId,
    what: &str,
    until: Instant,
) -> Result<Option<AzureVm>, Failure> {
    let request = arm.get(&id.text(), COMPUTE).query("$expand", "instanceView");
    match arm.call(ApiCall::new("VirtualMachines_Get", id.name(), what).until(until), &request).await {
        Ok(answer) => AzureVm::of(&answer.json()).map(Some).ok_or_else(|| {
            Error::transient(format!("{what}: Azure's answer is not that of a VM; it is tried again")).into()
        }),
        Err(failure) if matches!(failure.error, Error::NotFound { .. }) => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// Returns the batcher that looks up single VMs, by their ids. `None`: Azure does not know the VM (any more, or yet).
pub(crate) fn inspect(arm: Arm, window: Window) -> Lookup<AzureVm> {
    batch::lookup(window, move |ids, until| by_ids(arm.clone(), ids, until))
}

async fn by_ids(arm: Arm, ids: Vec<String>, until: Instant) -> Result<HashMap<String, AzureVm>, Error> {
    let what = what("look at", "VM", &ids);
    let mut found: HashMap<String, AzureVm> = HashMap::new();
    if ids.len() > FEW {
        let listed = list(&arm, &what, until).await?;
        found.extend(listed.into_iter().map(|vm| (vm.id.text(), vm)));
    }
    // The list may be late, leaves out VMs of other groups, and does not explain a failure.
    let is_unclear = |id: &&String| found.get(*id).is_none_or(|vm| vm.state == VmState::Failed);
    let unclear: Vec<ResourceId> =
        ids.iter().filter(is_unclear).filter_map(|id| ResourceId::of_kind(id, VM)).collect();
    let looks = unclear.iter().map(|id| one(&arm, id, &what, until));
    for (id, vm) in unclear.iter().zip(try_join_all(looks).await?) {
        match vm {
            Some(vm) => found.insert(id.text(), vm),
            None => found.remove(&id.text()),
        };
    }
    Ok(found)
}

/// Returns the VMs of the resource group, those of other owners included.
pub(crate) async fn list(arm: &Arm, what: &str, until: Instant) -> Result<Vec<AzureVm>, Failure> {
    let request = arm.get(&format!("{}/providers/Microsoft.Compute/virtualMachines", arm.group()), COMPUTE);
    arm.list(ApiCall::new("VirtualMachines_List", "list", what).until(until), &request, AzureVm::of).await
}

/// A network interface as Azure shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AzureNic {
    /// Id in lower case.
    pub id: ResourceId,
    /// Id of its VM in lower case.
    pub vm: Option<String>,
    pub tags: BTreeMap<String, String>,
    is_primary: bool,
    private: Vec<IpAddr>,
    /// Id of its public address in lower case.
    public: Option<String>,
}

impl AzureNic {
    fn of(value: &Value) -> Option<AzureNic> {
        let configurations = read::list(value, "/properties/ipConfigurations");
        let public = configurations.iter().find_map(|one| read::text(one, "/properties/publicIPAddress/id"));
        Some(AzureNic {
            id: ResourceId::parse(read::text(value, "/id")?)?,
            vm: read::text(value, "/properties/virtualMachine/id").map(str::to_ascii_lowercase),
            tags: read::texts(value, "/tags"),
            is_primary: read::flag(value, "/properties/primary").unwrap_or(false),
            private: configurations
                .iter()
                .filter_map(|one| read::address(one, "/properties/privateIPAddress"))
                .collect(),
            public: public.map(str::to_ascii_lowercase),
        })
    }
}

/// Returns all interfaces of the resource group.
pub(crate) async fn nics(arm: &Arm, what: &str, until: Instant) -> Result<Vec<AzureNic>, Failure> {
    let request = arm.get(&format!("{}/providers/Microsoft.Network/networkInterfaces", arm.group()), NETWORK);
    arm.list(ApiCall::new("NetworkInterfaces_List", "list", what).until(until), &request, AzureNic::of).await
}

/// Returns the public addresses of the resource group, by their ids in lower case.
async fn public_addresses(arm: &Arm, what: &str, until: Instant) -> Result<HashMap<String, IpAddr>, Failure> {
    let request = arm.get(&format!("{}/providers/Microsoft.Network/publicIPAddresses", arm.group()), NETWORK);
    let address = |value: &Value| {
        Some((read::text(value, "/id")?.to_ascii_lowercase(), read::address(value, "/properties/ipAddress")?))
    };
    let all = arm
        .list(ApiCall::new("PublicIPAddresses_List", "list", what).until(until), &request, address)
        .await?;
    Ok(all.into_iter().collect())
}

/// Batcher that looks up the addresses of VMs, by the VMs' ids. `None`: there are none yet.
pub(crate) type AddressLookup = Lookup<Vec<IpAddr>>;

pub(crate) fn inspect_addresses(arm: Arm, public: bool, window: Window) -> AddressLookup {
    batch::lookup(window, move |ids, until| {
        let arm = arm.clone();
        async move {
            let what = what("look at the addresses of", "VM", &ids);
            let nics = nics(&arm, &what, until).await?;
            Ok(addresses(&arm, &nics, public, &what, until).await?)
        }
    })
}

/// Returns the addresses of VMs by their first interfaces, the preferred one first. Where public addresses are
/// configured, the node cannot reach a VM without one.
async fn addresses(
    arm: &Arm,
    nics: &[AzureNic],
    public: bool,
    what: &str,
    until: Instant,
) -> Result<HashMap<String, Vec<IpAddr>>, Failure> {
    let publics = match public && nics.iter().any(|nic| nic.public.is_some()) {
        true => public_addresses(arm, what, until).await?,
        false => HashMap::new(),
    };
    let of = |nic: &AzureNic| {
        let own = nic.public.as_ref().and_then(|id| publics.get(id)).copied();
        match (public, own) {
            (true, None) => Vec::new(),
            (true, Some(own)) => [own].into_iter().chain(nic.private.iter().copied()).collect(),
            (false, _) => nic.private.clone(),
        }
    };
    let first = nics.iter().filter(|nic| nic.is_primary);
    let each = first.filter_map(|nic| Some((nic.vm.clone()?, of(nic))));
    Ok(each.filter(|(_, addresses)| !addresses.is_empty()).collect())
}

/// Returns every VM of this owner, and the rest of those that are gone except for an interface, from all pages.
pub(crate) async fn all_of(
    arm: &Arm,
    owner: &Owner,
    public: bool,
    until: Instant,
) -> Result<Vec<Owned>, Error> {
    let what = "list our VMs";
    // Interfaces first: one whose VM a later list lacks has lost it.
    let nics = nics(arm, what, until).await?;
    let addresses = addresses(arm, &nics, public, what, until).await?;
    let mut ours = list(arm, what, until).await?;
    ours.retain(|vm| vm.id.name().starts_with(&names::prefix(owner)) && vm.marks.are_of(owner));
    let failed: Vec<_> =
        ours.iter().filter(|vm| vm.state == VmState::Failed).map(|vm| vm.id.clone()).collect();
    let looks = failed.iter().map(|id| one(arm, id, what, until));
    for (id, vm) in failed.iter().zip(try_join_all(looks).await?) {
        ours.retain(|other| other.id != *id);
        ours.extend(vm);
    }
    let rest = left_over(arm, owner, &nics, &ours);
    let addresses_of = |vm: &AzureVm| addresses.get(&vm.id.text()).cloned().unwrap_or_default();
    Ok(ours.iter().filter_map(|vm| vm.owned(addresses_of(vm))).chain(rest).collect())
}

/// Returns the VMs of which only an interface is left. Azure deletes it in a moment, or `remove.rs` does.
fn left_over(arm: &Arm, owner: &Owner, nics: &[AzureNic], vms: &[AzureVm]) -> Vec<Owned> {
    let mut lost: Vec<ResourceId> = nics
        .iter()
        .filter(|nic| nic.vm.is_none())
        .filter_map(|nic| Some(arm.vm(&vm_of_part(owner, nic.id.name())?)))
        .filter(|id| !vms.iter().any(|vm| vm.id == *id))
        .collect();
    lost.sort_by(|a, b| a.names.cmp(&b.names));
    lost.dedup();
    let owned = |id: &ResourceId| {
        Some(Owned {
            id: InstanceId::new(id.text()).ok()?,
            key: None,
            name: None,
            state: OwnedState::Deleting,
            addresses: Vec::new(),
            created: None,
            node: Some(owner.node_name.clone()).filter(|node| !node.is_empty()),
        })
    };
    lost.iter().filter_map(owned).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const ID: &str = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/pp-a";

    fn vm(provisioning: &str, statuses: &Value) -> AzureVm {
        AzureVm::of(&json!({"id": ID, "zones": ["2"], "tags": {"peerpod.cluster": "c", "peerpod.key": "k"},
            "properties": {"provisioningState": provisioning, "timeCreated": "2026-11-06T00:00:00Z",
                "hardwareProfile": {"vmSize": "Standard_DC2as_v5"}, "instanceView": {"statuses": statuses},
                "storageProfile": {"dataDisks": [{"lun": 3, "managedDisk": {"id": "/A/B"}}, {"lun": "x"}]}}}))
        .unwrap()
    }

    #[test]
    fn the_state_follows_from_provisioning_and_power() {
        let power =
            |code: &str| json!([{"code": "ProvisioningState/x"}, {"code": format!("PowerState/{code}")}]);
        for (provisioning, statuses, state) in [
            ("Creating", json!([]), VmState::Pending),
            ("Creating", power("starting"), VmState::Placed),
            ("Succeeded", json!([]), VmState::Running),
            ("Succeeded", power("running"), VmState::Running),
            ("Succeeded", power("stopped"), VmState::Ended),
            ("Succeeded", power("deallocated"), VmState::Ended),
            ("Updating", power("running"), VmState::Running),
            ("Failed", power("running"), VmState::Running),
            ("Failed", json!([]), VmState::Failed),
            ("Deleting", power("running"), VmState::Deleting),
            ("Novel", json!([]), VmState::Running),
        ] {
            assert_eq!(vm(provisioning, &statuses).state, state, "{provisioning} {statuses}");
        }
    }

    #[test]
    fn a_failed_vm_has_azures_reason() {
        let statuses = json!([{"code": "ProvisioningState/failed"},
            {"code": "ProvisioningState/failed/AllocationFailed", "message": "none left"}]);
        let failed = vm("Failed", &statuses);
        assert_eq!(
            failed.refusal,
            Some(Said { code: "AllocationFailed".into(), message: "none left".into() })
        );
        assert_eq!(vm("Failed", &json!([{"code": "ProvisioningState/failed"}])).refusal, None);
        let statuses = json!([{"code": "ProvisioningState/failed/AllocationFailed"}, {"code": "PowerState/deallocated"}]);
        let ended = vm("Failed", &statuses);
        assert_eq!((ended.state, ended.refusal.is_some()), (VmState::Ended, true));
        assert_eq!(failed.disks, [(3, "/a/b".to_owned())]);
        assert_eq!((failed.zone.as_deref(), failed.id.name()), (Some("2"), "pp-a"));
    }

    #[test]
    fn what_is_no_vm_is_left_out() {
        for value in
            [json!({}), json!([]), json!({"id": "x"}), json!({"id": ID}), json!({"id": 5, "properties": 7})]
        {
            assert_eq!(AzureVm::of(&value), None, "{value}");
        }
        assert_eq!(AzureNic::of(&json!({"id": "x"})), None);
    }
}
