//! Decides from the readiness whether the node offers peer pods, and shows that as a condition and Events of the Node.
//! While the node is not ready, no pod could start, so [`Capacity`] withdraws the extended resource: Kubernetes then
//! places peer pods elsewhere. A short interruption changes nothing.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Node};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use peerpod_base::admin::Ready;
use peerpod_kube::client::Error;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::calls::unencodable;
use super::capacity::Capacity;
use super::events::{MOST_TEXT, OF_NODES, clipped, reference_of_node};

/// Type of the Node's condition.
const CONDITION: &str = "PeerPodsReady";
/// Time for which the node must be ready again before it offers peer pods again.
const RETURN_AFTER: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Interval at which an unchanged condition is written: another client may have replaced the Node.
const WRITE_EVERY: Duration = Duration::from_secs(300);
/// Outages of the API server that get an Event last this long at least.
const WORTH_AN_EVENT: Duration = Duration::from_secs(5);

/// Offer of peer pods, with a delay for each change.
#[derive(Debug)]
pub(super) struct Offer {
    withdraw_after: Duration,
    /// `None`: the node was never ready, and not for long.
    offered: Option<bool>,
    /// Time since which the readiness contradicts the offer.
    against: Option<Instant>,
}

impl Offer {
    pub(super) fn new(withdraw_after: Duration) -> Offer {
        Offer { withdraw_after, offered: None, against: None }
    }

    /// Returns the new offer if it changes now.
    fn step(&mut self, ready: bool, now: Instant) -> Option<bool> {
        if self.offered == Some(ready) {
            self.against = None;
            return None;
        }
        let since = now - *self.against.get_or_insert(now);
        let delay = match (self.offered, ready) {
            (None, true) => Duration::ZERO,
            (_, true) => RETURN_AFTER,
            (_, false) => self.withdraw_after,
        };
        if since < delay {
            return None;
        }
        (self.offered, self.against) = (Some(ready), None);
        self.offered
    }
}

/// State of the condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReadyCondition {
    ready: bool,
    reason: &'static str,
    message: String,
}

impl ReadyCondition {
    /// State of a node whose daemon ends.
    pub(super) fn stopped() -> ReadyCondition {
        let message = "peerpod-node has stopped: no pod can start; running pods go on".to_owned();
        ReadyCondition { ready: false, reason: "DaemonStopped", message }
    }

    fn of(offered: bool, waiting: &BTreeMap<String, String>) -> ReadyCondition {
        if offered {
            let message = "the provider and peerpod-relay work".to_owned();
            return ReadyCondition { ready: true, reason: "Ready", message };
        }
        let reason = match waiting.keys().next().map(String::as_str) {
            Some(name) if name.starts_with("provider") => "ProviderRefuses",
            Some("relay") => "RelayAway",
            Some(_) => "NotReady",
            None => "Returning",
        };
        let causes: Vec<&str> = waiting.values().map(String::as_str).collect();
        ReadyCondition { ready: false, reason, message: clipped(&causes.join("; "), MOST_TEXT).to_owned() }
    }
}

/// State that the Node must show.
#[derive(Clone, Debug, Default)]
struct Wanted {
    /// `None`: the offer is not known yet.
    shown: Option<ReadyCondition>,
    /// Latest change of the offer, with its number.
    change: Option<(u64, Change)>,
}

/// Change that gets an Event.
#[derive(Clone, Debug)]
struct Change {
    reason: &'static str,
    is_normal: bool,
    message: String,
    at: Timestamp,
}

impl Change {
    fn of(shown: &ReadyCondition) -> Change {
        let reason = if shown.ready { "CapacityRestored" } else { "CapacityWithdrawn" };
        Change { reason, is_normal: shown.ready, message: shown.message.clone(), at: Timestamp::now() }
    }
}

/// Follows the readiness, publishes the offer, and writes condition and Events, for ever. A slow API server delays what is
/// written, and no sample.
pub(super) async fn run(
    capacity: Capacity,
    ready: Ready,
    offer: Offer,
    publish: watch::Sender<Option<bool>>,
) {
    let (want, wanted) = watch::channel(Wanted::default());
    tokio::join!(sample(&ready, offer, &publish, &want), write(&capacity, wanted));
}

