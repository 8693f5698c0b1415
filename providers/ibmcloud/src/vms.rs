//! Lists and looks up VMs, with one call for many concurrent callers. May call `list_instances`, `get_instance` and
//! `list_volumes`.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::SystemTime;

use futures_util::future::try_join_all;
use peerpod_provider_api::{Error, IdempotencyKey, InstanceId, Owned, Owner};
use peerpod_provider_cloud::batch::{self, what};
use peerpod_provider_cloud::{ApiCall, Lookup, Marks, VmState, Window, marks};
use peerpod_provider_rest::{Failure, Said, ibm, read};
use serde_json::Value;
use tokio::time::Instant;

use crate::client::Vpc;
use crate::ids;

/// Most VMs that are looked at one by one.
const FEW: usize = 2;
/// Begin of the reasons of an instance that IBM could not start.
const NOT_STARTED: &str = "cannot_start";

/// A VM as IBM shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct IbmCloudVm {
    pub id: String,
    pub name: String,
    pub state: VmState,
    /// Key and digest of its create, from the names of its attachments.
    pub key: Option<IdempotencyKey>,
    pub digest: Option<String>,
    pub addresses: Vec<IpAddr>,
    pub made: Option<SystemTime>,
    pub disks: Vec<DataVolume>,
    /// Code and message of IBM for a VM that it did not start, or stopped.
    pub reason: Option<Said>,
}

/// Data volume of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DataVolume {
    /// Id of the attachment.
    pub attachment: String,
    /// Id of the volume.
    pub volume: String,
    /// Id of the device; `None`: the volume is not attached yet.
    pub device: Option<String>,
}

impl IbmCloudVm {
    /// Reads an instance; `None`: the value is none.
    pub(crate) fn of(value: &Value) -> Option<IbmCloudVm> {
        let text = |pointer: &str| read::text(value, pointer);
        let status = text("/status")?;
        let boot = text("/boot_volume_attachment/id");
        let disk = |one: &Value| {
            let attachment = read::text(one, "/id").filter(|id| Some(*id) != boot)?;
            Some(DataVolume {
                attachment: attachment.to_owned(),
                volume: read::text(one, "/volume/id")?.to_owned(),
                device: read::text(one, "/device/id").map(str::to_owned),
            })
        };
        let reason = reason(value, "/status_reasons").or_else(|| reason(value, "/lifecycle_reasons"));
        let nics = ["/primary_network_attachment", "/primary_network_interface"];
        Some(IbmCloudVm {
            id: text("/id").filter(|id| ids::is_id(id))?.to_owned(),
            name: text("/name")?.to_owned(),
            state: state(status, text("/lifecycle_state").unwrap_or_default(), reason.as_ref()),
            key: text("/boot_volume_attachment/name").and_then(ids::key_in),
            digest: text("/primary_network_attachment/name").and_then(ids::digest_in),
            addresses: nics
                .iter()
                .find_map(|nic| read::address(value, &format!("{nic}/primary_ip/address")))
                .into_iter()
                .collect(),
            made: read::time(value, "/created_at"),
            disks: read::list(value, "/volume_attachments").iter().filter_map(disk).collect(),
            reason,
        })
    }

    /// Returns the VM's entry in a list. The tags of its boot volume have its pod and its node.
    fn owned(&self, owner: &Owner, tags: Option<&Marks>) -> Option<Owned> {
        let node = tags.and_then(|tags| tags.node.clone()).unwrap_or_else(|| owner.node_name.clone());
        Some(Owned {
            id: InstanceId::new(self.id.clone()).ok()?,
            key: self.key.clone().or_else(|| tags?.key.clone()),
            name: tags.and_then(|tags| tags.name.clone()),
            state: self.state.owned()?,
            addresses: self.addresses.clone(),
            created: self.made,
            node: Some(node).filter(|node| !node.is_empty()),
        })
    }
}

fn reason(value: &Value, list: &str) -> Option<Said> {
    let first = read::list(value, list).first()?;
    let text = |pointer: &str| read::text(first, pointer).unwrap_or_default().to_owned();
    Some(Said { code: text("/code"), message: text("/message") })
}

fn state(status: &str, lifecycle: &str, reason: Option<&Said>) -> VmState {
    let is_not_started = reason.is_some_and(|said| said.code.starts_with(NOT_STARTED));
    match (status, lifecycle) {
        ("deleting", _) | (_, "deleting") => VmState::Deleting,
        ("failed", _) | (_, "failed") => VmState::Failed,
        ("running" | "restarting", _) => VmState::Running,
        _ if is_not_started => VmState::Failed,
        ("stopped" | "stopping", _) => VmState::Ended,
        // Also a state that IBM may add later. The VM exists, so it must be listed to be deleted.
        _ => VmState::Pending,
    }
}

