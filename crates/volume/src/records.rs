//! Stores the records through which `peerpod-csi node` and `peerpod-node` exchange a pod's volumes. They are files,
//! so that either process may die at any instruction and the other continues:
//!
//! ```text
//! <volumes-dir>/pods/<pod uid>/<volume id>.json            Record     written by the CSI wrapper at NodePublishVolume
//! <volumes-dir>/pods/<pod uid>/<volume id>.attached.json   Attached   written by the wrapper: the driver attached it
//! <volumes-dir>/pods/<pod uid>/<volume id>.secret.json     Credentials, written by the wrapper before the record
//! <volumes-dir>/pods/<pod uid>/vm.json                     Vm         written by the node: the pod's VM
//! <volumes-dir>/names/<namespace>/<pod>/<pod uid>          empty      finds the UID, which no shim sends
//! ```
//!
//! Each file is written whole and durably, 0600 in folders of 0700. Only `….secret.json` holds a secret; it is removed
//! with the record. The cost of a request for one pod does not depend on the number of pods.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use peerpod_common::files::make_folders;
use serde::{Deserialize, Serialize};

use crate::credentials::{self, Credentials};
use crate::descriptor::{GuestVolume, Identity, VERSION, VolumeId};
use crate::files::{
    gone, names, read_json, read_secret, remove, remove_emptied, sync_dir, unusable, write, write_json,
};

/// Largest file written or read, in bytes.
const MAX_FILE: u64 = 1 << 20;

/// Most volumes of one pod that are read; a higher number is an error.
pub const MAX_VOLUMES: usize = 256;

/// Pod, as named to the CSI driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pod {
    /// UID of the pod.
    pub uid: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
}

/// One published volume of one pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// [`VERSION`].
    pub version: u32,
    /// Descriptor for the guest.
    pub volume: GuestVolume,
    /// Pod of the volume.
    pub pod: Pod,
    /// Name of the CSI driver.
    pub driver: String,
    /// The driver's handle of the volume, as in Kubernetes.
    pub handle: String,
    /// Path at which kubelet had it published. The source of a container's bind mount is this path or lies below it.
    pub target_path: PathBuf,
    /// Contents of the marker file at the target: 64 random hexadecimal digits. They identify a mount that arrives
    /// without its source.
    pub marker: String,
    /// Present if the volume has one pod at a time; the number has no meaning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<u64>,
}

/// Attachment of the volume to the pod's VM by the driver.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// [`VERSION`].
    pub version: u32,
    /// VM to which the volume is attached; the file does not apply to another VM.
    pub instance: String,
    /// Property by which the guest recognises the disk.
    pub identity: Identity,
}

/// The VM of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vm {
    /// [`VERSION`].
    pub version: u32,
    /// Sandbox of the pod on the node.
    pub sandbox: String,
    /// The provider's id of the VM, once known. The node writes this file before it requests a VM: without an id, a
    /// VM may still appear.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// The VM is confirmed gone, or the request for it came to nothing: volumes attached to it are free.
    #[serde(default)]
    pub gone: bool,
}

/// Name of the marker file in a published target.
pub const MARKER: &str = ".peerpod-volume";

/// The folder of the records. A method fails if it cannot read, understand, remove or make durable a file, or if a name
/// is none of Kubernetes'.
#[derive(Clone, Debug)]
pub struct Records {
    root: PathBuf,
}

impl Records {
    /// Returns the records in this folder; the first record creates it.
    pub fn new(root: impl Into<PathBuf>) -> Records {
        Records { root: root.into() }
    }

    /// Makes the record durable, and then the entry for the pod's name.
    pub fn put(&self, record: &Record) -> io::Result<()> {
        let names = self.names(&record.pod.namespace, &record.pod.name)?;
        let folder = self.pod(&record.pod.uid)?;
        write_json(&folder, &format!("{}.json", record.volume.id), record, MAX_FILE)?;
        make_folders(&names)?;
        drop(OpenOptions::new().create(true).append(true).mode(0o600).open(names.join(&record.pod.uid))?);
        File::open(names)?.sync_all()
    }

    /// Returns a pod's volumes in the order of their ids. One that cannot be understood is an error: a pod must not start
    /// without one of its volumes.
    pub fn of_pod(&self, uid: &str) -> io::Result<Vec<Record>> {
        let mut records: Vec<Record> = Vec::new();
        for id in self.ids(uid)? {
            records.extend(self.get(uid, &id)?);
        }
        Ok(records)
    }

    /// Returns one volume of a pod.
    pub fn get(&self, uid: &str, id: &VolumeId) -> io::Result<Option<Record>> {
        let path = self.pod(uid)?.join(format!("{id}.json"));
        let record: Option<Record> = read_json(&path, MAX_FILE)?;
        if let Some(record) = &record {
            let same =
                record.version == VERSION && record.volume.version == VERSION && record.volume.id == *id;
            if !same || record.pod.uid != uid {
                return Err(unusable(&path, "it is of another version, volume or pod"));
            }
        }
        Ok(record)
    }