async fn sample(
    ready: &Ready,
    mut offer: Offer,
    publish: &watch::Sender<Option<bool>>,
    want: &watch::Sender<Wanted>,
) {
    loop {
        let waiting = ready.waiting();
        let before = offer.offered;
        let changed = offer.step(waiting.is_empty(), Instant::now());
        if let Some(offered) = offer.offered {
            let shown = ReadyCondition::of(offered, &waiting);
            want.send_modify(|wanted| {
                // The text of a withheld offer stays while the node returns.
                if shown.reason != "Returning" {
                    wanted.shown = Some(shown.clone());
                }
                if changed.is_some() && (before, offered) != (None, true) {
                    let number = wanted.change.as_ref().map_or(0, |(number, _)| number + 1);
                    wanted.change = Some((number, Change::of(&shown)));
                }
            });
            if changed.is_some() {
                publish.send_replace(Some(offered));
                match offered {
                    false => warn!(why = shown.message, "the node offers no peer pods any more"),
                    true => info!("the node offers peer pods"),
                }
            }
        }
        sleep(LOOK_EVERY).await;
    }
}

/// State that the Node shows.
#[derive(Default)]
struct Written {
    shown: Option<(ReadyCondition, Instant)>,
    change: Option<u64>,
    /// Event about an outage of the API server that is over.
    outage: Option<Change>,
}

async fn write(capacity: &Capacity, wanted: watch::Receiver<Wanted>) {
    let (mut written, mut failed) = (Written::default(), false);
    loop {
        if capacity.is_new.swap(false, Ordering::Relaxed) {
            written.shown = None;
        }
        let now = wanted.borrow().clone();
        let done = write_once(capacity, now, &mut written).await;
        if let Err(error) = &done
            && !failed
        {
            warn!(%error, "cannot show on the Node whether it offers peer pods; trying again");
        }
        failed = done.is_err();
        sleep(LOOK_EVERY).await;
    }
}

async fn write_once(capacity: &Capacity, wanted: Wanted, written: &mut Written) -> Result<(), Error> {
    if let Some(shown) = wanted.shown {
        let known = written.shown.as_ref().filter(|(_, at)| at.elapsed() < WRITE_EVERY);
        if known.is_none_or(|(known, _)| *known != shown) {
            capacity.show(&shown).await?;
            written.shown = Some((shown, Instant::now()));
        }
    }
    if let Some((number, change)) = &wanted.change
        && written.change != Some(*number)
    {
        capacity.tell(change).await?;
        written.change = Some(*number);
    }
    if let Some(outage) = capacity.calls.take_outage().filter(|outage| outage.lasted >= WORTH_AN_EVENT) {
        let message = format!(
            "the API server did not answer peerpod-node for {} s: {}; running pods went on, and delayed Events and PeerPods \
             follow now; check the node's path to the API server",
            outage.lasted.as_secs(),
            outage.why
        );
        let message = clipped(&message, MOST_TEXT).to_owned();
        let at = Timestamp::now();
        written.outage = Some(Change { reason: "ApiServerAway", is_normal: false, message, at });
    }
    if let Some(outage) = &written.outage {
        capacity.tell(outage).await?;
        written.outage = None;
    }
    Ok(())
}

impl Capacity {
    /// Writes the condition, unless the capacity is being given back.
    async fn show(&self, shown: &ReadyCondition) -> Result<(), Error> {
        let closed = self.closed.lock().await;
        if *closed { Ok(()) } else { self.write_condition(shown).await }
    }

    /// Writes the condition. The time of its transition changes with its status alone.
    pub(super) async fn write_condition(&self, shown: &ReadyCondition) -> Result<(), Error> {
        let node = self.node().await?;
        let (now, status) = (Timestamp::now(), if shown.ready { "True" } else { "False" });
        let mut condition = json!({
            "type": CONDITION, "status": status, "reason": shown.reason, "message": shown.message,
            "lastHeartbeatTime": now,
        });
        if status_of(&node).is_none_or(|old| old != status) {
            condition["lastTransitionTime"] = json!(now);
        }
        // Conditions are merged by their type.
        let patch = Patch::Strategic(json!({"status": {"conditions": [condition]}}));
        let params = PatchParams::default();
        let patched = self.nodes.patch_status(&self.node, &params, &patch);
        let what = format!("write the condition {CONDITION} of Node {}", self.node);
        self.calls.call("condition", what, patched).await.map(drop)
    }

