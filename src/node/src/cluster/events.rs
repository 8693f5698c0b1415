//! Posts failures and progress of a pod's VM as Events on the pod and on its PeerPod, and the life of the VM on the Node,
//! too. A repeated Event increases the count of the first one; Events beyond a pod's rate limit are dropped. While the
//! API server is unreachable, Events wait, limited in number and time.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Event;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Resource};
use parking_lot::Mutex;
use peerpod_common::caller_limits::{CallerLimits, Rate};
use peerpod_kube::client::Error;
use peerpod_kube::crds::PeerPod;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep};
use tracing::{debug, warn};

use super::calls::{AWAY, Calls, is_away, unencodable};
use super::pods::Reflector;
use crate::metrics::Metrics;
use crate::sandbox::ports::PodEvent;
use crate::spec::PodRef;

const COMPONENT: &str = "peerpod-node";
/// Prefix of the reasons that a VM's life has.
const OF_VM: &str = "VM";
/// Namespace of Events of Nodes, which have none.
pub(super) const OF_NODES: &str = "default";
/// Events that may wait to be written.
const MOST_WAITING: usize = 512;
const PATIENCE: Duration = Duration::from_secs(1800);
/// Written Events that are remembered, and the time that they are remembered after their last use.
const MOST_KNOWN: usize = 4096;
const MEMORY: Duration = Duration::from_secs(600);
/// Events of one pod: 20 in a burst, then one every 30 s.
const OF_A_POD: Rate = Rate { burst: 20.0, per_second: 1.0 / 30.0, at_once: usize::MAX };
/// Size limit of one message, in bytes; newer versions of the Event API refuse more.
pub(super) const MOST_TEXT: usize = 1024;
/// Time that an Event of an unknown pod waits for the pod.
const POD: Duration = Duration::from_secs(3);

#[derive(Clone)]
pub(crate) struct Events(Arc<Inner>);

struct Inner {
    calls: Calls,
    pods: Reflector,
    node: String,
    metrics: Metrics,
    waiting: Mutex<VecDeque<Waiting>>,
    /// By the pod's namespace and name.
    limits: CallerLimits<(String, String)>,
    wake: Notify,
}

#[derive(Clone)]
struct Waiting {
    pod: PodRef,
    on: Target,
    said: PodEvent,
    since: Instant,
    at: Timestamp,
}

/// Object on which an Event is posted.
#[derive(Clone)]
enum Target {
    Pod,
    /// The PeerPod of this name.
    PeerPod(String),
    /// This node. The text begins with the pod's name.
    Node,
}

/// Written Events, of which repetitions are counted.
type Written = HashMap<u64, (String, i32, Instant)>;

impl Events {
    pub(super) fn new(calls: Calls, pods: Reflector, node: &str, metrics: Metrics) -> Events {
        let (node, waiting) = (node.to_owned(), Mutex::default());
        let (limits, wake) = (CallerLimits::new(OF_A_POD), Notify::new());
        Events(Arc::new(Inner { calls, pods, node, metrics, waiting, limits, wake }))
    }

    /// Posts an Event on the pod, on the PeerPod of its sandbox if it names one, and the normal ones of a VM on the
    /// Node. Never waits; beyond a pod's rate limit, Events are dropped.
    pub(crate) fn tell(&self, pod: &PodRef, said: PodEvent) {
        let now = Instant::now();
        if self.0.limits.enter(&(pod.namespace.clone(), pod.name.clone()), now.into_std()).is_none() {
            self.0.metrics.cluster.events_dropped.inc();
            return;
        }
        let peerpod = said.of.as_ref().map(|id| PeerPod::name_of(&pod.name, id.as_str()));
        let event = Waiting { pod: pod.clone(), on: Target::Pod, said, since: now, at: Timestamp::now() };
        if let Some(name) = peerpod {
            self.put(Waiting { on: Target::PeerPod(name), ..event.clone() });
        }
        if event.said.is_normal && event.said.reason.starts_with(OF_VM) {
            self.put(Waiting { on: Target::Node, ..event.clone() });
        }
        self.put(event);
        self.0.wake.notify_one();
    }

    fn put(&self, event: Waiting) {
        let mut waiting = self.0.waiting.lock();
        if waiting.len() >= MOST_WAITING {
            // The oldest Event is the least useful.
            waiting.pop_front();
            self.0.metrics.cluster.events_dropped.inc();
        }
        waiting.push_back(event);
    }

    pub(super) async fn run(&self) {
        let (mut written, mut backoff) = (Written::default(), AWAY);
        loop {
            let next = self.0.waiting.lock().pop_front();
            let Some(waiting) = next else {
                self.0.wake.notified().await;
                continue;
            };
            match self.write(&waiting, &mut written).await {
                Ok(()) => backoff.reset(),
                Err(error) if is_away(&error) && waiting.since.elapsed() < PATIENCE => {
                    self.0.waiting.lock().push_front(waiting);
                    sleep(backoff.pause()).await;
                }
                Err(error) => {
                    self.0.metrics.cluster.events_dropped.inc();
                    let pod = waiting.pod.to_string();
                    if error.is_not_found() || error.status() == Some(403) {
                        debug!(pod, %error, "Event dropped: its namespace is gone or closed");
                    } else {
                        warn!(pod, %error, "Event not written");
                    }
                }
            }
        }
    }

