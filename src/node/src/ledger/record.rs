//! The record of one sandbox: format version 1. Plain data.
//!
//! Fields may be added with `#[serde(default)]`; a changed meaning needs a new version and a reader for the old one.
//! A sample of every released version is kept in `src/node/tests/samples/`.

use std::{net::IpAddr, path::PathBuf};

use peerpod_provider_api::{CreateRequest, IdempotencyKey};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::{
    sandbox::phase::Phase,
    spec::{PodRef, SandboxId},
    trust::Ticket,
    volumes::PodVolumes,
};

/// The version this program writes. It reads all up to it.
pub const VERSION: u32 = 1;

/// A record has a few kilobytes and the pod's initdata, each byte of which JSON may write as six; a larger file is not
/// ours.
pub const MAX_FILE: u64 = 32 << 20;

/// All that a restarted node must know of a sandbox.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// The format's version.
    pub version: u32,
    /// The sandbox, as the shim calls it.
    pub id: SandboxId,
    /// The phase, with what is known in it.
    pub phase: Phase,
    /// Whose sandbox it is; `None` in a tombstone of an id we never knew.
    #[serde(default)]
    pub pod: Option<PodRef>,
    /// When CreateVM was accepted, ms since 1970.
    pub created_ms: u64,
    /// Whether StartVM ever came.
    #[serde(default)]
    pub started: bool,
    /// The pod's network namespace; `None` in a tombstone of an id we never knew.
    #[serde(default)]
    pub netns: Option<NetnsRef>,
    /// What the cloud is asked for, byte for byte the same at each retry; dropped when the sandbox runs.
    #[serde(default)]
    pub request: Option<CreateRequest>,
    /// Which attempt made its VM; part of the key by which the cloud knows it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub attempt: u32,
    /// The raw TOML of `cc_init_data`, for the guest; it travels over the link, never in user-data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initdata: Option<String>,
    /// GPUs of the VM, as the pod asked.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub gpus: u32,
    /// The pod's volumes; `None`: it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<PodVolumes>,
    /// What the VM shows in order to join.
    #[serde(default)]
    pub ticket: Option<Ticket>,
    /// Its number in the batch that its VM was made in. The ticket is the batch's then: many VMs have it, and whose a VM
    /// is shows by its address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seat: Option<u32>,
    /// The key that used the ticket.
    #[serde(default)]
    pub binding: Option<Binding>,
    /// Whom the guest trusts: what was in its user-data, or was told since (see `Trusted` of the effects).
    #[serde(default)]
    pub trust: Option<String>,
    /// The VM's addresses, as the cloud told them.
    #[serde(default)]
    pub addresses: Vec<IpAddr>,
    /// What was made for it in the pod's network namespace.
    #[serde(default)]
    pub network: Option<Network>,
    /// The guest session that was last personalised.
    #[serde(default)]
    pub session: Option<String>,
    /// Digest of the network plan that this session carried out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub told: Option<String>,
    /// Digest of the pull secrets that this session was given; none, or none known of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub told_secret: Option<String>,
    /// Why it was stopped or failed, in words.
    #[serde(default)]
    pub cause: Option<String>,
    /// Whether `cause` is a failure, which StartVM answers with.
    #[serde(default)]
    pub failed: bool,
    /// What was reached when.
    #[serde(default)]
    pub stages: Vec<Stage>,
    /// When it became a tombstone, ms since 1970.
    #[serde(default)]
    pub gone_ms: Option<u64>,
}

/// A network namespace by path and identity: a path may come to name another one, and after a reboot so may the inode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetnsRef {
    /// As CreateVM gave it.
    pub path: PathBuf,
    /// Device of the namespace file.
    pub dev: u64,
    /// Inode of the namespace file.
    pub inode: u64,
    /// The kernel's boot id.
    pub boot_id: String,
}

impl NetnsRef {
    /// What tells it from every other namespace of this boot.
    pub fn identity(&self) -> (u64, u64) {
        (self.dev, self.inode)
    }
}

/// What the tunnel made and saw. The sandbox only carries it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Network {
    /// Whether it was reserved for VMs that are reached over IPv6.
    pub v6: bool,
    /// The tunnel's own record.
    pub tunnel: Box<RawValue>,
}

/// The ticket's first and only user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binding {
    /// SHA-256 of the guest's public key (SubjectPublicKeyInfo), hex.
    pub key_sha256: String,
    /// SHA-256 of the leaf certificates issued for it that are still good, hex; the newest last.
    pub certificates_sha256: Vec<String>,
    /// The newest chain, DER in base64, leaf first: asked again, the same key gets the same.
    pub chain: Vec<String>,
    /// The public half of the guest's tunnel key, hex; none from guests that make none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tunnel_key: Option<String>,
    /// Where its connection came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<IpAddr>,
}

/// A stage of a sandbox's life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// Its name, also the metric's label.
    pub name: String,
    /// When it was reached, ms after CreateVM was accepted.
    pub at_ms: u64,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// The key of the call that makes the VMs of the batch with this ticket.
pub fn batch_key(cluster_id: &str, ticket: &str) -> IdempotencyKey {
    IdempotencyKey::derive(cluster_id, &format!("batch/{ticket}"), 0)
}

impl Record {
    /// A tombstone for an id that was stopped before we knew it.
    pub fn tombstone(id: SandboxId, now_ms: u64) -> Record {
        Record {
            version: VERSION,
            id,
            phase: Phase::Gone,
            pod: None,
            created_ms: now_ms,
            started: false,
            netns: None,
            request: None,
            attempt: 0,
            initdata: None,
            gpus: 0,
            volumes: None,
            ticket: None,
            seat: None,
            binding: None,
            trust: None,
            addresses: Vec::new(),
            network: None,
            session: None,
            told: None,
            told_secret: None,
            cause: Some("stopped before it was created".into()),
            failed: false,
            stages: Vec::new(),
            gone_ms: Some(now_ms),
        }
    }

    /// Drops all that a tombstone does not need.
    pub fn bury(&mut self, now_ms: u64) {
        *self = Record {
            pod: self.pod.take(),
            created_ms: self.created_ms,
            started: self.started,
            cause: self.cause.take(),
            failed: self.failed,
            stages: std::mem::take(&mut self.stages),
            ..Record::tombstone(self.id.clone(), now_ms)
        };
    }

    /// Notes that a stage was reached, once.
    pub fn reached(&mut self, name: &str, now_ms: u64) {
        if !self.stages.iter().any(|stage| stage.name == name) {
            self.stages.push(Stage { name: name.into(), at_ms: now_ms.saturating_sub(self.created_ms) });
        }
    }

    /// The key under which the cloud has its VM; as long as there is none, that of the first attempt.
    pub fn key(&self, cluster_id: &str) -> IdempotencyKey {
        match (&self.ticket, self.phase.vm()) {
            (Some(ticket), Some(_)) if self.seat.is_some() => batch_key(cluster_id, &ticket.id),
            (_, Some(_)) => IdempotencyKey::derive(cluster_id, self.id.as_str(), self.attempt),
            (_, None) => IdempotencyKey::derive(cluster_id, self.id.as_str(), 0),
        }
    }

    /// The pod for log lines: namespace/name.
    pub fn pod_name(&self) -> String {
        self.pod.as_ref().map_or_else(|| "-".to_owned(), PodRef::to_string)
    }

    /// When a stage was reached, ms after CreateVM.
    pub fn stage(&self, name: &str) -> Option<u64> {
        self.stages.iter().find(|stage| stage.name == name).map(|stage| stage.at_ms)
    }
}
