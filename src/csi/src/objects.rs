//! Names, reads and writes the PeerpodVolume objects: one per (volume, pod), without secrets. May touch: those objects.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client, Resource, ResourceExt};
use peerpod_kube::client::{Error, within};
use peerpod_kube::crds::{PeerpodVolume, PeerpodVolumeSpec, PeerpodVolumeStatus};
use peerpod_volume::VolumeId;
use serde_json::json;

use crate::node::publications::Publication;

/// Finalizer of each object, removed when the disk is detached and the VM is gone.
pub(crate) const FINALIZER: &str = "peerpod.io/detach";
/// Label: the CSI driver's name.
pub(crate) const DRIVER: &str = "peerpod.io/csi-driver";
/// Label: the volume's id.
pub(crate) const VOLUME: &str = "peerpod.io/volume";
/// Label: the component that attaches the disk, `driver` or `provider`.
pub(crate) const ATTACH: &str = "peerpod.io/attach";
/// Condition: the driver attached the disk to the VM in `spec.vmID`.
pub(crate) const ATTACHED: &str = "Attached";
/// Condition: the volume is unpublished from the pod, and the pod's VM is gone or never existed.
pub(crate) const RELEASED: &str = "Released";

/// Returns the name of the object of a (volume, pod).
pub(crate) fn name(volume: &VolumeId, uid: &str) -> String {
    let plain: String = uid.to_lowercase().chars().filter(char::is_ascii_alphanumeric).collect();
    format!("{volume}-{}", &plain[plain.len().saturating_sub(12)..])
}

pub(crate) fn new(publication: &Publication, spec: PeerpodVolumeSpec) -> PeerpodVolume {
    let Publication { volume, driver, pod, driver_attached, .. } = publication;
    let labels = BTreeMap::from([
        (DRIVER.to_owned(), driver.clone()),
        (VOLUME.to_owned(), volume.to_string()),
        (ATTACH.to_owned(), if *driver_attached { "driver" } else { "provider" }.to_owned()),
    ]);
    let owner = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Pod".to_owned(),
        name: pod.name.clone(),
        uid: pod.uid.clone(),
        ..OwnerReference::default()
    };
    let metadata = ObjectMeta {
        name: Some(name(volume, &pod.uid)),
        namespace: Some(pod.namespace.clone()),
        labels: Some(labels),
        owner_references: Some(vec![owner]),
        finalizers: Some(vec![FINALIZER.to_owned()]),
        ..ObjectMeta::default()
    };
    PeerpodVolume { metadata, spec, status: None }
}

pub(crate) fn api(client: &Client, namespace: &str) -> Api<PeerpodVolume> {
    Api::namespaced(client.clone(), namespace)
}

pub(crate) async fn read(api: &Api<PeerpodVolume>, name: &str) -> Result<Option<PeerpodVolume>, Error> {
    within(format!("read PeerpodVolume {name}"), api.get_opt(name)).await
}

/// Creates the object, or finds it.
pub(crate) async fn make(api: &Api<PeerpodVolume>, object: &PeerpodVolume) -> Result<PeerpodVolume, Error> {
    let name = object.name_any();
    if let Some(found) = read(api, &name).await? {
        return Ok(found);
    }
    match within(format!("make PeerpodVolume {name}"), api.create(&PostParams::default(), object)).await {
        Err(error) if error.is_conflict() => {
            within(format!("read PeerpodVolume {name}"), api.get(&name)).await
        }
        made => made,
    }
}

/// Sets fields of the spec, if the object has not changed since it was read.
pub(crate) async fn set_spec(
    api: &Api<PeerpodVolume>,
    object: &PeerpodVolume,
    fields: serde_json::Value,
) -> Result<PeerpodVolume, Error> {
    let name = object.name_any();
    let patch = json!({"metadata": {"resourceVersion": object.resource_version()}, "spec": fields});
    let (what, patch) = (format!("patch PeerpodVolume {name}"), Patch::Merge(patch));
    within(what, api.patch(&name, &PatchParams::default(), &patch)).await
}

/// Sets a condition and the state, if the object has not changed since it was read.
pub(crate) async fn set_condition(
    api: &Api<PeerpodVolume>,
    object: &PeerpodVolume,
    state: &str,
    kind: &str,
    holds: bool,
    (reason, message): (&str, &str),
) -> Result<PeerpodVolume, Error> {
    let name = object.name_any();
    let mut status: PeerpodVolumeStatus = object.status.clone().unwrap_or_default();
    let word = if holds { "True" } else { "False" };
    let since = status.conditions.iter().find(|old| old.type_ == kind && old.status == word);
    let since = since.map_or_else(|| Time(Timestamp::now()), |old| old.last_transition_time.clone());
    status.conditions.retain(|old| old.type_ != kind);
    status.conditions.push(Condition {
        type_: kind.to_owned(),
        status: word.to_owned(),
        reason: reason.to_owned(),
        message: message.chars().take(1024).collect(),
        last_transition_time: since,
        observed_generation: object.metadata.generation,
    });
    status.state = Some(state.to_owned());
    status.observed_generation = object.metadata.generation;
    let patch = json!({"metadata": {"resourceVersion": object.resource_version()}, "status": status});
    let (what, patch) = (format!("patch status of PeerpodVolume {name}"), Patch::Merge(patch));
    within(what, api.patch_status(&name, &PatchParams::default(), &patch)).await
}

pub(crate) fn holds(object: &PeerpodVolume, kind: &str) -> bool {
    let conditions = object.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == kind && condition.status == "True")
}

/// Removes the finalizer, if it is there.
pub(crate) async fn let_go(api: &Api<PeerpodVolume>, object: &PeerpodVolume) -> Result<(), Error> {
    let name = object.name_any();
    let left: Vec<&String> = object.finalizers().iter().filter(|one| *one != FINALIZER).collect();
    if left.len() == object.finalizers().len() {
        return Ok(());
    }
    let patch =
        Patch::Merge(json!({"metadata": {"resourceVersion": object.resource_version(), "finalizers": left}}));
    let how = PatchParams::default();
    let done = within(format!("let PeerpodVolume {name} go"), api.patch(&name, &how, &patch));
    match done.await {
        Err(error) if error.is_not_found() => Ok(()),
        done => done.map(drop),
    }
}

/// Deletes the object. A deleted object is no error.
pub(crate) async fn delete(api: &Api<PeerpodVolume>, object: &PeerpodVolume) -> Result<(), Error> {
    if object.meta().deletion_timestamp.is_some() {
        return Ok(());
    }
    let name = object.name_any();
    match within(format!("delete PeerpodVolume {name}"), api.delete(&name, &Default::default())).await {
        Err(error) if error.is_not_found() => Ok(()),
        done => done.map(drop),
    }
}
