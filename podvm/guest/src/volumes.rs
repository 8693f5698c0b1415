//! The pod's volumes: which there are (told by the node when the VM becomes the pod's), and what the kata-agent needs to
//! mount one, found out at the moment when a container is made. The agent mounts, counts and unmounts; here the disk is
//! found by its identity, made ready once, and the names are filled in that only this kernel knows. A share that asks who
//! mounts it is mounted here, below [`SHARES`], and the agent is told of a folder: it writes down what it is told.
//!
//! May look at disks, run the makers of file systems on a disk that is provably empty, mount a volume for a moment below
//! [`MOMENT`], and such shares below [`SHARES`]. The disk that the VM has for itself is [`scratch`]'s.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use parking_lot::Mutex;
use peerpod_proto::guest::{Volume, VolumeFault};
use peerpod_volume::{Credentials, FsGroup, GuestVolume, Identity, Mode, Source, VolumeId};
use tokio::{task::spawn_blocking, time::timeout};

use self::find::{Disk, Places};
use crate::intercept::{Ready, Use, VOLUMES};

mod content;
mod fill;
mod find;
mod make;
mod moment;
pub(crate) mod scratch;
mod shares;
mod signed_in;

/// Where one is mounted for a moment.
const MOMENT: &str = "/run/peerpod/volumes-moment";
/// Where shares are mounted that ask who mounts them, until the VM ends.
const SHARES: &str = "/run/peerpod/shares";
/// A disk that was attached before the pod started is there in milliseconds; shims wait a minute for a container.
const WAIT: Duration = Duration::from_secs(40);
/// Files are there in milliseconds, or their server is away.
const LOOK: Duration = Duration::from_secs(20);
/// Volumes of one pod.
const MOST: usize = 256;

/// Why a volume cannot be used.
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

/// One volume that the pod has.
struct Known {
    volume: GuestVolume,
    identity: Option<Identity>,
    /// Who it is mounted as, where its server asks.
    credentials: Option<Credentials>,
    /// Whether what is mounted below [`SHARES`] was mounted as that, by this run of the program.
    signed_in: AtomicBool,
    /// Held while it is made ready or looked at: its file system is made once.
    turn: tokio::sync::Mutex<()>,
    /// Shared with whoever looks at its files: a server that is away keeps them in the kernel for as long as it likes.
    looks: Arc<()>,
}

impl Known {
    /// Work on its files, which may hang in the kernel: given up on after `limit`, and then not begun again before it has
    /// come back. The turn must be held.
    async fn look<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> Result<T, Fault> + Send + 'static,
    ) -> Result<T, Fault> {
        let stuck = || Fault::not_now(format!("its disk or server has not answered for {limit:?}"));
        if Arc::strong_count(&self.looks) > 1 {
            return Err(stuck());
        }
        let looks = self.looks.clone();
        let looked = spawn_blocking(move || {
            let result = work();
            drop(looks);
            result
        });
        let looked = timeout(limit, looked).await.map_err(|_| stuck())?;
        looked.map_err(|error| Fault::not_now(format!("look at its files: {error}")))?
    }
}

/// All that the pod has.
#[derive(Default)]
pub(crate) struct Volumes {
    known: Mutex<BTreeMap<VolumeId, Arc<Known>>>,
    places: Places,
}

impl Volumes {
    /// The pod has these, and no others.
    ///
    /// # Errors
    /// When one cannot be understood: a pod must not start with less than it asked for.
    pub(crate) fn learn(&self, told: &[Volume]) -> Result<(), String> {
        if told.len() > MOST {
            return Err(format!("{} volumes are more than {MOST}", told.len()));
        }
        let mut known = self.known.lock();
        let mut now = BTreeMap::new();
        for one in told {
            let volume = GuestVolume::read(&one.descriptor).map_err(|error| error.to_string())?;
            let identity = match &one.identity[..] {
                [] => None,
                json => Some(
                    serde_json::from_slice(json)
                        .map_err(|error| format!("identity of volume {}: {error}", volume.name))?,
                ),
            };
            let credentials = match &one.credentials[..] {
                [] => None,
                json => Some(
                    Credentials::read(json)
                        .map_err(|why| format!("who volume {} is mounted as: {why}", volume.name))?,
                ),
            };
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
        found.ok_or_else(|| Fault {
            kind: VolumeFault::VOLUME_FAULT_UNKNOWN,
            text: format!("the pod has no volume {id:?}"),
        })
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
                    // A clone has the identifier of what it was cloned from, which may be in this VM, too.
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

    /// Finds the volume's disk, and waits for it.
    async fn disk(&self, known: &Known) -> Result<Disk, Fault> {
        match &known.identity {
            Some(identity) => self.places.wait(identity, WAIT).await,
            None => Err(Fault::never(
                "the node did not say how its disk is recognised: it was not attached".into(),
            )),
        }
    }

    /// The paths as they are on the volume; made, where they are missing, as kubelet makes a subPath.
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
        known.look(LOOK, make).await
    }
}

/// A raw device for a container.
fn raw(known: &Known, disk: &Disk) -> Result<Ready, Fault> {
    use std::os::unix::fs::MetadataExt;
    let number = std::fs::metadata(&disk.node).map(|found| found.rdev());
    let number =
        number.map_err(|error| Fault::not_now(format!("look at {}: {error}", disk.node.display())))?;
    let part = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    Ok(Ready {
        // A device that is there already: the agent takes its node's numbers.
        driver: "mmioblk".into(),
        source: disk.node.display().to_string(),
        device: Some((part(nix::sys::stat::major(number)), part(nix::sys::stat::minor(number)))),
        read_only: known.volume.read_only,
        ..Ready::default()
    })
}

/// Where the agent mounts a volume.
pub(crate) fn mount_point(id: &VolumeId) -> PathBuf {
    Path::new(VOLUMES).join(id.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::testing::TempDir;

    /// A disk of zeros.
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
        assert!(error.contains("who volume pvc-1 is mounted as") && !error.contains("hidden"), "{error}");
        let wrong = Volume { identity: b"{\"kind\":1}".to_vec(), ..told(&ours) };
        assert!(volumes.learn(&[wrong]).unwrap_err().contains("identity of volume pvc-1"));
    }
}
