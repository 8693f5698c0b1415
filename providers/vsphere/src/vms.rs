//! Lists and looks up VMs, with one call for many concurrent callers. May call `FindChild` and `RetrievePropertiesEx`.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use peerpod_provider_api::{Error, InstanceId, Owned, OwnedState, Owner};
use peerpod_provider_cloud::batch::{self, what};
use peerpod_provider_cloud::{ApiCall, Lookup, Marks, Window, names};
use peerpod_provider_rest::Failure;
use tokio::time::Instant;

use crate::body::{CREATED, DELETING, DISKS};
use crate::client::Vcenter;
use crate::config::{ALPHABET, VsphereConfig};
use crate::inventory::{Object, Objects};
use crate::soap::{Moref, children, value};

/// Properties of a look.
const PROPERTIES: [&str; 5] =
    ["name", "runtime.powerState", "config.extraConfig", "guest.ipAddress", "config.files.vmPathName"];
/// Variables by which the guest reports its addresses; the names are those of cloud-init.
const ADDRESSES: [&str; 2] = ["guestinfo.local-ipv4", "guestinfo.local-ipv6"];
/// Largest number of VMs that are searched one by one; more of them by one list.
const FEW: usize = 2;
/// Most VMs in one question.
const MOST_AT_ONCE: usize = 200;
/// Most remembered references.
const MOST_KNOWN: usize = 10_000;

/// A VM as the vCenter shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VsphereVm {
    /// Name, which is its id.
    pub name: String,
    pub moref: Moref,
    pub power: Power,
    /// Whether a delete has marked it.
    pub is_deleting: bool,
    pub addresses: Vec<IpAddr>,
    pub marks: Marks,
    /// Folder of its files, like `[datastore1] pp-…/`.
    pub folder: String,
    /// Keys of the disks that were made with it.
    pub disks: Vec<String>,
    pub created: Option<SystemTime>,
}

/// Power state of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Power {
    On,
    Off,
    Suspended,
}

impl VsphereVm {
    /// Reads one VM of an answer; `None`: it is not complete yet.
    fn of(object: Object<'_, '_>) -> Option<VsphereVm> {
        let variables = variables(object);
        let get = |name: &str| variables.get(name).map(String::as_str);
        let listed = ADDRESSES.into_iter().filter_map(get).flat_map(|text| text.split([',', ' ']));
        let mut addresses: Vec<IpAddr> = Vec::new();
        for address in listed.chain(object.text("guest.ipAddress")).filter_map(|text| text.parse().ok()) {
            if is_usable(address) && !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        let path = object.text("config.files.vmPathName")?;
        let created = get(CREATED).and_then(|text| text.parse().ok()).map(Duration::from_secs);
        Some(VsphereVm {
            name: object.text("name")?.to_owned(),
            moref: object.moref()?,
            power: match object.text("runtime.powerState")? {
                "poweredOn" => Power::On,
                "suspended" => Power::Suspended,
                _ => Power::Off,
            },
            is_deleting: get(DELETING).is_some(),
            addresses,
            marks: ALPHABET.read(&variables),
            disks: get(DISKS).unwrap_or_default().split(',').map(str::to_owned).collect(),
            folder: path.rsplit_once('/').map(|(folder, _)| format!("{folder}/"))?,
            created: created.and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since)),
        })
    }

    /// Whether the VM has this owner, by its marks and by its name, which follows from them. A copy of a VM has the same
    /// marks and another name.
    pub(crate) fn is_of(&self, owner: &Owner) -> bool {
        let Marks { cluster, node, installation, key: Some(key), .. } = &self.marks else { return false };
        let text = |mark: &Option<String>| mark.clone().unwrap_or_default();
        let maker =
            Owner { cluster_id: text(cluster), node_name: text(node), installation: text(installation) };
        self.marks.are_of(owner) && names::unique(&maker, key) == self.name
    }

    /// Whether the VM runs and stays.
    pub(crate) fn lives(&self) -> bool {
        self.power == Power::On && !self.is_deleting
    }

    /// Returns the VM's entry in a list. `is_new`: this process made it a moment ago, so that it may not run yet.
    pub(crate) fn owned(&self, is_new: bool) -> Option<Owned> {
        let state = match self.power {
            _ if self.is_deleting => OwnedState::Deleting,
            Power::On | Power::Suspended => OwnedState::Running,
            Power::Off if is_new => OwnedState::Pending,
            Power::Off => OwnedState::Ended,
        };
        let id = InstanceId::new(self.name.clone()).ok()?;
        let addresses = if self.lives() { self.addresses.clone() } else { Vec::new() };
        Some(self.marks.owned(id, state, addresses, self.created))
    }
}

