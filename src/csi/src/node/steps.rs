//! Publishes a volume and undoes it in reverse order. Each step is found done or is repeated: intent on disk,
//! ownership, the cluster's object, the target, the record. May touch: targets, the records' folder, the API server.

use std::io;

use peerpod_common::blocking::blocking;
use peerpod_volume::Credentials;
use peerpod_volume::records::Record;

use super::place::map_path;
use super::publications::Publication;
use super::{NodeRole, device, target};
use crate::capability::SINGLE_NODE_SINGLE_WRITER;
use crate::grpc::{Code, Status};

/// Fence in the record of a volume with one pod at a time. It is never compared: the ownership decides.
const FENCE: u64 = 1;

impl NodeRole {
    pub(super) async fn put_up(
        &self,
        mut record: Record,
        mut publication: Publication,
        credentials: Option<Credentials>,
    ) -> Result<(), Status> {
        let all = self.of_volume(&publication).await?;
        let there = agreed(&all, &publication)?;
        if let Some(there) = there {
            publication.marker.clone_from(&there.marker);
            record.marker.clone_from(&there.marker);
        }
        let (new, leaving) = (there.is_none(), there.is_some_and(|there| there.leaving));
        // A leaving publication stays so until its earlier VM no longer blocks it; if that fails, it is still released.
        if !leaving {
            self.note(&publication, new).await?;
        }
        record.fence = self.own(&publication, new).await?;
        if let Some(cluster) = &self.0.cluster {
            cluster.put_object(&publication).await?;
        }
        if leaving {
            self.note(&publication, true).await?;
        }
        self.make_target(&publication).await?;
        let recorded = self.on_disk("record the volume", move |inner| {
            let (uid, id) = (&record.pod.uid, &record.volume.id);
            inner.records.put_credentials(uid, id, credentials.as_ref())?;
            inner.records.put(&record)
        });
        recorded.await?;
        self.0.pending.watch(&publication);
        tracing::info!(
            volume = %publication.name, pod = %format!("{}/{}", publication.pod.namespace, publication.pod.name),
            target = %publication.target.display(), "volume of a peer pod recorded"
        );
        Ok(())
    }

    /// Writes a publication durably; counts it if it is new or was leaving.
    async fn note(&self, publication: &Publication, counts: bool) -> Result<(), Status> {
        let noted = publication.clone();
        self.on_disk("note the publication", move |inner| inner.files.put(&noted)).await?;
        if counts {
            self.0.metrics.published.inc();
        }
        Ok(())
    }

    /// Takes the ownership of a volume with one pod at a time; `None`: it may have several.
    async fn own(&self, publication: &Publication, new: bool) -> Result<Option<u64>, Status> {
        if !publication.exclusive {
            return Ok(None);
        }
        let (uid, volume) = (publication.pod.uid.clone(), publication.volume.clone());
        let known = self.on_disk("read the volume's record", move |inner| inner.records.get(&uid, &volume));
        // An unreadable record is written again.
        let fence = known.await.ok().flatten().and_then(|record| record.fence);
        if fence.is_some() {
            return Ok(fence);
        }
        let owners = &self.0.owners;
        let taken = owners.take(&publication.volume, &publication.name, &publication.pod).await;
        if new && taken.as_ref().is_err_and(|why| why.code == Code::FailedPrecondition) {
            // A failure leaves at worst a publication without a target, which the next call finds.
            drop(self.forget(publication).await);
            self.0.metrics.published.dec();
        }
        taken.map(|()| Some(FENCE))
    }

    async fn make_target(&self, publication: &Publication) -> Result<(), Status> {
        let (target, marker) = (publication.target.clone(), publication.marker.clone());
        let internal = |why: String| Code::Internal.status(format!("publish {}: {why}", publication.name));
        let mut mapped = None;
        if publication.wanted.block
            && let Some(path) = map_path(&target)
        {
            let file = self.0.files.device_file(&publication.volume, &target);
            mapped = Some((path, device::make(&file, &marker).await.map_err(internal)?));
        }
        let raw = publication.wanted.block.then(|| publication.volume.clone());
        let made = blocking(move || -> io::Result<()> {
            target::publish_directory(&target, &marker)?;
            if let Some(volume) = raw {
                let like = mapped.as_ref().map(|(_, device)| device.as_path());
                target::make_placeholder(&target, &volume, like)?;
            }
            mapped.map_or(Ok(()), |(path, device)| target::publish_device(&path, &device))
        });
        made.await.map_err(|why| internal(why.to_string()))
    }

    pub(super) async fn take_down(&self, mut publication: Publication) -> Result<(), Status> {
        self.remove_target(&publication).await?;
        if !publication.leaving {
            publication.leaving = true;
            self.note(&publication, false).await?;
            self.0.metrics.published.dec();
        }
        match self.finish(&publication).await {
            Ok(true) => {}
            Ok(false) => self.0.pending.put(&publication),
            Err(why) => {
                // The pod no longer uses it; the release is repeated here.
                tracing::warn!(volume = %publication.name, error = %why, "not given back yet");
                self.0.metrics.retries.inc();
                self.0.pending.put(&publication);
            }
        }
        Ok(())
    }

