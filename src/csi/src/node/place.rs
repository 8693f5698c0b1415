//! Reads pod and PersistentVolume of a NodePublishVolume from the driver's pod information and kubelet's own paths.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use peerpod_proto::csi::NodePublishVolumeRequest;
use peerpod_volume::VolumeId;
use peerpod_volume::records::Pod;

use super::publications;
use crate::grpc::{Code, Status};

const POD: &str = "csi.storage.k8s.io/pod.";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Asker {
    /// A pod with all its names.
    Pod(Pod),
    /// A pod of which only the UID is known, from kubelet's path.
    Unnamed(String),
    /// No pod: the caller is not kubelet.
    Nobody,
}

impl Asker {
    /// Returns the pod, if the cluster can be asked for it.
    pub(super) fn named(&self) -> Option<&Pod> {
        match self {
            Asker::Pod(pod) => Some(pod),
            Asker::Unnamed(_) | Asker::Nobody => None,
        }
    }

    /// Returns the pod of the record. A volume without a pod gets a name of its own.
    pub(super) fn pod(&self, volume: &VolumeId) -> Result<Pod, Status> {
        match self {
            Asker::Pod(pod) => Ok(pod.clone()),
            Asker::Unnamed(uid) => Err(Code::FailedPrecondition
                .status(format!("pod {uid} is not named; set podInfoOnMount: true in the CSIDriver object"))),
            Asker::Nobody => {
                let uid = format!("none-{volume}");
                Ok(Pod { name: uid.clone(), namespace: publications::NO_NAMESPACE.to_owned(), uid })
            }
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Destination {
    pub(super) asker: Asker,
    /// The PersistentVolume, from kubelet's path.
    pub(super) volume: Option<String>,
}

impl Destination {
    pub(super) fn of(request: &NodePublishVolumeRequest) -> Destination {
        let (volume, path_uid) = kubelet_path(&request.target_path);
        Destination { asker: asker(&request.volume_context, path_uid), volume }
    }
}

fn asker(context: &HashMap<String, String>, path_uid: Option<String>) -> Asker {
    let said = |key: &str| context.get(&format!("{POD}{key}")).filter(|value| !value.is_empty()).cloned();
    match (said("uid").or(path_uid), said("namespace"), said("name")) {
        (Some(uid), Some(namespace), Some(name)) => Asker::Pod(Pod { uid, namespace, name }),
        (Some(uid), ..) => Asker::Unnamed(uid),
        (None, ..) => Asker::Nobody,
    }
}

/// Returns PersistentVolume and pod UID from kubelet's own paths, below any root:
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

/// Returns the path at which kubelet maps a raw volume for a pod: `…/volumeDevices/<pv>/dev/<uid>` for the target
/// `…/volumeDevices/publish/<pv>/<uid>`. `None`: the target is not one of kubelet's paths.
pub(super) fn map_path(target: &Path) -> Option<PathBuf> {
    let (uid, volume) = (target.file_name()?, target.parent()?.file_name()?);
    let publish = target.parent()?.parent()?;
    publish.ends_with("kubernetes.io/csi/volumeDevices/publish").then_some(())?;
    Some(publish.parent()?.join(volume).join("dev").join(uid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_known_by_name_or_uid_or_unknown() {
        let of = |said: &[(&str, &str)], path: Option<&str>| {
            let said = said.iter().map(|(key, value)| (format!("{POD}{key}"), (*value).to_owned())).collect();
            asker(&said, path.map(str::to_owned))
        };
        let pod = |uid: &str| Asker::Pod(Pod { uid: uid.into(), namespace: "n".into(), name: "p".into() });
        let names = [("namespace", "n"), ("name", "p"), ("uid", "u-1")];
        assert_eq!(of(&names, Some("u-2")), pod("u-1"));
        assert_eq!(of(&names[..2], Some("u-2")), pod("u-2"));
        assert_eq!(of(&names[1..], None), Asker::Unnamed("u-1".to_owned()));
        assert_eq!(of(&[("name", ""), ("uid", "")], Some("u-2")), Asker::Unnamed("u-2".to_owned()));
        assert_eq!(of(&names[..2], None), Asker::Nobody);
    }

    #[test]
    fn kubelets_paths_are_known_wherever_its_root_is_and_others_are_fine() {
        let both = |volume: &str, uid: &str| (Some(volume.to_owned()), Some(uid.to_owned()));
        for root in ["/var/lib/kubelet", "/var/data/k", ""] {
            let mount = format!("{root}/pods/u-1/volumes/kubernetes.io~csi/pvc-1/mount");
            assert_eq!(kubelet_path(&mount), both("pvc-1", "u-1"));
            let device = format!("{root}/plugins/kubernetes.io/csi/volumeDevices/publish/pvc-1/u-1");
            assert_eq!(kubelet_path(&device), both("pvc-1", "u-1"));
            let mapped = format!("{root}/plugins/kubernetes.io/csi/volumeDevices/pvc-1/dev/u-1");
            assert_eq!(map_path(Path::new(&device)), Some(mapped.into()));
            assert_eq!(map_path(Path::new(&mount)), None);
        }
        for other in ["", "/", "a", "/tmp/target", "/pods/u/volumes/kubernetes.io~csi/mount", "/pods//x"] {
            assert_eq!(kubelet_path(other), (None, None), "{other}");
            assert_eq!(map_path(Path::new(other)), None, "{other}");
        }
    }
}
