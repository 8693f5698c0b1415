//! Holds the pod's volumes, which the node sends when the VM is assigned to the pod. Finds the kata-agent's parameters
//! for mounting one when a container is made.
//!
//! The kata-agent mounts, counts and unmounts. The guest finds the disk by its identity, makes it ready once, and fills
//! in the names that only this kernel knows. The guest mounts shares that require credentials below [`SHARES`] and
//! gives the kata-agent a folder, because the kata-agent logs its input.
//!
//! May inspect disks, and run the makers of file systems on a disk that is provably empty. May mount a volume for a
//! moment below [`MOMENT`], and such shares below [`SHARES`]. [`scratch`] handles the disk that the VM has for itself.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use parking_lot::Mutex;
use peerpod_common::blocking::{Interrupted, blocking};
use peerpod_proto::guest::{Volume, VolumeFault};
use peerpod_volume::{Credentials, FsGroup, GuestVolume, Identity, Mode, Source, VolumeId};
use tokio::time::timeout;

use self::find::{Disk, Places};
use crate::intercept::{Ready, Use, VOLUMES};

mod content;
mod fill;
mod find;
mod hardware;
mod make;
mod moment;
pub(crate) mod scratch;
mod shares;
mod signed_in;

const MOMENT: &str = "/run/peerpod/volumes-moment";
/// Directory of mounted shares that require credentials; they stay until the VM ends.
const SHARES: &str = "/run/peerpod/shares";
/// Time limit for a disk, which appears in milliseconds if it was attached before; shims wait a minute for a container.
const WAIT: Duration = Duration::from_secs(40);
/// Time limit for files: they are there in milliseconds, or their server is away.
const LOOK: Duration = Duration::from_secs(20);
/// Limit of volumes per pod.
const MOST: usize = 256;

#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct Fault {
    pub(crate) kind: VolumeFault,
    pub(crate) text: String,
}

impl Fault {
    fn not_now(text: String) -> Fault {
        Fault { kind: VolumeFault::VOLUME_FAULT_NOT_NOW, text }
    }

    fn never(text: String) -> Fault {
        Fault { kind: VolumeFault::VOLUME_FAULT_NEVER, text }
    }

    fn of(self, volume: &GuestVolume) -> Fault {
        Fault { text: format!("volume {} ({}): {}", volume.name, volume.id, self.text), ..self }
    }
}

impl From<Interrupted> for Fault {
    fn from(interrupted: Interrupted) -> Fault {
        Fault::not_now(interrupted.to_string())
    }
}

struct Known {
    volume: GuestVolume,
    identity: Option<Identity>,
    /// User to mount it as, if its server requires one.
    credentials: Option<Credentials>,
    /// Whether this run of the program mounted it below [`SHARES`] as this user.
    signed_in: AtomicBool,
    /// Held while it is made ready or inspected: its file system is made once.
    turn: tokio::sync::Mutex<()>,
    /// Shared with tasks that use its files: a server that is away may keep them in the kernel for any time.
    looks: Arc<()>,
}

impl Known {
    /// Runs work on its files, which may hang in the kernel. Abandons it after `limit`, and then starts no other before
    /// it has returned. The turn must be held.
    async fn inspect<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Fault> {
        let stuck = || Fault::not_now(format!("its disk or server has not answered for {limit:?}"));
        if Arc::strong_count(&self.looks) > 1 {
            return Err(stuck());
        }
        let looks = self.looks.clone();
        let looked = blocking(move || {
            let result = work();
            drop(looks);
            result
        });
        timeout(limit, looked).await.map_err(|_| stuck())?
    }
}

#[derive(Default)]
pub(crate) struct Volumes {
    known: Mutex<BTreeMap<VolumeId, Arc<Known>>>,
    places: Places,
}

