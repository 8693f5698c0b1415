//! Reads a pod's volumes from the CSI wrapper's records and from the folder of Kata's direct volumes, and describes
//! them to the provider, the relay and the guest. The provider attaches its own disks; for those of a CSI driver, the
//! node records the VM and waits for the driver.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use parking_lot::Mutex;
use peerpod_common::blocking::blocking;
use peerpod_proto::{guest, relay};
use peerpod_provider_api::{
    DiskIdentity, DiskRequest, Error as CloudError, InstanceId, OwnedState, Provider, Retry,
};
use peerpod_volume::descriptor::{Attach, VERSION};
use peerpod_volume::records::{Record, Records, Vm};
use peerpod_volume::{GuestVolume, Identity, Mode, SecretRef, Source, VolumeId};
use serde::{Deserialize, Serialize};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};
use zeroize::Zeroizing;

use crate::sandbox::ports::Storage;
use crate::spec::{PodRef, SandboxId};

/// Returns the UIDs of this node's pods with a namespace and a name that are not terminating, as far as they are known.
pub(crate) type Pods = Arc<dyn Fn(&str, &str) -> Vec<String> + Send + Sync>;

/// Interval of checks for a driver's attachment, which takes seconds in the cloud.
const LOOK: Duration = Duration::from_millis(100);

/// All volumes of one pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodVolumes {
    pub uid: String,
    /// In the order of their ids.
    pub volumes: Vec<PodVolume>,
}

/// A volume of a pod, as it was when the pod's VM was requested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodVolume {
    pub volume: GuestVolume,
    /// Path at which it is published on this node.
    pub target_path: PathBuf,
    /// The content of the marker file there.
    pub marker: String,
    /// Set where the volume has one pod at a time; the number has no meaning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<u64>,
    /// Identity by which the guest recognises its disk; set when the disk is attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<Identity>,
}

impl PodVolume {
    fn of(record: Record) -> PodVolume {
        let Record { volume, target_path, marker, fence, .. } = record;
        PodVolume { volume, target_path, marker, fence, identity: None }
    }

    /// Returns the disk that the provider attaches; `None`: the provider does not attach this volume. A network disk is
    /// named by its URI: a hypervisor connects to it, and neither VM nor node needs an initiator. A provider without
    /// support refuses it.
    pub fn disk(&self) -> Option<DiskRequest> {
        let (volume, zone) = match &self.volume.source {
            Source::AttachedBlock { volume, zone, attach: Attach::Provider } => {
                (volume.clone(), zone.clone())
            }
            Source::Iscsi { portals, iqn, lun, secret: _ } => {
                (format!("iscsi://{}/{iqn}/{lun}", portals.first()?), None)
            }
            Source::Nbd { host, port, export } if host.contains(':') => {
                (format!("nbd://[{host}]:{port}/{export}"), None)
            }
            Source::Nbd { host, port, export } => (format!("nbd://{host}:{port}/{export}"), None),
            _ => return None,
        };
        Some(DiskRequest { volume, read_only: self.volume.read_only, zone })
    }

    /// Returns the reason if no provider of this version can attach it.
    fn unusable(&self) -> Option<String> {
        match &self.volume.source {
            Source::Iscsi { secret: Some(secret), .. } => Some(format!(
                "volume {}: this version does not pass its CHAP credentials (secret {}/{}) to the \
                 hypervisor; restrict the target by address instead",
                self.volume.name, secret.namespace, secret.name
            )),
            Source::Iscsi { portals, .. } if portals.is_empty() => {
                Some(format!("volume {}: it names no iSCSI portal", self.volume.name))
            }
            _ => None,
        }
    }

    pub(crate) fn is_missing(&self) -> bool {
        self.identity.is_none() && !matches!(self.volume.source, Source::Nfs { .. } | Source::Smb { .. })
    }
}

impl PodVolumes {
    pub(crate) fn is_ready(&self) -> bool {
        !self.volumes.iter().any(PodVolume::is_missing)
    }

