//! The record of one batch: several VMs asked for by one call. Format version 1. Plain data.
//!
//! It is written before the call and is all that the call depends on: who is in it, what is asked for, the ticket that
//! all its VMs show. What the cloud made is written before anybody hears of it. It goes when no member needs it.

use peerpod_provider_api::{CreateRequest, IdempotencyKey, InstanceId};
use serde::{Deserialize, Serialize};

use crate::{spec::SandboxId, trust::Ticket};

/// The version of a batch's file that this program writes. It reads all up to it.
pub const BATCH_VERSION: u32 = 1;

/// All that a restarted node must know of a batch.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Batch {
    /// The format's version.
    pub version: u32,
    /// Of the call; each of its VMs carries it.
    pub key: IdempotencyKey,
    /// What the cloud is asked for, byte for byte the same at each retry.
    pub request: CreateRequest,
    /// What each of its VMs shows in order to join. Its id is the batch's.
    pub ticket: Ticket,
    /// Whom its guests trust (see `Trusted` of the effects): what is in the user-data.
    pub trust: String,
    /// Who gets a VM; the place in the list is the number of the seat. As many are asked for.
    pub members: Vec<Member>,
    /// What was made, in the order of the seats. `None`: the cloud was perhaps not asked yet, or has not answered.
    #[serde(default)]
    pub made: Option<Vec<InstanceId>>,
    /// Why there are fewer than members.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rest: Option<Rest>,
}

/// One that a VM of the batch is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Which sandbox.
    pub sandbox: SandboxId,
    /// Which of its attempts.
    pub attempt: u32,
}

/// Why a batch has fewer VMs than were asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rest {
    /// Each that got none may ask by itself; otherwise a person must act first.
    pub again: bool,
    /// For people.
    pub text: String,
}
