//! Lists and looks up VMs, with one call for many concurrent callers. May call DescribeInstances and ListTagResources.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::time::SystemTime;

use peerpod_provider_api::{Error, IdempotencyKey, InstanceId, Owned, Owner};
use peerpod_provider_cloud::batch::{self, what};
use peerpod_provider_cloud::marks::{CLUSTER, INSTALLATION, KEY, NODE};
use peerpod_provider_cloud::{ApiCall, Lookup, Marks, VmState, Window, addresses};
use peerpod_provider_rest::{Failure, read};
use serde_json::Value;
use tokio::time::Instant;

use crate::client::{Ecs, PAGE, Parameters};
use crate::config::{ALPHABET, is_id};

/// Most ids of one call.
pub(crate) const MOST: usize = 100;
/// Window of look-ups and deletes.
pub(crate) const WINDOW: Window = Window { most: MOST, ..Window::LIST };
/// Most VMs that a list by tags shows ("DescribeInstances", `Tag.N.Key`). It does not say that there are more.
const MOST_BY_TAGS: usize = 1000;

/// A VM as Alibaba Cloud shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AlibabaCloudVm {
    pub id: String,
    pub state: VmState,
    pub machine: Option<String>,
    pub zone: Option<String>,
    pub private: Vec<IpAddr>,
    pub public: Option<IpAddr>,
    pub marks: Marks,
    pub created: Option<SystemTime>,
    /// Whether the cloud may take the VM back.
    pub is_spot: bool,
    /// Whether the cloud is about to take it back.
    pub is_recalled: bool,
}

/// Reads a life-cycle state.
fn state(word: &str) -> VmState {
    match word {
        "Starting" => VmState::Placed,
        "Running" => VmState::Running,
        "Stopping" => VmState::Stopping,
        "Stopped" => VmState::Ended,
        // Also a state that the cloud may add later. The VM exists, so it must be listed to be deleted.
        _ => VmState::Pending,
    }
}

impl AlibabaCloudVm {
    /// Reads one VM of an answer; `None`: it has no id.
    fn of(body: &Value) -> Option<AlibabaCloudVm> {
        let id = read::text(body, "/InstanceId").filter(|id| is_id(id, "i-"))?;
        let address = |pointer: &str| {
            read::list(body, pointer).iter().find_map(|one| one.as_str()?.parse::<IpAddr>().ok())
        };
        let tags: BTreeMap<String, String> = read::list(body, "/Tags/Tag")
            .iter()
            .filter_map(|tag| {
                Some((read::text(tag, "/TagKey")?, read::text(tag, "/TagValue").unwrap_or_default()))
            })
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .collect();
        let locks = read::list(body, "/OperationLocks/LockReason").iter();
        Some(AlibabaCloudVm {
            id: id.to_owned(),
            state: state(read::text(body, "/Status").unwrap_or_default()),
            machine: read::text(body, "/InstanceType").map(str::to_owned),
            zone: read::text(body, "/ZoneId").map(str::to_owned),
            private: address("/VpcAttributes/PrivateIpAddress/IpAddress").into_iter().collect(),
            public: address("/PublicIpAddress/IpAddress")
                .or_else(|| read::address(body, "/EipAddress/IpAddress")),
            marks: ALPHABET.read(&tags),
            created: read::time(body, "/CreationTime"),
            is_spot: read::text(body, "/SpotStrategy").is_some_and(|strategy| strategy != "NoSpot"),
            is_recalled: locks.into_iter().any(|lock| read::text(lock, "/LockReason") == Some("Recycling")),
        })
    }

    /// Returns the addresses, the preferred one first; empty if there are none yet.
    pub(crate) fn addresses(&self, public: bool) -> Vec<IpAddr> {
        addresses(&self.private, self.public, public)
    }

    /// Returns the VM's entry in a list. The cloud shows a VM that is being deleted like one that stops by itself.
    pub(crate) fn owned(&self, public: bool) -> Option<Owned> {
        let id = InstanceId::new(self.id.clone()).ok()?;
        Some(self.marks.owned(id, self.state.owned()?, self.addresses(public), self.created))
    }
}

/// Returns the batcher that looks up single VMs. `None`: the cloud does not know the VM (any more, or yet).
pub(crate) fn inspect(ecs: Ecs) -> Lookup<AlibabaCloudVm> {
    batch::lookup(WINDOW, move |ids, until| by_ids(ecs.clone(), ids, until))
}

/// Returns those of these VMs that the cloud shows.
pub(crate) async fn by_ids(
    ecs: Ecs,
    ids: Vec<String>,
    until: Instant,
) -> Result<HashMap<String, AlibabaCloudVm>, Error> {
    let what = what("look at", "VM", &ids);
    let mut found = HashMap::new();
    for part in ids.chunks(MOST) {
        let asked = Parameters::default().ids("InstanceIds", part);
        found.extend(
            pages(&ecs, asked, "look", &what, until).await?.into_iter().map(|vm| (vm.id.clone(), vm)),
        );
    }
    Ok(found)
}

/// Returns every VM of this owner, from all pages.
pub(crate) async fn all_of(ecs: &Ecs, owner: &Owner, until: Instant) -> Result<Vec<AlibabaCloudVm>, Error> {
    let what = "list our VMs";
    let tags = tags(owner);
    let mut found = pages(ecs, Parameters::default().tags(&tags), "list", what, until).await?;
    if found.len() >= MOST_BY_TAGS {
        let ids = tagged(ecs, &tags, what, until).await?;
        found = by_ids(ecs.clone(), ids, until).await?.into_values().collect();
    }
    found.retain(|vm| vm.marks.are_of(owner));
    Ok(found)
}

