//! Proves that a disk may be attached to a VM, or detached from it, before the driver is asked. A PeerpodVolume names
//! volume and VM, and the driver obeys. An attach is proven by the present objects of others. A detach comes when pod,
//! claim and PeerPod may be gone: it is proven by `spec.nodeID`, which the controller alone writes (`admissionPolicy`)
//! after the proof of the attach, and by the volume's Lease. May touch: nothing; it reads.

use k8s_openapi::api::core::v1::{PersistentVolume, Pod};
use kube::ResourceExt;
use peerpod_kube::client::Error;
use peerpod_kube::crds::PeerpodVolume;
use peerpod_kube::lease::LeaseOwner;

use super::lookup::{self, Lookup};
use crate::grpc::{Code, Status};
use crate::node::ownership;

/// Reason why the driver is not asked.
#[derive(Debug)]
pub(super) enum Failure {
    /// A step failed, or a proof is not there yet.
    Failed(Status),
    /// The object contradicts the proof: the reason as in conditions, and a text with a remedy.
    Refused(&'static str, String),
}

impl From<Status> for Failure {
    fn from(why: Status) -> Failure {
        Failure::Failed(why)
    }
}

impl From<Error> for Failure {
    fn from(why: Error) -> Failure {
        Failure::Failed(why.into())
    }
}

impl From<Failure> for Status {
    fn from(failure: Failure) -> Status {
        match failure {
            Failure::Failed(why) => why,
            Failure::Refused(reason, text) => Code::FailedPrecondition.status(format!("{reason}: {text}")),
        }
    }
}

/// Returns the owner that the Lease of the object's volume must name.
pub(super) fn owner(object: &PeerpodVolume) -> LeaseOwner {
    let text = |field: &Option<String>| field.clone().unwrap_or_default();
    ownership::owner(&text(&object.spec.pod_uid), &text(&object.spec.node_name))
}

/// Proves that the object's pod has a claim to the volume and may have it now, and that its VM is this VM. Returns the
/// PersistentVolume.
pub(super) async fn attach(
    lookup: &Lookup,
    driver: &str,
    object: &PeerpodVolume,
    vm: &str,
    found: Option<&LeaseOwner>,
) -> Result<PersistentVolume, Failure> {
    let namespace = object.namespace().unwrap_or_default();
    let wanted = owner(object);
    let (volume, pod) = claimed(lookup, driver, object, &namespace, &wanted).await?;
    let peerpods = lookup.peerpods(&namespace, &wanted.node, &pod).await?;
    let mut vms = peerpods.iter().map(|peerpod| peerpod.spec.instance_id.as_deref());
    let name = format!("{namespace}/{}", pod.name_any());
    if !vms.clone().any(|known| known == Some(vm)) {
        if peerpods.is_empty() || vms.any(|known| known.is_none()) {
            return Err(Failure::Failed(Code::Unavailable.status(format!(
                "the PeerPod of pod {name} names no VM yet; peerpod-node writes it, with the setting \
                 cluster.node-name"
            ))));
        }
        return Err(Failure::Refused(
            "VMNotOurs",
            format!(
                "VM {vm} is of no PeerPod of pod {name} on node {}: the disk is not attached to it; if \
                 the pod is stuck, delete it",
                wanted.node
            ),
        ));
    }
    match found {
        None if !is_shared(&volume) => Err(not_the_owner(None, &wanted)),
        None => Ok(volume),
        Some(_) => detach(object, found).map(|()| volume),
    }
}

/// Proves that the disk of an object with `spec.nodeID` is not another pod's by now. A volume without a Lease has
/// several pods at a time, or its Lease was removed by hand.
pub(super) fn detach(object: &PeerpodVolume, found: Option<&LeaseOwner>) -> Result<(), Failure> {
    let wanted = owner(object);
    match found {
        Some(found) if *found != wanted => Err(not_the_owner(Some(found), &wanted)),
        _ => Ok(()),
    }
}

/// Returns the object's PersistentVolume and its pod, which uses the claim of the volume on the object's node.
async fn claimed(
    lookup: &Lookup,
    driver: &str,
    object: &PeerpodVolume,
    namespace: &str,
    wanted: &LeaseOwner,
) -> Result<(PersistentVolume, Pod), Failure> {
    let name = object.spec.volume_name.as_deref().unwrap_or_default();
    let handle = object.spec.volume_id.as_deref().unwrap_or_default();
    let volume = lookup.named(name, driver, handle).await?;
    let claim = volume.as_ref().and_then(lookup::claim_of).filter(|(of, _)| of == namespace);
    if let (Some(volume), Some((_, claim))) = (volume, claim) {
        let users = lookup.users(namespace, &claim, &wanted.node).await?;
        if let Some(pod) = users.into_iter().find(|pod| pod.uid().as_ref() == Some(&wanted.identity)) {
            return Ok((volume, pod));
        }
    }
    Err(Failure::Refused(
        "NotTheClaim",
        format!(
            "no pod of namespace {namespace} on node {} with UID {} uses a claim that has the volume {name}: the \
             disk is not attached; delete the PeerpodVolume if the pod is gone",
            wanted.node, wanted.identity
        ),
    ))
}

/// Whether an administrator permits several nodes at a time. Such a volume may have no Lease.
fn is_shared(volume: &PersistentVolume) -> bool {
    let modes = volume.spec.as_ref().and_then(|spec| spec.access_modes.as_deref()).unwrap_or_default();
    modes.iter().any(|mode| ["ReadWriteMany", "ReadOnlyMany"].contains(&mode.as_str()))
}

fn not_the_owner(found: Option<&LeaseOwner>, wanted: &LeaseOwner) -> Failure {
    let of = |owner: &LeaseOwner| format!("the pod with UID {} on node {:?}", owner.identity, owner.node);
    let names = found.map_or_else(|| "no pod".to_owned(), of);
    Failure::Refused(
        "NotTheOwner",
        format!(
            "the volume's Lease names {names} and not {}: the disk is neither attached nor detached; if the \
             Lease was changed by hand, remove the finalizer {} once the VM is gone",
            of(wanted),
            crate::objects::FINALIZER
        ),
    )
}