impl Volumes {
    /// Replaces the pod's volumes by these. Fails if one is unreadable or too many: a pod must not start with less.
    pub(crate) fn learn(&self, told: &[Volume]) -> Result<(), String> {
        if told.len() > MOST {
            return Err(format!("{} volumes are more than {MOST}", told.len()));
        }
        let mut known = self.known.lock();
        let mut now = BTreeMap::new();
        for one in told {
            let volume = GuestVolume::read(&one.descriptor).map_err(|error| error.to_string())?;
            let identity = Some(&one.identity[..]).filter(|json| !json.is_empty());
            let identity = identity.map(serde_json::from_slice).transpose();
            let identity =
                identity.map_err(|error| format!("identity of volume {}: {error}", volume.name))?;
            let credentials = Some(&one.credentials[..]).filter(|json| !json.is_empty());
            let credentials = credentials.map(Credentials::read).transpose();
            let credentials =
                credentials.map_err(|why| format!("credentials of volume {}: {why}", volume.name))?;
            let same = known.get(&volume.id).filter(|old| {
                old.volume == volume && old.identity == identity && old.credentials == credentials
            });
            let entry = same.cloned().unwrap_or_else(|| {
                Arc::new(Known {
                    volume: volume.clone(),
                    identity,
                    credentials,
                    signed_in: AtomicBool::new(false),
                    turn: tokio::sync::Mutex::default(),
                    looks: Arc::default(),
                })
            });
            now.insert(volume.id, entry);
        }
        *known = now;
        Ok(())
    }

    fn get(&self, id: &str) -> Result<Arc<Known>, Fault> {
        let known = self.known.lock();
        let found = id.parse::<VolumeId>().ok().and_then(|id| known.get(&id).cloned());
        let kind = VolumeFault::VOLUME_FAULT_UNKNOWN;
        found.ok_or_else(|| Fault { kind, text: format!("the pod has no volume {id:?}") })
    }

    /// Makes a volume ready for a container that is about to be made.
    pub(crate) async fn prepare(&self, wanted: Use) -> Result<Ready, Fault> {
        let known = self.get(&wanted.id)?;
        let volume = &known.volume;
        let _turn = known.turn.lock().await;
        self.ready(&known, wanted.paths).await.map_err(|fault| fault.of(volume))
    }

    async fn ready(&self, known: &Known, paths: Vec<PathBuf>) -> Result<Ready, Fault> {
        let mut ready = match (&known.volume.source, &known.volume.mode) {
            (Source::Nfs { server, export }, Mode::Filesystem { mount_options, .. }) => {
                shares::nfs(server, export, mount_options).await?
            }
            (Source::Smb { server, share, secret }, Mode::Filesystem { mount_options, .. }) => {
                match &known.credentials {
                    Some(credentials) => {
                        let told = shares::smb_options(server, mount_options).await?;
                        let unc = shares::unc(server, share);
                        signed_in::mounted(known, unc, secret.as_ref(), told, credentials.clone()).await?
                    }
                    None => shares::smb(server, share, secret.as_ref(), mount_options).await?,
                }
            }
            (_, Mode::Block) => {
                let disk = self.disk(known).await?;
                return raw(known, &disk);
            }
            (_, Mode::Filesystem { fs_type, mount_options, .. }) => {
                let disk = self.disk(known).await?;
                let kind =
                    make::filesystem(&disk, &known.volume.id, fs_type.as_deref(), known.volume.read_only)
                        .await?;
                let mut ready = Ready {
                    driver: "blk".into(),
                    source: disk.node.display().to_string(),
                    options: mount_options.clone(),
                    fstype: kind,
                    ..Ready::default()
                };
                if ready.fstype == "xfs" && !ready.options.iter().any(|option| option == "nouuid") {
                    // A clone has the identifier of its original, which may be in this VM, too.
                    ready.options.push("nouuid".into());
                }
                if !known.volume.read_only {
                    self.catch_up(known, &disk, &ready).await;
                }
                ready
            }
        };
        ready.read_only = known.volume.read_only;
        if ready.read_only {
            ready.options.retain(|option| option != "rw");
            ready.options.push("ro".into());
            // A log that is not clean would be written to.
            match ready.fstype.as_str() {
                "xfs" => ready.options.push("norecovery".into()),
                "ext3" | "ext4" => ready.options.push("noload".into()),
                _ => {}
            }
        } else if let Mode::Filesystem { fs_group: Some(FsGroup { gid, policy }), .. } = &known.volume.mode {
            ready.fs_group = Some((*gid, *policy == peerpod_volume::FsGroupPolicy::OnRootMismatch));
        }
        ready.paths = self.paths(known, &ready, paths).await?;
        Ok(ready)
    }

