//! NodePublishVolume and its undoing. Each step is found done or done again: intent on disk, ownership, the cluster's
//! object, the target, the record, the answer; and back in the other order.

use std::{collections::HashMap, path::PathBuf};

use hyper::Response;
use peerpod_proto::csi::NodePublishVolumeRequest;
use peerpod_volume::{
    FsGroup, GuestVolume, Mode, Source, VolumeId, descriptor,
    records::{Pod, Record},
};
use protobuf::Message;

use super::{
    Node, Whose, disk, empty, missing,
    publications::{self, Publication},
    target, whose,
};
use crate::{
    adapters::{self, Known},
    body::Body,
    capability::{self, SINGLE_NODE_SINGLE_WRITER, Wanted},
    cluster::PodFacts,
    grpc::{self, Code, Status},
    optin,
    proxy::Call,
};

const POD: &str = "csi.storage.k8s.io/pod.";
const EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";

impl Node {
    pub(super) async fn publish(self, call: Call) -> Result<Response<Body>, Status> {
        let Ok(mut request) = NodePublishVolumeRequest::parse_from_bytes(&call.message) else {
            return call.pass(None).await;
        };
        let place = Place::of(&request);
        let facts = self.facts(&place).await?;
        let mut decided = whose(&request.volume_context, &request.publish_context)?;
        let by_class = facts.as_ref().and_then(|facts| facts.runtime_class.as_ref());
        if decided == Whose::Drivers && by_class.is_some_and(|class| self.0.classes.contains(class)) {
            decided = Whose::OursByClass;
        }
        match decided {
            Whose::Drivers => return call.pass(None).await,
            Whose::DriversSaidSo => {
                request.volume_context.remove(optin::KEY);
                return call.pass(Some(grpc::encode(&request)?)).await;
            }
            Whose::Ours | Whose::OursByClass => {}
        }
        let wanted = capability::wanted(request.volume_capability.as_ref())
            .map_err(|why| Status::new(Code::InvalidArgument, why))?;
        let Some(wanted) =
            wanted.filter(|_| !request.volume_id.is_empty() && !request.target_path.is_empty())
        else {
            return Err(missing("volume_id, target_path and a volume_capability of block or mount"));
        };
        let Some((record, publication)) = self.describe(&request, &wanted, place, facts, decided).await?
        else {
            return call.pass(None).await;
        };
        let turn = self.0.turns.turn(publication.volume.as_str()).await;
        // Not cut off when the caller leaves.
        let work = tokio::spawn(async move {
            let _turn = turn;
            self.put_up(record, publication).await
        });
        work.await.map_err(|why| Status::new(Code::Internal, format!("publish: {why}")))??;
        empty()
    }

    /// The pod's facts, where the cluster knows it and somebody needs them.
    async fn facts(&self, place: &Place) -> Result<Option<PodFacts>, Status> {
        let said_nothing = place.plain && self.0.classes.is_empty();
        match (&self.0.cluster, &place.pod) {
            (Some(cluster), Some(pod)) if !said_nothing => {
                cluster.pod(pod, self.0.driver.name().await?).await
            }
            _ => Ok(None),
        }
    }