/// Looks at one VM, of any owner; `None`: it does not exist.
pub(crate) async fn one(
    vpc: &Vpc,
    id: &str,
    what: &str,
    until: Instant,
) -> Result<Option<IbmCloudVm>, Failure> {
    let found =
        vpc.find(ApiCall::new("get_instance", id, what).until(until), &vpc.get(["instances", id])).await?;
    let Some(found) = found else { return Ok(None) };
    let odd = || Error::transient(format!("{what}: the answer is another instance; it is tried again"));
    let vm = IbmCloudVm::of(&found).filter(|vm| vm.id == id);
    vm.map(Some).ok_or_else(|| odd().into())
}

/// Looks for the VM of this name; `None`: it does not exist.
pub(crate) async fn named(
    vpc: &Vpc,
    name: &str,
    what: &str,
    until: Instant,
) -> Result<Option<IbmCloudVm>, Failure> {
    let request = vpc.get(["instances"]).query("name", name);
    let found = vpc
        .list(ApiCall::new("list_instances", name, what).until(until), "instances", request, IbmCloudVm::of)
        .await?;
    Ok(found.into_iter().find(|vm| vm.name == name))
}

/// Returns the batcher that looks up single VMs, by their ids. `None`: IBM does not know the VM (any more, or yet).
pub(crate) fn inspect(vpc: Vpc, network: String, window: Window) -> Lookup<IbmCloudVm> {
    batch::lookup(window, move |ids, until| by_ids(vpc.clone(), network.clone(), ids, until))
}

async fn by_ids(
    vpc: Vpc,
    network: String,
    ids: Vec<String>,
    until: Instant,
) -> Result<HashMap<String, IbmCloudVm>, Error> {
    let what = what("look at", "VM", &ids);
    let mut found: HashMap<String, IbmCloudVm> = HashMap::new();
    if ids.len() > FEW {
        let listed = list(&vpc, &network, &what, until).await?;
        found.extend(listed.into_iter().map(|vm| (vm.id.clone(), vm)));
    }
    // The list may be late.
    let missing: Vec<&String> = ids.iter().filter(|id| !found.contains_key(*id)).collect();
    let looks = missing.iter().map(|id| one(&vpc, id, &what, until));
    for vm in try_join_all(looks).await?.into_iter().flatten() {
        found.insert(vm.id.clone(), vm);
    }
    Ok(found)
}

/// Returns the VMs of the VPC, those of other owners included.
async fn list(vpc: &Vpc, network: &str, what: &str, until: Instant) -> Result<Vec<IbmCloudVm>, Failure> {
    let request = vpc.get(["instances"]).query("vpc.id", network);
    vpc.list(ApiCall::new("list_instances", "list", what).until(until), "instances", request, IbmCloudVm::of)
        .await
}

/// Boot volume with our tags.
#[derive(Debug, Clone)]
pub(crate) struct BootVolume {
    pub id: String,
    pub marks: Marks,
    /// Id of the instance that has it.
    pub vm: Option<String>,
    /// Whether no instance has it, and IBM does not delete it already.
    pub is_free: bool,
}

impl BootVolume {
    /// Reads a volume; `None`: the value is none.
    pub(crate) fn of(value: &Value) -> Option<BootVolume> {
        let tags = ibm::read_tags(read::list(value, "/user_tags"));
        let is = |pointer: &str, word: &str| read::text(value, pointer) == Some(word);
        Some(BootVolume {
            id: read::text(value, "/id").filter(|id| ids::is_id(id))?.to_owned(),
            marks: ibm::TAGS.read(&tags),
            vm: read::text(value, "/volume_attachments/0/instance/id").map(str::to_owned),
            is_free: is("/attachment_state", "unattached") && is("/status", "available"),
        })
    }
}

/// Returns the boot volumes of this owner's cluster and installation.
pub(crate) async fn boot_volumes(
    vpc: &Vpc,
    owner: &Owner,
    what: &str,
    until: Instant,
) -> Result<Vec<BootVolume>, Failure> {
    let cluster = format!("{}:{}", ibm::TAGS.name(marks::CLUSTER), ibm::TAGS.value(&owner.cluster_id));
    let request = vpc.get(["volumes"]).query("tag", &cluster);
    let mut found = vpc
        .list(ApiCall::new("list_volumes", "list", what).until(until), "volumes", request, BootVolume::of)
        .await?;
    found.retain(|volume| volume.marks.are_of(owner));
    Ok(found)
}

