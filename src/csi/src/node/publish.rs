//! Handles NodePublishVolume: decides between driver and peer pod, and describes the volume; `steps` carries it out. A
//! pod without a VM would get the marker's filesystem and lose its writes, so it is refused. May touch: the API server.

use std::path::PathBuf;

use peerpod_proto::csi::NodePublishVolumeRequest;
use peerpod_volume::records::{Pod, Record};
use peerpod_volume::{Credentials, FsGroup, GuestVolume, Mode, Source, VolumeId, descriptor};

use super::place::Destination;
use super::publications::{self, Publication};
use super::secrets::{self, signs_in};
use super::{NodeRole, VolumeOwner, empty, missing, volume_owner};
use crate::capability::{self, Capability};
use crate::cluster::PodFacts;
use crate::drivers::{self, VolumeInfo};
use crate::grpc::{self, Code, Status};
use crate::optin;
use crate::proxy::{Answered, Intercepted};
use crate::secrets::Given;

const EPHEMERAL: &str = "csi.storage.k8s.io/ephemeral";

impl NodeRole {
    pub(super) async fn publish(self, call: Intercepted, mut request: NodePublishVolumeRequest) -> Answered {
        let place = Destination::of(&request);
        let mut decided = volume_owner(&request.volume_context, &request.publish_context)?;
        if decided == VolumeOwner::Driver && self.is_of_class(&place).await? {
            decided = VolumeOwner::VmByClass;
        }
        match decided {
            VolumeOwner::Driver => return call.pass(None).await,
            VolumeOwner::DriverByOptOut => {
                request.volume_context.remove(optin::KEY);
                return call.pass(Some(grpc::encode(&request)?)).await;
            }
            VolumeOwner::Vm | VolumeOwner::VmByClass => {}
        }
        let facts = self.facts(&place).await?;
        let name = place.volume.as_deref().unwrap_or(&request.volume_id);
        self.must_have_a_vm(name, place.asker.named(), facts.as_ref())?;
        let wanted = capability::wanted(request.volume_capability.as_ref())
            .map_err(|why| Code::InvalidArgument.status(why))?;
        let Some(wanted) =
            wanted.filter(|_| !request.volume_id.is_empty() && !request.target_path.is_empty())
        else {
            return Err(missing("volume_id, target_path and a volume_capability of block or mount"));
        };
        // The request keeps its secrets until it is certain that the driver does not receive it.
        let given = self.given(&request).await?;
        let described = self.describe(&request, &wanted, &place, facts, decided, given).await?;
        let Some((record, publication, credentials)) = described else {
            return call.pass(None).await;
        };
        secrets::wipe(&mut request.secrets);
        bounded(&record, &publication)?;
        let turn = self.0.turns.lock(&publication.volume).await;
        // Runs to its end even if the caller leaves.
        let work = tokio::spawn(async move {
            let _turn = turn;
            self.put_up(record, publication, credentials).await
        });
        work.await.map_err(|why| Code::Internal.status(format!("publish: {why}")))??;
        empty()
    }

    /// Whether the pod's RuntimeClass alone sends all its volumes to a VM. Without podInfoOnMount the pod is unknown,
    /// and its volume goes to the driver. While the API server cannot be asked, the call fails and is repeated: on the
    /// node the data would be missing in the pod's VM.
    async fn is_of_class(&self, place: &Destination) -> Result<bool, Status> {
        match (&self.0.cluster, place.asker.named()) {
            (Some(cluster), Some(pod)) => {
                let class = cluster.class(pod).await?;
                Ok(class.is_some_and(|class| self.0.classes.contains(&class)))
            }
            _ => Ok(false),
        }
    }

    /// Returns the pod's properties, where the cluster has the pod.
    async fn facts(&self, place: &Destination) -> Result<Option<PodFacts>, Status> {
        match (&self.0.cluster, place.asker.named()) {
            (Some(cluster), Some(pod)) => cluster.pod(pod, self.0.upstream.driver().await?).await,
            _ => Ok(None),
        }
    }

    /// Refuses a pod that certainly has no VM.
    fn must_have_a_vm(&self, name: &str, pod: Option<&Pod>, facts: Option<&PodFacts>) -> Result<(), Status> {
        let (Some(pod), Some(facts)) = (pod, facts) else { return Ok(()) };
        let classes = &self.0.classes;
        let has = match &facts.runtime_class {
            None => "no RuntimeClass".to_owned(),
            Some(class) if classes.contains(class) => return Ok(()),
            Some(class) => format!(
                "RuntimeClass {class}, which is not one of csi.runtime-classes ({})",
                classes.join(", ")
            ),
        };
        let text = format!(
            "volume {name} is for peer pods (peerpod: \"true\"), and pod {}/{} has {has}: without a VM it \
             would lose its data; give the pod the RuntimeClass of peer pods, or use a volume of a \
             StorageClass without the parameter",
            pod.namespace, pod.name
        );
        Err(Code::FailedPrecondition.status(text))
    }

