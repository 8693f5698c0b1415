//! Defines the errors of calls about a sandbox. `rpc` maps them to ttrpc statuses, in one place.

use std::time::Duration;

use peerpod_common::blocking::Interrupted;

use crate::spec::SandboxId;

/// Reason why a call about a sandbox failed, for the pod's author: first the failure, then its cause and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    #[error("sandbox {0} is unknown to this node: CreateVM was never called for it, or long ago")]
    Unknown(SandboxId),
    #[error("sandbox {id} was stopped: {cause}")]
    Stopped { id: SandboxId, cause: String },
    /// The sandbox could not be started; it is being removed.
    #[error("sandbox {id} could not be started: {cause}")]
    Failed { id: SandboxId, cause: String },
    /// The start takes longer than a caller may wait. It goes on.
    #[error("sandbox {id} is still {phase} after {waited:?}: the start goes on; call StartVM again")]
    Late { id: SandboxId, phase: &'static str, waited: Duration },
    #[error("network namespace of sandbox {id}: {why}")]
    Netns { id: SandboxId, why: String },
    #[error("network namespace {path} belongs to sandbox {other}; each sandbox needs one of its own")]
    NetnsTaken { path: String, other: SandboxId },
    #[error(
        "volume {volume} has one writer at a time, and sandbox {other} of this node holds it (or is \
         releasing it); the pod starts when that sandbox is gone"
    )]
    VolumeTaken { volume: String, other: SandboxId },
    #[error("{0}")]
    Invalid(String),
    #[error("this node runs {0} sandboxes already, which is its limit")]
    Full(usize),
    /// The intent could not be made durable, so nothing was begun. A full disk may pass.
    #[error("{text}")]
    Disk { text: String, full: bool },
    #[error("claim refused: {0}")]
    Claim(ClaimRefused),
    #[error("the node is still making the VM of {0}")]
    NoVmYet(String),
    #[error("pod {0} has no live sandbox on this node")]
    NoSuchPod(String),
    /// A component of the node is broken or closing; a retry may work.
    #[error("{0}")]
    Unavailable(String),
}

impl From<Interrupted> for Error {
    fn from(interrupted: Interrupted) -> Error {
        Error::Unavailable(interrupted.to_string())
    }
}

/// Reason why a guest gets no certificate. The first three have the same text, so that a guest cannot distinguish them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ClaimRefused {
    #[error("unknown ticket")]
    UnknownTicket,
    #[error("unknown ticket")]
    WrongSecret,
    #[error("unknown ticket")]
    NotWanted,
    /// The ticket belongs to a batch, and no single member's VM is known to have the guest's source address yet.
    #[error("the owner of the VM at this address is not known (yet)")]
    NotYet,
    /// Another key used the ticket: the user-data leaked, or the VM lost its memory.
    #[error("another key has used the ticket")]
    OtherKey,
    #[error("the ticket does not belong to the sandbox of the dialled VM")]
    OtherVm,
    #[error(
        "the ticket has expired, because the VM took too long to join; see why it boots slowly, and delete the pod"
    )]
    Expired,
    /// The CSR is malformed, or not signed by its own key.
    #[error("the certificate request cannot be used")]
    BadRequest,
}

impl ClaimRefused {
    /// Returns the label of the metric, one word.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            ClaimRefused::UnknownTicket => "unknown_ticket",
            ClaimRefused::WrongSecret => "wrong_secret",
            ClaimRefused::NotWanted => "not_wanted",
            ClaimRefused::NotYet => "address",
            ClaimRefused::OtherKey => "other_key",
            ClaimRefused::OtherVm => "other_vm",
            ClaimRefused::Expired => "expired",
            ClaimRefused::BadRequest => "bad_request",
        }
    }
}

impl From<crate::ledger::Error> for Error {
    fn from(error: crate::ledger::Error) -> Error {
        Error::Disk { full: error.is_full(), text: error.to_string() }
    }
}

/// Certificate that a guest gets for its ticket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Granted {
    pub id: SandboxId,
    /// Chain in DER, leaf first.
    pub chain: Vec<Vec<u8>>,
}
