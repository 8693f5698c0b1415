//! Lists and looks up VMs, with one call for many concurrent callers, and reads the tags of each VM once. May call
//! `pvminstances.getall` and `pvminstances.get`.
//!
//! A list has no tags. They never change, so a VM of ours is read once for them.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::SystemTime;

use futures_util::future::try_join_all;
use futures_util::{StreamExt, TryStreamExt, stream};
use parking_lot::Mutex;
use peerpod_provider_api::{Error, InstanceId, Owned};
use peerpod_provider_cloud::batch::{self, what};
use peerpod_provider_cloud::{ApiCall, Lookup, Marks, VmState, Window, addresses, names};
use peerpod_provider_rest::{Failure, Method, Said, ibm, read};
use serde_json::Value;
use tokio::time::Instant;

use crate::client::Power;
use crate::config::is_name;

/// Most VMs with kept tags. Beyond that the others are read again.
const MOST: usize = 10_000;
/// Number of VMs that are read at once for their tags.
const AT_ONCE: usize = 16;
/// Code of a VM that PowerVS could not make.
const FAULT: &str = "ERROR";

/// A VM as PowerVS shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PowerVsVm {
    pub id: String,
    pub name: String,
    pub state: VmState,
    pub made: Option<SystemTime>,
    pub nics: Vec<PowerVsNic>,
    /// Fault of a VM that PowerVS could not make.
    pub fault: Option<Said>,
}

/// Network interface of a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PowerVsNic {
    pub network: String,
    pub address: Option<IpAddr>,
    pub public: Option<IpAddr>,
    pub mac: Option<String>,
}

impl PowerVsVm {
    /// Reads a VM; `None`: the value is none.
    pub(crate) fn of(value: &Value) -> Option<PowerVsVm> {
        let text = |pointer: &str| read::text(value, pointer);
        let task = text("/taskState").unwrap_or_default().to_ascii_lowercase();
        let state = match text("/status")?.to_ascii_uppercase().as_str() {
            _ if task.contains("delet") => VmState::Deleting,
            "ACTIVE" | "WARNING" | "REBOOT" | "HARD_REBOOT" | "MIGRATING" | "RESIZE" => VmState::Running,
            "SHUTOFF" | "STOPPED" => VmState::Ended,
            FAULT => VmState::Failed,
            "DELETING" | "DELETED" => VmState::Deleting,
            // Also a state that PowerVS may add later. The VM exists, so it must be listed to be deleted.
            _ => VmState::Pending,
        };
        Some(PowerVsVm {
            id: text("/pvmInstanceID").filter(|id| is_name(id))?.to_owned(),
            name: text("/serverName")?.to_owned(),
            state,
            made: read::time(value, "/creationDate"),
            nics: read::list(value, "/networks").iter().map(PowerVsNic::of).collect(),
            fault: (state == VmState::Failed).then(|| {
                let detail =
                    ["/fault/details", "/fault/message", "/health/reason"].into_iter().find_map(text);
                Said { code: FAULT.to_owned(), message: detail.unwrap_or("no reason").to_owned() }
            }),
        })
    }

    /// Returns the VM's entry in a list.
    pub(crate) fn owned(&self, marks: &Marks, public: bool) -> Option<Owned> {
        let id = InstanceId::new(self.id.clone()).ok()?;
        let addresses = self.nics.first().map(|nic| nic.addresses(public)).unwrap_or_default();
        Some(marks.owned(id, self.state.owned()?, addresses, self.made))
    }
}

impl PowerVsNic {
    fn of(value: &Value) -> PowerVsNic {
        let address = |pointers: [&str; 2]| pointers.iter().find_map(|one| read::address(value, one));
        PowerVsNic {
            network: read::text(value, "/networkID").unwrap_or_default().to_owned(),
            address: address(["/ipAddress", "/ip"]),
            public: address(["/externalIP", "/externalIP"]),
            mac: read::text(value, "/macAddress").map(str::to_ascii_lowercase),
        }
    }

    /// Returns the addresses, the preferred one first; empty if there are none yet.
    pub(crate) fn addresses(&self, public: bool) -> Vec<IpAddr> {
        addresses(self.address.as_slice(), self.public, public)
    }
}

/// Looks at one VM, with its tags; `None`: it does not exist.
pub(crate) async fn one(
    power: &Power,
    id: &str,
    what: &str,
    until: Instant,
) -> Result<Option<(PowerVsVm, Marks)>, Failure> {
    let found =
        power.find(ApiCall::new("pvminstances.get", id, what).until(until), ["pvm-instances", id]).await?;
    let Some(found) = found else { return Ok(None) };
    let vm = PowerVsVm::of(&found).filter(|vm| vm.id == id);
    let odd = || Error::transient(format!("{what}: the answer is another VM; it is tried again"));
    let vm = vm.ok_or_else(odd)?;
    Ok(Some((vm, ibm::TAGS.read(&ibm::read_tags(read::list(&found, "/userTags"))))))
}

/// Returns Peerpod's VMs of the workspace, those of other owners included.
pub(crate) async fn list(power: &Power, what: &str, until: Instant) -> Result<Vec<PowerVsVm>, Failure> {
    let request = power.request(Method::GET, ["pvm-instances"]);
    let answer =
        power.call(ApiCall::new("pvminstances.getall", "list", what).until(until), &request).await?.json();
    let all = answer.get("pvmInstances").and_then(Value::as_array);
    let all = all.ok_or_else(|| Error::transient(format!("{what}: the answer has no list")))?;
    let ours = all.iter().filter_map(PowerVsVm::of).filter(|vm| vm.name.starts_with(names::ALL));
    Ok(ours.collect())
}

