//! The folder in which `peerpod-csi node` and `peerpod-node` hand a pod's volumes to each other. Files, so that either may
//! die at any instruction and the other goes on:
//!
//! ```text
//! <volumes-dir>/pods/<pod uid>/<volume id>.json            Record     written by the CSI wrapper at NodePublishVolume
//! <volumes-dir>/pods/<pod uid>/<volume id>.attached.json   Attached   written by the wrapper: the driver attached it
//! <volumes-dir>/pods/<pod uid>/<volume id>.secret.json     Credentials, written by the wrapper before the record
//! <volumes-dir>/pods/<pod uid>/vm.json                     Vm         written by the node: the pod's VM
//! <volumes-dir>/names/<namespace>/<pod>/<pod uid>          empty      finds the UID, which no shim sends
//! ```
//!
//! Each file is written whole (temporary file, fsync, rename, fsync of the folder), 0600 in folders of 0700. None but
//! `….secret.json` holds a secret; that goes with the record. What is asked for one pod costs the same however many pods
//! there are.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::PathBuf,
};

use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::{
    credentials::{self, Credentials},
    descriptor::{GuestVolume, Identity, VERSION, VolumeId},
    files::{gone, make_dir, names, read_json, remove_emptied, sync_dir, unusable, write, write_json},
};

/// The largest file that is written or read.
const MAX_FILE: u64 = 1 << 20;

/// The most volumes of one pod that are read: more is a fault, not a pod.
pub const MAX_VOLUMES: usize = 256;

/// A pod, as the CSI driver was told of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pod {
    /// Its UID.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// One published volume of one pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// [`VERSION`].
    pub version: u32,
    /// What the guest is told.
    pub volume: GuestVolume,
    /// Whose it is.
    pub pod: Pod,
    /// The CSI driver's name.
    pub driver: String,
    /// The driver's handle of the volume, as Kubernetes has it.
    pub handle: String,
    /// Where kubelet had it published: the source of a container's bind mount is this or lies below it.
    pub target_path: PathBuf,
    /// The content of the marker file at the target, by which a mount is recognised that arrives without its source. 64
    /// hexadecimal digits, random.
    pub marker: String,
    /// There where the volume has one pod at a time; the number says nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<u64>,
}

/// The driver attached the volume to the pod's VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// [`VERSION`].
    pub version: u32,
    /// The VM that it is attached to: of another one it says nothing.
    pub instance: String,
    /// How the guest recognises it.
    pub identity: Identity,
}

/// The VM of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vm {
    /// [`VERSION`].
    pub version: u32,
    /// The node's sandbox.
    pub sandbox: String,
    /// The provider's id of the VM; none until it is known. The node notes the VM before it asks for one: none here is a
    /// VM that may come.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<String>,
    /// The VM is confirmed gone, or nothing came of asking for it: what was attached to it is free.
    #[serde(default)]
    pub gone: bool,
}

/// The marker file's name in a published target.
pub const MARKER: &str = ".peerpod-volume";

/// The folder.
#[derive(Clone, Debug)]
pub struct Records {
    root: PathBuf,
}

impl Records {
    /// In this folder, which is made with the first record.
    pub fn new(root: impl Into<PathBuf>) -> Records {
        Records { root: root.into() }
    }

    /// Makes the record durable, and then the pod's name findable.
    ///
    /// # Errors
    /// When it could not be.
    pub fn put(&self, record: &Record) -> io::Result<()> {
        let names = self.names(&record.pod.namespace, &record.pod.name)?;
        let folder = self.pod(&record.pod.uid)?;
        write_json(&folder, &format!("{}.json", record.volume.id), record, MAX_FILE)?;
        make_dir(&names)?;
        drop(OpenOptions::new().create(true).append(true).mode(0o600).open(names.join(&record.pod.uid))?);
        File::open(names)?.sync_all()
    }

    /// A pod's volumes, in the order of their ids.
    ///
    /// # Errors
    /// When one cannot be read or understood: a pod must not start without a volume of its.
    pub fn of_pod(&self, uid: &str) -> io::Result<Vec<Record>> {
        let mut records: Vec<Record> = Vec::new();
        for id in self.ids(uid)? {
            records.extend(self.get(uid, &id)?);
        }
        Ok(records)
    }

    /// One volume of a pod.
    ///
    /// # Errors
    /// When it is there and cannot be read or understood.
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

