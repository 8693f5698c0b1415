//! Attaches existing disks as disks of a pod. May call `RetrieveVStorageObject`, `AttachDisk_Task`, `DetachDisk_Task`,
//! `ReconfigVM_Task`, and the looks of `inventory.rs`.
//!
//! A volume is a first-class disk by its id, as vSphere's CSI driver makes them, or a file, like `[datastore1] a/b.vmdk`.
//! The guest finds a disk by its World Wide Name, which follows from the disk's own id.

use peerpod_provider_api::{DiskIdentity, DiskRequest, Error, InstanceId};
use peerpod_provider_cloud::refusal::clip;
use peerpod_provider_cloud::{ApiCall, until};
use peerpod_provider_rest::Failure;
use roxmltree::Node;

use crate::Vsphere;
use crate::body::{change, reconfigure};
use crate::facts;
use crate::inventory::{Object, Objects};
use crate::soap::{self, Method, Moref, child, element, text, value};
use crate::vms::VsphereVm;

/// Length of a first-class disk's id.
const ID: usize = 36;

/// Places of a SCSI controller.
const PLACES: u32 = 16;
/// Property with the devices of a VM or of a snapshot.
const DEVICES: &str = "config.hardware.device";
/// Property with the tree of a VM's snapshots.
const SNAPSHOTS: &str = "snapshot.rootSnapshotList";

/// Disk that a volume names.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Volume {
    FirstClass(String),
    File(String),
}

impl Volume {
    /// Reads the name of a volume; `None`: it names no disk.
    pub(crate) fn parse(text: &str) -> Option<Volume> {
        let is_id = text.len() == ID && text.chars().all(|c| c.is_ascii_hexdigit() || c == '-');
        if is_id {
            return Some(Volume::FirstClass(text.to_ascii_lowercase()));
        }
        let path = text.strip_prefix('[')?.split_once("] ")?;
        let is_file =
            !path.0.is_empty() && path.1.ends_with(".vmdk") && path.1.split('/').all(|part| part != "..");
        (is_file && !text.contains(char::is_control)).then(|| Volume::File(text.to_owned()))
    }
}

/// Disk of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VmDisk {
    /// Key of its device.
    pub key: String,
    pub file: String,
    /// Id of the first-class disk.
    pub first_class: Option<String>,
    /// Id that the guest sees.
    pub uuid: Option<String>,
}

impl VmDisk {
    fn of(device: Node<'_, '_>) -> Option<VmDisk> {
        if soap::kind(device) != Some("VirtualDisk") {
            return None;
        }
        let backing = child(device, "backing")?;
        let id = child(device, "vDiskId").and_then(|id| value(id, "id"));
        Some(VmDisk {
            key: value(device, "key")?.to_owned(),
            // A disk without a file is a device of the host; its place is no folder of the VM.
            file: value(backing, "fileName").unwrap_or_default().to_owned(),
            first_class: id.map(str::to_ascii_lowercase),
            uuid: value(backing, "uuid").map(str::to_owned),
        })
    }

    /// Returns the disks among these devices.
    pub(crate) fn all(devices: &[Node<'_, '_>]) -> Vec<VmDisk> {
        devices.iter().filter_map(|device| VmDisk::of(*device)).collect()
    }

    /// Whether the disk was made with the VM. Only such a disk may be deleted with it. A disk that was added by hand may be
    /// in the VM's folder, too, and has another key.
    pub(crate) fn is_own(&self, vm: &VsphereVm) -> bool {
        let is_beside = !vm.folder.is_empty() && self.file.starts_with(&vm.folder);
        self.first_class.is_none() && is_beside && vm.disks.contains(&self.key)
    }

    fn is(&self, volume: &Volume) -> bool {
        match volume {
            Volume::FirstClass(id) => self.first_class.as_ref() == Some(id),
            Volume::File(path) => self.first_class.is_none() && self.file == *path,
        }
    }

