//! Defines the record of one batch: several VMs that one call requests. Format version 1. Plain data.
//!
//! The file is written before the call and holds everything that the call depends on: the members, the request, and the
//! ticket that all VMs show. The created VMs are recorded before any member learns of them. The file is removed when no
//! member needs it.

use peerpod_provider_api::{CreateRequest, IdempotencyKey, InstanceId};
use serde::{Deserialize, Serialize};

use crate::spec::SandboxId;
use crate::trust::Ticket;

/// Version of the batch file that this program writes. It reads all versions up to it.
pub const BATCH_VERSION: u32 = 1;

/// State of a batch that a restarted node needs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Batch {
    /// The format's version.
    pub version: u32,
    /// Idempotency key of the call; each of its VMs carries it.
    pub key: IdempotencyKey,
    /// Request to the cloud, byte for byte the same at each retry.
    pub request: CreateRequest,
    /// Ticket that each VM shows in order to join. Its id is the batch's id.
    pub ticket: Ticket,
    /// Id of the CAs in the user-data, which the guests trust (see `Trusted` of the ports).
    pub trust: String,
    /// Sandboxes that get a VM; the position in the list is the member index. The call requests as many VMs.
    pub members: Vec<Member>,
    /// Created VMs, by member index. `None`: the cloud may not have been called yet, or has not answered.
    #[serde(default)]
    pub made: Option<Vec<InstanceId>>,
    /// Reason that there are fewer VMs than members.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rest: Option<Rest>,
}

/// Sandbox that gets a VM of the batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The sandbox.
    pub sandbox: SandboxId,
    /// Number of the sandbox's attempt.
    pub attempt: u32,
}

/// Reason that a batch has fewer VMs than requested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rest {
    /// Whether each member without a VM may request one by itself; otherwise a person must act first.
    pub again: bool,
    /// Explanation for people.
    pub text: String,
}
