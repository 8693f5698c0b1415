//! Decides the treatment of a PeerPod that is being deleted. Pure; the documentation of `controller::vms` has the
//! rules.

use std::time::Duration;

use peerpod_kube::crds::Phase;

/// Input of the decision, each fact as far as it is needed.
#[derive(Clone, Copy, Debug)]
pub(super) struct PeerPodFacts {
    /// Whether the PeerPod's provider is this controller's provider.
    pub(super) ours: bool,
    /// Time since the deletion was requested.
    pub(super) since: Duration,
    /// Whether its node is alive; `false` without a node.
    pub(super) daemon_lives: bool,
    /// Whether its Node object exists; `true` without a node, which proves nothing.
    pub(super) node_exists: bool,
    /// Whether the containers of its pod may be running; without a known pod, whether a live node has it in its ledger.
    pub(super) pod_lives: bool,
    /// Phase that its node wrote last.
    pub(super) phase: Option<Phase>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// The VM belongs to another provider.
    Foreign,
    /// The node may act first, for this time.
    NodeFirst(Duration),
    PodLives,
    Delete,
}

pub(super) fn decide(facts: &PeerPodFacts, node_first: Duration) -> Decision {
    if !facts.ours {
        return Decision::Foreign;
    }
    if facts.daemon_lives && facts.since < node_first {
        return Decision::NodeFirst(node_first - facts.since);
    }
    let node_lost = !facts.node_exists && !facts.daemon_lives;
    if facts.pod_lives && !facts.phase.is_some_and(Phase::is_stopped) && !node_lost {
        return Decision::PodLives;
    }
    Decision::Delete
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Duration = Duration::from_secs(30);
    const PHASES: [Option<Phase>; 8] = [
        None,
        Some(Phase::Created),
        Some(Phase::Booting),
        Some(Phase::Joining),
        Some(Phase::Running),
        Some(Phase::Leaving),
        Some(Phase::Gone),
        Some(Phase::Unwanted),
    ];

    fn all() -> impl Iterator<Item = PeerPodFacts> {
        let flags = (0..16_u8).map(|bits| [bits & 1 != 0, bits & 2 != 0, bits & 4 != 0, bits & 8 != 0]);
        let phases = flags.flat_map(|flags| PHASES.map(|phase| (flags, phase)));
        phases.flat_map(|([ours, daemon_lives, node_exists, pod_lives], phase)| {
            [0, 29, 30, 3600].map(|since| PeerPodFacts {
                ours,
                since: Duration::from_secs(since),
                daemon_lives,
                node_exists,
                pod_lives,
                phase,
            })
        })
    }

    #[test]
    fn a_vm_is_deleted_only_if_its_pod_does_not_run_and_its_node_had_its_turn() {
        for facts in all() {
            let may = facts.ours
                && (!facts.daemon_lives || facts.since >= FIRST)
                && (!facts.pod_lives
                    || facts.phase.is_some_and(Phase::is_stopped)
                    || !facts.node_exists && !facts.daemon_lives);
            assert_eq!(decide(&facts, FIRST) == Decision::Delete, may, "{facts:?}");
        }
    }

    #[test]
    fn only_a_running_pod_or_another_provider_causes_an_endless_wait() {
        for facts in all().filter(|facts| facts.ours && !facts.pod_lives) {
            let later = PeerPodFacts { since: Duration::from_secs(3600), ..facts };
            assert_eq!(decide(&later, FIRST), Decision::Delete, "{facts:?}");
        }
    }
}
