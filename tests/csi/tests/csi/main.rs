//! peerpod-csi before a real CSI driver.

mod cluster;
mod crash;
mod peer_pods;
mod transparent;
