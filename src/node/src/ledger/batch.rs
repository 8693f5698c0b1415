//! Defines the record of one batch (format version 1): everything that the call depends on, written before it, and
//! then the created VMs, before any member learns of them.

use peerpod_provider_api::{CreateRequest, IdempotencyKey, InstanceId};
use serde::{Deserialize, Serialize};

use crate::spec::SandboxId;
use crate::trust::Ticket;

/// Version of the batch file that this program writes. It reads all versions up to it.
pub(crate) const BATCH_VERSION: u32 = 1;

/// State of a batch that a restarted node needs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Batch {
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
    pub made: Option<Vec<InstanceId>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rest: Option<Rest>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Member {
    pub sandbox: SandboxId,
    pub attempt: u32,
}

/// Reason that a batch has fewer VMs than requested.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Rest {
    /// Whether each member without a VM may request one by itself; otherwise a person must act first.
    pub again: bool,
    pub text: String,
}
