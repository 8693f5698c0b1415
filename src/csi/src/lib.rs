//! `peerpod-csi`: stands between Kubernetes (kubelet, the CSI sidecars) and a CSI driver that knows nothing of it. Every
//! call passes as it is; only for a volume of a peer pod a few are answered otherwise, because its disk goes to the pod's
//! VM and not to this node.
//!
//! `proxy` passes ← `server` (our socket) and → `upstream` (the driver's); `node` and `controller` are what is done with
//! the calls that are looked into; `drivers` is all that is known of drivers by name. May touch: the two sockets, the
//! targets that kubelet names, loop devices, the records' folder, the API server. Knows nothing of how a VM is made or
//! reached.

pub mod app;
pub mod body;
pub mod capability;
pub mod cluster;
pub mod config;
pub mod controller;
pub mod driver;
pub mod drivers;
pub mod grpc;
pub mod locks;
pub mod metrics;
pub mod node;
pub mod objects;
pub mod optin;
pub mod proxy;
pub mod schema;
pub mod secrets;
pub mod server;
pub mod upstream;
