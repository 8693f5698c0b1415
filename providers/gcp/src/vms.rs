//! Lists and looks up VMs, with one call for many concurrent callers. May call `get`, `list` and `aggregatedList` of
//! instances.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::time::SystemTime;

use futures_util::future::try_join_all;
use peerpod_provider_api::{Error, IdempotencyKey, Owned, OwnedState, Owner};
use peerpod_provider_cloud::batch::{self, what};
use peerpod_provider_cloud::refusal::clip;
use peerpod_provider_cloud::{ApiCall, Lookup, Marks, VmState, Window, addresses};
use peerpod_provider_rest::{Failure, read};
use serde_json::Value;
use tokio::time::Instant;

use crate::client::Compute;
use crate::links::{self, VmId};
use crate::marks;

/// Largest number of VMs of a zone that are looked up one by one; more of them by one list.
const FEW: usize = 2;

/// A VM as Google shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GcpVm {
    pub id: VmId,
    pub state: VmState,
    pub machine: Option<String>,
    pub private: Vec<IpAddr>,
    pub public: Option<IpAddr>,
    /// Disks other than the boot disk: the path below the API's version, and the device name.
    pub disks: Vec<(String, String)>,
    /// Whether its boot disk, and so each other one, is an NVMe disk by request.
    pub is_nvme: bool,
    pub marks: Marks,
    pub created: Option<SystemTime>,
    /// Reason of the state, if Google gives one.
    pub reason: Option<String>,
}

/// Reads a life-cycle state.
fn state(word: &str) -> VmState {
    match word {
        "STAGING" => VmState::Placed,
        "RUNNING" | "REPAIRING" => VmState::Running,
        "STOPPING" | "PENDING_STOP" | "SUSPENDING" => VmState::Stopping,
        "DEPROVISIONING" => VmState::Deleting,
        "TERMINATED" | "STOPPED" | "SUSPENDED" => VmState::Ended,
        // Also a state that Google may add later. The VM exists, so it must be listed to be deleted.
        _ => VmState::Pending,
    }
}

impl GcpVm {
    /// Reads one VM of an answer; `None`: it has no name or zone.
    pub(crate) fn of(body: &Value) -> Option<GcpVm> {
        let zone = links::last(read::text(body, "/zone")?);
        let id = VmId::parse(&format!("{zone}/{}", read::text(body, "/name")?))?;
        let disks = read::list(body, "/disks").iter().filter(|disk| read::flag(disk, "/boot") != Some(true));
        let disk = |disk: &Value| {
            let source = links::PersistentDisk::parse(read::text(disk, "/source")?, "unknown")?;
            Some((source.path(), read::text(disk, "/deviceName").unwrap_or_default().to_owned()))
        };
        Some(GcpVm {
            state: state(read::text(body, "/status").unwrap_or_default()),
            machine: read::text(body, "/machineType").map(|link| links::last(link).to_owned()),
            private: read::address(body, "/networkInterfaces/0/networkIP").into_iter().collect(),
            public: read::list(body, "/networkInterfaces/0/accessConfigs")
                .iter()
                .find_map(|config| read::address(config, "/natIP")),
            disks: disks.filter_map(disk).collect(),
            is_nvme: read::text(body, "/disks/0/interface") == Some("NVME"),
            marks: read::text(body, "/description").map(marks::read).unwrap_or_default(),
            created: read::time(body, "/creationTimestamp"),
            reason: read::text(body, "/statusMessage").map(clip),
            id,
        })
    }

    /// Returns the addresses, the preferred one first; empty if there are none yet.
    pub(crate) fn addresses(&self, public: bool) -> Vec<IpAddr> {
        addresses(&self.private, self.public, public)
    }

    /// Returns the VM's entry in a list. Google shows a VM that is being deleted like one that stops by itself.
    /// `is_deleted`: this process requested its deletion.
    pub(crate) fn owned(&self, public: bool, is_deleted: bool) -> Option<Owned> {
        let state = if is_deleted { OwnedState::Deleting } else { self.state.owned()? };
        Some(self.marks.owned(self.id.id()?, state, self.addresses(public), self.created))
    }
}

/// Returns the batcher that looks up single VMs by the text of their ids. `None`: Google does not know the VM.
pub(crate) fn inspect(compute: Compute, owner: Owner) -> Lookup<GcpVm> {
    batch::lookup(Window::LIST, move |ids, until| by_ids(compute.clone(), owner.clone(), ids, until))
}

