//! What both ends of the link share: the secure channel, the session that survives a lost connection, ttrpc
//! frames, and the path MTU. No Kubernetes, no cloud SDK: this crate is in the VM's trusted base
//! and in the relay that faces hostile guests.

pub mod birth;
pub mod claim;
pub mod endpoint;
pub mod frame;
pub mod ids;
pub mod initdata;
pub mod path_mtu;
pub mod record;
pub mod session;
pub mod tls;