    /// Whether a VM may write to one of them.
    pub(crate) fn is_written(&self) -> bool {
        self.volumes.iter().any(|one| !one.volume.read_only)
    }

    pub(crate) fn disks(&self) -> Vec<DiskRequest> {
        self.volumes.iter().filter_map(PodVolume::disk).collect()
    }

    /// Returns the volumes that one VM at a time may have.
    pub fn single_writers(&self) -> impl Iterator<Item = &GuestVolume> {
        self.volumes.iter().filter(|one| one.fence.is_some()).map(|one| &one.volume)
    }

    /// Returns the descriptions by which the relay recognises the volumes.
    pub fn for_relay(&self) -> Vec<relay::Volume> {
        let volume = |one: &PodVolume| relay::Volume {
            id: one.volume.id.to_string(),
            name: one.volume.name.clone(),
            target_path: one.target_path.to_string_lossy().into_owned(),
            marker: one.marker.clone(),
            read_only: one.volume.read_only,
            block: one.volume.mode == Mode::Block,
            ..relay::Volume::default()
        };
        self.volumes.iter().map(volume).collect()
    }

    /// Returns the descriptions for the guest.
    pub fn for_guest(&self) -> Vec<guest::Volume> {
        let json = |value: serde_json::Result<Vec<u8>>| value.unwrap_or_default();
        let volume = |one: &PodVolume| guest::Volume {
            descriptor: json(serde_json::to_vec(&one.volume)),
            identity: one.identity.as_ref().map(|it| json(serde_json::to_vec(it))).unwrap_or_default(),
            ..guest::Volume::default()
        };
        self.volumes.iter().map(volume).collect()
    }
}

/// Converts the provider's disk identity to the descriptor's; the variants are the same.
pub(crate) fn identity(told: DiskIdentity) -> Identity {
    match told {
        DiskIdentity::Serial(serial) => Identity::Serial(serial),
        DiskIdentity::ById(name) => Identity::ById(name),
        DiskIdentity::Lun(lun) => Identity::Lun(lun),
        DiskIdentity::Wwn(wwn) => Identity::Wwn(wwn),
    }
}

/// The records, and the lookup of the pods that they belong to.
#[derive(Clone)]
pub(crate) struct Volumes {
    records: Records,
    pods: Option<Pods>,
    /// Folder in which other CSI drivers describe volumes in Kata's format.
    direct: Option<PathBuf>,
    /// Held while a pod's VM is noted: two sandboxes of one pod may do so at once.
    notes: Arc<Mutex<()>>,
}

impl Volumes {
    /// Opens the records in `folder`. `direct`: folder in which other CSI drivers describe volumes in Kata's format.
    pub(crate) fn new(folder: &Path, direct: Option<&Path>, pods: Option<Pods>) -> Volumes {
        let direct = direct.map(Path::to_owned);
        Volumes { records: Records::new(folder), pods, direct, notes: Arc::default() }
    }

    /// Returns a pod's volumes, and no other pod's. After an error, no VM may be made. Blocks for some file reads.
    pub(crate) fn of_pod(&self, pod: &PodRef) -> Result<Option<PodVolumes>, String> {
        let uid = self.uid(pod).map_err(|why| format!("find the volumes of pod {pod}: {why}"))?;
        let Some(uid) = uid.or_else(|| self.uid_of_watch(pod)) else { return Ok(None) };
        let failed = |why: String| format!("read the volumes of pod {pod}: {why}");
        let records = self.records.of_pod(&uid).map_err(|error| failed(error.to_string()))?;
        let is_other =
            |record: &&Record| record.pod.namespace != pod.namespace || record.pod.name != pod.name;
        if let Some(Record { volume, pod: other, .. }) = records.iter().find(is_other) {
            let (volume, namespace, name) = (&volume.name, &other.namespace, &other.name);
            return Err(failed(format!("the record of volume {volume} belongs to pod {namespace}/{name}")));
        }
        let mut volumes: Vec<PodVolume> = records.into_iter().map(PodVolume::of).collect();
        if let Some(folder) = &self.direct {
            let others = direct::of_pod(folder, &uid).map_err(failed)?;
            let known: Vec<PathBuf> = volumes.iter().map(|one| one.target_path.clone()).collect();
            volumes.extend(others.into_iter().filter(|one| !known.contains(&one.target_path)));
        }
        if let Some(why) = volumes.iter().find_map(PodVolume::unusable) {
            return Err(why);
        }
        for GuestVolume { id, name: volume, source, .. } in volumes.iter().map(|one| &one.volume) {
            let Source::Smb { secret: Some(SecretRef { namespace, name }), .. } = source else { continue };
            let there = self.records.credentials(&uid, id);
            if there.map_err(|error| failed(format!("volume {volume}: {error}")))?.is_none() {
                return Err(failed(format!(
                    "volume {volume} is mounted with secret {namespace}/{name}, which kubelet did not pass \
                     when it published the volume; name the secret as nodeStageSecretRef or \
                     nodePublishSecretRef of the PersistentVolume, and recreate the pod"
                )));
            }
        }
        Ok((!volumes.is_empty()).then_some(PodVolumes { uid, volumes }))
    }

