//! Defines the record of one sandbox: format version 1. Plain data.
//!
//! Fields may be added with `#[serde(default)]`; a changed meaning needs a new version and a reader for the old one.
//! A sample of every earlier version is kept in `src/node/tests/samples/`.

use std::net::IpAddr;
use std::path::PathBuf;

use peerpod_podnet::netns::NetnsId;
use peerpod_provider_api::{Chosen, CreateRequest, IdempotencyKey};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::sandbox::phase::Phase;
use crate::spec::{PodRef, SandboxId};
use crate::trust::Ticket;
use crate::volumes::PodVolumes;

/// Version that this program writes. It reads all versions up to it.
pub(crate) const VERSION: u32 = 1;

/// Size limit of a record file: a few kilobytes, and the pod's initdata, of which JSON may write a byte as six.
pub(crate) const MAX_FILE: u64 = 32 << 20;

/// State of a sandbox that a restarted node needs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// The format's version.
    pub version: u32,
    /// The sandbox's id, as the shim sends it.
    pub id: SandboxId,
    /// The phase, with its data.
    pub phase: Phase,
    /// The sandbox's pod; `None` in a tombstone of an id that was never created.
    pub pod: Option<PodRef>,
    /// When CreateVM was accepted, ms since 1970.
    pub created_ms: u64,
    /// Whether StartVM was ever called.
    #[serde(default)]
    pub started: bool,
    /// The pod's network namespace; `None` in a tombstone of an id that was never created.
    pub netns: Option<NetnsRef>,
    /// The VM that is requested.
    #[serde(flatten)]
    pub wanted: WantedVm,
    /// The pod's volumes; `None`: it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<PodVolumes>,
    /// The guest's proof of identity.
    #[serde(flatten)]
    pub enrolment: Enrolment,
    /// The VM's addresses, as the cloud reports them.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
    /// State that was made for it in the pod's network namespace.
    pub network: Option<Network>,
    /// The assignment that the guest received last.
    #[serde(flatten)]
    pub assigned: Assignment,
    /// The end, as far as it is known.
    #[serde(flatten)]
    pub end: RecordEnd,
    /// Times of its start, and the trace to which they belong.
    #[serde(flatten)]
    pub trace: StartTrace,
}

/// The VM that a sandbox requests.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct WantedVm {
    /// Request to the cloud, byte for byte the same at each retry; dropped when the sandbox runs.
    pub request: Option<CreateRequest>,
    /// Number of the attempt that made its VM; part of the key by which the cloud identifies it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub attempt: u32,
    /// The raw TOML of `cc_init_data`, for the guest; it is sent over the link, never in user-data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initdata: Option<String>,
    #[serde(default, skip_serializing_if = "is_zero")]
    pub gpus: u32,
    /// Choices of provider and cloud for the VM; `None`: no VM, or the answer to its create was lost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chosen: Option<Chosen>,
}

/// Data by which the node recognises the sandbox's guest.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Enrolment {
    pub ticket: Option<Ticket>,
    /// Member index in the batch that made its VM. The ticket is then the batch's, and the address identifies the VM.
    #[serde(default, rename = "seat", skip_serializing_if = "Option::is_none")]
    pub batch_member: Option<u32>,
    /// The key that used the ticket.
    pub binding: Option<Binding>,
    /// Id of the CAs that the guest trusts, from its user-data or received since (see `Trusted` of the ports).
    pub trust: Option<String>,
}

impl Enrolment {
    /// Returns the ticket of the batch, if a batch made the VM.
    pub(crate) fn shared_ticket(&self) -> Option<&Ticket> {
        self.ticket.as_ref().filter(|_| self.batch_member.is_some())
    }
}

/// The pod's assignment, as a guest last received it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Assignment {
    pub session: Option<String>,
    /// Digest of the network plan that this session applied.
    #[serde(default, rename = "told", skip_serializing_if = "Option::is_none")]
    pub plan: Option<String>,
    /// Digest of the pull secrets that this session received; `None`: none, or unknown.
    #[serde(default, rename = "told_secret", skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
}

/// Stop or failure of a sandbox, and its tombstone.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RecordEnd {
    /// Reason of the stop or failure, as text.
    pub cause: Option<String>,
    /// Whether `cause` is a failure, which StartVM returns.
    #[serde(default)]
    pub failed: bool,
    /// When it became a tombstone, ms since 1970.
    pub gone_ms: Option<u64>,
    /// Whether the guest is not asked to flush any more: it was, or its VM had ended before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub flush_over: bool,
}

/// A network namespace: a path may later name another one, and so may the inode after a reboot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetnsRef {
    /// The path that CreateVM sent.
    pub path: PathBuf,
    pub dev: u64,
    pub inode: u64,
    pub boot_id: String,
}

