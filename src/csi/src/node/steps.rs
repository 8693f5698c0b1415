//! Publishes a volume and undoes it. Each step is found done or is repeated: intent on disk, ownership, the cluster's
//! object, the target, the record, the answer; the undo runs in the reverse order. May touch: targets, the records'
//! folder, the API server.

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
        let volume = publication.volume.clone();
        let all = self.on_disk("read the publications", move |inner| inner.files.of(&volume)).await?;
        let there = agreed(&all, &publication)?;
        if let Some(there) = there {
            publication.marker.clone_from(&there.marker);
            record.marker.clone_from(&there.marker);
        }
        let (new, leaving) = (there.is_none(), there.is_some_and(|there| there.leaving));
        // A publication that is leaving stays so until its earlier VM no longer blocks it. If that fails, it is still
        // released.
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
            let refused = publication.clone();
            // A failure leaves at worst a publication without a target, which the next call finds.
            drop(
                self.on_disk("forget the refused publication", move |inner| inner.files.remove(&refused))
                    .await,
            );
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
                target::make_placeholder(
                    &target,
                    &volume,
                    mapped.as_ref().map(|(_, device)| device.as_path()),
                )?;
            }
            mapped.map_or(Ok(()), |(path, device)| Ok(target::publish_device(&path, &device)?))
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
            Ok(false) => self.0.pending.leave(&publication),
            Err(why) => {
                // The pod no longer uses it; the release is repeated here.
                tracing::warn!(volume = %publication.name, error = %why, "not given back yet");
                self.0.metrics.retries.inc();
                self.0.pending.leave(&publication);
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
            mapped.map_or(Ok(()), |path| Ok(target::unpublish(&path)?))
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
        let over = publication.clone();
        self.on_disk("forget the publication", move |inner| inner.files.remove(&over)).await?;
        Ok(true)
    }

    /// Whether the pod has the volume at another target, too.
    async fn has_another(&self, publication: &Publication) -> Result<bool, Status> {
        let volume = publication.volume.clone();
        let all = self.on_disk("read the publications", move |inner| inner.files.of(&volume)).await?;
        Ok(all.iter().any(|other| {
            other.pod.uid == publication.pod.uid && other.target != publication.target && !other.leaving
        }))
    }

    /// Releases the record before the Lease: a record that outlived its Lease would make the pod count as the owner.
    /// Returns false while there is a VM.
    async fn give_back(&self, publication: &Publication) -> Result<bool, Status> {
        if self.has_vm(publication).await? {
            return Ok(false);
        }
        let (uid, volume) = (publication.pod.uid.clone(), publication.volume.clone());
        self.on_disk("withdraw the volume's record", move |inner| inner.records.withdraw(&uid, &volume))
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

/// Returns the publication at the wanted target, if none of the others conflicts with it.
fn agreed<'a>(all: &'a [Publication], wanted: &Publication) -> Result<Option<&'a Publication>, Status> {
    let mut there = None;
    for other in all {
        if other.target == wanted.target {
            compatible(other, wanted)?;
            there = Some(other);
        } else if !other.leaving {
            elsewhere(other, wanted)?;
        }
    }
    Ok(there)
}

/// Accepts the same publication again, and refuses a different one.
fn compatible(there: &Publication, wanted: &Publication) -> Result<(), Status> {
    let same = there.pod.uid == wanted.pod.uid
        && there.read_only == wanted.read_only
        && there.wanted == wanted.wanted;
    if same {
        return Ok(());
    }
    let target = wanted.target.display();
    let text = format!("volume {} is published at {target} for another pod or in another way", wanted.name);
    Err(Code::AlreadyExists.status(text))
}

/// Refuses a second target of a volume with a single writer on this node.
fn elsewhere(there: &Publication, wanted: &Publication) -> Result<(), Status> {
    if [there.wanted.access_mode, wanted.wanted.access_mode].contains(&SINGLE_NODE_SINGLE_WRITER) {
        return Err(Code::FailedPrecondition.status(format!(
            "volume {} has one writer (ReadWriteOncePod) and is published at {} for pod {}/{}",
            wanted.name,
            there.target.display(),
            there.pod.namespace,
            there.pod.name
        )));
    }
    Ok(())
}
