//! Builds the call that clones a VM from the template. Pure.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use peerpod_provider_api::{CreateRequest, Error, IdempotencyKey, Owner};
use peerpod_provider_cloud::{marks, names};

use crate::config::{ALPHABET, VsphereConfig};
use crate::facts::{Template, VsphereNetwork, VspherePlace};
use crate::soap::{self, Method, Moref, element, option, text, typed};

/// Variable of a VM with its user-data, which the guest reads and overwrites.
pub(crate) const USER_DATA: &str = "guestinfo.userdata";
/// Mark of a VM that is being deleted.
pub(crate) const DELETING: &str = "peerpod.deleting";
/// Mark with the time of the create, in seconds since 1970.
pub(crate) const CREATED: &str = "peerpod.created";
/// Mark with the keys of the disks that are made with the VM.
pub(crate) const DISKS: &str = "peerpod.disks";
/// Prefix of labels and of the administrator's tags.
const TAG: &str = "peerpod.tag.";
/// Largest annotation, in characters; it is for people.
const MAX_ANNOTATION: usize = 1000;
/// Granularity of a VM's memory, in MiB.
const MEMORY_STEP: u64 = 4;

/// VM that is about to be made.
pub(crate) struct VsphereVmSpec<'s> {
    pub config: &'s VsphereConfig,
    pub owner: &'s Owner,
    pub request: &'s CreateRequest,
    pub key: &'s IdempotencyKey,
    pub folder: &'s Moref,
    pub template: &'s Template,
    pub place: &'s VspherePlace,
    pub networks: [Option<&'s VsphereNetwork>; 2],
}

impl VsphereVmSpec<'_> {
    /// Returns the call for a VM of this name.
    pub(crate) fn clone_of(&self, name: &str) -> Result<Method, Error> {
        let VspherePlace { pool, host, datastore, .. } = self.place;
        let datastore_xml = datastore.as_ref().map(|(_, moref)| moref.xml("datastore")).unwrap_or_default();
        let snapshot = self.template.snapshot.as_ref();
        let move_type =
            snapshot.map(|_| text("diskMoveType", "createNewChildDiskBacking")).unwrap_or_default();
        let host = host.as_ref().map(|host| host.xml("host")).unwrap_or_default();
        let location = element("location", &(datastore_xml + &move_type + &pool.xml("pool") + &host));
        let spec = [
            location,
            text("template", "false"),
            element("config", &self.settings(name)?),
            text("powerOn", "true"),
            snapshot.map(|snapshot| snapshot.xml("snapshot")).unwrap_or_default(),
        ];
        let arguments = self.folder.xml("folder") + &text("name", name) + &element("spec", &spec.concat());
        Ok(Method { name: "CloneVM_Task", this: self.template.moref.clone(), arguments })
    }

    /// Returns virtual CPUs and memory in MiB.
    pub(crate) fn size(&self) -> (u32, u64) {
        let (size, config) = (&self.request.size, self.config);
        let vcpus = if size.vcpus == 0 { config.vcpus } else { size.vcpus };
        let memory = if size.memory_mib == 0 { config.memory_mib } else { size.memory_mib };
        (vcpus, memory.next_multiple_of(MEMORY_STEP))
    }

    fn settings(&self, name: &str) -> Result<String, Error> {
        let Owner { cluster_id, node_name, installation } = self.owner;
        let uuid = names::digest(&[cluster_id, node_name, installation, self.key.as_str(), "instance"]);
        let (vcpus, memory) = self.size();
        let what = format!("Peerpod: pod VM {} of the node {node_name}", self.request.name);
        let annotation: String = what.chars().take(MAX_ANNOTATION).collect();
        let fields = [
            // A handle for people. The name is the identity: a vCenter may change this id.
            text("instanceUuid", &names::uuid_text(&names::version_8(&uuid))),
            text("annotation", &annotation),
            text("numCPUs", &vcpus.to_string()),
            text("memoryMB", &memory.to_string()),
            self.devices(name),
            self.variables()?.iter().map(|(key, value)| option(key, value)).collect(),
        ];
        Ok(fields.concat())
    }

    fn variables(&self) -> Result<BTreeMap<String, String>, Error> {
        let marks = ALPHABET.marks(self.request, self.key, self.owner, &self.config.tags)?;
        // Other names have a meaning for the hypervisor.
        let mut all: BTreeMap<String, String> = marks
            .into_iter()
            .map(|(name, value)| match name.starts_with(marks::PREFIX) {
                true => (name, value),
                false => (format!("{TAG}{name}"), value),
            })
            .filter(|(name, _)| name != DELETING)
            .collect();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let fixed = [
            (CREATED, now.as_secs().to_string()),
            (DISKS, self.template.disks.join(",")),
            (USER_DATA, BASE64_STANDARD.encode(&self.request.user_data)),
            ("guestinfo.userdata.encoding", "base64".to_owned()),
            // The guest sees the ids of disks.
            ("disk.EnableUUID", "TRUE".to_owned()),
        ];
        all.extend(fixed.map(|(name, value)| (name.to_owned(), value)));
        Ok(all)
    }

    fn devices(&self, name: &str) -> String {
        let [first, second] = self.networks;
        let edited = first
            .zip(self.template.nic.as_ref())
            .map(|(network, (kind, key))| change("edit", kind, &(text("key", key) + &backing(network))));
        let added = second.filter(|_| self.request.second_nic).map(|network| {
            let connectable = text("startConnected", "true")
                + &text("allowGuestControl", "false")
                + &text("connected", "true");
            let device = text("key", "-101") + &backing(network) + &element("connectable", &connectable);
            change("add", "VirtualVmxnet3", &(device + &text("addressType", "generated")))
        });
        let console = self.config.console.then(|| {
            let datastore = self.place.datastore.as_ref().map(|(name, _)| name);
            let datastore = datastore.unwrap_or(&self.template.datastore);
            let file = text("fileName", &format!("[{datastore}] {name}/console.log"));
            let backing = typed("backing", "VirtualSerialPortFileBackingInfo", &file);
            let device = text("key", "-102") + &backing + &text("yieldOnPoll", "true");
            change("add", "VirtualSerialPort", &device)
        });
        [edited, added, console].into_iter().flatten().collect()
    }
}

