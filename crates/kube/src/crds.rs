//! Defines the custom resources of group `confidentialcontainers.org`, version `v1alpha1`, and generates their
//! CustomResourceDefinitions.
//!
//! Objects of the replaced system (cloud-api-adaptor) are read and written back whole: its fields keep their names,
//! `cleand` too, and no added field is required. The API server keeps only the fields defined here. May touch: nothing.

mod peerpod;
mod peerpodconfig;
mod peerpodvolume;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

pub use peerpod::{PeerPod, PeerPodSpec, PeerPodStatus, Phase, Stage};
pub use peerpodconfig::{PeerPodConfig, PeerPodConfigSpec, PeerPodConfigStatus};
pub use peerpodvolume::{PeerpodVolume, PeerpodVolumeSpec, PeerpodVolumeStatus};

/// Finalizer of every PeerPod. It is removed when the VM is known to be gone.
pub const FINALIZER: &str = "peer.pod/finalizer";

/// Returns all definitions, in the order in which they are printed.
pub fn all() -> Vec<CustomResourceDefinition> {
    vec![PeerPod::crd(), PeerPodConfig::crd(), PeerpodVolume::crd()]
}

/// Returns one definition as YAML, as `deploy/crds/<plural>.yaml` holds it.
///
/// # Errors
/// Never for these types: all their fields have YAML forms.
pub fn yaml(crd: &CustomResourceDefinition) -> Result<String, serde_yaml::Error> {
    // Converted by way of JSON, so that the keys are always in the same order.
    let value = serde_json::to_value(crd).map_err(<serde_yaml::Error as serde::ser::Error>::custom)?;
    serde_yaml::to_string(&value)
}

#[cfg(test)]
mod tests;
