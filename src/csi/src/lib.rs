//! `peerpod-csi`: stands between Kubernetes (kubelet, the CSI sidecars) and a CSI driver that knows nothing of it. Every
//! call passes as it is; only for a volume of a peer pod a few are answered otherwise, because its disk goes to the pod's
//! VM and not to this node.
//!
//! `proxy` passes ← `server` (our socket) and → `upstream` (the driver's); `node` and `controller` are what is done with
//! the calls that are looked into. May touch: the two sockets, the targets that kubelet names, the records' folder, the
//! API server. Knows nothing of how a VM is made or reached.

pub mod app;
pub mod body;
pub mod config;
pub mod grpc;
pub mod metrics;
pub mod optin;
pub mod proxy;
pub mod server;
pub mod upstream;
