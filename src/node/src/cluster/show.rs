//! Derives the Kubernetes view of a sandbox: a pure function of its record.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use peerpod_kube::crds::{self, PeerPod, PeerPodSpec, PeerPodStatus};
use peerpod_provider_api::InstanceId;

use crate::ledger::Record;
use crate::sandbox::phase::Phase;
use crate::spec::SandboxId;

/// Limits of the resource.
const MOST_ADDRESSES: usize = 16;
const MOST_STAGES: usize = 32;
/// Length limit of a condition's message.
const MOST_TEXT: usize = 1024;

/// Facts that all PeerPods of a node share.
#[derive(Clone, Debug)]
pub(crate) struct About {
    pub provider: String,
    pub node: String,
    /// Part of every idempotency key.
    pub cluster_id: String,
}

/// Desired PeerPod of one sandbox.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DesiredPeerPod {
    pub sandbox: SandboxId,
    pub namespace: String,
    /// Name and UID of the pod.
    pub pod: String,
    pub uid: Option<String>,
    pub name: String,
    pub is_live: bool,
    /// Whether nothing of the sandbox is left; then there is nothing to show.
    pub is_gone: bool,
    pub spec: PeerPodSpec,
    pub status: PeerPodStatus,
}

impl DesiredPeerPod {
    /// Derives the view of this record; `None`: the record names no pod.
    pub(crate) fn of(record: &Record, about: &About, now_ms: u64) -> Option<DesiredPeerPod> {
        let pod = record.pod.as_ref()?;
        let vm = record.phase.vm();
        let spec = PeerPodSpec {
            cloud_provider: Some(about.provider.clone()),
            instance_id: vm.map(|vm| vm.as_str().to_owned()),
            sandbox_id: Some(record.id.to_string()),
            node_name: Some(about.node.clone()),
            idempotency_key: Some(record.key(&about.cluster_id).as_str().to_owned()),
        };
        let addresses = record.addresses.iter().take(MOST_ADDRESSES).map(ToString::to_string).collect();
        let chosen = record.offering().unwrap_or_default();
        let status = PeerPodStatus {
            cleaned: None,
            instance_type: shown_text(chosen.instance_type),
            zone: shown_text(chosen.zone),
            market: chosen.market.map(|market| market.word().to_owned()),
            image: shown_text(chosen.image),
            phase: Some(phase(record)),
            addresses,
            stages: stages(record),
            conditions: vec![created(record, vm, now_ms), ready(record, now_ms)],
            observed_generation: None,
        };
        Some(DesiredPeerPod {
            sandbox: record.id.clone(),
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            uid: pod.uid.clone(),
            name: PeerPod::name_of(&pod.name, record.id.as_str()),
            is_live: record.phase.is_live(),
            is_gone: record.phase == Phase::Gone,
            spec,
            status,
        })
    }
}

/// Shortens a provider's text to the limit of the resource; an empty text is none.
fn shown_text(text: Option<String>) -> Option<String> {
    text.map(|text| text.chars().take(MOST_TEXT).collect()).filter(|text: &String| !text.is_empty())
}

fn phase(record: &Record) -> crds::Phase {
    match record.phase {
        Phase::Created | Phase::Booting { .. } => crds::Phase::Created,
        Phase::Joining { .. } if record.enrolment.binding.is_none() => crds::Phase::Booting,
        Phase::Joining { .. } => crds::Phase::Joining,
        Phase::Running { .. } => crds::Phase::Running,
        Phase::Unwanted { .. } => crds::Phase::Unwanted,
        Phase::Leaving { .. } => crds::Phase::Leaving,
        Phase::Gone => crds::Phase::Gone,
    }
}

fn stages(record: &Record) -> Vec<crds::Stage> {
    let mut before = 0;
    let mut stages = Vec::new();
    for stage in record.trace.stages.iter().take(MOST_STAGES) {
        let took = stage.at_ms.saturating_sub(before);
        before = stage.at_ms;
        stages.push(crds::Stage {
            name: stage.name.clone(),
            at: time(record.created_ms.saturating_add(stage.at_ms)),
            took_milliseconds: i64::try_from(took).unwrap_or(i64::MAX),
        });
    }
    stages
}

fn created(record: &Record, vm: Option<&InstanceId>, now_ms: u64) -> Condition {
    let made = record.stage("vm_made").map(|at_ms| record.created_ms.saturating_add(at_ms));
    match vm {
        Some(vm) => condition("Created", true, "Made", format!("VM {vm}"), made.unwrap_or(now_ms)),
        None if record.end.failed => condition("Created", false, "Failed", cause(record), now_ms),
        None => {
            let text = "the node has requested a VM from the provider".into();
            condition("Created", false, "Asked", text, record.created_ms)
        }
    }
}

fn ready(record: &Record, now_ms: u64) -> Condition {
    let running = record.stage("running").map(|at_ms| record.created_ms.saturating_add(at_ms));
    match record.phase {
        Phase::Running { .. } => {
            condition("Ready", true, "Running", "the VM's agent answers".into(), running.unwrap_or(now_ms))
        }
        _ if record.end.failed => condition("Ready", false, "Failed", cause(record), now_ms),
        _ if record.phase.is_live() => {
            let text = "the VM's agent does not answer yet".into();
            condition("Ready", false, "Starting", text, record.created_ms)
        }
        _ => condition("Ready", false, "Stopped", cause(record), now_ms),
    }
}

fn cause(record: &Record) -> String {
    let text = record.end.cause.as_deref().unwrap_or("the sandbox was stopped");
    text.chars().take(MOST_TEXT).collect()
}

fn condition(kind: &str, status: bool, reason: &str, message: String, at_ms: u64) -> Condition {
    Condition {
        type_: kind.to_owned(),
        status: if status { "True" } else { "False" }.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: time(at_ms),
        observed_generation: None,
    }
}

fn time(ms: u64) -> Time {
    let at = i64::try_from(ms).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok());
    Time(at.unwrap_or_default())
}

#[cfg(test)]
mod tests;
