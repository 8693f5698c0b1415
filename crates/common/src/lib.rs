//! Small parts that the programs of the node and of the VM share. Knows no pod and no protocol.

pub mod accept;
pub mod backoff;
pub mod blocking;
pub mod files;
pub mod keyed_locks;
pub mod reactor;
pub mod tun;
