//! Small parts that the programs of the node and of the VM share. Knows no pod and no protocol.

pub mod accept;
pub mod backoff;
pub mod blocking;
pub mod caller_limits;
pub mod crowd;
pub mod fd_passing;
pub mod files;
pub mod id;
pub mod keyed_locks;
pub mod limit;
pub mod reactor;
pub mod tun;
pub mod unix_socket;