/// Returns the change of one device.
pub(crate) fn change(operation: &str, kind: &str, device: &str) -> String {
    element("deviceChange", &(text("operation", operation) + &typed("device", kind, device)))
}

fn backing(network: &VsphereNetwork) -> String {
    match network {
        VsphereNetwork::Standard { name, moref } => {
            let inner = text("deviceName", name) + &moref.xml("network");
            typed("backing", "VirtualEthernetCardNetworkBackingInfo", &inner)
        }
        VsphereNetwork::Distributed { switch, portgroup } => {
            let port = text("switchUuid", switch) + &text("portgroupKey", portgroup);
            let inner = element("port", &port);
            typed("backing", "VirtualEthernetCardDistributedVirtualPortBackingInfo", &inner)
        }
    }
}

/// Returns the call that changes a VM: devices, and variables after them.
pub(crate) fn reconfigure(vm: &Moref, devices: &str, variables: &[(&str, &str)]) -> Method {
    let variables: String = variables.iter().map(|(key, value)| soap::option(key, value)).collect();
    let arguments = element("spec", &(devices.to_owned() + &variables));
    Method { name: "ReconfigVM_Task", this: vm.clone(), arguments }
}

#[cfg(test)]
mod tests {
    use peerpod_provider_api::Size;
    use roxmltree::{Document, Node};

    use super::*;
    use crate::config::tests::read;
    use crate::soap::{child, children, value};

    fn moref(kind: &str) -> Moref {
        Moref { kind: kind.into(), id: format!("{kind}-1") }
    }

    fn shaped(
        settings: &[(&str, &str)],
        change: impl FnOnce(&mut CreateRequest, &mut Template, &mut VspherePlace),
        then: impl FnOnce(Node<'_, '_>),
    ) {
        let config = read(settings).unwrap();
        let owner = Owner { cluster_id: "c_1".into(), node_name: "n".into(), installation: "i".into() };
        let mut request = CreateRequest {
            name: "web-0".into(),
            user_data: "{\"ticket\":\"t\"}\n".into(),
            labels: [
                ("team".to_owned(), "blue".to_owned()),
                ("peerpod.deleting".to_owned(), "true".to_owned()),
            ]
            .into(),
            ..CreateRequest::default()
        };
        let mut template = Template {
            path: "DC0/vm/t".into(),
            moref: moref("VirtualMachine"),
            snapshot: Some(moref("VirtualMachineSnapshot")),
            datastore: "ds-0".into(),
            disks: vec!["2000".into(), "2016".into()],
            nic: Some(("VirtualVmxnet3".into(), "4000".into())),
            has_vmci: true,
            is_efi: true,
        };
        let mut place = VspherePlace {
            name: "esx-1".into(),
            pool: moref("ResourcePool"),
            host: Some(moref("HostSystem")),
            datastore: None,
        };
        change(&mut request, &mut template, &mut place);
        let network = VsphereNetwork::Distributed { switch: "5 0".into(), portgroup: "dvportgroup-1".into() };
        let second = VsphereNetwork::Standard { name: "Storage & more".into(), moref: moref("Network") };
        let shape = VsphereVmSpec {
            config: &config,
            owner: &owner,
            request: &request,
            key: &IdempotencyKey::derive("c", "s", 0),
            folder: &moref("Folder"),
            template: &template,
            place: &place,
            networks: [Some(&network).filter(|_| config.network.is_some()), Some(&second)],
        };
        let body = shape.clone_of("pp-1").unwrap().envelope();
        let document = Document::parse(&body).unwrap();
        then(document.descendants().find(|node| node.has_tag_name("CloneVM_Task")).unwrap());
    }

