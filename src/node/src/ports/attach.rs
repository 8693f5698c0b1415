//! Attaches all volumes of a pod to its VM concurrently. The provider attaches its own disks. For the disks of a CSI
//! driver, the node records the VM and waits for the driver.

use std::{io, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures_util::future::join_all;
use peerpod_provider_api::{Error as CloudError, InstanceId, OwnedState, Provider, Retry};
use peerpod_volume::Identity;
use tokio::task::spawn_blocking;
use zeroize::Zeroizing;

use crate::{
    sandbox::ports::Storage,
    spec::{PodRef, SandboxId},
    volumes::{self, PodVolume, PodVolumes, Volumes},
};

/// Time that one wait for a driver's attachment takes: a call to its cloud, of seconds to a minute. The caller then
/// waits again.
const DRIVER: Duration = Duration::from_secs(60);

/// The records of the pods' volumes, and the provider that attaches disks.
pub(crate) struct PodStorage {
    /// The records.
    pub volumes: Volumes,
    /// The provider, decorated.
    pub provider: Arc<dyn Provider>,
}

impl PodStorage {
    async fn on_thread<T: Send + 'static>(
        &self,
        work: impl FnOnce(Volumes) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let volumes = self.volumes.clone();
        spawn_blocking(move || work(volumes)).await.unwrap_or_else(|error| Err(error.into()))
    }

    async fn attach_one(&self, uid: &str, vm: &InstanceId, one: &PodVolume) -> Result<Identity, CloudError> {
        let name = &one.volume.name;
        if let Some(disk) = one.disk() {
            let Some(attaches) = self.provider.volumes() else {
                let text = format!("volume {name}: provider {} attaches no disks", self.provider.name());
                return Err(CloudError::unsupported("volumes", text));
            };
            return attaches.attach(vm, &disk).await.map(volumes::identity);
        }
        let attached = self.volumes.attached(uid, &one.volume.id, vm.as_str(), DRIVER).await;
        attached.map_err(|error| CloudError::transient(format!("volume {name}: {error}")))
    }

    async fn note(
        &self,
        uid: &str,
        id: &SandboxId,
        vm: Option<&InstanceId>,
        gone: bool,
    ) -> Result<(), CloudError> {
        let (pod, id, vm) = (uid.to_owned(), id.to_string(), vm.map(InstanceId::to_string));
        let noted = self.on_thread(move |records| records.note_vm(&pod, &id, vm.as_deref(), gone)).await;
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
        self.note(&volumes.uid, id, None, false).await?;
        // Read after the note: an unpublish looks for the note after it has removed the record.
        let volumes = volumes.clone();
        let missing = self.on_thread(move |records| records.unpublished(&volumes)).await;
        match missing {
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
            // An accepted deletion does not prove that the machine no longer writes.
            let there = self.provider.list_owned().await?.into_iter().find(|owned| owned.id == *vm);
            if let Some(there) = there {
                let how = match there.state {
                    OwnedState::Deleting => "is still being deleted",
                    _ => "still exists",
                };
                return Err(CloudError::transient(format!("VM {vm} {how}, so its volumes are not free")));
            }
        }
        self.note(uid, id, vm, true).await
    }
}
