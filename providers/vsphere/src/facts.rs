//! Loads the facts that a create needs: template, hosts, datastores, networks. They are loaded at first use and cached; a
//! delete needs none of them. May call the look-ups of `inventory.rs`.

use std::time::Duration;

use futures_util::future::try_join_all;
use peerpod_provider_api::{Arch, Error};
use peerpod_provider_cloud::refusal::together;
use peerpod_provider_cloud::{ApiCall, Catalogue, Location, MachineType};
use peerpod_provider_rest::Failure;

use crate::client::Vcenter;
use crate::config::{LARGEST, VsphereConfig};
use crate::inventory::{Object, Objects};
use crate::soap::{self, Moref, child, value};
use crate::volumes::VmDisk;

/// Time for which facts are used. An administrator may replace the template by one of the same name.
pub(crate) const FRESH: Duration = Duration::from_secs(600);
/// Owner of these calls, for the scheduler.
const OWNER: &str = "facts";
/// Name of the one type of VM in the catalogue: all sizes are possible.
pub(crate) const TYPE: &str = "vm";
/// Most disks besides the root disk: four SCSI controllers with 15 places, a host's limit per controller.
const MAX_DISKS: u32 = 59;

/// Facts about the vCenter.
#[derive(Debug)]
pub(crate) struct VsphereFacts {
    pub template: Template,
    /// Pairs of a host or cluster and a datastore.
    pub places: Vec<VspherePlace>,
    pub network: Option<VsphereNetwork>,
    pub second_network: Option<VsphereNetwork>,
}

/// Template, or VM that is off, of which VMs are clones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Template {
    pub path: String,
    pub moref: Moref,
    /// Snapshot whose disks linked clones share; `None`: clones are full.
    pub snapshot: Option<Moref>,
    /// Datastore of the template.
    pub datastore: String,
    /// Keys of its disks. A clone's own disks have the same keys.
    pub disks: Vec<String>,
    /// Type and key of its first NIC.
    pub nic: Option<(String, String)>,
    /// Whether the guest can reach the hypervisor's variables.
    pub has_vmci: bool,
    pub is_efi: bool,
}

/// Place of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VspherePlace {
    /// Name of the place, which placements record: host or cluster, and the datastore if it is configured.
    pub name: String,
    pub pool: Moref,
    /// Host; `None`: the cluster's DRS chooses one.
    pub host: Option<Moref>,
    /// Datastore, with its name; `None`: that of the template.
    pub datastore: Option<(String, Moref)>,
}

/// Network that a NIC is connected to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum VsphereNetwork {
    Standard { name: String, moref: Moref },
    Distributed { switch: String, portgroup: String },
}

impl VsphereFacts {
    /// Loads all facts, independent ones at the same time. An error has all refusals: every missing privilege and every
    /// wrong setting.
    pub(crate) async fn load(vcenter: &Vcenter, config: &VsphereConfig) -> Result<VsphereFacts, Error> {
        let (template, places, networks) = tokio::join!(
            template(vcenter, config, &config.template),
            places(vcenter, config),
            networks(vcenter, config)
        );
        let errors = [template.as_ref().err(), places.as_ref().err(), networks.as_ref().err()];
        let errors: Vec<Error> = errors.into_iter().flatten().cloned().collect();
        if !errors.is_empty() {
            return Err(together(errors));
        }
        let (network, second_network) = networks?;
        Ok(VsphereFacts { template: template?, places: places?, network, second_network })
    }

    /// Returns the places as a catalogue with one type of VM, because every size is possible.
    pub(crate) fn catalogue(&self) -> Catalogue {
        let (vcpus, memory_mib) = LARGEST;
        let machine = MachineType {
            name: TYPE.to_owned(),
            vcpus,
            memory_mib,
            archs: vec![Arch::X86_64],
            max_disks: Some(MAX_DISKS),
            ..MachineType::default()
        };
        let places = self.places.iter().map(|place| Location { zone: place.name.clone(), subnet: None });
        Catalogue { types: vec![machine], places: places.collect(), ..Catalogue::default() }
    }
}

/// Finds an object that a setting names.
async fn named(vcenter: &Vcenter, path: &str, key: &str) -> Result<Moref, Error> {
    let what = format!("look at {path}");
    let found = vcenter.by_path(&what, path).await?;
    found.ok_or_else(|| {
        Error::invalid(format!(
            "{what}: there is none, or this account may not see it; correct provider.vsphere.{key} or datacenter, or \
             grant System.View"
        ))
    })
}