    /// Returns the UIDs of the pods of this name that have volumes. There are several while a pod of a StatefulSet
    /// terminates and its successor starts.
    pub fn uids(&self, namespace: &str, name: &str) -> io::Result<Vec<String>> {
        names(&self.names(namespace, name)?)
    }

    /// Removes a volume's record and the files about it, but none of the pod: later readers make no VM with the
    /// volume. A missing record is no error.
    pub fn withdraw(&self, uid: &str, id: &VolumeId) -> io::Result<()> {
        let folder = self.pod(uid)?;
        self.put_credentials(uid, id, None)?;
        gone(fs::remove_file(folder.join(format!("{id}.attached.json"))))?;
        gone(fs::remove_file(folder.join(format!("{id}.json"))))?;
        sync_dir(&folder)
    }

    /// As [`Records::withdraw`]; with the pod's last volume it also removes all files of the pod, its VM's included.
    pub fn remove(&self, pod: &Pod, id: &VolumeId) -> io::Result<()> {
        self.withdraw(&pod.uid, id)?;
        if !self.ids(&pod.uid)?.is_empty() {
            return Ok(());
        }
        let folder = self.pod(&pod.uid)?;
        let names = self.names(&pod.namespace, &pod.name)?;
        gone(fs::remove_file(names.join(&pod.uid)))?;
        // Another pod of the same name or namespace may have its entry there; the next record makes the folders again.
        drop(remove_emptied(&names));
        drop(names.parent().map(remove_emptied));
        gone(fs::remove_file(folder.join("vm.json")))?;
        remove_emptied(&folder)
    }

    /// Stores the credentials for a volume, or removes them durably if `None`. Call it before [`Records::put`]: the
    /// record asserts that all files of the volume exist.
    pub fn put_credentials(&self, uid: &str, id: &VolumeId, given: Option<&Credentials>) -> io::Result<()> {
        let (folder, name) = (self.pod(uid)?, format!("{id}.secret.json"));
        match given {
            Some(credentials) => write(&folder, &name, &credentials.to_bytes()),
            None => remove(&folder, &name),
        }
    }

    /// Returns the credentials for a volume; `None` if there are none. An error contains no part of them.
    pub fn credentials(&self, uid: &str, id: &VolumeId) -> io::Result<Option<Credentials>> {
        let path = self.pod(uid)?.join(format!("{id}.secret.json"));
        let Some(bytes) = read_secret(&path, credentials::MAX_BYTES)? else { return Ok(None) };
        Credentials::read(&bytes).map(Some).map_err(|why| unusable(&path, &why))
    }

    /// Stores the driver's attachment of a volume.
    pub fn put_attached(&self, uid: &str, id: &VolumeId, attached: &Attached) -> io::Result<()> {
        write_json(&self.pod(uid)?, &format!("{id}.attached.json"), attached, MAX_FILE)
    }

    /// Returns the driver's attachment of a volume.
    pub fn attached(&self, uid: &str, id: &VolumeId) -> io::Result<Option<Attached>> {
        read_json(&self.pod(uid)?.join(format!("{id}.attached.json")), MAX_FILE)
    }

    /// Stores the pod's VM.
    pub fn put_vm(&self, uid: &str, vm: &Vm) -> io::Result<()> {
        write_json(&self.pod(uid)?, "vm.json", vm, MAX_FILE)
    }

    /// Returns the pod's VM.
    pub fn vm(&self, uid: &str) -> io::Result<Option<Vm>> {
        read_json(&self.pod(uid)?.join("vm.json"), MAX_FILE)
    }

    /// Returns the folder of a pod's files, for callers that wait for one of them.
    pub fn pod(&self, uid: &str) -> io::Result<PathBuf> {
        Ok(self.root.join("pods").join(plain(uid)?))
    }

    /// Returns every pod that has files here; for a start, never for one request.
    pub fn pods(&self) -> io::Result<Vec<String>> {
        names(&self.root.join("pods"))
    }

    fn names(&self, namespace: &str, name: &str) -> io::Result<PathBuf> {
        Ok(self.root.join("names").join(plain(namespace)?).join(plain(name)?))
    }

    fn ids(&self, uid: &str) -> io::Result<Vec<VolumeId>> {
        let found = names(&self.pod(uid)?)?;
        let mut ids: Vec<VolumeId> = found
            .iter()
            .filter_map(|name| name.strip_suffix(".json")?.parse().ok())
            .take(MAX_VOLUMES + 1)
            .collect();
        if ids.len() > MAX_VOLUMES {
            return Err(io::Error::other(format!("pod {uid} has more than {MAX_VOLUMES} volumes")));
        }
        ids.sort();
        Ok(ids)
    }
}

/// Refuses a name that would lead out of the folder. Kubernetes' names and UIDs never do.
fn plain(name: &str) -> io::Result<&str> {
    let fine = !name.is_empty() && name.len() <= 253 && !name.starts_with('.') && !name.contains(['/', '\0']);
    if fine {
        Ok(name)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{name:?} is no name of Kubernetes'")))
    }
}

#[cfg(test)]
mod tests {
    use zeroize::Zeroizing;

    use super::*;
    use crate::descriptor::{Mode, Source};

