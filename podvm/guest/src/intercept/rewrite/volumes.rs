//! Handles a container's volumes: reads the wanted ones from the relay's additions to the request, and fills the
//! request in when they are ready.

use std::path::{Path, PathBuf};

use anyhow::ensure;
use peerpod_proto::intercept::{
    CreateContainerRequest, Device, FSGroup, LinuxDevice, LinuxDeviceCgroup, Storage,
};
use peerpod_proto::ttrpc_frame::Request;
use protobuf::{Message, MessageField};

use crate::intercept::{Ready, Use, VOLUMES};

/// Driver of a Storage, and type of a Device, that the relay leaves to the guest.
const OURS: &str = "peerpod-volume";
/// Limit of volumes per container.
const MOST: usize = 256;

pub(in crate::intercept) struct Waiting {
    pub(in crate::intercept) wanted: Vec<Use>,
    pub(super) request: Request,
    pub(super) container: CreateContainerRequest,
}

/// Returns a path's place on a volume, if it lies on it.
pub(super) fn path_on(id: &str, source: &str) -> Option<PathBuf> {
    Path::new(source).strip_prefix(Path::new(VOLUMES).join(id)).ok().map(Path::to_owned)
}

/// Returns the wanted volumes: one for each Storage and each Device that the guest fills in.
pub(super) fn wanted(container: &CreateContainerRequest) -> anyhow::Result<Vec<Use>> {
    let storages = container.storages.iter().filter(|storage| storage.driver == OURS);
    let devices = container.devices.iter().filter(|device| device.type_ == OURS);
    let ids = storages.map(|storage| &storage.source).chain(devices.map(|device| &device.vm_path));
    let mut wanted: Vec<Use> = Vec::new();
    for id in ids {
        ensure!(
            !id.is_empty() && !id.contains('/') && wanted.len() < MOST,
            "{id:?} is no volume, or it is one of more than {MOST}"
        );
        if !wanted.iter().any(|volume| volume.id == *id) {
            let mounts = container.OCI.iter().flat_map(|spec| &spec.Mounts);
            let paths = mounts.filter_map(|mount| path_on(id, &mount.source)).collect();
            wanted.push(Use { id: id.clone(), paths });
        }
    }
    Ok(wanted)
}

impl Waiting {
    /// Returns the request for the kata-agent.
    pub(in crate::intercept) fn with(mut self, ready: &[Ready]) -> anyhow::Result<Vec<u8>> {
        for (wanted, ready) in self.wanted.iter().zip(ready) {
            let storages = self.container.storages.iter_mut();
            for storage in storages.filter(|storage| storage.driver == OURS && storage.source == wanted.id) {
                fill_storage(storage, ready);
            }
            fill_mounts(&mut self.container, wanted, ready);
            fill_devices(&mut self.container, &wanted.id, ready);
        }
        let left = self.container.storages.iter().any(|storage| storage.driver == OURS)
            || self.container.devices.iter().any(|device| device.type_ == OURS);
        ensure!(!left, "some of its volumes were not prepared");
        self.request.payload = self.container.write_to_bytes()?;
        super::encode(&self.request)
    }
}

fn fill_storage(storage: &mut Storage, ready: &Ready) {
    storage.driver.clone_from(&ready.driver);
    storage.source.clone_from(&ready.source);
    storage.fstype.clone_from(&ready.fstype);
    storage.options.clone_from(&ready.options);
    storage.fs_group = match ready.fs_group {
        None => MessageField::none(),
        Some((group_id, on_mismatch)) => {
            let group_change_policy = u32::from(on_mismatch);
            MessageField::some(FSGroup { group_id, group_change_policy, ..FSGroup::default() })
        }
    };
}

fn fill_mounts(container: &mut CreateContainerRequest, wanted: &Use, ready: &Ready) {
    let mounts = container.OCI.as_mut().into_iter().flat_map(|spec| &mut spec.Mounts);
    let ours = mounts.filter(|mount| path_on(&wanted.id, &mount.source).is_some());
    for (mount, path) in ours.zip(&ready.paths) {
        let source = Path::new(VOLUMES).join(&wanted.id).join(path);
        mount.source = source.to_string_lossy().trim_end_matches('/').to_owned();
        if ready.read_only {
            mount.options.retain(|option| option != "rw" && option != "ro");
            mount.options.push("ro".to_owned());
        }
    }
}

/// Fills in a raw device: the numbers in the container's specification are those of a placeholder on the node. A rule
/// for the numbers of a block device is removed, because in the VM another device may have them. A rule for a
/// placeholder that is a character device stays, because it is the rule for /dev/full.
fn fill_devices(container: &mut CreateContainerRequest, id: &str, ready: &Ready) {
    let Some((major, minor)) = ready.device else { return };
    let (major, minor) = (i64::from(major), i64::from(minor));
    let ours = |device: &&mut Device| device.type_ == OURS && device.vm_path == id;
    let mut places = Vec::new();
    for device in container.devices.iter_mut().filter(ours) {
        device.type_.clone_from(&ready.driver);
        device.vm_path.clone_from(&ready.source);
        places.push(device.container_path.clone());
    }
    let linux = container.OCI.mut_or_insert_default().Linux.mut_or_insert_default();
    for place in places {
        let at = linux.Devices.iter().position(|device| device.Path == place);
        let resources = linux.Resources.mut_or_insert_default();
        let new = LinuxDevice {
            Path: place,
            Type: "b".into(),
            Major: major,
            Minor: minor,
            ..LinuxDevice::default()
        };
        match at {
            Some(at) => {
                let device = &mut linux.Devices[at];
                let (old_major, old_minor) = (device.Major, device.Minor);
                resources
                    .Devices
                    .retain(|rule| rule.Type != "b" || (rule.Major, rule.Minor) != (old_major, old_minor));
                (device.Type, device.Major, device.Minor) = (new.Type, major, minor);
            }
            None => linux.Devices.push(new),
        }
        resources.Devices.push(LinuxDeviceCgroup {
            Allow: true,
            Type: "b".into(),
            Major: major,
            Minor: minor,
            Access: if ready.read_only { "rm" } else { "rwm" }.into(),
            ..LinuxDeviceCgroup::default()
        });
    }
}
