//! Drivers of disks, and the identities of their disks. Most drivers, including unknown ones, answer with a LUN, a WWN,
//! a serial number or a path below `/dev/disk/by-id/` ([`ANY`]).

use peerpod_volume::Identity;

use super::{Answer, Disk, Family};

/// Number of characters of its serial that a virtio disk shows.
const VIRTIO: usize = 20;

/// Keys under which most drivers return a device's path.
const PATHS: [&str; 3] = ["devicePath", "device-path", "device"];

/// Rules for an unknown driver.
pub(super) const ANY: Disk =
    Disk { keys: &["lun", "wwn", "serial", PATHS[0], PATHS[1], PATHS[2]], identity: any };

const fn family(name: &'static str, disk: Disk) -> Family {
    Family { name, source: None, disk: Some(disk), login: None }
}

pub(super) const FAMILIES: [Family; 6] = [
    family("ebs.csi.aws.com", Disk { keys: &[], identity: ebs }),
    family("pd.csi.storage.gke.io", Disk { keys: &[], identity: persistent_disk }),
    family("cinder.csi.openstack.org", Disk { keys: &[], identity: cinder }),
    family("csi.hetzner.cloud", Disk { keys: &[], identity: hetzner }),
    family("dobs.csi.digitalocean.com", Disk { keys: &[DIGITALOCEAN], identity: digitalocean }),
    family("csi.vsphere.vmware.com", Disk { keys: &[VSPHERE], identity: vsphere }),
];

/// NVMe: the serial is the id without its dash.
fn ebs(handle: &str, _: &Answer<'_>) -> Option<Identity> {
    Some(Identity::Serial(handle.replace('-', "")))
}

fn persistent_disk(handle: &str, _: &Answer<'_>) -> Option<Identity> {
    Some(Identity::ById(format!("google-{}", handle.rsplit('/').next().unwrap_or(handle))))
}

fn cinder(handle: &str, _: &Answer<'_>) -> Option<Identity> {
    Some(Identity::Serial(handle.chars().take(VIRTIO).collect()))
}

fn hetzner(handle: &str, _: &Answer<'_>) -> Option<Identity> {
    Some(Identity::ById(format!("scsi-0HC_Volume_{handle}")))
}

const DIGITALOCEAN: &str = "dobs.csi.digitalocean.com/volume-name";

fn digitalocean(_: &str, answer: &Answer<'_>) -> Option<Identity> {
    Some(Identity::ById(format!("scsi-0DO_Volume_{}", answer.get(DIGITALOCEAN)?)))
}

const VSPHERE: &str = "diskUUID";

fn vsphere(_: &str, answer: &Answer<'_>) -> Option<Identity> {
    Some(Identity::Wwn(format!("0x{}", answer.get(VSPHERE)?.replace('-', "").to_lowercase())))
}

fn any(_: &str, answer: &Answer<'_>) -> Option<Identity> {
    if let Some(lun) = answer.get("lun").and_then(|lun| lun.parse().ok()) {
        return Some(Identity::Lun(lun));
    }
    if let Some(wwn) = answer.get("wwn") {
        return Some(Identity::Wwn(wwn.to_owned()));
    }
    if let Some(serial) = answer.get("serial") {
        return Some(Identity::Serial(serial.to_owned()));
    }
    PATHS
        .into_iter()
        .filter_map(|key| answer.get(key))
        .find_map(|path| path.strip_prefix("/dev/disk/by-id/"))
        .map(|name| Identity::ById(name.to_owned()))
}