/// Requests the deletion of a VM. A VM that is gone is as good.
pub(crate) async fn delete(power: &Power, id: &str, what: &str, until: Instant) -> Result<(), Error> {
    let request = power.request(Method::DELETE, ["pvm-instances", id]);
    match power.call(ApiCall::new("pvminstances.delete", id, what).until(until), &request).await {
        Ok(_) => Ok(()),
        Err(failure) if matches!(failure.error, Error::NotFound { .. }) => Ok(()),
        Err(failure) => Err(failure.error),
    }
}

/// Returns the batcher that looks up VMs, by their ids or by their names, which several may have. `None`: there is none.
pub(crate) fn inspect(power: Power) -> Lookup<Vec<PowerVsVm>> {
    batch::lookup(Window::LIST, move |keys, until| by_keys(power.clone(), keys, until))
}

async fn by_keys(
    power: Power,
    keys: Vec<String>,
    until: Instant,
) -> Result<HashMap<String, Vec<PowerVsVm>>, Error> {
    let what = what("look at", "VM", &keys);
    let mut found: HashMap<String, Vec<PowerVsVm>> = HashMap::new();
    for vm in list(&power, &what, until).await? {
        found.insert(vm.id.clone(), vec![vm.clone()]);
        found.entry(vm.name.clone()).or_default().push(vm);
    }
    // The list may be late. A name can be looked up in no other way.
    let missing = keys.iter().filter(|key| !found.contains_key(*key) && !key.starts_with(names::ALL));
    let looks: Vec<_> = missing.map(|id| one(&power, id, &what, until)).collect();
    for (vm, _) in try_join_all(looks).await?.into_iter().flatten() {
        found.insert(vm.id.clone(), vec![vm]);
    }
    Ok(found)
}

/// Tags of VMs, by their ids.
#[derive(Debug, Default)]
pub(crate) struct Tags(Mutex<HashMap<String, Marks>>);

impl Tags {
    /// Returns the marks of a VM. Reads them once. `None`: the VM is gone.
    pub(crate) async fn of(
        &self,
        power: &Power,
        id: &str,
        what: &str,
        until: Instant,
    ) -> Result<Option<Marks>, Error> {
        if let Some(marks) = self.0.lock().get(id) {
            return Ok(Some(marks.clone()));
        }
        let Some((_, marks)) = one(power, id, what, until).await? else { return Ok(None) };
        if marks.key.is_none() {
            // PowerVS may show the tags of a new VM late.
            return Ok(Some(marks));
        }
        let mut all = self.0.lock();
        if all.len() >= MOST {
            all.clear();
        }
        all.insert(id.to_owned(), marks.clone());
        Ok(Some(marks))
    }

    /// Returns these VMs with their marks, in this order, without those that are gone.
    pub(crate) async fn of_all(
        &self,
        power: &Power,
        vms: Vec<PowerVsVm>,
        what: &str,
        until: Instant,
    ) -> Result<Vec<(PowerVsVm, Marks)>, Error> {
        let looks = vms.into_iter().map(|vm| async move {
            let marks = self.of(power, &vm.id, what, until).await?;
            Ok::<_, Error>(marks.map(|marks| (vm, marks)))
        });
        let found: Vec<_> = stream::iter(looks).buffered(AT_ONCE).try_collect().await?;
        Ok(found.into_iter().flatten().collect())
    }

    /// Drops the tags of VMs that do not exist any more.
    pub(crate) fn keep(&self, vms: &[PowerVsVm]) {
        self.0.lock().retain(|id, _| vms.iter().any(|vm| vm.id == *id));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vm(more: &Value) -> Option<PowerVsVm> {
        let mut value = json!({"pvmInstanceID": "a-1", "serverName": "pp-a", "status": "ACTIVE",
            "creationDate": "2026-11-06T00:00:00.000Z",
            "networks": [{"networkID": "n", "ipAddress": "192.168.0.4", "externalIP": "203.0.113.4", "macAddress": "FA:16"}]});
        for (name, one) in more.as_object().unwrap() {
            value[name] = one.clone();
        }
        PowerVsVm::of(&value)
    }

    #[test]
    fn the_state_follows_from_status_and_task() {
        for (status, task, state) in [
            ("BUILD", "spawning", VmState::Pending),
            ("ACTIVE", "", VmState::Running),
            ("ACTIVE", "deleting", VmState::Deleting),
            ("SHUTOFF", "", VmState::Ended),
            ("ERROR", "", VmState::Failed),
            ("NOVEL", "", VmState::Pending),
        ] {
            assert_eq!(
                vm(&json!({"status": status, "taskState": task})).unwrap().state,
                state,
                "{status} {task}"
            );
        }
        let failed = vm(
            &json!({"status": "ERROR", "fault": {"code": 500, "message": "m", "details": "No valid host"}}),
        );
        assert_eq!(failed.unwrap().fault.unwrap().message, "No valid host");
        for bad in [json!({"pvmInstanceID": "a/b"}), json!({"status": 5}), json!({"serverName": ""})] {
            assert_eq!(vm(&bad), None, "{bad}");
        }
    }

    #[test]
    fn an_interface_has_its_addresses() {
        let nic = vm(&json!({})).unwrap().nics.remove(0);
        let texts = |public| nic.addresses(public).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(
            (texts(false), texts(true)),
            (vec!["192.168.0.4".into()], vec!["203.0.113.4".into(), "192.168.0.4".into()])
        );
        assert_eq!(nic.mac.as_deref(), Some("fa:16"));
        assert!(PowerVsNic::default().addresses(true).is_empty());
    }
}