impl NetnsRef {
    /// Identity that separates it from every other namespace of this boot.
    pub(crate) fn identity(&self) -> NetnsId {
        NetnsId { dev: self.dev, inode: self.inode }
    }
}

/// State of the pod's tunnel. The sandbox only stores it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Network {
    /// Whether it was reserved for VMs that are reached over IPv6.
    pub v6: bool,
    pub tunnel: Box<RawValue>,
}

/// The ticket's first and only user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binding {
    /// SHA-256 of the guest's public key (SubjectPublicKeyInfo), hex.
    pub key_sha256: String,
    /// SHA-256 of the leaf certificates issued for it that are still valid, hex; the newest last.
    pub certificates_sha256: Vec<String>,
    /// The newest chain, DER in base64, leaf first: a repeated request with the same key gets the same chain.
    pub chain: Vec<String>,
    /// The public half of the guest's tunnel key, hex; `None` for guests that make none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tunnel_key: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<IpAddr>,
}

/// Times of a start, and the trace to which they belong.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StartTrace {
    /// Stages that were reached, with their times.
    #[serde(default)]
    pub stages: Vec<Stage>,
    /// W3C `traceparent` of CreateVM, if its caller records a trace.
    #[serde(default, rename = "traceparent", skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
}

/// Stage that a sandbox reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// Also the metric's label.
    pub name: String,
    /// Time at which it was reached, ms after CreateVM was accepted.
    pub at_ms: u64,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// Returns the key of the call that makes the VMs of the batch with this ticket.
pub(crate) fn batch_key(cluster_id: &str, ticket: &str) -> IdempotencyKey {
    IdempotencyKey::derive(cluster_id, &format!("batch/{ticket}"), 0)
}

impl Record {
    /// Makes a tombstone for an id that was stopped before it was created.
    pub(crate) fn tombstone(id: SandboxId, now_ms: u64) -> Record {
        Record {
            version: VERSION,
            id,
            phase: Phase::Gone,
            pod: None,
            created_ms: now_ms,
            started: false,
            netns: None,
            wanted: WantedVm::default(),
            volumes: None,
            enrolment: Enrolment::default(),
            addresses: Vec::new(),
            network: None,
            assigned: Assignment::default(),
            end: RecordEnd {
                cause: Some("stopped before it was created".into()),
                failed: false,
                gone_ms: Some(now_ms),
                flush_over: false,
            },
            trace: StartTrace::default(),
        }
    }

    /// Turns the record into a tombstone and drops all data that a tombstone does not need.
    pub(crate) fn write_tombstone(&mut self, now_ms: u64) {
        *self = Record {
            pod: self.pod.take(),
            created_ms: self.created_ms,
            started: self.started,
            end: RecordEnd { gone_ms: Some(now_ms), ..std::mem::take(&mut self.end) },
            trace: StartTrace { stages: std::mem::take(&mut self.trace.stages), parent: None },
            ..Record::tombstone(self.id.clone(), now_ms)
        };
    }

    /// Records that a stage was reached; the first time counts.
    pub(crate) fn reached(&mut self, name: &str, now_ms: u64) {
        if !self.trace.stages.iter().any(|stage| stage.name == name) {
            self.trace
                .stages
                .push(Stage { name: name.into(), at_ms: now_ms.saturating_sub(self.created_ms) });
        }
    }

    /// Returns the key under which the cloud has its VM; without a VM, the key of the first attempt.
    pub(crate) fn key(&self, cluster_id: &str) -> IdempotencyKey {
        match (self.phase.vm(), self.enrolment.shared_ticket()) {
            (Some(_), Some(ticket)) => batch_key(cluster_id, &ticket.id),
            (Some(_), None) => IdempotencyKey::derive(cluster_id, self.id.as_str(), self.wanted.attempt),
            (None, _) => IdempotencyKey::derive(cluster_id, self.id.as_str(), 0),
        }
    }

    /// Returns the choices for its VM, while it has one.
    pub(crate) fn offering(&self) -> Option<Chosen> {
        self.phase.vm().map(|_| self.wanted.chosen.clone().unwrap_or_default())
    }

    /// Returns the pod for log lines: namespace/name.
    pub(crate) fn pod_name(&self) -> String {
        self.pod.as_ref().map_or_else(|| "-".to_owned(), PodRef::to_string)
    }

    /// Returns all stages with their times, for a log line.
    pub(crate) fn stages_text(&self) -> String {
        let texts: Vec<String> =
            self.trace.stages.iter().map(|stage| format!("{}={}ms", stage.name, stage.at_ms)).collect();
        texts.join(" ")
    }

    /// Returns the time at which a stage was reached, ms after CreateVM.
    pub(crate) fn stage(&self, name: &str) -> Option<u64> {
        self.trace.stages.iter().find(|stage| stage.name == name).map(|stage| stage.at_ms)
    }
}