    async fn remove_target(&self, publication: &Publication) -> Result<(), Status> {
        let target = publication.target.clone();
        let mapped = map_path(&target).filter(|_| publication.wanted.block);
        let internal = |why: String| Code::Internal.status(format!("unpublish {}: {why}", publication.name));
        let gone = blocking(move || -> io::Result<()> {
            target::unpublish(&target)?;
            // kubelet unmaps before this call, unless it never mapped.
            mapped.map_or(Ok(()), |path| target::unpublish(&path))
        });
        gone.await.map_err(|why| internal(why.to_string()))?;
        if publication.wanted.block {
            let file = self.0.files.device_file(&publication.volume, &publication.target);
            device::remove(&file).await.map_err(internal)?;
        }
        Ok(())
    }

    /// Releases the rest of a publication without a target. Returns false while its VM exists.
    pub(super) async fn finish(&self, publication: &Publication) -> Result<bool, Status> {
        if !self.has_another(publication).await? && !self.give_back(publication).await? {
            return Ok(false);
        }
        self.forget(publication).await?;
        Ok(true)
    }

    async fn forget(&self, publication: &Publication) -> Result<(), Status> {
        let over = publication.clone();
        self.on_disk("forget the publication", move |inner| inner.files.remove(&over)).await
    }

    async fn of_volume(&self, publication: &Publication) -> Result<Vec<Publication>, Status> {
        let volume = publication.volume.clone();
        self.on_disk("read the publications", move |inner| inner.files.of(&volume)).await
    }

    /// Whether the pod has the volume at another target, too.
    async fn has_another(&self, publication: &Publication) -> Result<bool, Status> {
        Ok(self.of_volume(publication).await?.iter().any(|other| {
            other.pod.uid == publication.pod.uid && other.target != publication.target && !other.leaving
        }))
    }

    /// Returns false while there is a VM. A record that outlived its Lease would make the pod count as the owner.
    async fn give_back(&self, publication: &Publication) -> Result<bool, Status> {
        if self.has_vm(publication).await? {
            return Ok(false);
        }
        let (pod, volume) = (publication.pod.clone(), publication.volume.clone());
        self.on_disk("withdraw the volume's record", move |inner| inner.records.withdraw(&pod.uid, &volume))
            .await?;
        // A VM requested meanwhile is recorded by now, or its creation finds no record of the volume.
        if self.has_vm(publication).await? {
            return Ok(false);
        }
        if let Some(cluster) = &self.0.cluster
            && !cluster.finish_object(publication).await?
        {
            return Ok(false);
        }
        if publication.exclusive {
            self.0.owners.release(&publication.volume, &publication.name, &publication.pod).await?;
        }
        let (pod, volume) = (publication.pod.clone(), publication.volume.clone());
        self.on_disk("remove the volume's record", move |inner| inner.records.remove(&pod, &volume)).await?;
        Ok(true)
    }

    /// Whether the pod's VM exists or may still be created. The node records a VM before it requests it, and marks it
    /// gone even if the creation failed. Without a record none was ever requested.
    pub(super) async fn has_vm(&self, publication: &Publication) -> Result<bool, Status> {
        let uid = publication.pod.uid.clone();
        let vm = self.on_disk("read the pod's VM", move |inner| inner.records.vm(&uid)).await?;
        Ok(vm.is_some_and(|vm| !vm.gone))
    }
}

/// Returns the publication at the wanted target. Fails if it differs from the wanted one, or if a volume with a single
/// writer on this node has another target.
fn agreed<'a>(all: &'a [Publication], wanted: &Publication) -> Result<Option<&'a Publication>, Status> {
    let name = &wanted.name;
    let other = all.iter().filter(|other| other.target != wanted.target && !other.leaving).find(|other| {
        [other.wanted.access_mode, wanted.wanted.access_mode].contains(&SINGLE_NODE_SINGLE_WRITER)
    });
    if let Some(other) = other {
        let (target, pod) = (other.target.display(), &other.pod);
        return Err(Code::FailedPrecondition.status(format!(
            "volume {name} has one writer (ReadWriteOncePod) and is published at {target} for pod {}/{}",
            pod.namespace, pod.name
        )));
    }
    let there = all.iter().find(|other| other.target == wanted.target);
    let differs = |there: &Publication| {
        (&there.pod.uid, there.read_only, &there.wanted)
            != (&wanted.pod.uid, wanted.read_only, &wanted.wanted)
    };
    if there.is_some_and(differs) {
        let target = wanted.target.display();
        let text = format!("volume {name} is published at {target} for another pod or in another way");
        return Err(Code::AlreadyExists.status(text));
    }
    Ok(there)
}
