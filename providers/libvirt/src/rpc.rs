//! Implements libvirtd's own protocol: XDR messages over one stream, any number of calls in flight, events in between.
//!
//! The provider does not use libvirt's C library, so there is no library to link or load, and no thread that waits in C
//! code. A deadline really ends a call, and a lost connection is noticed at once. The numbers and the order of fields
//! are those of libvirt's published `remote_protocol.x` and `virnetprotocol.x`, which never change, only grow.

pub mod calls;
pub mod connection;
pub mod link;
pub mod message;
pub mod xdr;

use std::time::Duration;

pub use connection::{Connection, DomainEvent};
pub use link::Redialer;

/// Reason why a call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RpcError {
    /// libvirt returned an error.
    #[error("{} (libvirt error {})", .0.text, .0.code)]
    Failed(message::Failure),
    /// There is no connection, or it was lost.
    #[error("{0}")]
    Lost(String),
    /// libvirtd does not permit the connection.
    #[error("{0}")]
    Refused(String),
    /// No answer in time.
    #[error("libvirtd gave no answer within {0:?}")]
    Late(Duration),
    /// The answer cannot be parsed.
    #[error("libvirtd's answer cannot be read: {0}")]
    Garbled(#[from] xdr::Garbled),
}

impl RpcError {
    /// Returns libvirt's error number, if libvirt returned an error.
    pub fn code(&self) -> Option<i32> {
        match self {
            RpcError::Failed(failure) => Some(failure.code),
            _ => None,
        }
    }

    /// Returns whether libvirt's error is that the object of the call does not exist.
    pub fn is_absent(&self) -> bool {
        self.code().is_some_and(|code| [code::NO_DOMAIN, code::NO_STORAGE_VOL].contains(&code))
    }
}

/// libvirt's error numbers that the provider distinguishes (`virErrorNumber`).
pub mod code {
    /// Something inside libvirt or QEMU failed.
    pub const INTERNAL_ERROR: i32 = 1;
    /// Out of memory.
    pub const NO_MEMORY: i32 = 2;
    /// The driver does not have the call.
    pub const NO_SUPPORT: i32 = 3;
    /// An argument is wrong, or a flag is unknown.
    pub const INVALID_ARG: i32 = 8;
    /// The hypervisor refused.
    pub const OPERATION_FAILED: i32 = 9;
    /// Not allowed on this connection.
    pub const OPERATION_DENIED: i32 = 29;
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
    /// Not possible in the current state.
    pub const OPERATION_INVALID: i32 = 55;
    /// An operation took too long.
    pub const OPERATION_TIMEOUT: i32 = 68;
    /// The metadata element does not exist.
    pub const NO_DOMAIN_METADATA: i32 = 80;
    /// Another user holds the resource.
    pub const RESOURCE_BUSY: i32 = 87;
    /// A policy forbids it.
    pub const ACCESS_DENIED: i32 = 88;
    /// The volume already exists.
    pub const STORAGE_VOL_EXIST: i32 = 90;
    /// The device is not there.
    pub const DEVICE_MISSING: i32 = 99;
}