    /// What is recorded; none: an inline volume that only the driver can make.
    async fn describe(
        &self,
        request: &NodePublishVolumeRequest,
        wanted: &Wanted,
        place: Place,
        facts: Option<PodFacts>,
        decided: Whose,
    ) -> Result<Option<(Record, Publication)>, Status> {
        let driver = self.0.driver.name().await?;
        let volume = VolumeId::of(driver, &request.volume_id);
        let claim = match (&self.0.cluster, &place.volume) {
            (Some(cluster), Some(name)) => cluster.claim(name, &request.volume_id).await?,
            _ => None,
        }
        .unwrap_or_default();
        let known = Known {
            driver,
            handle: &request.volume_id,
            context: &request.volume_context,
            secret: claim.secret,
            zone: claim.zone,
            region: self.0.region.clone(),
            attach: self.0.attach,
        };
        let name = place.volume.clone().unwrap_or_else(|| request.volume_id.clone());
        let (source, options) = adapters::source(&known).map_err(|why| {
            Status::new(Code::FailedPrecondition, format!("volume {name} of {driver}: {why}"))
        })?;
        let disk = matches!(source, Source::AttachedBlock { .. });
        let inline = request.volume_context.get(EPHEMERAL).is_some_and(|word| word == "true");
        if disk && decided == Whose::OursByClass {
            if inline {
                return Ok(None);
            }
            return Err(Status::new(
                Code::FailedPrecondition,
                format!(
                    "volume {name} is attached to this node although its pod's RuntimeClass sends it to a VM; give the \
                     controller's role the same csi.runtime-classes, or set peerpod: \"true\" in the StorageClass"
                ),
            ));
        }
        if disk && inline {
            return Err(Status::new(
                Code::FailedPrecondition,
                format!(
                    "inline volume {name}: {driver} makes it on the node, so it cannot be in a VM; use a claim"
                ),
            ));
        }
        let pod = place.pod(&volume)?;
        let read_only = request.readonly || wanted.reads_only();
        let driver_attached = disk && self.0.attach == descriptor::Attach::Driver;
        let exclusive = wanted.exclusive(&source, read_only);
        let mode = mode(wanted, options, facts.as_ref());
        let target = PathBuf::from(&request.target_path);
        let publication = Publication {
            version: publications::VERSION,
            volume: volume.clone(),
            driver: driver.to_owned(),
            handle: request.volume_id.clone(),
            name: name.clone(),
            pod: pod.clone(),
            target: target.clone(),
            wanted: wanted.clone(),
            read_only,
            marker: marker()?,
            exclusive,
            driver_attached,
            leaving: false,
        };
        let record = Record {
            version: descriptor::VERSION,
            volume: GuestVolume { version: descriptor::VERSION, id: volume, name, source, mode, read_only },
            pod,
            driver: driver.to_owned(),
            handle: request.volume_id.clone(),
            target_path: target,
            marker: publication.marker.clone(),
            fence: None,
        };
        Ok(Some((record, publication)))
    }

    async fn put_up(&self, mut record: Record, mut publication: Publication) -> Result<(), Status> {
        let inner = &self.0;
        let all = inner.files.of(&publication.volume).map_err(|why| disk("read what is published", &why))?;
        let mut fence = None;
        for other in &all {
            if other.target == publication.target {
                compatible(other, &publication)?;
                publication.marker.clone_from(&other.marker);
            } else if !other.leaving {
                elsewhere(other, &publication)?;
            }
        }
        record.marker.clone_from(&publication.marker);
        let new = !all.iter().any(|other| other.target == publication.target);
        inner.files.put(&publication).map_err(|why| disk("note what is published", &why))?;
        if publication.exclusive {
            let known = inner.records.get(&publication.pod.uid, &publication.volume).ok().flatten();
            fence = known.and_then(|record| record.fence);
            if fence.is_none() {
                match inner.owners.take(&publication.volume, &publication.name, &publication.pod).await {
                    Ok(token) => fence = Some(token),
                    Err(refused) => {
                        if new && refused.code == Code::FailedPrecondition {
                            // Fails at worst to a note without a target, which the next call finds.
                            drop(inner.files.remove(&publication));
                        }
                        return Err(refused);
                    }
                }
            }
        }
        record.fence = fence;
        if let Some(cluster) = &inner.cluster {
            cluster.put_object(&publication).await?;
        }
        let (target, marker, block) =
            (publication.target.clone(), publication.marker.clone(), publication.wanted.block);
        let made = tokio::task::spawn_blocking(move || {
            if block {
                target::publish_file(&target, &marker)
            } else {
                target::publish_directory(&target, &marker)
            }
        });
        made.await
            .map_err(|why| Status::new(Code::Internal, format!("publish: {why}")))?
            .map_err(|why| Status::new(Code::Internal, why.to_string()))?;
        inner.records.put(&record).map_err(|why| disk("record the volume", &why))?;
        inner.pending.watch(&publication);
        if new {
            inner.metrics.published.inc();
        }
        tracing::info!(
            volume = %publication.name, pod = %format!("{}/{}", publication.pod.namespace, publication.pod.name),
            target = %publication.target.display(), "volume of a peer pod recorded"
        );
        Ok(())
    }

