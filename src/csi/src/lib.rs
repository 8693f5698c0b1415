//! Implements `peerpod-csi`, a proxy between Kubernetes (kubelet, the CSI sidecars) and an unmodified CSI driver. Calls
//! pass unchanged, except a few for volumes of peer pods, because their disk goes to the pod's VM and not to this node.
//!
//! `proxy` forwards calls between `server` (the proxy's socket) and `upstream` (the driver's socket). `node` and
//! `controller` handle the intercepted calls. `drivers` holds all knowledge of drivers by name. May touch: the two
//! sockets, the targets that kubelet names, loop devices, the records' folder, the API server. It does not create VMs
//! or connect to them.

pub mod app;
mod body;
mod capability;
mod cluster;
pub mod config;
mod controller;
mod drivers;
mod grpc;
mod metrics;
mod node;
mod objects;
mod optin;
mod proxy;
mod secrets;
mod server;
mod upstream;
