//! Implements libvirtd's own protocol: XDR messages over one stream, any number of calls in flight, events in between.
//!
//! The provider does not use libvirt's C library, so there is no library to link or load, and no thread that waits in C
//! code. A deadline really ends a call, and a lost connection is noticed at once. The numbers and the order of fields
//! are those of libvirt's published `remote_protocol.x` and `virnetprotocol.x`, which never change, only grow.

pub(crate) mod calls;
pub(crate) mod connection;
pub mod link;
pub(crate) mod message;
pub(crate) mod xdr;

use std::time::Duration;

pub(crate) use connection::{DomainEvent, LibvirtConnection};
pub(crate) use link::Redialer;

/// Reason why a call failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RpcError {
    /// libvirt returned an error.
    #[error("{} (libvirt error {})", .0.text, .0.code)]
    Failed(message::LibvirtFailure),
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
    pub(crate) fn code(&self) -> Option<i32> {
        match self {
            RpcError::Failed(failure) => Some(failure.code),
            _ => None,
        }
    }

    /// Returns whether libvirt's error is that the object of the call does not exist.
    pub(crate) fn is_absent(&self) -> bool {
        self.code().is_some_and(|code| [code::NO_DOMAIN, code::NO_STORAGE_VOL].contains(&code))
    }
}

/// Returns `None` for an object that does not exist.
pub(crate) fn unless_absent<T>(found: Result<T, RpcError>) -> Result<Option<T>, RpcError> {
    match found {
        Err(error) if error.is_absent() => Ok(None),
        found => found.map(Some),
    }
}

/// libvirt's error numbers that the provider distinguishes (`virErrorNumber`).
pub(crate) mod code {
    pub(crate) const INTERNAL_ERROR: i32 = 1;
    pub(crate) const NO_MEMORY: i32 = 2;
    /// The driver does not have the call.
    pub(crate) const NO_SUPPORT: i32 = 3;
    /// An argument is wrong, or a flag is unknown.
    pub(crate) const INVALID_ARG: i32 = 8;
    pub(crate) const OPERATION_FAILED: i32 = 9;
    pub(crate) const OPERATION_DENIED: i32 = 29;
    pub(crate) const NO_DOMAIN: i32 = 42;
    pub(crate) const NO_NETWORK: i32 = 43;
    pub(crate) const AUTH_FAILED: i32 = 45;
    pub(crate) const NO_STORAGE_POOL: i32 = 49;
    pub(crate) const NO_STORAGE_VOL: i32 = 50;
    /// Not possible in the current state.
    pub(crate) const OPERATION_INVALID: i32 = 55;
    pub(crate) const OPERATION_TIMEOUT: i32 = 68;
    /// The metadata element does not exist.
    pub(crate) const NO_DOMAIN_METADATA: i32 = 80;
    pub(crate) const RESOURCE_BUSY: i32 = 87;
    pub(crate) const ACCESS_DENIED: i32 = 88;
    pub(crate) const STORAGE_VOL_EXIST: i32 = 90;
    pub(crate) const DEVICE_MISSING: i32 = 99;
}