/// Returns the variables of a VM.
fn variables(object: Object<'_, '_>) -> BTreeMap<String, String> {
    let Some(list) = object.property("config.extraConfig") else { return BTreeMap::new() };
    let pair = |node| Some((value(node, "key")?.to_owned(), value(node, "value")?.to_owned()));
    children(list, "OptionValue").filter_map(pair).collect()
}

/// Whether a node can reach the address: the guest also has others.
fn is_usable(address: IpAddr) -> bool {
    let is_link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    !address.is_unspecified() && !address.is_loopback() && !address.is_multicast() && !is_link_local
}

/// Folder of the provider's VMs, and the references that are known.
pub(crate) struct Folder {
    vcenter: Vcenter,
    config: VsphereConfig,
    moref: Mutex<Option<Moref>>,
    known: Mutex<HashMap<String, Moref>>,
}

/// Returns the batcher that looks up single VMs by their names. `None`: the folder has no such VM.
pub(crate) fn inspect(folder: Arc<Folder>) -> Lookup<VsphereVm> {
    batch::lookup(Window::LIST, move |names, until| {
        let folder = Arc::clone(&folder);
        async move { Ok(folder.by_names(names, until).await?) }
    })
}

impl Folder {
    /// Returns the folder; makes no call.
    pub(crate) fn new(vcenter: Vcenter, config: VsphereConfig) -> Folder {
        Folder { vcenter, config, moref: Mutex::default(), known: Mutex::default() }
    }

    /// Returns the folder, if it was found before.
    pub(crate) fn known(&self) -> Option<Moref> {
        self.moref.lock().clone()
    }

    /// Records the folder.
    pub(crate) fn found(&self, folder: &Moref) {
        *self.moref.lock() = Some(folder.clone());
    }

    /// Finds the folder. `None`: there is none yet, and so no VM.
    pub(crate) async fn find(&self, what: &str) -> Result<Option<Moref>, Failure> {
        if let Some(known) = self.known() {
            return Ok(Some(known));
        }
        let found = self.vcenter.by_path(what, &self.config.folder_path()).await?;
        self.moref.lock().clone_from(&found);
        Ok(found)
    }

    /// Forgets the folder, which an administrator may have replaced.
    pub(crate) fn forget(&self) {
        *self.moref.lock() = None;
        self.known.lock().clear();
    }

    /// Records the reference of a VM.
    fn learn(&self, vm: &VsphereVm) {
        let mut known = self.known.lock();
        if known.len() >= MOST_KNOWN {
            known.clear();
        }
        known.insert(vm.name.clone(), vm.moref.clone());
    }

    /// Returns those of these VMs that the folder has, of any owner.
    async fn by_names(
        &self,
        names: Vec<String>,
        until: Instant,
    ) -> Result<HashMap<String, VsphereVm>, Failure> {
        let what = what("look at", "VM", &names);
        let Some(folder) = self.find(&what).await? else { return Ok(HashMap::new()) };
        let known: Vec<Moref> =
            names.iter().filter_map(|name| self.known.lock().get(name).cloned()).collect();
        let mut found = self.details(&known, &what, until).await?;
        found.retain(|vm| names.contains(&vm.name));
        let missing: Vec<String> =
            names.into_iter().filter(|name| !found.iter().any(|vm| vm.name == *name)).collect();
        for name in &missing {
            self.known.lock().remove(name);
        }
        let mut morefs = Vec::new();
        let call = ApiCall::new("FindChild", "look", &what).until(until);
        if missing.len() > FEW {
            let listed = self.listed(call, &folder, |name| missing.iter().any(|one| one == name)).await;
            morefs = self.checked(listed)?;
        } else {
            for name in &missing {
                morefs.extend(self.checked(self.vcenter.child(call, &folder, name).await)?);
            }
        }
        found.extend(self.details(&morefs, &what, until).await?);
        for vm in &found {
            self.learn(vm);
        }
        Ok(found.into_iter().map(|vm| (vm.name.clone(), vm)).collect())
    }

    /// Returns all VMs of this owner.
    pub(crate) async fn all_of(&self, owner: &Owner, until: Instant) -> Result<Vec<VsphereVm>, Failure> {
        let what = "list our VMs";
        let Some(folder) = self.find(what).await? else { return Ok(Vec::new()) };
        let prefix = names::prefix(owner);
        let call = ApiCall::new("RetrievePropertiesEx", "list", what).until(until);
        let listed = self.listed(call, &folder, |name| name.starts_with(&prefix)).await;
        let mut found = self.details(&self.checked(listed)?, what, until).await?;
        found.retain(|vm| vm.is_of(owner));
        Ok(found)
    }