    /// Returns the identity of the disk in the guest.
    fn identity(&self) -> Option<DiskIdentity> {
        let digits: String = self.uuid.as_ref()?.chars().filter(char::is_ascii_hexdigit).collect();
        Some(DiskIdentity::Wwn(format!("naa.{}", digits.to_ascii_lowercase())))
    }
}

/// Devices of a VM.
#[derive(Debug, Clone, Default)]
pub(crate) struct Devices {
    pub disks: Vec<VmDisk>,
    /// Key, and numbers of the devices on it, of each SCSI controller.
    controllers: Vec<(String, Vec<u32>)>,
    /// File of the console.
    pub console: Option<String>,
    /// Snapshots of the VM.
    snapshots: Vec<Moref>,
}

impl Devices {
    fn of(object: Object<'_, '_>) -> Option<Devices> {
        let list = object.property(DEVICES)?;
        let devices: Vec<_> = list.children().filter(Node::is_element).collect();
        let is_scsi = |device: &&Node<'_, '_>| child(**device, "scsiCtlrUnitNumber").is_some();
        let number =
            |device: &Node<'_, '_>, name| value(*device, name).and_then(|number| number.parse().ok());
        let controllers = devices.iter().filter(is_scsi).filter_map(|controller| {
            let key = value(*controller, "key")?;
            let on = devices.iter().filter(|device| value(**device, "controllerKey") == Some(key));
            let own = number(controller, "scsiCtlrUnitNumber").into_iter();
            Some((key.to_owned(), on.filter_map(|device| number(device, "unitNumber")).chain(own).collect()))
        });
        let ports = devices.iter().filter(|device| soap::kind(**device) == Some("VirtualSerialPort"));
        let files = ports.filter_map(|port| value(child(*port, "backing")?, "fileName"));
        let tree = object.property(SNAPSHOTS).into_iter().flat_map(|tree| tree.descendants());
        Some(Devices {
            controllers: controllers.collect(),
            console: files.map(str::to_owned).next(),
            disks: VmDisk::all(&devices),
            snapshots: tree.filter(|node| node.has_tag_name("snapshot")).filter_map(Moref::read).collect(),
        })
    }

    fn find(&self, volume: &Volume) -> Option<&VmDisk> {
        self.disks.iter().find(|disk| disk.is(volume))
    }

    /// Returns a controller's key and a free number on it.
    fn free(&self) -> Option<(&str, u32)> {
        let mut controllers = self.controllers.iter();
        controllers.find_map(|(key, taken)| {
            let number = (0..PLACES).find(|number| !taken.contains(number))?;
            Some((key.as_str(), number))
        })
    }
}

/// Reads the devices of a VM. `None`: it is gone.
pub(crate) async fn devices(
    vsphere: &Vsphere,
    vm: &VsphereVm,
    what: &str,
) -> Result<Option<Devices>, Failure> {
    let call = ApiCall::new("RetrievePropertiesEx", &vm.name, what);
    let vcenter = &vsphere.connected()?.vcenter;
    vcenter.retrieve_one(call, &[DEVICES, SNAPSHOTS], &vm.moref, Devices::of).await
}

/// Fails when a snapshot of the VM has a disk that was not made with the VM.
pub(crate) async fn check_snapshots(
    vsphere: &Vsphere,
    vm: &VsphereVm,
    devices: &Devices,
    what: &str,
) -> Result<(), Error> {
    let call = ApiCall::new("RetrievePropertiesEx", &vm.name, what);
    let (vcenter, snapshots) = (&vsphere.connected()?.vcenter, Objects::These(&devices.snapshots));
    let properties = ("VirtualMachineSnapshot", &[DEVICES][..]);
    let found = vcenter.retrieve(call, properties, snapshots, Devices::of).await?;
    let is_own = |devices: &Devices| devices.disks.iter().all(|disk| disk.is_own(vm));
    if found.len() == devices.snapshots.len() && found.iter().all(is_own) {
        return Ok(());
    }
    Err(Error::transient(format!(
        "{what}: a snapshot of the VM has a disk that was not made with the VM, and a destroy would delete the disk; \
         delete the VM's snapshots in the vCenter, it is tried again"
    )))
}