/// Looks at a template. Fails if there is none that can be cloned.
pub(crate) async fn template(
    vcenter: &Vcenter,
    config: &VsphereConfig,
    name: &str,
) -> Result<Template, Error> {
    let path = format!("{}/{name}", config.vm_root());
    let moref = named(vcenter, &path, "template").await?;
    let what = format!("look at the template {name}");
    if moref.kind != "VirtualMachine" {
        return Err(Error::invalid(format!("{what}: it is a {}; name a template", moref.kind)));
    }
    let properties = [
        "config.template",
        "snapshot.currentSnapshot",
        "runtime.powerState",
        "config.hardware.device",
        "config.files.vmPathName",
        "config.firmware",
    ];
    let read = |object: Object<'_, '_>| {
        let devices: Vec<_> = object.property("config.hardware.device")?.children().collect();
        let is = |kind: &str| devices.iter().any(|device| soap::kind(*device) == Some(kind));
        let nic = devices.iter().find(|device| child(**device, "macAddress").is_some());
        let template = Template {
            path: path.clone(),
            moref: moref.clone(),
            snapshot: object.reference("snapshot.currentSnapshot"),
            datastore: datastore_of(object.text("config.files.vmPathName")?)?.to_owned(),
            disks: VmDisk::all(&devices).into_iter().map(|disk| disk.key).collect(),
            nic: nic.and_then(|nic| Some((soap::kind(*nic)?.to_owned(), value(*nic, "key")?.to_owned()))),
            has_vmci: is("VirtualMachineVMCIDevice"),
            is_efi: object.text("config.firmware") == Some("efi"),
        };
        let is_off = object.text("runtime.powerState") == Some("poweredOff");
        Some((template, object.text("config.template") == Some("true") || is_off))
    };
    let call = ApiCall::new("RetrievePropertiesEx", OWNER, &what);
    match vcenter.retrieve_one(call, &properties, &moref, read).await? {
        Some((template, true)) => Ok(template),
        Some((_, false)) => {
            Err(Error::invalid(format!("{what}: it is a running VM; switch it off, or make it a template")))
        }
        None => {
            Err(Error::invalid(format!("{what}: it cannot be read; grant this account System.Read on it")))
        }
    }
}

/// Returns the datastore in a path like `[datastore1] folder/file`.
pub(crate) fn datastore_of(path: &str) -> Option<&str> {
    Some(path.strip_prefix('[')?.split_once(']')?.0)
}

async fn places(vcenter: &Vcenter, config: &VsphereConfig) -> Result<Vec<VspherePlace>, Error> {
    let root = format!("{}/host", config.datacenter);
    let pool_below = |path: &str| match &config.resource_pool {
        Some(pool) => (format!("{path}/Resources/{pool}"), "resource-pool"),
        None => (format!("{path}/Resources"), "cluster"),
    };
    let datastores = try_join_all(config.datastores.iter().map(|name| async move {
        let found = datastore(vcenter, config, name).await?;
        Ok::<_, Error>(Some((name.clone(), found)))
    }));
    let mut datastores = datastores.await?;
    if datastores.is_empty() {
        datastores.push(None);
    }
    let mut hosts: Vec<(String, Moref, Option<Moref>)> = Vec::new();
    if let Some(cluster) = config.cluster.as_ref().filter(|_| config.drs) {
        let (path, key) = pool_below(&format!("{root}/{cluster}"));
        hosts.push((cluster.clone(), named(vcenter, &path, key).await?, None));
    }
    for host in &config.hosts {
        let parent = config.cluster.as_ref().unwrap_or(host);
        let (path, key) = pool_below(&format!("{root}/{parent}"));
        let pool = named(vcenter, &path, key).await?;
        let moref = named(vcenter, &format!("{root}/{parent}/{host}"), "hosts").await?;
        hosts.push((host.clone(), pool, Some(moref)));
    }
    let place = |(host, pool, moref): &(String, Moref, Option<Moref>),
                 datastore: &Option<(String, Moref)>| {
        let name = match datastore {
            Some((datastore, _)) => format!("{host}/{datastore}"),
            None => host.clone(),
        };
        VspherePlace { name, pool: pool.clone(), host: moref.clone(), datastore: datastore.clone() }
    };
    Ok(hosts.iter().flat_map(|host| datastores.iter().map(move |datastore| place(host, datastore))).collect())
}