/// Returns every VM of this owner in the VPC, from all pages.
pub(crate) async fn all_of(
    vpc: &Vpc,
    network: &str,
    owner: &Owner,
    until: Instant,
) -> Result<Vec<Owned>, Error> {
    let what = "list our VMs";
    let mut ours = list(vpc, network, what, until).await?;
    ours.retain(|vm| ids::is_of(owner, &vm.name));
    // The volumes last: one of a VM in the list exists by then, or IBM has not made it yet.
    let volumes = boot_volumes(vpc, owner, what, until).await?;
    let tags: HashMap<&str, &Marks> =
        volumes.iter().filter_map(|volume| Some((volume.vm.as_deref()?, &volume.marks))).collect();
    Ok(ours.iter().filter_map(|vm| vm.owned(owner, tags.get(vm.id.as_str()).copied())).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vm(more: &Value) -> Option<IbmCloudVm> {
        let mut value = json!({"id": "0717_a", "name": "pp-a", "status": "running", "lifecycle_state": "stable",
            "created_at": "2026-11-06T00:00:00Z",
            "boot_volume_attachment": {"id": "0717-boot", "name": "boot"},
            "primary_network_attachment": {"name": "nic0", "primary_ip": {"address": "10.0.0.4"}},
            "volume_attachments": [{"id": "0717-boot", "volume": {"id": "r006-b"}},
                {"id": "0717-d", "volume": {"id": "r006-d"}, "device": {"id": "0717-d-x"}}, {"id": "0717-e"}]});
        for (name, one) in more.as_object().unwrap() {
            value[name] = one.clone();
        }
        IbmCloudVm::of(&value)
    }

    #[test]
    fn the_state_follows_from_status_and_reasons() {
        let because = |code: &str| json!([{"code": code, "message": "m"}]);
        for (status, lifecycle, code, state) in [
            ("pending", "pending", "", VmState::Pending),
            ("starting", "stable", "", VmState::Pending),
            ("running", "stable", "", VmState::Running),
            ("restarting", "updating", "", VmState::Running),
            ("stopped", "stable", "", VmState::Ended),
            ("stopped", "stable", "stopped_by_preemption", VmState::Ended),
            ("stopping", "stable", "", VmState::Ended),
            ("stopped", "stable", "cannot_start_capacity", VmState::Failed),
            ("pending", "pending", "cannot_start_capacity", VmState::Failed),
            ("failed", "failed", "", VmState::Failed),
            ("pending", "failed", "", VmState::Failed),
            ("deleting", "deleting", "", VmState::Deleting),
            ("novel", "stable", "", VmState::Pending),
        ] {
            let reasons = if code.is_empty() { json!([]) } else { because(code) };
            let found =
                vm(&json!({"status": status, "lifecycle_state": lifecycle, "status_reasons": reasons}));
            assert_eq!(found.unwrap().state, state, "{status} {lifecycle} {code}");
        }
    }

    #[test]
    fn an_instance_has_its_data_volumes_and_an_address_that_is_set() {
        let found = vm(&json!({})).unwrap();
        let disk = DataVolume {
            attachment: "0717-d".into(),
            volume: "r006-d".into(),
            device: Some("0717-d-x".into()),
        };
        assert_eq!((found.disks, found.addresses.len(), found.key), (vec![disk], 1, None));
        let unset =
            json!({"primary_network_attachment": {"name": "n", "primary_ip": {"address": "0.0.0.0"}}});
        assert!(vm(&unset).unwrap().addresses.is_empty());
        for bad in [json!({"id": "a/b"}), json!({"id": 5}), json!({"name": ""}), json!({"status": null})] {
            assert_eq!(vm(&bad), None, "{bad}");
        }
    }

    #[test]
    fn the_tags_of_a_boot_volume_are_read_back() {
        let value = json!({"id": "r006-b", "status": "available", "attachment_state": "unattached",
            "user_tags": ["peerpod.cluster:c", "peerpod.node:_4e_ode-1.example", "team:blue", "odd"]});
        let volume = BootVolume::of(&value).unwrap();
        assert_eq!((volume.marks.node.as_deref(), volume.is_free), (Some("Node-1.example"), true));
        assert!(BootVolume::of(&json!({"id": "r006-b"})).is_some_and(|volume| !volume.is_free));
        assert!(BootVolume::of(&json!({})).is_none());
    }
}
