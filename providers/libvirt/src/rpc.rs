//! libvirtd's own protocol: XDR messages over one stream, any number of calls under way, events in between.
//!
//! Spoken here instead of through libvirt's C library: nothing to link or load, no thread that waits in C code, a
//! deadline that truly ends a call, and a lost connection is seen at once. The numbers and the order of fields are
//! those of libvirt's published `remote_protocol.x` and `virnetprotocol.x`, which never change, only grow.

pub mod calls;
pub mod connection;
pub mod link;
pub mod message;
pub mod xdr;

use std::time::Duration;

pub use connection::{Connection, Event};
pub use link::Link;

/// Why a call has no answer, or not a good one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RpcError {
    /// libvirt says no.
    #[error("{} (libvirt error {})", .0.text, .0.code)]
    Failed(message::Failure),
    /// There is no connection, or there is none any more.
    #[error("{0}")]
    Lost(String),
    /// We may not connect.
    #[error("{0}")]
    Refused(String),
    /// No answer in time.
    #[error("libvirtd gave no answer within {0:?}")]
    Late(Duration),
    /// An answer that is none.
    #[error("libvirtd's answer cannot be read: {0}")]
    Garbled(#[from] xdr::Garbled),
}

impl RpcError {
    /// libvirt's error number, if libvirt said no.
    pub fn code(&self) -> Option<i32> {
        match self {
            RpcError::Failed(failure) => Some(failure.code),
            _ => None,
        }
    }

    /// Whether libvirt says that what the call is about does not exist.
    pub fn is_absent(&self) -> bool {
        self.code().is_some_and(|code| [code::NO_DOMAIN, code::NO_STORAGE_VOL].contains(&code))
    }
}

/// libvirt's error numbers that we tell apart (`virErrorNumber`).
pub mod code {
    /// Something inside libvirt or QEMU failed.
    pub const INTERNAL_ERROR: i32 = 1;
    /// Out of memory.
    pub const NO_MEMORY: i32 = 2;
    /// This driver does not have the call.
    pub const NO_SUPPORT: i32 = 3;
    /// An argument is wrong, or a flag is unknown.
    pub const INVALID_ARG: i32 = 8;
    /// The hypervisor refused.
    pub const OPERATION_FAILED: i32 = 9;
    /// The XML makes no sense.
    pub const XML_ERROR: i32 = 27;
    /// Not allowed on this connection.
    pub const OPERATION_DENIED: i32 = 29;
    /// A system call failed.
    pub const SYSTEM_ERROR: i32 = 38;
    /// There is no such domain.
    pub const NO_DOMAIN: i32 = 42;
    /// There is no such network.
    pub const NO_NETWORK: i32 = 43;
    /// Authentication failed.
    pub const AUTH_FAILED: i32 = 45;
    /// There is no such pool.
    pub const NO_STORAGE_POOL: i32 = 49;
    /// There is no such volume.
    pub const NO_STORAGE_VOL: i32 = 50;
    /// Not in this state of things.
    pub const OPERATION_INVALID: i32 = 55;
    /// This hypervisor cannot do that.
    pub const CONFIG_UNSUPPORTED: i32 = 67;
    /// Something took too long.
    pub const OPERATION_TIMEOUT: i32 = 68;
    /// Our metadata is not there.
    pub const NO_DOMAIN_METADATA: i32 = 80;
    /// Used by somebody else.
    pub const RESOURCE_BUSY: i32 = 87;
    /// A policy forbids it.
    pub const ACCESS_DENIED: i32 = 88;
    /// There is such a volume already.
    pub const STORAGE_VOL_EXIST: i32 = 90;
    /// The device is not there.
    pub const DEVICE_MISSING: i32 = 99;
}