/// Finds a datastore of the datacenter by its name. It may be in a folder or in a cluster of datastores.
async fn datastore(vcenter: &Vcenter, config: &VsphereConfig, name: &str) -> Result<Moref, Error> {
    let all = datastores(vcenter, config, "look at the datastores").await?;
    let found = all.into_iter().find(|(one, _)| one == name);
    found.map(|(_, moref)| moref).ok_or_else(|| {
        Error::invalid(format!(
            "look at the datastore {name}: the datacenter {} has none of this name; correct provider.vsphere.datastores",
            config.datacenter
        ))
    })
}

/// Returns all datastores of the datacenter, with their names.
pub(crate) async fn datastores(
    vcenter: &Vcenter,
    config: &VsphereConfig,
    what: &str,
) -> Result<Vec<(String, Moref)>, Error> {
    Ok(named_of(vcenter, config, what, ("datastore", "Datastore")).await?)
}

/// Returns the objects in a list of the datacenter, with their names.
async fn named_of(
    vcenter: &Vcenter,
    config: &VsphereConfig,
    what: &str,
    (list, kind): (&str, &str),
) -> Result<Vec<(String, Moref)>, Failure> {
    let datacenter = named(vcenter, &config.datacenter, "datacenter").await?;
    let call = ApiCall::new("RetrievePropertiesEx", OWNER, what);
    let read = |object: Object<'_, '_>| Some(object.references(list));
    let found = vcenter.retrieve_one(call, &[list], &datacenter, read).await?.unwrap_or_default();
    let named = |object: Object<'_, '_>| Some((object.text("name")?.to_owned(), object.moref()?));
    vcenter.retrieve(call, (kind, &["name"]), Objects::These(&found), named).await
}

async fn networks(
    vcenter: &Vcenter,
    config: &VsphereConfig,
) -> Result<(Option<VsphereNetwork>, Option<VsphereNetwork>), Error> {
    if config.network.is_none() && config.second_network.is_none() {
        return Ok((None, None));
    }
    let what = "look at the networks";
    // Portgroups of distributed switches are networks, too.
    let all = named_of(vcenter, config, what, ("network", "Network")).await?;
    let find = async |name: &Option<String>, key: &str| {
        let Some(name) = name else { return Ok(None) };
        match all.iter().find(|(one, _)| one == name) {
            Some((_, moref)) => network(vcenter, name, moref).await.map(Some),
            None => Err(Error::invalid(format!(
                "look at the network {name}: the datacenter {} has none of this name; correct provider.vsphere.{key}",
                config.datacenter
            ))),
        }
    };
    Ok((find(&config.network, "network").await?, find(&config.second_network, "second-network").await?))
}

async fn network(vcenter: &Vcenter, name: &str, moref: &Moref) -> Result<VsphereNetwork, Error> {
    let what = format!("look at the network {name}");
    match moref.kind.as_str() {
        "Network" => Ok(VsphereNetwork::Standard { name: name.to_owned(), moref: moref.clone() }),
        "DistributedVirtualPortgroup" => {
            let call = ApiCall::new("RetrievePropertiesEx", OWNER, &what);
            let properties = ["key", "config.distributedVirtualSwitch"];
            let read = |object: Object<'_, '_>| {
                Some((object.text("key")?.to_owned(), object.reference("config.distributedVirtualSwitch")?))
            };
            let found = vcenter.retrieve_one(call, &properties, moref, read).await?;
            let unread =
                || Error::invalid(format!("{what}: it cannot be read; grant this account System.Read on it"));
            let (portgroup, switch) = found.ok_or_else(unread)?;
            let uuid = |object: Object<'_, '_>| object.text("uuid").map(str::to_owned);
            let uuid = vcenter.retrieve_one(call, &["uuid"], &switch, uuid).await?;
            Ok(VsphereNetwork::Distributed { switch: uuid.ok_or_else(unread)?, portgroup })
        }
        other => Err(Error::invalid(format!(
            "{what}: it is a {other}; name a standard network or the portgroup of a distributed switch"
        ))),
    }
}