    async fn disk(&self, known: &Known) -> Result<Disk, Fault> {
        match &known.identity {
            Some(identity) => self.places.wait(identity, WAIT).await,
            None => Err(Fault::never("the node sent no identity of its disk: it was not attached".into())),
        }
    }

    /// Returns the paths as they are on the volume; makes missing ones, as kubelet makes a subPath.
    async fn paths(&self, known: &Known, ready: &Ready, paths: Vec<PathBuf>) -> Result<Vec<PathBuf>, Fault> {
        if paths.iter().all(|path| path.as_os_str().is_empty()) {
            return Ok(paths);
        }
        let (ready, id) = (ready.clone(), known.volume.id.clone());
        let make = move || {
            moment::with(&id, &ready, |root| {
                paths.iter().map(|path| moment::path_in(root, path, !ready.read_only)).collect()
            })
        };
        known.inspect(LOOK, make).await
    }
}

fn raw(known: &Known, disk: &Disk) -> Result<Ready, Fault> {
    use std::os::unix::fs::MetadataExt;
    let node = disk.node.display();
    let found = std::fs::metadata(&disk.node);
    let number = found.map_err(|error| Fault::not_now(format!("look at {node}: {error}")))?.rdev();
    let part = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    Ok(Ready {
        // For a device that exists already: the kata-agent takes the numbers of its node.
        driver: "mmioblk".into(),
        source: node.to_string(),
        device: Some((part(nix::sys::stat::major(number)), part(nix::sys::stat::minor(number)))),
        read_only: known.volume.read_only,
        ..Ready::default()
    })
}

/// Returns the path where the kata-agent mounts a volume.
pub(crate) fn mount_point(id: &VolumeId) -> PathBuf {
    Path::new(VOLUMES).join(id.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::testing::TempDir;

    /// Makes a disk of zeros.
    pub(super) fn zeros(dir: &TempDir, size: u64) -> Disk {
        let node = dir.path().join("zeros");
        std::fs::File::create(&node).unwrap().set_len(size).unwrap();
        Disk { name: "zeros".into(), node, size }
    }

    fn told(id: &VolumeId) -> Volume {
        let volume = GuestVolume {
            version: 1,
            id: id.clone(),
            name: "pvc-1".into(),
            source: Source::AttachedBlock { volume: "v".into(), zone: None, attach: Default::default() },
            mode: Mode::Block,
            read_only: false,
        };
        Volume { descriptor: serde_json::to_vec(&volume).unwrap(), ..Volume::default() }
    }

    #[tokio::test]
    async fn only_the_pods_own_volumes_are_known() {
        let volumes = Volumes::default();
        let (ours, others) = (VolumeId::of("d", "ours"), VolumeId::of("d", "others"));
        volumes.learn(&[told(&ours)]).unwrap();
        let ask = |id: &str| Use { id: id.to_owned(), paths: Vec::new() };
        let refused = volumes.prepare(ask(others.as_str())).await.unwrap_err();
        assert_eq!(refused.kind, VolumeFault::VOLUME_FAULT_UNKNOWN);
        assert!(volumes.prepare(ask("../../etc")).await.is_err());
        let error = volumes.prepare(ask(ours.as_str())).await.unwrap_err().to_string();
        assert!(error.contains("pvc-1") && error.contains("was not attached"), "{error}");

        assert!(volumes.learn(&[Volume { descriptor: b"{".to_vec(), ..Volume::default() }]).is_err());
        let hidden = br#"{"version":1,"username":"joe","password":["hidden"]}"#.to_vec();
        let wrong = Volume { credentials: hidden, ..told(&ours) };
        let error = volumes.learn(&[wrong]).unwrap_err();
        assert!(error.contains("credentials of volume pvc-1") && !error.contains("hidden"), "{error}");
        let wrong = Volume { identity: b"{\"kind\":1}".to_vec(), ..told(&ours) };
        assert!(volumes.learn(&[wrong]).unwrap_err().contains("identity of volume pvc-1"));
    }
}