    pub(super) async fn take_down(&self, mut publication: Publication) -> Result<(), Status> {
        let target = publication.target.clone();
        let gone = tokio::task::spawn_blocking(move || target::unpublish(&target));
        gone.await
            .map_err(|why| Status::new(Code::Internal, format!("unpublish: {why}")))?
            .map_err(|why| Status::new(Code::Internal, why.to_string()))?;
        if !publication.leaving {
            publication.leaving = true;
            self.0.metrics.published.dec();
            self.0
                .files
                .put(&publication)
                .map_err(|why| disk("note what is not published any more", &why))?;
        }
        match self.finish(&publication).await {
            Ok(true) => {}
            Ok(false) => self.0.pending.leave(&publication),
            Err(why) => {
                // The pod has nothing of it any more; the rest is ours to repeat.
                tracing::warn!(volume = %publication.name, error = %why, "not given back yet");
                self.0.metrics.retries.inc();
                self.0.pending.leave(&publication);
            }
        }
        Ok(())
    }

    /// Gives back what a publication whose target is gone still has. False: its VM is not gone yet.
    pub(super) async fn finish(&self, publication: &Publication) -> Result<bool, Status> {
        let inner = &self.0;
        let all = inner.files.of(&publication.volume).map_err(|why| disk("read what is published", &why))?;
        let another = all.iter().any(|other| {
            other.pod.uid == publication.pod.uid && other.target != publication.target && !other.leaving
        });
        if !another {
            let vm = inner.records.vm(&publication.pod.uid).map_err(|why| disk("read the pod's VM", &why))?;
            if vm.is_some_and(|vm| !vm.gone) {
                return Ok(false);
            }
            if let Some(cluster) = &inner.cluster
                && !cluster.finish_object(publication).await?
            {
                return Ok(false);
            }
            if publication.exclusive {
                inner.owners.release(&publication.volume, &publication.name, &publication.pod).await?;
            }
            let removed = inner.records.remove(&publication.pod, &publication.volume);
            removed.map_err(|why| disk("remove the volume's record", &why))?;
        }
        inner.files.remove(publication).map_err(|why| disk("forget what was published", &why))?;
        Ok(true)
    }
}

/// Published there already: the same again is fine.
fn compatible(there: &Publication, wanted: &Publication) -> Result<(), Status> {
    let same = there.pod.uid == wanted.pod.uid
        && there.read_only == wanted.read_only
        && there.wanted == wanted.wanted;
    if same {
        return Ok(());
    }
    let target = wanted.target.display();
    let text = format!("volume {} is published at {target} for another pod or in another way", wanted.name);
    Err(Status::new(Code::AlreadyExists, text))
}

/// Published somewhere else on this node.
fn elsewhere(there: &Publication, wanted: &Publication) -> Result<(), Status> {
    if [there.wanted.access_mode, wanted.wanted.access_mode].contains(&SINGLE_NODE_SINGLE_WRITER) {
        return Err(Status::new(
            Code::FailedPrecondition,
            format!(
                "volume {} has one writer (ReadWriteOncePod) and is published at {} for pod {}/{}",
                wanted.name,
                there.target.display(),
                there.pod.namespace,
                there.pod.name
            ),
        ));
    }
    Ok(())
}

