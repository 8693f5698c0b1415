//! Small parts that the programs of the node and of the VM share. Knows no pod and no protocol.

pub mod files;
pub mod reactor;
pub mod tun;