    fn variables(config: Node<'_, '_>) -> BTreeMap<String, String> {
        let pair = |node| Some((value(node, "key")?.to_owned(), value(node, "value")?.to_owned()));
        children(config, "extraConfig").filter_map(pair).collect()
    }

    #[test]
    fn a_clone_is_linked_to_the_snapshot_and_has_marks_and_user_data() {
        shaped(
            &[],
            |_, _, _| {},
            |call| {
                let spec = child(call, "spec").unwrap();
                let location = child(spec, "location").unwrap();
                assert_eq!(value(location, "diskMoveType"), Some("createNewChildDiskBacking"));
                assert_eq!(value(location, "host"), Some("HostSystem-1"));
                assert!(child(location, "datastore").is_none(), "the template's");
                assert_eq!(
                    (value(spec, "powerOn"), value(spec, "snapshot")),
                    (Some("true"), Some("VirtualMachineSnapshot-1"))
                );
                let config = child(spec, "config").unwrap();
                assert_eq!((value(config, "numCPUs"), value(config, "memoryMB")), (Some("2"), Some("4096")));
                let variables = variables(config);
                let user_data = BASE64_STANDARD.decode(&variables[USER_DATA]).unwrap();
                assert_eq!(user_data, b"{\"ticket\":\"t\"}\n");
                assert_eq!(variables["disk.EnableUUID"], "TRUE");
                assert_eq!(variables["peerpod.tag.team"], "blue");
                assert_eq!(variables[DISKS], "2000,2016");
                assert!(!variables.contains_key(DELETING) && variables.contains_key(CREATED));
                assert_eq!(ALPHABET.read(&variables).cluster.as_deref(), Some("c_1"));
                assert!(child(config, "deviceChange").is_none());
            },
        );
    }

    #[test]
    fn without_a_snapshot_the_clone_is_full_and_drs_chooses_the_host() {
        let change = |request: &mut CreateRequest, template: &mut Template, place: &mut VspherePlace| {
            template.snapshot = None;
            place.host = None;
            place.datastore = Some(("ds-1".into(), moref("Datastore")));
            request.size = Size { vcpus: 3, memory_mib: 1022, ..Size::default() };
        };
        shaped(&[("console", "true")], change, |call| {
            let spec = child(call, "spec").unwrap();
            let location = child(spec, "location").unwrap();
            assert!(child(location, "diskMoveType").is_none() && child(location, "host").is_none());
            assert_eq!(value(location, "datastore"), Some("Datastore-1"));
            assert!(child(spec, "snapshot").is_none());
            let config = child(spec, "config").unwrap();
            assert_eq!((value(config, "numCPUs"), value(config, "memoryMB")), (Some("3"), Some("1024")));
            let device = child(child(config, "deviceChange").unwrap(), "device").unwrap();
            assert_eq!(soap::kind(device), Some("VirtualSerialPort"));
            assert_eq!(value(child(device, "backing").unwrap(), "fileName"), Some("[ds-1] pp-1/console.log"));
        });
    }

    #[test]
    fn networks_are_in_the_clones_nics() {
        let settings = [("network", "pods"), ("second-network", "Storage & more")];
        shaped(
            &settings,
            |request, _, _| request.second_nic = true,
            |call| {
                let config = child(child(call, "spec").unwrap(), "config").unwrap();
                let changes: Vec<_> = children(config, "deviceChange").collect();
                assert_eq!(changes.len(), 2);
                let [first, second] = [0, 1].map(|n| child(changes[n], "device").unwrap());
                assert_eq!(
                    (value(changes[0], "operation"), value(first, "key")),
                    (Some("edit"), Some("4000"))
                );
                let port = child(child(first, "backing").unwrap(), "port").unwrap();
                assert_eq!(value(port, "portgroupKey"), Some("dvportgroup-1"));
                assert_eq!(value(changes[1], "operation"), Some("add"));
                assert_eq!(value(child(second, "backing").unwrap(), "deviceName"), Some("Storage & more"));
            },
        );
    }
}
