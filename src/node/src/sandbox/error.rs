//! What a call about a sandbox can end with. The door maps these to ttrpc's statuses, in one place.

use std::time::Duration;

use crate::spec::SandboxId;

/// Why a call about a sandbox failed. The text reaches the person who made the pod: first what, then why and what to
/// do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Nobody ever created it.
    #[error("sandbox {0} is unknown to this node: CreateVM was never called for it, or long ago")]
    Unknown(SandboxId),
    /// It was stopped.
    #[error("sandbox {id} is not wanted any more: {cause}")]
    Stopped {
        /// Which.
        id: SandboxId,
        /// By whom or what.
        cause: String,
    },
    /// It could not be brought up; it is being taken away.
    #[error("sandbox {id} could not be started: {cause}")]
    Failed {
        /// Which.
        id: SandboxId,
        /// What went wrong, where.
        cause: String,
    },
    /// It takes longer than a caller may wait. It goes on.
    #[error("sandbox {id} is still {phase} after {waited:?}: {why}")]
    Late {
        /// Which.
        id: SandboxId,
        /// Where it stands.
        phase: &'static str,
        /// How long this call waited.
        waited: Duration,
        /// What is being waited for.
        why: String,
    },
    /// The network namespace cannot be used.
    #[error("network namespace of sandbox {id}: {why}")]
    Netns {
        /// Which.
        id: SandboxId,
        /// Why not.
        why: String,
    },
    /// Another sandbox lives in that network namespace.
    #[error("network namespace {path} belongs to sandbox {other}; each sandbox needs one of its own")]
    NetnsTaken {
        /// As CreateVM gave it.
        path: String,
        /// Whose it is.
        other: SandboxId,
    },
    /// Another sandbox's VM has a volume that only one may have.
    #[error(
        "volume {volume} has one writer at a time, and sandbox {other} of this node has it (or is giving it back); the pod \
         starts when that one is gone"
    )]
    VolumeTaken {
        /// Name and id.
        volume: String,
        /// Whose it is.
        other: SandboxId,
    },
    /// The request itself is wrong.
    #[error("{0}")]
    Invalid(String),
    /// The node has as many sandboxes as it may.
    #[error("this node runs {limit} sandboxes already, which is its limit (node.max-sandboxes)")]
    Full {
        /// The limit.
        limit: usize,
    },
    /// The intent could not be made durable, so nothing was begun.
    #[error("{text}")]
    Disk {
        /// Names the file and what would help.
        text: String,
        /// The disk is full, which may pass.
        full: bool,
    },
    /// A guest's claim was refused.
    #[error("claim refused: {0}")]
    Claim(ClaimRefused),
    /// The pod's VM is not known yet.
    #[error("the VM of {pod} is still being made")]
    NoVmYet {
        /// namespace/name.
        pod: String,
    },
    /// No sandbox of that pod is alive here.
    #[error("no sandbox of pod {pod} is alive on this node")]
    NoSuchPod {
        /// namespace/name.
        pod: String,
    },
    /// Something of ours is broken or closing; another try may work.
    #[error("{0}")]
    Unavailable(String),
}

/// Why a guest does not get a certificate. The guest hears no more than "refused" of the first three.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClaimRefused {
    /// No sandbox has that ticket.
    #[error("unknown ticket")]
    UnknownTicket,
    /// The ticket's secret is another one.
    #[error("unknown ticket")]
    WrongSecret,
    /// The sandbox is on its way out.
    #[error("unknown ticket")]
    NotWanted,
    /// The ticket is a batch's, and no one member's VM is known to have the address that the guest comes from. It may be
    /// soon.
    #[error("whose VM comes from this address is not known (yet)")]
    NotYet,
    /// The ticket was used by another key: somebody read the user-data, or the VM lost its memory.
    #[error("the ticket was used by another key")]
    OtherKey,
    /// It was shown where another sandbox's VM was dialled.
    #[error("the ticket is not that of the sandbox whose VM was dialled")]
    OtherVm,
    /// It came too late.
    #[error("the ticket has expired")]
    Expired,
    /// The CSR is not one, or is not signed by its own key.
    #[error("the certificate request cannot be used")]
    BadRequest,
}

impl ClaimRefused {
    /// One word for the metric.
    pub fn reason(self) -> &'static str {
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

/// What a guest gets for its ticket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Granted {
    /// The sandbox it is the guest of.
    pub id: SandboxId,
    /// DER, leaf first.
    pub chain: Vec<Vec<u8>>,
}