    /// Returns the credentials of the pod's shares, as [`Storage::credentials`] says. They are read from the records
    /// each time, so that they are nowhere else on this node. Blocks for some file reads.
    fn credentials(&self, volumes: &PodVolumes) -> Result<Vec<Option<Zeroizing<Vec<u8>>>>, String> {
        let of = |one: &PodVolume| -> Result<Option<Zeroizing<Vec<u8>>>, String> {
            if !matches!(one.volume.source, Source::Smb { .. }) {
                return Ok(None);
            }
            let GuestVolume { id, name, .. } = &one.volume;
            let read = self.records.credentials(&volumes.uid, id);
            let read = read.map_err(|error| format!("read the credentials of volume {name}: {error}"));
            Ok(read?.map(|credentials| credentials.to_bytes()))
        };
        volumes.volumes.iter().map(of).collect()
    }

    /// Returns the UID from the pod watch, if exactly one pod has the name: other drivers' records contain none.
    fn uid_of_watch(&self, pod: &PodRef) -> Option<String> {
        let mut known = self.pods.as_ref()?(&pod.namespace, &pod.name);
        if known.len() == 1 { known.pop() } else { None }
    }

    /// Identifies the pod. Only the Go shim under CRI-O sends the UID, and a name may belong to two pods for a while.
    fn uid(&self, pod: &PodRef) -> Result<Option<String>, String> {
        if let Some(uid) = &pod.uid {
            return Ok(Some(uid.clone()));
        }
        let recorded = self.records.uids(&pod.namespace, &pod.name).map_err(|error| error.to_string())?;
        if recorded.is_empty() {
            return Ok(None);
        }
        let known = self.pods.as_ref().map(|pods| pods(&pod.namespace, &pod.name)).unwrap_or_default();
        // A recorded pod that is not known and had no VM yet may be the one that starts: the watch lags behind kubelet.
        let mut unread = false;
        for uid in recorded.iter().filter(|uid| !known.contains(uid)) {
            unread |= self.records.vm(uid).map_err(|error| error.to_string())?.is_none();
        }
        match (&known[..], &recorded[..]) {
            ([one], _) if !unread => Ok(Some(one.clone())),
            ([], [one]) => Ok(Some(one.clone())),
            (known, recorded) => {
                let mut all: Vec<&str> = known.iter().chain(recorded).map(String::as_str).collect();
                all.sort_unstable();
                all.dedup();
                Err(format!(
                    "several pods of this name have volumes on this node, and the sandbox does not identify \
                     one (UIDs {}); the node tries again until the API server reports the pod or the volumes \
                     of the other pods are unpublished",
                    all.join(", ")
                ))
            }
        }
    }

