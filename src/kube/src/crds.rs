//! The custom resources, group `confidentialcontainers.org`, version `v1alpha1`: what each field means, and the
//! CustomResourceDefinitions that say so to an API server.
//!
//! Objects of the system that we replace are read and written back whole: its fields keep their names, `cleand` too, and
//! none of ours is required. The API server keeps only fields that stand here. May touch: nothing.

mod peerpod;
mod peerpodconfig;
mod peerpodvolume;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

pub use peerpod::{PeerPod, PeerPodSpec, PeerPodStatus, Phase, Stage};
pub use peerpodconfig::{PeerPodConfig, PeerPodConfigSpec, PeerPodConfigStatus};
pub use peerpodvolume::{PeerpodVolume, PeerpodVolumeSpec, PeerpodVolumeStatus};

/// On every PeerPod: it goes when its VM is known to be gone.
pub const FINALIZER: &str = "peer.pod/finalizer";

/// All of them, in the order in which they are printed.
pub fn all() -> Vec<CustomResourceDefinition> {
    vec![PeerPod::crd(), PeerPodConfig::crd(), PeerpodVolume::crd()]
}

/// One as YAML, as it is kept in `deploy/crds/<plural>.yaml`.
///
/// # Errors
/// Never for ours: their fields all have YAML forms.
pub fn yaml(crd: &CustomResourceDefinition) -> Result<String, serde_yaml::Error> {
    // By way of JSON, so that keys come in one order whatever the types say.
    let value = serde_json::to_value(crd).map_err(<serde_yaml::Error as serde::ser::Error>::custom)?;
    serde_yaml::to_string(&value)
}

#[cfg(test)]
mod tests;