fn mode(wanted: &Wanted, more: Vec<String>, facts: Option<&PodFacts>) -> Mode {
    if wanted.block {
        return Mode::Block;
    }
    let policy = facts.map(|facts| facts.policy).unwrap_or_default();
    let gid = wanted.group.or_else(|| facts.and_then(|facts| facts.group(wanted)));
    let mount_options = wanted.mount_options.iter().cloned().chain(more).collect();
    let fs_group = gid.map(|gid| FsGroup { gid, policy });
    Mode::Filesystem { fs_type: wanted.fs_type.clone(), mount_options, fs_group }
}

fn marker() -> Result<String, Status> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|why| Status::new(Code::Internal, format!("random bytes: {why}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// What a request says of the pod and the PersistentVolume.
struct Place {
    /// By the driver's pod information, or by kubelet's path (then without names).
    pod: Option<Pod>,
    /// The PersistentVolume, by kubelet's path.
    volume: Option<String>,
    /// Neither the volume nor the controller says that it is ours.
    plain: bool,
}

impl Place {
    fn of(request: &NodePublishVolumeRequest) -> Place {
        let context: &HashMap<String, String> = &request.volume_context;
        let said = |key: &str| context.get(&format!("{POD}{key}")).cloned().unwrap_or_default();
        let (volume, path_uid) = kubelet_path(&request.target_path);
        let mut pod = Pod { uid: said("uid"), namespace: said("namespace"), name: said("name") };
        if pod.uid.is_empty() {
            pod.uid = path_uid.unwrap_or_default();
        }
        let plain = whose(context, &request.publish_context).is_ok_and(|whose| whose == Whose::Drivers);
        Place { pod: Some(pod).filter(|pod| !pod.uid.is_empty()), volume, plain }
    }

    /// Whose record it is. A caller that is not kubelet names no pod: then the volume has one of its own.
    fn pod(self, volume: &VolumeId) -> Result<Pod, Status> {
        match self.pod {
            Some(pod) if pod.name.is_empty() || pod.namespace.is_empty() => Err(Status::new(
                Code::FailedPrecondition,
                format!("pod {} is not named; set podInfoOnMount: true in the CSIDriver object", pod.uid),
            )),
            Some(pod) => Ok(pod),
            None => {
                let uid = format!("none-{volume}");
                Ok(Pod { name: uid.clone(), namespace: publications::NO_NAMESPACE.to_owned(), uid })
            }
        }
    }
}

/// The PersistentVolume and the pod's UID in kubelet's own paths, wherever its root is:
/// `…/pods/<uid>/volumes/kubernetes.io~csi/<pv>/mount` and `…/volumeDevices/publish/<pv>/<uid>`.
fn kubelet_path(path: &str) -> (Option<String>, Option<String>) {
    let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
    match parts.as_slice() {
        [.., "pods", uid, "volumes", "kubernetes.io~csi", volume, "mount"]
        | [.., "kubernetes.io", "csi", "volumeDevices", "publish", volume, uid] => {
            (Some((*volume).to_owned()), Some((*uid).to_owned()))
        }
        _ => (None, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kubelets_paths_are_known_wherever_its_root_is_and_others_are_fine() {
        let both = |volume: &str, uid: &str| (Some(volume.to_owned()), Some(uid.to_owned()));
        for root in ["/var/lib/kubelet", "/var/data/k", ""] {
            let mount = format!("{root}/pods/u-1/volumes/kubernetes.io~csi/pvc-1/mount");
            assert_eq!(kubelet_path(&mount), both("pvc-1", "u-1"));
            let device = format!("{root}/plugins/kubernetes.io/csi/volumeDevices/publish/pvc-1/u-1");
            assert_eq!(kubelet_path(&device), both("pvc-1", "u-1"));
        }
        for other in ["", "/", "a", "/tmp/target", "/pods/u/volumes/kubernetes.io~csi/mount", "/pods//x"] {
            assert_eq!(kubelet_path(other), (None, None), "{other}");
        }
    }
}
