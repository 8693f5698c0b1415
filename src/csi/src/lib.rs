//! Implements `peerpod-csi`, a proxy between Kubernetes (kubelet, the CSI sidecars) and an unmodified CSI driver. Every
//! call passes unchanged. Only a few calls for volumes of peer pods are answered differently, because their disk goes
//! to the pod's VM and not to this node.
//!
//! `proxy` forwards calls between `server` (the proxy's socket) and `upstream` (the driver's socket). `node` and
//! `controller` handle the intercepted calls. `drivers` holds all knowledge of drivers by name. May touch: the two
//! sockets, the targets that kubelet names, loop devices, the records' folder, the API server. It does not create VMs
//! or connect to them.

pub mod app;
pub mod body;
pub mod capability;
pub mod cluster;
pub mod config;
pub mod controller;
pub mod driver;
pub mod drivers;
pub mod grpc;
pub mod metrics;
pub mod node;
pub mod objects;
pub mod optin;
pub mod proxy;
pub mod schema;
pub mod secrets;
pub mod server;
pub mod upstream;