    /// Posts an Event on the Node. The name is the same when the same Event is tried again.
    async fn tell(&self, change: &Change) -> Result<(), Error> {
        let Change { reason, is_normal, message, at } = change;
        let what = format!("write the Event {reason} of Node {}", self.node);
        let event = serde_json::from_value(json!({
            "metadata": {"name": format!("{}.{:x}", self.node, at.as_millisecond()), "namespace": OF_NODES},
            "involvedObject": reference_of_node(&self.node),
            "reason": reason, "message": message, "type": if *is_normal { "Normal" } else { "Warning" },
            "count": 1, "firstTimestamp": at, "lastTimestamp": at,
            "source": {"component": "peerpod-node", "host": self.node},
            "reportingComponent": "peerpod-node", "reportingInstance": self.node,
        }));
        let event: Event = event.map_err(|error| unencodable(&what, error))?;
        let events: Api<Event> = Api::namespaced(self.calls.client.clone(), OF_NODES);
        let params = PostParams::default();
        match self.calls.call("event", what, events.create(&params, &event)).await {
            Err(error) if !error.is_conflict() => Err(error),
            _ => Ok(()),
        }
    }
}

/// Status of the Node's condition.
pub(super) fn status_of(node: &Node) -> Option<&str> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    conditions.iter().find(|one| one.type_ == CONDITION).map(|one| one.status.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_interruption_withdraws_nothing_and_a_long_one_does() {
        let start = Instant::now();
        let mut offer = Offer::new(Duration::from_secs(15));
        let mut at = |second: u64, ready: bool| offer.step(ready, start + Duration::from_secs(second));
        assert_eq!(at(0, false), None, "a start waits");
        assert_eq!(at(2, true), Some(true), "the first readiness counts at once");
        assert_eq!((at(3, false), at(17, false), at(18, true)), (None, None, None));
        assert_eq!((at(20, false), at(34, false)), (None, None), "counted anew");
        assert_eq!(at(35, false), Some(false));
        assert_eq!(at(36, false), None);
        assert_eq!((at(40, true), at(44, false), at(45, true)), (None, None, None), "it flaps");
        assert_eq!(at(50, true), Some(true));
        let mut never = Offer::new(Duration::from_secs(15));
        assert_eq!(never.step(false, start), None);
        assert_eq!(never.step(false, start + Duration::from_secs(15)), Some(false));
    }

    /// The API server accepts requests and never answers.
    #[tokio::test(start_paused = true)]
    async fn a_slow_api_server_delays_no_withdrawal() {
        let silent = tower::service_fn(|_: hyper::Request<kube::client::Body>| {
            std::future::pending::<Result<hyper::Response<kube::client::Body>, std::io::Error>>()
        });
        let (ready, metrics) = (Ready::default(), crate::metrics::Metrics::new(&mut Default::default()));
        let calls =
            super::super::calls::Calls::new(kube::Client::new(silent, "default"), metrics, ready.clone());
        let publish = watch::Sender::new(None);
        let mut offered = publish.subscribe();
        let config = super::super::ClusterConfig {
            node_name: "n".to_owned(),
            pod_uid: None,
            namespace: "n".to_owned(),
            resource: "r".to_owned(),
            capacity: Some(1),
            withdraw_after: Duration::from_secs(15),
            kubeconfig: None,
        };
        let capacity = Capacity::new(calls, &config, offered.clone());
        let running = run(capacity, ready.clone(), Offer::new(Duration::from_secs(15)), publish);
        let test = async {
            offered.wait_for(|offered| *offered == Some(true)).await.unwrap();
            ready.not_ready("relay", "away");
            let began = Instant::now();
            offered.wait_for(|offered| *offered == Some(false)).await.unwrap();
            assert!(began.elapsed() <= Duration::from_secs(17), "{:?}", began.elapsed());
        };
        tokio::select! {
            () = running => unreachable!("it runs for ever"),
            () = test => {}
        }
    }

    #[test]
    fn the_condition_names_the_cause() {
        let shown =
            |name: &str, why: &str| ReadyCondition::of(false, &[(name.to_owned(), why.to_owned())].into());
        assert_eq!(shown("provider", "allow ec2:CreateFleet").reason, "ProviderRefuses");
        assert_eq!(shown("provider-connection", "no libvirtd").message, "no libvirtd");
        assert_eq!(shown("relay", "away").reason, "RelayAway");
        assert_eq!(shown("relay", &"ä".repeat(MOST_TEXT)).message.len(), MOST_TEXT);
        assert!(ReadyCondition::of(true, &BTreeMap::new()).ready);
    }
}
