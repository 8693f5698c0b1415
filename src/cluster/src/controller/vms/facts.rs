//! Reads a PeerPod's pod and node from the API server: one object at a time, and only as far as the decision needs.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use k8s_openapi::jiff::Timestamp;
use kube::{Api, ResourceExt};
use peerpod_kube::client::{self, within};
use peerpod_kube::crds::{PeerPod, Phase};
use peerpod_kube::{heartbeat, lease};

use super::decide::PeerPodFacts;
use crate::controller::Context;

/// How long past its own grace period a deleted pod may still be running.
pub(super) const LEAVING: Duration = Duration::from_secs(60);
/// How far the clocks of node and controller may differ before a live node counts as dead. (A mistake only costs the
/// node its turn: orphans are judged by the controller's clock alone.)
const SKEW: Duration = Duration::from_secs(60);

/// Returns the first pod among the owner references, at any position.
pub(super) fn owner_of(peerpod: &PeerPod) -> Option<&OwnerReference> {
    peerpod.owner_references().iter().find(|owner| owner.kind == "Pod" && owner.api_version == "v1")
}

pub(super) async fn gather(
    context: &Context,
    peerpod: &PeerPod,
    ours: bool,
) -> Result<PeerPodFacts, client::Error> {
    let now = Timestamp::now();
    let phase = peerpod.status.as_ref().and_then(|status| status.phase);
    let asked_for = peerpod.metadata.deletion_timestamp.as_ref().map_or(now, |at| at.0);
    let mut facts = PeerPodFacts {
        ours,
        since: age(asked_for, now),
        daemon_lives: false,
        node_exists: true,
        pod_lives: false,
        phase,
    };
    if !ours {
        return Ok(facts);
    }
    let node = peerpod.spec.node_name.as_deref();
    if let Some(node) = node {
        facts.daemon_lives = daemon_lives(context, node, now).await?;
    }
    if phase.is_some_and(Phase::is_stopped) {
        return Ok(facts);
    }
    let Some(owner) = owner_of(peerpod) else {
        facts.pod_lives = unsaid_pod_lives(peerpod, facts.daemon_lives);
        return Ok(facts);
    };
    if let Some(namespace) = peerpod.namespace() {
        let pods: Api<Pod> = Api::namespaced(context.client.clone(), &namespace);
        let found = within(format!("read pod {namespace}/{}", owner.name), pods.get_opt(&owner.name)).await?;
        facts.pod_lives = pod_lives(found.as_ref(), &owner.uid, now);
    }
    if let (Some(node), true, false) = (node, facts.pod_lives, facts.daemon_lives) {
        let nodes: Api<Node> = Api::all(context.client.clone());
        let found = within(format!("read node {node}"), nodes.get_metadata_opt(node)).await?;
        facts.node_exists = found.is_some();
    }
    Ok(facts)
}

async fn daemon_lives(context: &Context, node: &str, now: Timestamp) -> Result<bool, client::Error> {
    let name = heartbeat::name_of(node);
    let leases: Api<Lease> = Api::namespaced(context.client.clone(), &context.namespace);
    let found = within(format!("read lease {name}"), leases.get_opt(&name)).await?;
    Ok(found.is_some_and(|lease| is_fresh(&lease, now)))
}

fn is_fresh(found: &Lease, now: Timestamp) -> bool {
    since_renewal(found, now).is_some_and(|age| age < lease::lasts(found).unwrap_or_default() + SKEW)
}

/// Compares the clock of the Lease's owner with the controller's clock.
pub(super) fn since_renewal(found: &Lease, now: Timestamp) -> Option<Duration> {
    Some(age(found.spec.as_ref()?.renew_time.as_ref()?.0, now))
}

/// Zero for a time in the future.
fn age(at: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(at)).unwrap_or_default()
}

/// Whether an unknown pod lives, of which the PeerPod has no owner reference. A node writes the PeerPod even while it
/// cannot find the pod. A live node has the sandbox in its ledger, and has recorded no stop.
fn unsaid_pod_lives(peerpod: &PeerPod, daemon_lives: bool) -> bool {
    peerpod.spec.sandbox_id.is_some() && daemon_lives
}

