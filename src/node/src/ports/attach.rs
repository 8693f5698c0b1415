//! Attaches all volumes of a pod to its VM concurrently. The provider attaches its own disks. For the disks of a CSI
//! driver, the node records the VM and waits for the driver.

use std::time::Duration;

use futures_util::future::join_all;
use peerpod_provider_api::{Error as CloudError, InstanceId, OwnedState, Provider};
use peerpod_volume::Identity;

use crate::{
    spec::SandboxId,
    volumes::{self, PodVolume, PodVolumes, Volumes},
};

/// Time that one wait for a driver's attachment takes: a call to its cloud, of seconds to a minute. The caller then
/// waits again.
const DRIVER: Duration = Duration::from_secs(60);

/// See [`crate::sandbox::ports::Storage::expect_vm`].
pub(super) async fn expect(
    records: &Volumes,
    id: &SandboxId,
    volumes: &PodVolumes,
) -> Result<(), CloudError> {
    note(records, &volumes.uid, id, None, false).await?;
    // Read after the note: an unpublish looks for the note after it has removed the record.
    let (records, volumes) = (records.clone(), volumes.clone());
    let missing = tokio::task::spawn_blocking(move || records.unpublished(&volumes)).await;
    let failed = |why: String| CloudError::transient(format!("check the pod's volumes again: {why}"));
    match missing.map_err(|error| failed(error.to_string()))?.map_err(|error| failed(error.to_string()))? {
        Some(name) => Err(CloudError::invalid(format!(
            "volume {name} was unpublished before the VM was requested; the pod is being deleted"
        ))),
        None => Ok(()),
    }
}

/// See [`crate::sandbox::ports::Storage::attach`].
pub(super) async fn attach(
    records: &Volumes,
    provider: &dyn Provider,
    id: &SandboxId,
    vm: &InstanceId,
    mut all: PodVolumes,
) -> Result<PodVolumes, CloudError> {
    note(records, &all.uid, id, Some(vm), false).await?;
    let uid = all.uid.clone();
    let missing = all.volumes.iter_mut().filter(|one| one.is_missing());
    let work = missing.map(|one| {
        let uid = &uid;
        async move {
            let identity = attach_one(records, provider, uid, vm, one).await?;
            one.identity = Some(identity);
            Ok::<(), CloudError>(())
        }
    });
    // All volumes are attempted, so that one failure does not leave others half attached.
    let failed: Vec<CloudError> = join_all(work).await.into_iter().filter_map(Result::err).collect();
    // A permanent error is more useful than a transient one.
    let worst = |error: &CloudError| u8::from(matches!(error.retry(), peerpod_provider_api::Retry::After(_)));
    match failed.into_iter().min_by_key(worst) {
        Some(error) => Err(error),
        None => Ok(all),
    }
}

async fn attach_one(
    records: &Volumes,
    provider: &dyn Provider,
    uid: &str,
    vm: &InstanceId,
    one: &PodVolume,
) -> Result<Identity, CloudError> {
    let name = &one.volume.name;
    if let Some(disk) = one.disk() {
        let Some(attaches) = provider.volumes() else {
            let text = format!("volume {name}: provider {} attaches no disks", provider.name());
            return Err(CloudError::unsupported("volumes", text));
        };
        return attaches.attach(vm, &disk).await.map(volumes::identity);
    }
    let attached = records.attached(uid, &one.volume.id, vm.as_str(), DRIVER).await;
    attached.map_err(|error| CloudError::transient(format!("volume {name}: {error}")))
}

/// See [`crate::sandbox::ports::Storage::release`].
pub(super) async fn release(
    records: &Volumes,
    provider: &dyn Provider,
    id: &SandboxId,
    vm: Option<&InstanceId>,
    uid: &str,
) -> Result<(), CloudError> {
    if let Some(vm) = vm {
        // An accepted deletion does not prove that the machine no longer writes.
        let there = provider.list_owned().await?.into_iter().find(|owned| owned.id == *vm);
        if let Some(there) = there {
            let how = match there.state {
                OwnedState::Deleting => "is still being deleted",
                _ => "still exists",
            };
            return Err(CloudError::transient(format!("VM {vm} {how}, so its volumes are not free")));
        }
    }
    note(records, uid, id, vm, true).await
}

async fn note(
    records: &Volumes,
    uid: &str,
    id: &SandboxId,
    vm: Option<&InstanceId>,
    gone: bool,
) -> Result<(), CloudError> {
    let (records, pod, id, vm) =
        (records.clone(), uid.to_owned(), id.to_string(), vm.map(InstanceId::to_string));
    let noted = tokio::task::spawn_blocking(move || records.note_vm(&pod, &id, vm.as_deref(), gone)).await;
    let failed =
        |why: String| CloudError::transient(format!("note the VM of pod {uid} for its volumes: {why}"));
    noted.map_err(|error| failed(error.to_string()))?.map_err(|error| failed(error.to_string()))
}