    /// Returns the data to be recorded; `None`: an inline volume that only the driver can make.
    async fn describe(
        &self,
        request: &NodePublishVolumeRequest,
        wanted: &Capability,
        place: &Destination,
        facts: Option<PodFacts>,
        decided: VolumeOwner,
        given: Option<Given>,
    ) -> Result<Option<(Record, Publication, Option<Credentials>)>, Status> {
        let driver = self.0.upstream.driver().await?;
        let volume = VolumeId::of(driver, &request.volume_id);
        let name = place.volume.clone().unwrap_or_else(|| request.volume_id.clone());
        let (mut source, options) = self.source(request, place, &name).await?;
        let disk = matches!(source, Source::AttachedBlock { .. });
        if disk && !is_for_vm(request, decided, driver, &name)? {
            return Ok(None);
        }
        let credentials = signs_in(&mut source, driver, given, wanted, &options)
            .map_err(|why| Code::InvalidArgument.status(format!("volume {name} of {driver}: {why}")))?;
        let read_only = request.readonly || wanted.reads_only();
        let publication = Publication {
            version: publications::VERSION,
            pod: place.asker.pod(&volume)?,
            volume,
            driver: driver.to_owned(),
            handle: request.volume_id.clone(),
            name,
            target: PathBuf::from(&request.target_path),
            wanted: wanted.clone(),
            read_only,
            marker: marker()?,
            exclusive: wanted.exclusive(&source, read_only),
            driver_attached: disk && self.0.attach == descriptor::Attach::Driver,
            leaving: false,
        };
        let record = record(&publication, source, mode(wanted, options, facts.as_ref()));
        Ok(Some((record, publication, credentials)))
    }

    async fn source(
        &self,
        request: &NodePublishVolumeRequest,
        place: &Destination,
        name: &str,
    ) -> Result<(Source, Vec<String>), Status> {
        let driver = self.0.upstream.driver().await?;
        let claim = match (&self.0.cluster, &place.volume) {
            (Some(cluster), Some(name)) => cluster.claim(name, &request.volume_id).await?,
            _ => None,
        }
        .unwrap_or_default();
        let known = VolumeInfo {
            driver,
            handle: &request.volume_id,
            context: &request.volume_context,
            secret: claim.secret,
            zone: claim.zone,
            region: self.0.region.clone(),
            attach: self.0.attach,
        };
        drivers::source(&known)
            .map_err(|why| Code::FailedPrecondition.status(format!("volume {name} of {driver}: {why}")))
    }
}

/// Returns false for an inline disk that the driver makes on the node, where only the pod's class asks for a VM.
fn is_for_vm(
    request: &NodePublishVolumeRequest,
    decided: VolumeOwner,
    driver: &str,
    name: &str,
) -> Result<bool, Status> {
    let inline = request.volume_context.get(EPHEMERAL).is_some_and(|word| word == "true");
    let why = match (decided == VolumeOwner::VmByClass, inline) {
        (true, true) => return Ok(false),
        (false, false) => return Ok(true),
        (true, false) => format!(
            "volume {name} is attached to this node although its pod's RuntimeClass sends it to a VM; give the controller's \
             role the same csi.runtime-classes, or set peerpod: \"true\" in the StorageClass"
        ),
        (false, true) => {
            format!(
                "inline volume {name}: {driver} makes it on the node, so it cannot be in a VM; use a claim"
            )
        }
    };
    Err(Code::FailedPrecondition.status(why))
}

fn record(publication: &Publication, source: Source, mode: Mode) -> Record {
    let Publication { volume, name, read_only, pod, driver, handle, target, marker, .. } =
        publication.clone();
    Record {
        version: descriptor::VERSION,
        volume: GuestVolume { version: descriptor::VERSION, id: volume, name, source, mode, read_only },
        pod,
        driver,
        handle,
        target_path: target,
        marker,
        fence: None,
    }
}

fn mode(wanted: &Capability, more: Vec<String>, facts: Option<&PodFacts>) -> Mode {
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
    getrandom::fill(&mut bytes).map_err(|why| Code::Internal.status(format!("random bytes: {why}")))?;
    Ok(hex::encode(bytes))
}

/// Checks the limits of the stored files, which must be readable again.
fn bounded(record: &Record, publication: &Publication) -> Result<(), Status> {
    for (json, limit) in [
        (serde_json::to_vec(publication), publications::MAX_FILE as usize),
        (serde_json::to_vec(&record.volume), descriptor::MAX_BYTES),
    ] {
        let bytes = json.map_err(|why| Code::Internal.status(format!("as JSON: {why}")))?.len();
        if bytes > limit {
            return Err(Code::InvalidArgument.status(format!(
                "volume {}: its record has {bytes} bytes, more than {limit}; it needs fewer mount options \
                 or shorter attributes",
                publication.name.chars().take(253).collect::<String>()
            )));
        }
    }
    Ok(())
}