/// Whether the pod of this uid lives, given the pod found under its name.
fn pod_lives(found: Option<&Pod>, uid: &str, now: Timestamp) -> bool {
    let Some(pod) = found.filter(|pod| pod.metadata.uid.as_deref() == Some(uid)) else { return false };
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    // A pod's deletionTimestamp is the moment at which its grace period ends.
    let over = pod.metadata.deletion_timestamp.as_ref().is_some_and(|at| age(at.0, now) > LEAVING);
    !matches!(phase, Some("Succeeded" | "Failed")) && !over
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::coordination::v1::LeaseSpec;
    use k8s_openapi::api::core::v1::PodStatus;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, Time};
    use peerpod_kube::crds::PeerPodSpec;

    use super::*;
    use crate::controller::vms::decide::{Decision, decide};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + second).unwrap()
    }

    fn pod(phase: &str, leaves: Option<i64>) -> Pod {
        let metadata = ObjectMeta {
            uid: Some("u".into()),
            deletion_timestamp: leaves.map(|second| Time(at(second))),
            ..ObjectMeta::default()
        };
        let status = PodStatus { phase: Some(phase.into()), ..PodStatus::default() };
        Pod { metadata, status: Some(status), ..Pod::default() }
    }

    #[test]
    fn a_pod_is_known_by_its_uid_and_lives_until_it_ended_or_its_time_is_over() {
        let lives = |pod: &Pod, uid| pod_lives(Some(pod), uid, at(0));
        assert!(!pod_lives(None, "u", at(0)));
        assert!(!lives(&pod("Running", None), "of the next one of this name"));
        for phase in ["Pending", "Running", "Unknown"] {
            assert!(lives(&pod(phase, None), "u"), "{phase}");
        }
        for phase in ["Succeeded", "Failed"] {
            assert!(!lives(&pod(phase, None), "u"), "{phase}");
        }
        assert!(lives(&pod("Running", Some(30)), "u"), "in its grace period");
        assert!(lives(&pod("Running", Some(-60)), "u"));
        assert!(!lives(&pod("Running", Some(-61)), "u"), "a kubelet that died does not keep it");
    }

    #[test]
    fn a_sandbox_without_owner_runs_until_its_daemon_ends_or_stops_it() {
        let spec = |sandbox: Option<&str>| PeerPodSpec {
            sandbox_id: sandbox.map(str::to_owned),
            ..PeerPodSpec::default()
        };
        let peerpod = |sandbox| PeerPod::new("p", spec(sandbox));
        assert_eq!(owner_of(&peerpod(Some("s"))), None);
        assert!(unsaid_pod_lives(&peerpod(Some("s")), true));
        assert!(!unsaid_pod_lives(&peerpod(Some("s")), false), "no process is left that could stop it");
        assert!(!unsaid_pod_lives(&peerpod(None), true), "of the replaced system");
        let facts = |phase| PeerPodFacts {
            ours: true,
            since: Duration::from_secs(3600),
            daemon_lives: true,
            node_exists: true,
            pod_lives: true,
            phase,
        };
        let first = Duration::from_secs(30);
        assert_eq!(decide(&facts(Some(Phase::Running)), first), Decision::PodLives);
        assert_eq!(decide(&facts(Some(Phase::Leaving)), first), Decision::Delete);
    }

    #[test]
    fn a_heartbeat_is_fresh_for_its_duration_and_the_clocks_error() {
        let lease = |renewed: Option<i64>| Lease {
            spec: Some(LeaseSpec {
                lease_duration_seconds: Some(40),
                renew_time: renewed.map(|second| MicroTime(at(second))),
                ..LeaseSpec::default()
            }),
            ..Lease::default()
        };
        assert!(is_fresh(&lease(Some(0)), at(99)));
        assert!(!is_fresh(&lease(Some(0)), at(100)));
        assert!(is_fresh(&lease(Some(1000)), at(0)), "a clock that is ahead");
        assert!(!is_fresh(&lease(None), at(0)));
    }
}