    /// Records the pod's VM for the CSI wrapper; without an instance: a VM may be made. No reader waits where the pod
    /// has no files. With `gone`, it writes only if no later sandbox of the pod has recorded its own VM.
    fn note_vm(&self, uid: &str, sandbox: &str, instance: Option<&str>, gone: bool) -> io::Result<()> {
        let _turn = self.notes.lock();
        let later = |noted: Vm| noted.sandbox != sandbox;
        if !self.records.pod(uid)?.exists() || gone && self.records.vm(uid)?.is_some_and(later) {
            return Ok(());
        }
        let instance = instance.map(str::to_owned);
        self.records.put_vm(uid, &Vm { version: VERSION, sandbox: sandbox.into(), instance, gone })
    }

    /// Returns the name of a volume that was recorded and no longer is.
    pub(crate) fn unpublished(&self, volumes: &PodVolumes) -> io::Result<Option<String>> {
        let there = self.records.of_pod(&volumes.uid)?;
        // A volume without a marker belongs to another driver and has no record.
        let recorded = volumes.volumes.iter().filter(|one| !one.marker.is_empty());
        let gone = |one: &&PodVolume| !there.iter().any(|record| record.volume.id == one.volume.id);
        Ok(recorded.into_iter().find(gone).map(|one| one.volume.name.clone()))
    }

    /// Waits until the driver has attached a volume to this VM, for at most `limit`.
    pub(crate) async fn attached(
        &self,
        uid: &str,
        id: &VolumeId,
        instance: &str,
        limit: Duration,
    ) -> io::Result<Identity> {
        let deadline = Instant::now() + limit;
        loop {
            let (records, pod, volume) = (self.records.clone(), uid.to_owned(), id.clone());
            let found = blocking(move || records.attached(&pod, &volume)).await?;
            match found.filter(|found| found.version == VERSION && found.instance == instance) {
                Some(found) => return Ok(found.identity),
                None if Instant::now() > deadline => {
                    let text =
                        format!("its CSI driver has not attached it to VM {instance} within {limit:?}");
                    return Err(io::Error::new(io::ErrorKind::TimedOut, text));
                }
                None => sleep(LOOK).await,
            }
        }
    }
}

/// Limit of one wait for a driver's attachment, which takes its cloud up to a minute. The caller then waits again.
const DRIVER: Duration = Duration::from_secs(60);

/// The records of the pods' volumes, and the provider that attaches disks.
pub(crate) struct PodStorage {
    pub volumes: Volumes,
    pub provider: Arc<dyn Provider>,
}

impl PodStorage {
    async fn attach_one(&self, uid: &str, vm: &InstanceId, one: &PodVolume) -> Result<Identity, CloudError> {
        let name = &one.volume.name;
        if let Some(disk) = one.disk() {
            let Some(attaches) = self.provider.extensions().volumes else {
                let text = format!("volume {name}: provider {} attaches no disks", self.provider.name());
                return Err(CloudError::unsupported("volumes", text));
            };
            return attaches.attach(vm, &disk).await.map(identity);
        }
        let attached = self.volumes.attached(uid, &one.volume.id, vm.as_str(), DRIVER).await;
        attached.map_err(|error| CloudError::transient(format!("volume {name}: {error}")))
    }

    /// Fails while the provider lists the VM: an accepted deletion does not prove that the machine no longer writes.
    async fn require_gone(&self, vm: &str) -> Result<(), CloudError> {
        let owned = self.provider.list_owned().await?;
        let Some(there) = owned.iter().find(|owned| owned.id.as_str() == vm) else { return Ok(()) };
        let is_deleting = there.state == OwnedState::Deleting;
        let how = if is_deleting { "is still being deleted" } else { "still exists" };
        Err(CloudError::transient(format!("VM {vm} {how}, so its volumes are not free")))
    }