fn parse(volume: &str, what: &str) -> Result<Volume, Error> {
    Volume::parse(volume).ok_or_else(|| {
        Error::invalid(format!(
            "{what}: `{}` is no disk; write the id of a first-class disk, or a file like [datastore1] folder/disk.vmdk",
            clip(&volume.chars().take(80).collect::<String>())
        ))
    })
}

/// Checks the names of disks before any call.
pub(crate) fn check(disks: &[DiskRequest], what: &str) -> Result<(), Error> {
    disks.iter().try_for_each(|disk| parse(&disk.volume, what).map(drop))
}

/// Attaches a disk, or finds it attached.
pub(crate) async fn attach(
    vsphere: &Vsphere,
    id: &InstanceId,
    disk: &DiskRequest,
) -> Result<DiskIdentity, Error> {
    let what = format!("attach of {} to {id}", clip(&disk.volume));
    let volume = parse(&disk.volume, &what)?;
    // Before the look at the VM, so that the call follows the look at once: a delete may begin between them.
    let source = match &volume {
        Volume::FirstClass(disk) => Source::FirstClass(disk, datastore_with(vsphere, disk, &what).await?),
        Volume::File(path) => Source::File(path),
    };
    let vm = vsphere.wait_for(id, &what, |_| true).await?;
    if !vm.lives() {
        return Err(Error::not_found(format!("{what}: the VM has ended")));
    }
    let gone = || Error::not_found(format!("{what}: the VM is gone"));
    let before = devices(vsphere, &vm, &what).await?.ok_or_else(gone)?;
    if before.find(&volume).is_none() {
        let method = source.attach(&vm, &before, &what)?;
        vsphere.run(ApiCall::new(method.name, &vm.name, &what), &method).await?;
    }
    let after = devices(vsphere, &vm, &what).await?.ok_or_else(gone)?;
    let identity = after.find(&volume).and_then(VmDisk::identity);
    identity
        .ok_or_else(|| Error::transient(format!("{what}: the VM does not show it yet; it is tried again")))
}

/// Disk that is ready to be attached.
enum Source<'v> {
    /// Id of a first-class disk, and its datastore, which the call names.
    FirstClass(&'v str, Moref),
    File(&'v str),
}

impl Source<'_> {
    /// Returns the call that attaches the disk to this VM.
    fn attach(&self, vm: &VsphereVm, devices: &Devices, what: &str) -> Result<Method, Error> {
        let path = match self {
            Source::FirstClass(id, datastore) => {
                let arguments = element("diskId", &text("id", id)) + &datastore.xml("datastore");
                return Ok(Method { name: "AttachDisk_Task", this: vm.moref.clone(), arguments });
            }
            Source::File(path) => path,
        };
        let (controller, number) = devices.free().ok_or_else(|| {
            Error::invalid(format!(
                "{what}: its SCSI controllers have no free place; add one to the template"
            ))
        })?;
        let backing = text("fileName", path) + &text("diskMode", "independent_persistent");
        let device = text("key", "-103")
            + &soap::typed("backing", "VirtualDiskFlatVer2BackingInfo", &backing)
            + &text("controllerKey", controller)
            + &text("unitNumber", &number.to_string())
            // The file has its size.
            + &text("capacityInKB", "0");
        Ok(reconfigure(&vm.moref, &change("add", "VirtualDisk", &device), &[]))
    }
}