    /// Returns the VMs in the folder whose names are wanted, from all pages.
    async fn listed(
        &self,
        call: ApiCall<'_>,
        folder: &Moref,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Result<Vec<Moref>, Failure> {
        let read = |object: Object<'_, '_>| is_wanted(object.text("name")?).then(|| object.moref()).flatten();
        self.vcenter.retrieve(call, ("VirtualMachine", &["name"]), Objects::In(folder), read).await
    }

    async fn details(&self, morefs: &[Moref], what: &str, until: Instant) -> Result<Vec<VsphereVm>, Failure> {
        let mut found = Vec::new();
        for some in morefs.chunks(MOST_AT_ONCE) {
            let call = ApiCall::new("RetrievePropertiesEx", "look", what).until(until);
            let properties = ("VirtualMachine", &PROPERTIES[..]);
            found.extend(self.vcenter.retrieve(call, properties, Objects::These(some), VsphereVm::of).await?);
        }
        Ok(found)
    }

    /// Forgets a folder that is gone; the next call finds it again.
    fn checked<T>(&self, answer: Result<T, Failure>) -> Result<T, Failure> {
        answer.map_err(|failure| match failure.error {
            Error::NotFound { text } => {
                self.forget();
                Error::transient(text).into()
            }
            _ => failure,
        })
    }
}

#[cfg(test)]
mod tests {
    use peerpod_provider_api::IdempotencyKey;
    use roxmltree::Document;

    use super::*;

    const KEY: &str = "<OptionValue><key>peerpod.key</key><value>k</value></OptionValue>";

    fn owner(installation: &str) -> Owner {
        Owner { cluster_id: "c".into(), node_name: "n".into(), installation: installation.into() }
    }

    fn seen(power: &str, more: &str, then: impl FnOnce(Option<VsphereVm>)) {
        let name = names::unique(&owner("i"), &IdempotencyKey::parse("k").unwrap());
        let text = format!(
            "<objects><obj type='VirtualMachine'>vm-7</obj><propSet><name>name</name><val>{name}</val></propSet>\
             <propSet><name>runtime.powerState</name><val>{power}</val></propSet>\
             <propSet><name>config.files.vmPathName</name><val>[ds 1] pp-1/pp-1.vmx</val></propSet>\
             <propSet><name>guest.ipAddress</name><val>10.0.0.9</val></propSet>\
             <propSet><name>config.extraConfig</name><val>{more}\
             <OptionValue><key>peerpod.cluster</key><value>c</value></OptionValue>\
             <OptionValue><key>peerpod.node</key><value>n</value></OptionValue>\
             <OptionValue><key>peerpod.installation</key><value>i</value></OptionValue>\
             <OptionValue><key>peerpod.created</key><value>1000</value></OptionValue></val></propSet></objects>"
        );
        let document = Document::parse(&text).unwrap();
        then(VsphereVm::of(Object(document.root_element())));
    }

    #[test]
    fn a_vm_is_read_as_the_api_shows_it() {
        let addresses = "<OptionValue><key>guestinfo.local-ipv4</key><value>10.0.0.2,169.254.1.1,x</value></OptionValue>\
             <OptionValue><key>guestinfo.local-ipv6</key><value>fe80::1 fd00::2</value></OptionValue>";
        seen("poweredOn", &format!("{addresses}{KEY}"), |vm| {
            let mut vm = vm.unwrap();
            let found: Vec<String> = vm.addresses.iter().map(IpAddr::to_string).collect();
            assert_eq!(found, ["10.0.0.2", "fd00::2", "10.0.0.9"]);
            assert_eq!((vm.folder.as_str(), vm.moref.id.as_str()), ("[ds 1] pp-1/", "vm-7"));
            let anywhere = Owner { node_name: String::new(), ..owner("i") };
            assert!(vm.is_of(&owner("i")) && vm.is_of(&anywhere) && !vm.is_of(&owner("j")) && vm.lives());
            assert_eq!(vm.owned(false).unwrap().state, OwnedState::Running);
            assert_eq!(vm.created, SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(1000)));
            vm.name.push_str("-copy");
            assert!(!vm.is_of(&owner("i")) && !vm.is_of(&anywhere), "a copy by hand has the same marks");
        });
    }

    #[test]
    fn a_vm_that_is_off_is_new_or_has_ended_or_is_being_deleted() {
        seen("poweredOff", "", |vm| {
            let vm = vm.unwrap();
            assert_eq!(vm.owned(true).unwrap().state, OwnedState::Pending);
            let ended = vm.owned(false).unwrap();
            assert_eq!((ended.state, ended.addresses.len()), (OwnedState::Ended, 0));
        });
        let mark = "<OptionValue><key>peerpod.deleting</key><value>true</value></OptionValue>";
        seen("poweredOn", mark, |vm| {
            let vm = vm.unwrap();
            assert!(!vm.lives() && vm.owned(true).unwrap().state == OwnedState::Deleting);
        });
    }

    #[test]
    fn half_of_a_vm_is_none() {
        let document = Document::parse("<objects><obj type='VirtualMachine'>vm-7</obj></objects>").unwrap();
        assert_eq!(VsphereVm::of(Object(document.root_element())), None);
    }
}