/// Returns those of these VMs that Google shows. A list selects by this owner's marks and may lag, so a VM that it does
/// not have is looked up alone.
async fn by_ids(
    compute: Compute,
    owner: Owner,
    ids: Vec<String>,
    until: Instant,
) -> Result<HashMap<String, GcpVm>, Error> {
    let mut zones: BTreeMap<String, Vec<VmId>> = BTreeMap::new();
    for id in ids.iter().filter_map(|id| VmId::parse(id)) {
        zones.entry(id.zone.clone()).or_default().push(id);
    }
    let what = what("look at", "VM", &ids);
    let (compute, owner, what) = (&compute, &owner, &what);
    let each = zones.into_iter().map(|(zone, wanted)| async move {
        let mut found: HashMap<String, GcpVm> = HashMap::new();
        if wanted.len() > FEW {
            let listed = in_zone(compute, &zone, (owner, &marks::filter(owner)), what, until).await?;
            found.extend(listed.into_iter().map(|vm| (vm.id.to_string(), vm)));
        }
        let missing = wanted.into_iter().filter(|id| !found.contains_key(&id.to_string()));
        let alone =
            try_join_all(missing.map(|id| async move { one(compute, &id, what, until).await })).await?;
        found.extend(alone.into_iter().flatten().map(|vm| (vm.id.to_string(), vm)));
        Ok::<_, Failure>(found)
    });
    Ok(try_join_all(each).await?.into_iter().flatten().collect())
}