    /// The UIDs of pods of this name that have volumes: several while one of a StatefulSet's is going and its successor
    /// comes.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn uids(&self, namespace: &str, name: &str) -> io::Result<Vec<String>> {
        names(&self.names(namespace, name)?)
    }

    /// Removes a volume's record and what was noted about it, and nothing of the pod: whoever looks from now on makes no VM
    /// with it. Not there is fine.
    ///
    /// # Errors
    /// When it is still there.
    pub fn withdraw(&self, uid: &str, id: &VolumeId) -> io::Result<()> {
        let folder = self.pod(uid)?;
        self.put_credentials(uid, id, None)?;
        gone(fs::remove_file(folder.join(format!("{id}.attached.json"))))?;
        gone(fs::remove_file(folder.join(format!("{id}.json"))))?;
        sync_dir(&folder)
    }

    /// As [`Records::withdraw`], and with the pod's last volume all that is noted of the pod, its VM too.
    ///
    /// # Errors
    /// When it is still there.
    pub fn remove(&self, pod: &Pod, id: &VolumeId) -> io::Result<()> {
        self.withdraw(&pod.uid, id)?;
        if !self.ids(&pod.uid)?.is_empty() {
            return Ok(());
        }
        let folder = self.pod(&pod.uid)?;
        let names = self.names(&pod.namespace, &pod.name)?;
        gone(fs::remove_file(names.join(&pod.uid)))?;
        // Another pod of the name, or of the namespace, may have its entry there; the next record makes it again.
        drop(remove_emptied(&names));
        drop(names.parent().map(remove_emptied));
        gone(fs::remove_file(folder.join("vm.json")))?;
        remove_emptied(&folder)
    }

    /// Keeps who a volume is mounted as, or, with none, forgets it for good. Before the record is put, which says that all
    /// of the volume is there.
    ///
    /// # Errors
    /// When it could not be made durable.
    pub fn put_credentials(
        &self,
        uid: &str,
        id: &VolumeId,
        credentials: Option<&Credentials>,
    ) -> io::Result<()> {
        let (folder, name) = (self.pod(uid)?, format!("{id}.secret.json"));
        match credentials {
            Some(credentials) => write(&folder, &name, &credentials.to_bytes()),
            None => {
                // Also what a writer left that was killed.
                gone(fs::remove_file(folder.join(format!(".{name}.new"))))?;
                gone(fs::remove_file(folder.join(name)))?;
                sync_dir(&folder)
            }
        }
    }

    /// Who a volume is mounted as; none: nobody said.
    ///
    /// # Errors
    /// When it is there and cannot be read or understood; nothing of it is in the error.
    pub fn credentials(&self, uid: &str, id: &VolumeId) -> io::Result<Option<Credentials>> {
        let path = self.pod(uid)?.join(format!("{id}.secret.json"));
        let file = match File::open(&path) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let mut bytes = Zeroizing::new(Vec::with_capacity(credentials::MAX_BYTES + 2));
        file.take(credentials::MAX_BYTES as u64 + 1).read_to_end(&mut bytes)?;
        Credentials::read(&bytes).map(Some).map_err(|why| unusable(&path, &why.to_string()))
    }

    /// Notes where the driver attached a volume.
    ///
    /// # Errors
    /// When it could not be made durable.
    pub fn put_attached(&self, uid: &str, id: &VolumeId, attached: &Attached) -> io::Result<()> {
        write_json(&self.pod(uid)?, &format!("{id}.attached.json"), attached, MAX_FILE)
    }

    /// Where the driver attached a volume.
    ///
    /// # Errors
    /// When it is there and cannot be read or understood.
    pub fn attached(&self, uid: &str, id: &VolumeId) -> io::Result<Option<Attached>> {
        read_json(&self.pod(uid)?.join(format!("{id}.attached.json")), MAX_FILE)
    }

    /// Notes the pod's VM.
    ///
    /// # Errors
    /// When it could not be made durable.
    pub fn put_vm(&self, uid: &str, vm: &Vm) -> io::Result<()> {
        write_json(&self.pod(uid)?, "vm.json", vm, MAX_FILE)
    }

    /// The pod's VM.
    ///
    /// # Errors
    /// When it is there and cannot be read or understood.
    pub fn vm(&self, uid: &str) -> io::Result<Option<Vm>> {
        read_json(&self.pod(uid)?.join("vm.json"), MAX_FILE)
    }

    /// The folder of a pod's files, for whoever waits for one of them.
    ///
    /// # Errors
    /// When the UID cannot be a folder's name.
    pub fn pod(&self, uid: &str) -> io::Result<PathBuf> {
        Ok(self.root.join("pods").join(plain(uid)?))
    }

    /// Every pod that has files here: for a start, never for one request.
    ///
    /// # Errors
    /// When the folder cannot be read.
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

/// Refuses what would lead out of the folder. Kubernetes' names and UIDs never do.
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
        assert_eq!(records.vm("u-1").unwrap(), Some(vm), "it may still come");
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
    fn who_a_volume_is_mounted_as_is_in_a_file_of_its_own_and_goes_with_the_record() {
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