    async fn write(&self, waiting: &Waiting, written: &mut Written) -> Result<(), Error> {
        let Waiting { pod, on, said, at, .. } = waiting;
        let Some(object) = self.object(waiting).await? else { return Ok(()) };
        let uid = object["uid"].as_str();
        let (namespace, text) = match on {
            Target::Node => (OF_NODES, format!("{pod}: {}", said.text)),
            Target::Pod | Target::PeerPod(_) => (&*pod.namespace, said.text.clone()),
        };
        let message = clipped(&text, MOST_TEXT);
        let key = {
            let mut hasher = DefaultHasher::new();
            (namespace, &pod.name, &uid, said.reason, &message).hash(&mut hasher);
            hasher.finish()
        };
        let now = Instant::now();
        if written.len() >= MOST_KNOWN {
            written.clear();
        }
        written.retain(|_, (_, _, last)| now.duration_since(*last) < MEMORY);
        let events: Api<Event> = Api::namespaced(self.0.calls.client.clone(), namespace);
        let what = format!("write an Event about Pod {pod}");
        if let Some((name, count, last)) = written.get_mut(&key) {
            let more = json!({"count": *count + 1, "lastTimestamp": at});
            let (params, patch) = (PatchParams::default(), Patch::Merge(more));
            match self.0.calls.call("event", what.clone(), events.patch(name, &params, &patch)).await {
                Err(error) if error.is_not_found() => {}
                Err(error) => return Err(error),
                Ok(_) => {
                    (*count, *last) = (*count + 1, now);
                    return Ok(());
                }
            }
        }
        // The name is the same when the same write is tried again.
        let name = format!(
            "{}.{:x}{:08x}",
            clipped(&pod.name, 200).trim_end_matches(['-', '.']),
            at.as_millisecond(),
            key as u32
        );
        let event = serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": object,
            "reason": said.reason,
            "message": message,
            "type": if said.is_normal { "Normal" } else { "Warning" },
            "count": 1,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "source": {"component": COMPONENT, "host": self.0.node},
            "reportingComponent": COMPONENT,
            "reportingInstance": self.0.node,
        }));
        let event: Event = event.map_err(|error| unencodable(&what, error))?;
        match self.0.calls.call("event", what, events.create(&PostParams::default(), &event)).await {
            Err(error) if !error.is_conflict() => Err(error),
            _ => {
                written.insert(key, (name, 1, now));
                Ok(())
            }
        }
    }

    /// Returns the reference of the Event's object; `None`: the PeerPod is gone.
    async fn object(&self, waiting: &Waiting) -> Result<Option<Value>, Error> {
        let Waiting { pod: PodRef { namespace, name, .. }, on, .. } = waiting;
        let peerpod = match on {
            Target::PeerPod(peerpod) => peerpod,
            Target::Node => return Ok(Some(reference_of_node(&self.0.node))),
            Target::Pod => {
                let uid = self.uid(&waiting.pod, waiting.since).await;
                return Ok(Some(json!({
                    "apiVersion": "v1", "kind": "Pod", "namespace": namespace, "name": name, "uid": uid,
                })));
            }
        };
        let api: Api<PeerPod> = Api::namespaced(self.0.calls.client.clone(), namespace);
        let what = format!("read PeerPod {namespace}/{peerpod} for an Event");
        let found = self.0.calls.call("look", what, api.get_opt(peerpod)).await?;
        Ok(found.map(|found| {
            let version = PeerPod::api_version(&());
            json!({
                "apiVersion": version, "kind": "PeerPod", "namespace": namespace, "name": peerpod,
                "uid": found.metadata.uid,
            })
        }))
    }

    /// Returns the pod's UID: `kubectl describe` shows the Events that name it.
    async fn uid(&self, pod: &PodRef, since: Instant) -> Option<String> {
        loop {
            let known = self.0.pods.newest(&pod.namespace, &pod.name).map(|found| found.uid);
            let uid = pod.uid.clone().or(known);
            if uid.is_some() || since.elapsed() >= POD {
                return uid;
            }
            sleep(Duration::from_millis(100)).await;
        }
    }
}

/// Returns the reference of a Node. kubelet and kubectl use a Node's name as the UID in its Events.
pub(super) fn reference_of_node(name: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "name": name, "uid": name})
}

/// Cuts a text to at most `most` bytes, at a character boundary.
pub(super) fn clipped(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn events_per_pod_are_bounded_and_the_budget_refills() {
        let limits = CallerLimits::new(OF_A_POD);
        let said = || (0..100).filter(|_| limits.enter(&"pod", Instant::now().into_std()).is_some()).count();
        assert_eq!(said(), 20);
        sleep(Duration::from_secs(60)).await;
        assert_eq!(said(), 2);
        sleep(MEMORY * 10).await;
        assert_eq!(said(), 20);
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        assert_eq!(clipped("häßlich", 2), "h");
        assert_eq!(clipped("abc", 9), "abc");
    }
}
