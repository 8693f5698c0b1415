//! Computes the status of a PeerPodConfig: one condition, `Ready`, with the first missing prerequisite. Pure.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use peerpod_kube::crds::{PeerPodConfig, PeerPodConfigStatus};

/// Progress of one DaemonSet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Progress {
    /// Nodes that the DaemonSet selects.
    pub(super) wanted: i32,
    /// Nodes with a ready pod of the DaemonSet.
    pub(super) ready: i32,
    /// Nodes that run the newest version.
    pub(super) updated: i32,
    /// Whether the DaemonSet controller has seen the last applied version.
    pub(super) seen: bool,
}

/// Whether everything is ready, a reason in one word, and a sentence.
pub(super) type Verdict = (bool, &'static str, String);

/// Judges the applied DaemonSets. `webhook` is the reason why no pod is admitted, if so.
pub(super) fn verdict(node: Progress, relay: Progress, webhook: Option<String>) -> Verdict {
    if !node.seen || !relay.seen {
        return (false, "Progressing", "the DaemonSets have just been applied".to_owned());
    }
    if node.wanted == 0 {
        return (
            false,
            "NoNodes",
            "no node has the labels of nodeSelector; label one, or change it".to_owned(),
        );
    }
    let wanted = node.wanted;
    if relay.ready < relay.wanted || node.ready < wanted {
        let text = format!(
            "of {wanted} nodes peerpod-node is ready on {}, peerpod-relay on {}; their pods' logs name the \
             cause",
            node.ready, relay.ready
        );
        return (false, "NodesNotReady", text);
    }
    if let Some(why) = webhook {
        return (false, "WebhookNotReady", why);
    }
    // The relay's version does not count: an old relay serves until its handover.
    if node.updated < wanted {
        let text = format!("peerpod-node is up to date on {} of {wanted} nodes", node.updated);
        return (true, "Updating", text);
    }
    (true, "Serving", format!("peer pods can run on {wanted} nodes"))
}

/// Returns the status to be written. A condition that does not change keeps its time.
pub(super) fn status(
    config: &PeerPodConfig,
    (ready, reason, message): Verdict,
    now: Timestamp,
) -> PeerPodConfigStatus {
    let said = if ready { "True" } else { "False" };
    let mut before = config.status.iter().flat_map(|status| &status.conditions);
    let old = before.find(|condition| condition.type_ == "Ready" && condition.status == said);
    let since = old.map_or(Time(now), |condition| condition.last_transition_time.clone());
    let generation = config.metadata.generation;
    let condition = Condition {
        type_: "Ready".to_owned(),
        status: said.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: since,
        observed_generation: generation,
    };
    PeerPodConfigStatus {
        setup_completed: Some(ready),
        conditions: vec![condition],
        observed_generation: generation,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(wanted: i32, ready: i32, updated: i32) -> Progress {
        Progress { wanted, ready, updated, seen: true }
    }

    fn applied(node: Progress, relay: Progress, webhook: Option<&str>) -> Verdict {
        verdict(node, relay, webhook.map(str::to_owned))
    }

    #[test]
    fn the_first_missing_object_is_named() {
        let unseen = Progress { seen: false, ..progress(3, 3, 3) };
        let good = progress(3, 3, 3);
        for (verdict, ready, reason) in [
            (applied(unseen, good, None), false, "Progressing"),
            (applied(progress(0, 0, 0), progress(0, 0, 0), None), false, "NoNodes"),
            (applied(progress(3, 2, 3), good, None), false, "NodesNotReady"),
            (applied(good, progress(3, 2, 3), None), false, "NodesNotReady"),
            (applied(good, good, Some("w")), false, "WebhookNotReady"),
            (applied(progress(3, 3, 1), good, None), true, "Updating"),
            (applied(good, progress(3, 3, 0), None), true, "Serving"),
            (applied(good, good, None), true, "Serving"),
        ] {
            let (is, why, text) = verdict;
            assert_eq!((is, why), (ready, reason));
            assert!(!text.is_empty());
        }
        let (.., text) = applied(progress(3, 2, 3), progress(3, 1, 3), None);
        assert!(text.contains("peerpod-node is ready on 2, peerpod-relay on 1"), "{text}");
    }

    #[test]
    fn a_condition_that_stays_keeps_its_time() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let mut config = PeerPodConfig::default();
        let good = applied(progress(1, 1, 1), progress(1, 1, 1), None);
        let first = status(&config, good, at(1));
        assert_eq!(
            (first.setup_completed, first.conditions[0].last_transition_time.clone()),
            (Some(true), Time(at(1)))
        );
        config.status = Some(first);
        let still = status(&config, applied(progress(1, 1, 0), progress(1, 1, 1), None), at(2));
        assert_eq!(still.conditions[0].last_transition_time, Time(at(1)));
        config.status = Some(still);
        let lost = status(&config, applied(progress(1, 0, 1), progress(1, 1, 1), None), at(3));
        assert_eq!(
            (lost.setup_completed, lost.conditions[0].last_transition_time.clone()),
            (Some(false), Time(at(3)))
        );
    }
}
