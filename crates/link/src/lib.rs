//! Code that both ends of the link share. This crate is part of the VM's trusted base and of the relay, which faces
//! hostile guests: it has no Kubernetes client and no cloud SDK.

pub mod base64_bytes;
pub mod claim;
pub mod endpoint;
pub mod frame;
pub mod ids;
pub mod initdata;
pub mod path_mtu;
pub mod record;
pub mod session;
pub mod tls;
pub mod user_data;