/// Finds the datastore of a first-class disk.
async fn datastore_with(vsphere: &Vsphere, disk: &str, what: &str) -> Result<Moref, Error> {
    let vcenter = &vsphere.connected()?.vcenter;
    for (_, datastore) in facts::datastores(vcenter, &vsphere.config, what).await? {
        let name = "RetrieveVStorageObject";
        let this = vcenter.services().await?.disks.clone();
        let arguments = element("id", &text("id", disk)) + &datastore.xml("datastore");
        let found = |node: Node<'_, '_>| child(node, "returnval").map(drop);
        match vcenter.call(ApiCall::new(name, disk, what), &Method { name, this, arguments }, found).await {
            Ok(()) => return Ok(datastore),
            // Datastores without first-class disks, and those that cannot have any.
            Err(failure) if matches!(failure.error, Error::NotFound { .. } | Error::Invalid { .. }) => {}
            Err(failure) => return Err(failure.error),
        }
    }
    Err(Error::not_found(format!("{what}: no datastore of {} has such a disk", vsphere.config.datacenter)))
}

/// Detaches a disk. Succeeds also if it is not attached, and if the VM is gone or has another owner.
pub(crate) async fn detach(vsphere: &Vsphere, id: &InstanceId, volume: &str) -> Result<(), Error> {
    let what = format!("detach of {} from {id}", clip(volume));
    let volume = parse(volume, &what)?;
    let seen = vsphere.connected()?.vms.ask(id.as_str().to_owned(), until(), &what).await?;
    let Some(vm) = seen.filter(|vm| vm.is_of(&vsphere.owner)) else { return Ok(()) };
    let Some(devices) = devices(vsphere, &vm, &what).await? else { return Ok(()) };
    let Some(disk) = devices.find(&volume) else { return Ok(()) };
    release(vsphere, &vm, disk, &what).await
}