    fn record(uid: &str, handle: &str) -> Record {
        let source = Source::Nfs { server: "10.0.0.2".into(), export: "/e".into() };
        Record {
            version: VERSION,
            volume: GuestVolume {
                version: VERSION,
                id: VolumeId::of("driver", handle),
                name: handle.into(),
                source,
                mode: Mode::Block,
                read_only: false,
            },
            pod: Pod { uid: uid.into(), namespace: "shop".into(), name: "web-0".into() },
            driver: "driver".into(),
            handle: handle.into(),
            target_path: "/t".into(),
            marker: "m".into(),
            fence: None,
        }
    }

    #[test]
    fn a_pods_volumes_come_back_and_go() {
        let folder = std::env::temp_dir().join(format!("peerpod-records-{}", std::process::id()));
        let records = Records::new(&folder);
        let (a, b, other) = (record("u-1", "a"), record("u-1", "b"), record("u-2", "a"));
        for record in [&a, &b, &other] {
            records.put(record).unwrap();
            records.put(record).unwrap();
        }
        let mut uids = records.uids("shop", "web-0").unwrap();
        uids.sort();
        assert_eq!(uids, ["u-1", "u-2"]);
        let mut found = records.of_pod("u-1").unwrap();
        found.sort_by(|x, y| x.handle.cmp(&y.handle));
        assert_eq!(found, [a.clone(), b.clone()]);
        let vm = Vm { version: VERSION, sandbox: "s".into(), instance: None, gone: false };
        records.put_vm("u-1", &vm).unwrap();
        for record in [&a, &b] {
            records.withdraw("u-1", &record.volume.id).unwrap();
            records.withdraw("u-3", &record.volume.id).unwrap();
        }
        assert!(records.of_pod("u-1").unwrap().is_empty());
        assert_eq!(records.vm("u-1").unwrap(), Some(vm), "the VM may still join");
        for _ in 0..2 {
            records.remove(&a.pod, &a.volume.id).unwrap();
            records.remove(&b.pod, &b.volume.id).unwrap();
        }
        assert_eq!(records.uids("shop", "web-0").unwrap(), ["u-2"]);
        assert_eq!(records.pods().unwrap(), ["u-2"]);
        records.remove(&other.pod, &other.volume.id).unwrap();
        for folder in ["pods", "names"] {
            assert_eq!(names(&records.root.join(folder)).unwrap(), [""; 0], "{folder}");
        }
        for name in ["..", "a/b", ""] {
            assert!(records.of_pod(name).is_err(), "{name}");
        }
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn credentials_are_in_a_separate_file_and_are_removed_with_the_record() {
        use std::os::unix::fs::MetadataExt;
        let root = std::env::temp_dir().join(format!("peerpod-records-secret-{}", std::process::id()));
        let records = Records::new(&root);
        let (a, b) = (record("u-1", "a"), record("u-1", "b"));
        let id = &a.volume.id;
        let credentials = Credentials {
            version: credentials::VERSION,
            username: Zeroizing::new("joe".into()),
            password: Zeroizing::new("hidden, word".into()),
            domain: None,
        };
        assert!(records.credentials("u-1", id).unwrap().is_none());
        records.put_credentials("u-1", id, Some(&credentials)).unwrap();
        for record in [&a, &b] {
            records.put(record).unwrap();
        }
        assert!(records.credentials("u-1", id).unwrap() == Some(credentials.clone()));
        assert!(records.credentials("u-1", &b.volume.id).unwrap().is_none());
        assert_eq!(records.of_pod("u-1").unwrap().len(), 2, "it is no record");
        let folder = records.pod("u-1").unwrap();
        let file = folder.join(format!("{id}.secret.json"));
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o600);
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            assert_eq!(fs::read_to_string(&path).unwrap().contains("hidden"), path == file, "{path:?}");
        }
        fs::write(&file, r#"{"version":1,"username":"joe","password":["hidden"]}"#).unwrap();
        let why = records.credentials("u-1", id).unwrap_err().to_string();
        assert!(why.contains(&*file.to_string_lossy()) && !why.contains("hidden"), "{why}");
        // A writer was killed here.
        fs::write(folder.join(format!(".{id}.secret.json.new")), "hidden").unwrap();
        records.withdraw("u-1", id).unwrap();
        assert!(records.credentials("u-1", id).unwrap().is_none());
        let left: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, [std::ffi::OsString::from(format!("{}.json", b.volume.id))]);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_record_that_cannot_be_understood_is_an_error_not_a_pod_without_a_volume() {
        let folder = std::env::temp_dir().join(format!("peerpod-records-bad-{}", std::process::id()));
        let records = Records::new(&folder);
        let record = record("u-1", "a");
        records.put(&record).unwrap();
        let path = records.pod("u-1").unwrap().join(format!("{}.json", record.volume.id));
        for bad in ["{", r#"{"version":1}"#] {
            fs::write(&path, bad).unwrap();
            let error = records.of_pod("u-1").unwrap_err().to_string();
            assert!(error.contains(&*path.to_string_lossy()), "{error}");
        }
        fs::remove_dir_all(folder).unwrap();
    }
}