    /// Fails while an earlier VM may have the pod's volumes. The table of sandboxes does not show a sandbox whose record
    /// is in quarantine, but its VM may go on writing.
    async fn require_no_earlier_vm(&self, id: &SandboxId, volumes: &PodVolumes) -> Result<(), CloudError> {
        let uid = &volumes.uid;
        if volumes.single_writers().next().is_none() {
            return Ok(());
        }
        let (records, pod) = (self.volumes.records.clone(), uid.clone());
        let noted = blocking(move || records.vm(&pod)).await;
        let noted = noted.map_err(|why| CloudError::transient(format!("read the VM of pod {uid}: {why}")))?;
        let Some(Vm { sandbox, instance, .. }) = noted.filter(|noted| !noted.gone) else { return Ok(()) };
        match instance {
            Some(vm) => self.require_gone(&vm).await,
            None if sandbox == id.as_str() => Ok(()),
            None => Err(CloudError::transient(format!(
                "sandbox {sandbox} of the same pod may have a VM with the pod's volumes, and its record is lost; check \
                 that no VM of that sandbox exists, and remove pods/{uid}/vm.json from the folder of volume records"
            ))),
        }
    }

    async fn note(
        &self,
        uid: &str,
        id: &SandboxId,
        vm: Option<&InstanceId>,
        gone: bool,
    ) -> Result<(), CloudError> {
        let (volumes, pod) = (self.volumes.clone(), uid.to_owned());
        let (id, vm) = (id.to_string(), vm.map(InstanceId::to_string));
        let noted = blocking(move || volumes.note_vm(&pod, &id, vm.as_deref(), gone)).await;
        noted.map_err(|why| CloudError::transient(format!("note the VM of pod {uid} for its volumes: {why}")))
    }
}

#[async_trait]
impl Storage for PodStorage {
    async fn volumes(&self, pod: &PodRef) -> Result<Option<PodVolumes>, String> {
        let (volumes, pod) = (self.volumes.clone(), pod.clone());
        let read = spawn_blocking(move || volumes.of_pod(&pod)).await;
        read.unwrap_or_else(|error| Err(format!("read the pod's volumes: {error}")))
    }

    async fn credentials(&self, volumes: &PodVolumes) -> Result<Vec<Option<Zeroizing<Vec<u8>>>>, String> {
        let (records, volumes) = (self.volumes.clone(), volumes.clone());
        let read = spawn_blocking(move || records.credentials(&volumes)).await;
        read.unwrap_or_else(|error| Err(format!("read the credentials of the pod's shares: {error}")))
    }

    async fn expect_vm(&self, id: &SandboxId, volumes: &PodVolumes) -> Result<(), CloudError> {
        self.require_no_earlier_vm(id, volumes).await?;
        self.note(&volumes.uid, id, None, false).await?;
        // Read after the note: an unpublish looks for the note after it has removed the record.
        let (records, volumes) = (self.volumes.clone(), volumes.clone());
        match blocking(move || records.unpublished(&volumes)).await {
            Ok(None) => Ok(()),
            Ok(Some(name)) => Err(CloudError::invalid(format!(
                "volume {name} was unpublished before the VM was requested; the pod is being deleted"
            ))),
            Err(why) => Err(CloudError::transient(format!("check the pod's volumes again: {why}"))),
        }
    }

    async fn attach(
        &self,
        id: &SandboxId,
        vm: &InstanceId,
        mut all: PodVolumes,
    ) -> Result<PodVolumes, CloudError> {
        self.note(&all.uid, id, Some(vm), false).await?;
        let uid = &all.uid;
        let work = all.volumes.iter_mut().filter(|one| one.is_missing()).map(|one| async move {
            one.identity = Some(self.attach_one(uid, vm, one).await?);
            Ok::<(), CloudError>(())
        });
        // All volumes are attempted, so that one failure does not leave others half attached.
        let failed: Vec<CloudError> = join_all(work).await.into_iter().filter_map(Result::err).collect();
        // A permanent error is more useful than a transient one.
        let worst = |error: &CloudError| u8::from(matches!(error.retry(), Retry::After(_)));
        failed.into_iter().min_by_key(worst).map_or(Ok(all), Err)
    }

    async fn release(&self, id: &SandboxId, vm: Option<&InstanceId>, uid: &str) -> Result<(), CloudError> {
        if let Some(vm) = vm {
            self.require_gone(vm.as_str()).await?;
        }
        self.note(uid, id, vm, true).await
    }
}

mod direct;
#[cfg(test)]
pub(crate) mod tests;