/// Returns the tags that all VMs of this owner have.
fn tags(owner: &Owner) -> BTreeMap<String, String> {
    let tag = |name: &str, value: &str| (ALPHABET.name(name), ALPHABET.value(value));
    let node = Some(tag(NODE, &owner.node_name)).filter(|_| !owner.node_name.is_empty());
    let ours = [tag(CLUSTER, &owner.cluster_id), tag(INSTALLATION, &owner.installation)];
    ours.into_iter().chain(node).collect()
}

/// Returns the ids of all VMs with these tags, where there are more than a list of VMs shows.
async fn tagged(
    ecs: &Ecs,
    tags: &BTreeMap<String, String>,
    what: &str,
    until: Instant,
) -> Result<Vec<String>, Error> {
    let mut ids = Vec::new();
    let asked = Parameters::default().with("ResourceType", "instance").tags(tags);
    let call = ApiCall::new("ListTagResources", "list", what).until(until);
    ecs.pages(call, asked, |page| {
        let each = read::list(page, "/TagResources/TagResource").iter();
        ids.extend(each.filter_map(|one| read::text(one, "/ResourceId")).map(str::to_owned));
        Ok(())
    })
    .await?;
    // One entry for each tag of a VM.
    ids.sort();
    ids.dedup();
    Ok(ids)
}

/// Returns the VMs that this owner made with this key.
pub(crate) async fn by_key(
    ecs: &Ecs,
    owner: &Owner,
    key: &IdempotencyKey,
    what: &str,
    until: Instant,
) -> Result<Vec<AlibabaCloudVm>, Error> {
    let mut tags = tags(owner);
    tags.insert(ALPHABET.name(KEY), ALPHABET.value(key.as_str()));
    let mut found = pages(ecs, Parameters::default().tags(&tags), "list", what, until).await?;
    found.retain(|vm| vm.marks.are_of(owner) && vm.marks.key.as_ref() == Some(key));
    Ok(found)
}

/// Returns the VMs of all pages.
async fn pages(
    ecs: &Ecs,
    asked: Parameters,
    subject: &str,
    what: &str,
    until: Instant,
) -> Result<Vec<AlibabaCloudVm>, Failure> {
    let mut seen = Vec::new();
    let call = ApiCall::new("DescribeInstances", subject, what).until(until);
    ecs.pages(call, asked.with(PAGE.0, PAGE.1), |page| {
        if page.pointer("/Instances/Instance").is_none() {
            return Err(Error::transient("the answer has no list of instances; it is tried again"));
        }
        seen.extend(read::list(page, "/Instances/Instance").iter().filter_map(AlibabaCloudVm::of));
        Ok(())
    })
    .await?;
    Ok(seen)
}

#[cfg(test)]
mod tests {
    use peerpod_provider_api::OwnedState;
    use serde_json::json;

    use super::*;

    fn body() -> Value {
        json!({
            "InstanceId": "i-2ze0123456789abcdefg", "Status": "Running", "InstanceType": "ecs.g8i.xlarge",
            "ZoneId": "cn-beijing-i", "CreationTime": "2026-11-26T10:00Z", "SpotStrategy": "NoSpot",
            "VpcAttributes": {"PrivateIpAddress": {"IpAddress": ["10.0.0.2"]}},
            "PublicIpAddress": {"IpAddress": []}, "EipAddress": {"IpAddress": ""},
            "Tags": {"Tag": [{"TagKey": "peerpod.cluster", "TagValue": "c"}, {"TagKey": "peerpod.node", "TagValue": "n"},
                {"TagKey": "peerpod.installation", "TagValue": "i"}, {"TagKey": "empty", "TagValue": ""}]},
            "OperationLocks": {"LockReason": []},
        })
    }

    #[test]
    fn a_vm_is_read_as_the_api_shows_it() {
        let vm = AlibabaCloudVm::of(&body()).unwrap();
        assert_eq!(vm.addresses(false), ["10.0.0.2".parse::<IpAddr>().unwrap()]);
        assert!(vm.addresses(true).is_empty() && !vm.is_spot && !vm.is_recalled);
        assert!(vm.created.is_some(), "a time without seconds");
        let owner = |installation: &str| Owner {
            cluster_id: "c".into(),
            node_name: "n".into(),
            installation: installation.into(),
        };
        assert!(vm.marks.are_of(&owner("i")) && !vm.marks.are_of(&owner("j")));
        assert_eq!(vm.owned(false).unwrap().state, OwnedState::Running);
        let mut spot = body();
        spot["SpotStrategy"] = json!("SpotAsPriceGo");
        spot["OperationLocks"] = json!({"LockReason": [{"LockReason": "Recycling"}]});
        spot["PublicIpAddress"] = json!({"IpAddress": ["192.0.2.1"]});
        let vm = AlibabaCloudVm::of(&spot).unwrap();
        assert!(vm.is_spot && vm.is_recalled);
        assert_eq!(vm.addresses(true)[0], "192.0.2.1".parse::<IpAddr>().unwrap());
    }

    #[test]
    fn odd_answers_are_no_vms_and_unknown_states_are_listed() {
        for odd in [json!(null), json!({"InstanceId": 7}), json!({"InstanceId": "../x"})] {
            assert_eq!(AlibabaCloudVm::of(&odd), None, "{odd}");
        }
        let mut one = body();
        one["Status"] = json!("Thinking");
        assert_eq!(AlibabaCloudVm::of(&one).unwrap().owned(false).unwrap().state, OwnedState::Pending);
        one["Status"] = json!("Stopping");
        assert_eq!(AlibabaCloudVm::of(&one).unwrap().owned(false).unwrap().state, OwnedState::Ended);
    }
}
