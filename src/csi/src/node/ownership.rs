//! Records the owner of a disk that has a single writer. A VolumeAttachment guards a disk only per worker, and two pods
//! of one worker are two VMs. In a cluster a Lease per volume holds the owner, otherwise a file on this node. The
//! ownership is released only when the holder's VM is gone. The Lease or file is deleted with it, so that a volume
//! without a pod leaves nothing behind. May touch: Leases in one namespace, the records' folder.

use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use peerpod_common::blocking::blocking;
use peerpod_kube::lease::{self, LeaseOwner, Taken};
use peerpod_volume::VolumeId;
use peerpod_volume::records::Pod;

use super::publications::Publications;
use crate::grpc::{Code, Status};

#[derive(Clone, Debug)]
pub(crate) enum Ownership {
    /// Leases, and the name of this node.
    Cluster(Box<Api<Lease>>, String),
    Node(Publications),
}

/// Returns the owner of a volume's Lease for this pod of this node.
pub(crate) fn owner(uid: &str, node: &str) -> LeaseOwner {
    LeaseOwner { identity: uid.to_owned(), node: node.to_owned(), ..LeaseOwner::default() }
}

pub(crate) fn lease_name(volume: &VolumeId) -> String {
    format!("peerpod-volume-{volume}")
}

impl Ownership {
    /// Takes a volume for a pod. Taking it again is no error. FAILED_PRECONDITION: another pod has it. UNAVAILABLE: the
    /// owner cannot be determined now.
    pub(crate) async fn take(&self, volume: &VolumeId, name: &str, pod: &Pod) -> Result<(), Status> {
        match self {
            Ownership::Cluster(leases, node) => {
                let taken = lease::take(leases, &lease_name(volume), &owner(&pod.uid, node), None).await;
                match taken.map_err(|why| unknown(name, &why))? {
                    Taken::Ours(_) => Ok(()),
                    Taken::Others { holder, .. } => Err(taken_by(name, &holder)),
                }
            }
            Ownership::Node(files) => {
                let (files, volume, uid) = (files.clone(), volume.clone(), pod.uid.clone());
                let taken =
                    blocking(move || files.take(&volume, &uid)).await.map_err(|why| unknown(name, &why))?;
                taken.map_err(|holder| taken_by(name, &holder))
            }
        }
    }

    /// Releases a pod's volume. A volume of another owner is no error.
    pub(crate) async fn release(&self, volume: &VolumeId, name: &str, pod: &Pod) -> Result<(), Status> {
        match self {
            Ownership::Cluster(leases, node) => release_lease(leases, volume, &owner(&pod.uid, node)).await,
            Ownership::Node(files) => {
                let (files, volume, uid) = (files.clone(), volume.clone(), pod.uid.clone());
                blocking(move || files.give_back(&volume, &uid)).await.map_err(|why| unknown(name, &why))
            }
        }
    }
}

/// Releases a pod's ownership of a volume, from any process. A Lease of another pod or node is no error.
pub(crate) async fn release_lease(
    leases: &Api<Lease>,
    volume: &VolumeId,
    owner: &LeaseOwner,
) -> Result<(), Status> {
    let removed = lease::remove(leases, &lease_name(volume), owner).await;
    removed.map_err(|why| unknown(volume.as_str(), &why))
}

/// Returns the pod and the node that a volume's Lease names; `None`: the volume has no owner.
pub(crate) async fn lease_owner(
    leases: &Api<Lease>,
    volume: &VolumeId,
) -> Result<Option<LeaseOwner>, Status> {
    let found = lease::owner(leases, &lease_name(volume)).await;
    found.map_err(|why| unknown(volume.as_str(), &why))
}

fn taken_by(name: &str, holder: &str) -> Status {
    Code::FailedPrecondition.status(format!(
            "volume {name} has one user at a time and belongs to the pod with UID {holder} until that pod's VM is gone; \
             this one waits. A volume for several pods needs ReadWriteMany and a driver that can do it"
        ))
}

fn unknown(name: &str, why: &dyn std::fmt::Display) -> Status {
    Code::Unavailable.status(format!("find the owner of volume {name}: {why}"))
}