/// Removes a disk from a VM. Its file stays.
pub(crate) async fn release(
    vsphere: &Vsphere,
    vm: &VsphereVm,
    disk: &VmDisk,
    what: &str,
) -> Result<(), Error> {
    let method = match &disk.first_class {
        Some(id) => {
            let arguments = element("diskId", &text("id", id));
            Method { name: "DetachDisk_Task", this: vm.moref.clone(), arguments }
        }
        None => {
            // Without a file operation, the file stays.
            let device = text("key", &disk.key) + &text("capacityInKB", "0");
            reconfigure(&vm.moref, &change("remove", "VirtualDisk", &device), &[])
        }
    };
    match vsphere.run(ApiCall::new(method.name, &vm.name, what), &method).await {
        // It was removed meanwhile.
        Err(failure) if matches!(failure.error, Error::NotFound { .. }) => Ok(()),
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use peerpod_provider_cloud::Marks;
    use roxmltree::Document;

    use super::*;
    use crate::vms::Power;

    const SEEN: &str = "<objects xmlns:xsi='http://www.w3.org/2001/XMLSchema-instance'>\
        <obj type='VirtualMachine'>vm-1</obj><propSet><name>config.hardware.device</name><val>\
        <VirtualDevice xsi:type='ParaVirtualSCSIController'><key>1000</key><scsiCtlrUnitNumber>7</scsiCtlrUnitNumber></VirtualDevice>\
        <VirtualDevice xsi:type='VirtualDisk'><key>2000</key><backing><fileName>[ds 1] pp-1/pp-1.vmdk</fileName></backing>\
        <controllerKey>1000</controllerKey><unitNumber>0</unitNumber></VirtualDevice>\
        <VirtualDevice xsi:type='VirtualDisk'><key>2001</key><backing><fileName>[ds 1] fcd/d.vmdk</fileName>\
        <uuid>6000C290-1234-5678-9abc-def012345678</uuid></backing><controllerKey>1000</controllerKey><unitNumber>1</unitNumber>\
        <vDiskId><id>B032A84C-8A82-495C-8431-8F318BCD80BD</id></vDiskId></VirtualDevice>\
        <VirtualDevice xsi:type='VirtualSerialPort'><key>9000</key><backing><fileName>[ds 1] pp-1/console.log</fileName></backing></VirtualDevice>\
        </val></propSet><propSet><name>snapshot.rootSnapshotList</name><val><VirtualMachineSnapshotTree>\
        <snapshot type='VirtualMachineSnapshot'>snapshot-1</snapshot><name>a</name><childSnapshotList>\
        <snapshot type='VirtualMachineSnapshot'>snapshot-2</snapshot></childSnapshotList></VirtualMachineSnapshotTree></val>\
        </propSet></objects>";

    #[test]
    fn a_disk_is_recognised_by_its_id_or_its_file() {
        let document = Document::parse(SEEN).unwrap();
        let devices = Devices::of(Object(document.root_element())).unwrap();
        let volume = Volume::parse("b032a84c-8a82-495c-8431-8f318bcd80bd").unwrap();
        let disk = devices.find(&volume).unwrap();
        assert_eq!(
            disk.identity(),
            Some(DiskIdentity::Wwn("naa.6000c290123456789abcdef012345678".to_owned()))
        );
        let file = Volume::parse("[ds 1] pp-1/pp-1.vmdk").unwrap();
        assert_eq!(devices.find(&file).unwrap().key, "2000");
        let of_first_class = Volume::parse("[ds 1] fcd/d.vmdk").unwrap();
        assert_eq!(devices.find(&of_first_class), None, "another name of the first-class disk");
        assert_eq!(devices.free(), Some(("1000", 2)));
        assert_eq!(devices.console.as_deref(), Some("[ds 1] pp-1/console.log"));
        let snapshots: Vec<&str> = devices.snapshots.iter().map(|moref| moref.id.as_str()).collect();
        assert_eq!(snapshots, ["snapshot-1", "snapshot-2"], "of the whole tree");
    }

    #[test]
    fn only_a_disk_that_was_made_with_the_vm_is_its_own() {
        let disk = |file: &str, key: &str, first_class: Option<&str>| VmDisk {
            key: key.into(),
            file: file.into(),
            first_class: first_class.map(str::to_owned),
            uuid: None,
        };
        let vm = |folder: &str, disks: &[&str]| VsphereVm {
            name: "pp-1".into(),
            moref: Moref { kind: "VirtualMachine".into(), id: "vm-1".into() },
            power: Power::Off,
            is_deleting: true,
            addresses: Vec::new(),
            marks: Marks::default(),
            folder: folder.into(),
            disks: disks.iter().map(|key| (*key).to_owned()).collect(),
            created: None,
        };
        let (own, ours) =
            (disk("[ds 1] pp-1/pp-1.vmdk", "2000", None), vm("[ds 1] pp-1/", &["2000", "2001"]));
        assert!(own.is_own(&ours));
        assert!(!own.is_own(&vm("", &["2000"])) && !own.is_own(&vm("[ds 1] pp-1/", &[""])));
        for (file, key, id) in [
            ("[ds 1] pp-1/pp-1.vmdk", "2000", Some("id")),
            ("[ds 1] pp-1/by-hand.vmdk", "2002", None),
            ("[ds 1] pp-10/a.vmdk", "2000", None),
            ("[ds 2] pp-1/a.vmdk", "2000", None),
            ("[ds 1] a.vmdk", "2000", None),
            ("", "2000", None),
        ] {
            assert!(!disk(file, key, id).is_own(&ours), "{file}");
        }
    }

    #[test]
    fn a_volume_is_an_id_or_a_file() {
        for bad in ["", "pvc-1", "file:b032a84c", "[ds]a.vmdk", "[] a.vmdk", "[ds] a/../b.vmdk", "[ds] a.vmx"]
        {
            assert_eq!(Volume::parse(bad), None, "{bad}");
        }
        assert!(matches!(Volume::parse("[ds] a.vmdk"), Some(Volume::File(_))));
    }
}