/// Looks at one VM, of any owner. `None`: there is none.
pub(crate) async fn one(
    compute: &Compute,
    id: &VmId,
    what: &str,
    until: Instant,
) -> Result<Option<GcpVm>, Failure> {
    let owner = id.to_string();
    let call = ApiCall::new("instances.get", &owner, what).until(until);
    match compute.get(call, &compute.own(&id.path()), &[]).await {
        Ok(body) => match GcpVm::of(&body).filter(|vm| vm.id == *id) {
            Some(vm) => Ok(Some(vm)),
            None => {
                Err(Error::transient(format!("{what}: the answer is another VM; it is tried again")).into())
            }
        },
        Err(failure) if failure.status() == 404 && is_missing(&failure) => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// Whether a call failed because there is no such VM. A project or zone that is not there is another matter.
pub(crate) fn is_missing(failure: &Failure) -> bool {
    matches!(failure.error, Error::NotFound { .. })
}

/// Returns the VMs of this owner in a zone that a filter selects, from all pages.
pub(crate) async fn in_zone(
    compute: &Compute,
    zone: &str,
    (owner, filter): (&Owner, &str),
    what: &str,
    until: Instant,
) -> Result<Vec<GcpVm>, Failure> {
    let mut found = Vec::new();
    let call = ApiCall::new("instances.list", "list", what).until(until);
    let path = compute.own(&format!("zones/{zone}/instances"));
    compute
        .pages(call, &path, &[("filter", filter)], |page| {
            let ours = read::list(page, "/items").iter().filter_map(GcpVm::of);
            found.extend(ours.filter(|vm| vm.marks.are_of(owner)));
            Ok(())
        })
        .await?;
    Ok(found)
}

/// Returns the VMs of a zone that this owner made with this key.
pub(crate) async fn by_key(
    compute: &Compute,
    zone: &str,
    owner: &Owner,
    key: &IdempotencyKey,
    what: &str,
    until: Instant,
) -> Result<Vec<GcpVm>, Failure> {
    let mut found = in_zone(compute, zone, (owner, &marks::filter_by_key(owner, key)), what, until).await?;
    found.retain(|vm| vm.marks.key.as_ref() == Some(key));
    found.sort_by(|a, b| a.id.cmp(&b.id));
    Ok(found)
}

/// Returns every VM of this owner in all zones, also in those that the settings do not name any more. All are in the
/// region of the settings, if these name one.
pub(crate) async fn all_of(
    compute: &Compute,
    owner: &Owner,
    region: Option<&str>,
    until: Instant,
) -> Result<Vec<GcpVm>, Error> {
    let what = "list our VMs";
    let mut found = Vec::new();
    let call = ApiCall::new("instances.aggregatedList", "list", what).until(until);
    let filter = marks::filter(owner);
    let path = compute.own("aggregated/instances");
    compute
        .pages(call, &path, &[("filter", &filter)], |page| {
            whole(page, region)?;
            let zones = page.get("items").and_then(Value::as_object).into_iter().flatten();
            for (_, zone) in zones {
                let ours = read::list(zone, "/instances").iter().filter_map(GcpVm::of);
                found.extend(ours.filter(|vm| vm.marks.are_of(owner)));
            }
            Ok(())
        })
        .await?;
    Ok(found)
}

/// Refuses a page without the VMs of a zone that does not answer. An outage of another region is no matter of ours.
fn whole(page: &Value, region: Option<&str>) -> Result<(), Error> {
    let zones = page.get("items").and_then(Value::as_object).into_iter().flatten();
    let silent = zones.filter(|(_, zone)| read::text(zone, "/warning/code") == Some("UNREACHABLE"));
    let mut silent: Vec<&str> = silent.map(|(name, _)| links::last(name)).collect();
    silent.extend(read::list(page, "/unreachables").iter().filter_map(Value::as_str).map(links::last));
    let is_ours = |zone: &&&str| region.is_none_or(|region| links::region_of(zone) == region);
    match silent.iter().find(is_ours) {
        Some(zone) => {
            Err(Error::transient(format!("the zone {zone:.63} does not answer; it is tried again")))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn body() -> Value {
        json!({
            "name": "pp-1", "zone": "https://www.googleapis.com/compute/v1/projects/p-1/zones/us-central1-a",
            "status": "RUNNING", "machineType": "https://x/compute/v1/projects/p-1/zones/us-central1-a/machineTypes/e2-medium",
            "creationTimestamp": "2026-11-26T10:00:00.123-08:00",
            "description": "{\"cluster\":\"c\",\"node\":\"n\",\"installation\":\"i\",\"key\":\"k\"}",
            "networkInterfaces": [{"networkIP": "10.0.0.2", "accessConfigs": [{"natIP": "192.0.2.1"}]}],
            "disks": [{"boot": true, "source": "projects/p-1/zones/us-central1-a/disks/pp-1"},
                {"source": "https://x/compute/v1/projects/p-1/zones/us-central1-a/disks/pvc-1", "deviceName": "pp-x"}],
        })
    }

    #[test]
    fn a_vm_is_read_as_the_api_shows_it() {
        let vm = GcpVm::of(&body()).unwrap();
        assert_eq!(vm.id.to_string(), "us-central1-a/pp-1");
        assert_eq!(
            vm.disks,
            [("projects/p-1/zones/us-central1-a/disks/pvc-1".to_owned(), "pp-x".to_owned())]
        );
        assert_eq!(vm.addresses(false), ["10.0.0.2".parse::<IpAddr>().unwrap()]);
        assert_eq!(vm.addresses(true)[0], "192.0.2.1".parse::<IpAddr>().unwrap());
        let owner = |installation: &str| Owner {
            cluster_id: "c".into(),
            node_name: "n".into(),
            installation: installation.into(),
        };
        assert!(vm.marks.are_of(&owner("i")) && !vm.marks.are_of(&owner("j")));
        assert_eq!(vm.owned(false, false).unwrap().state, OwnedState::Running);
        assert_eq!(vm.owned(false, true).unwrap().state, OwnedState::Deleting);
        assert!(vm.created.is_some() && vm.machine.as_deref() == Some("e2-medium"));
    }

    #[test]
    fn odd_answers_are_no_vms_and_unknown_states_are_listed() {
        for odd in [json!(null), json!({"name": "pp-1"}), json!({"name": "../x", "zone": "a/b"})] {
            assert_eq!(GcpVm::of(&odd), None, "{odd}");
        }
        let mut one = body();
        one["status"] = json!("NEW_STATE");
        one["networkInterfaces"] = json!([{"networkIP": "0.0.0.0"}]);
        let vm = GcpVm::of(&one).unwrap();
        assert_eq!((vm.state, vm.addresses(false).len(), vm.addresses(true).len()), (VmState::Pending, 0, 0));
        one["status"] = json!("STOPPING");
        assert_eq!(GcpVm::of(&one).unwrap().owned(false, false).unwrap().state, OwnedState::Ended);
    }

    #[test]
    fn a_list_without_a_zone_is_an_error() {
        whole(&json!({"items": {"zones/a-1-a": {"warning": {"code": "NO_RESULTS_ON_PAGE"}}}}), None).unwrap();
        for part in [
            json!({"items": {"zones/a-1-a": {"warning": {"code": "UNREACHABLE"}}}}),
            json!({"unreachables": ["projects/p/zones/a-1-a"]}),
        ] {
            for region in [None, Some("a-1")] {
                let error = whole(&part, region).unwrap_err();
                assert!(error.class() == "transient" && error.to_string().contains("a-1-a"), "{error}");
            }
            whole(&part, Some("b-1")).unwrap();
        }
    }
}
