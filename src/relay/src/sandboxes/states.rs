//! States that the node watches: one per sandbox, each with the version of its last change. They are states, not
//! events: a node that was away sends the last version it saw and gets the present differences. The cost of a change
//! and of an answer depends on the number of changes, not on the number of sandboxes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use peerpod_link::base64_bytes;
use peerpod_proto::relay::{SandboxState, WatchResponse};
use protobuf::Message;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::agent::filter::Shared;
use crate::id::SandboxId;

/// An answer ends when it has this many bytes of guest statuses; the rest comes with the next one.
const ANSWER_BYTES: usize = 1 << 20;
/// An answer ends when it has this many sandboxes.
const ANSWER_SANDBOXES: usize = 4096;

/// The versioned states.
#[derive(Debug, Default)]
struct Core {
    version: u64,
    entries: HashMap<SandboxId, Entry>,
    by_version: BTreeMap<u64, SandboxId>,
    /// Sandboxes with an open creating connection, and the pod that CreateVM named; includes sandboxes not put yet.
    hypervisor: HashMap<SandboxId, Arc<str>>,
}

#[derive(Debug)]
struct Entry {
    version: u64,
    state: SandboxState,
    /// `namespace/name`, for log records.
    pod: Arc<str>,
    counters: Arc<Shared>,
}

impl Core {
    fn put(&mut self, id: &SandboxId, pod: &str, counters: Arc<Shared>) {
        if self.entries.contains_key(id) {
            return;
        }
        let state = SandboxState {
            id: id.to_string(),
            hypervisor_connected: self.hypervisor.contains_key(id),
            ..Default::default()
        };
        self.version += 1;
        self.by_version.insert(self.version, id.clone());
        let entry = Entry { version: self.version, state, pod: pod.into(), counters };
        self.entries.insert(id.clone(), entry);
    }

    fn delete(&mut self, id: &SandboxId) {
        if let Some(entry) = self.entries.remove(id) {
            self.by_version.remove(&entry.version);
        }
    }

    /// Changes a state; returns true if it differs now.
    fn change(&mut self, id: &SandboxId, change: impl FnOnce(&mut SandboxState)) -> bool {
        let Some(entry) = self.entries.get_mut(id) else { return false };
        let before = entry.state.clone();
        change(&mut entry.state);
        if entry.state == before {
            return false;
        }
        self.by_version.remove(&entry.version);
        self.version += 1;
        entry.version = self.version;
        self.by_version.insert(self.version, id.clone());
        true
    }

    fn hypervisor(&mut self, id: &SandboxId, pod: Option<&str>) -> bool {
        match pod {
            Some(pod) => drop(self.hypervisor.insert(id.clone(), pod.into())),
            None => drop(self.hypervisor.remove(id)),
        }
        self.change(id, |state| state.hypervisor_connected = pod.is_some())
    }

    fn pod(&self, id: &SandboxId) -> Arc<str> {
        let put = self.entries.get(id).map(|entry| &entry.pod);
        put.or_else(|| self.hypervisor.get(id)).cloned().unwrap_or_else(|| "-".into())
    }

    /// Returns the version that the answer covers, and the states that changed after `since`.
    fn since(&self, since: u64) -> (u64, Vec<SandboxState>) {
        let mut changed = Vec::new();
        let mut bytes = 0;
        for (version, id) in self.by_version.range(since.saturating_add(1)..) {
            let Some(entry) = self.entries.get(id) else { continue };
            let mut state = entry.state.clone();
            [state.bytes_to_guest, state.bytes_from_guest, state.frames_to_guest, state.frames_from_guest] =
                entry.counters.counts().map(|count| count.load(Relaxed));
            bytes += state.guest_status.len();
            changed.push(state);
            if bytes >= ANSWER_BYTES || changed.len() >= ANSWER_SANDBOXES {
                return (*version, changed);
            }
        }
        (self.version, changed)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StateState {
    #[serde(with = "base64_bytes")]
    state: Vec<u8>,
    /// Bytes to and from the guest, frames to and from it.
    traffic: [u64; 4],
}

/// The states, shared: changed by the sandboxes and the hypervisor proxy, watched by the node.
#[derive(Debug)]
pub(crate) struct States {
    epoch: String,
    core: watch::Sender<Core>,
}

impl States {
    /// Starts with no states; `epoch` differs from that of every other relay process.
    pub(crate) fn new(epoch: String) -> States {
        States::go_on(epoch, 0)
    }

    /// Continues the epoch and version of another process, so that the node sees no difference.
    pub(crate) fn go_on(epoch: String, version: u64) -> States {
        States { epoch, core: watch::Sender::new(Core { version, ..Core::default() }) }
    }

    /// Returns the number of changes so far.
    pub(crate) fn version(&self) -> u64 {
        self.core.borrow().version
    }

    pub(crate) fn show(&self, id: &SandboxId) -> Option<StateState> {
        let core = self.core.borrow();
        let entry = core.entries.get(id)?;
        Some(StateState {
            state: entry.state.write_to_bytes().ok()?,
            traffic: entry.counters.counts().map(|count| count.load(Relaxed)),
        })
    }

    /// Restores the state from another process. The guest is not connected here yet.
    pub(crate) fn put_shown(&self, id: &SandboxId, pod: &str, counters: Arc<Shared>, shown: &StateState) {
        for (count, shown) in counters.counts().into_iter().zip(shown.traffic) {
            count.store(shown, Relaxed);
        }
        self.put(id, pod, counters);
        if let Ok(state) = SandboxState::parse_from_bytes(&shown.state) {
            // The hypervisor proxy, which is restored later, sets the connected shims.
            let away = SandboxState { guest_connected: false, hypervisor_connected: false, ..state };
            self.change(id, |now| *now = SandboxState { id: id.to_string(), ..away });
        }
    }

    /// Returns the epoch, which stays the same over handovers and changes on a restart.
    pub(crate) fn epoch(&self) -> &str {
        &self.epoch
    }

    pub(crate) fn put(&self, id: &SandboxId, pod: &str, counters: Arc<Shared>) {
        self.core.send_modify(|core| core.put(id, pod, counters));
    }

    /// Removes a sandbox. Nothing is announced, because the node itself requested it.
    pub(crate) fn delete(&self, id: &SandboxId) {
        self.core.send_if_modified(|core| {
            core.delete(id);
            false
        });
    }

    /// Changes a sandbox's state; an unknown sandbox is ignored.
    pub(crate) fn change(&self, id: &SandboxId, change: impl FnOnce(&mut SandboxState)) {
        self.core.send_if_modified(|core| core.change(id, change));
    }

    /// Records that the connection that created the sandbox for this pod is open; with `None`, that it is closed.
    pub(crate) fn hypervisor(&self, id: &SandboxId, pod: Option<&str>) {
        self.core.send_if_modified(|core| core.hypervisor(id, pod));
    }

    /// Returns a sandbox's pod for log records, as the node put it or its CreateVM named it; else `-`.
    pub(crate) fn pod(&self, id: &SandboxId) -> Arc<str> {
        self.core.borrow().pod(id)
    }

    /// Waits for a version newer than `since`; with another epoch, returns everything at once.
    pub(crate) async fn newer(&self, epoch: &str, since: u64) -> WatchResponse {
        let same = epoch == self.epoch;
        let since = if same { since } else { 0 };
        if same {
            // Fails only if the sender is gone, and `self` holds it.
            drop(self.core.subscribe().wait_for(|core| core.version > since).await);
        }
        let (version, changed) = self.core.borrow().since(since);
        WatchResponse { epoch: self.epoch.clone(), version, changed, ..Default::default() }
    }

    /// Returns the answer of [`States::newer`] after a time without changes.
    pub(crate) fn nothing(&self, since: u64) -> WatchResponse {
        WatchResponse { epoch: self.epoch.clone(), version: since, ..Default::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> SandboxId {
        SandboxId::new(text).unwrap()
    }

    fn ids(states: &[SandboxState]) -> Vec<&str> {
        states.iter().map(|state| state.id.as_str()).collect()
    }

    #[test]
    fn an_answer_has_only_the_changes_since_the_last_one() {
        let mut core = Core::default();
        for name in ["a", "b", "c"] {
            core.put(&id(name), "", Arc::default());
        }
        let (seen, all) = core.since(0);
        assert_eq!(ids(&all), ["a", "b", "c"]);
        assert_eq!(core.since(seen).1, []);
        assert!(core.change(&id("a"), |state| state.guest_connected = true));
        assert!(!core.change(&id("b"), |state| state.guest_connected = false), "no change, no version");
        assert!(!core.change(&id("x"), |state| state.guest_connected = true));
        let (now, changed) = core.since(seen);
        assert_eq!(ids(&changed), ["a"]);
        assert!(changed[0].guest_connected && now > seen);
        core.delete(&id("b"));
        assert_eq!(ids(&core.since(0).1), ["c", "a"], "in the order of their last change");
        assert_eq!(core.by_version.len(), core.entries.len());
    }

    #[test]
    fn a_creating_connection_is_known_before_the_sandbox_is() {
        let mut core = Core::default();
        core.hypervisor(&id("a"), Some(""));
        core.put(&id("a"), "", Arc::default());
        assert!(core.since(0).1[0].hypervisor_connected);
        assert!(core.hypervisor(&id("a"), None));
    }

    #[test]
    fn many_guest_messages_come_in_several_answers() {
        let mut core = Core::default();
        for n in 0..40 {
            let id = id(&format!("s{n}"));
            core.put(&id, "", Arc::default());
            core.change(&id, |state| state.guest_status = vec![0; 64 << 10]);
        }
        let (mut seen, mut total, mut answers) = (0, 0, 0);
        loop {
            let (version, changed) = core.since(seen);
            if changed.is_empty() {
                break;
            }
            total += changed.len();
            answers += 1;
            seen = version;
        }
        assert_eq!((total, answers), (40, 3));
        assert_eq!(seen, core.version);
    }

    #[tokio::test]
    async fn a_watch_wakes_at_a_change_and_another_epoch_answers_at_once() {
        let states = Arc::new(States::new("e1".into()));
        let first = states.newer("", 0).await;
        assert_eq!((first.epoch.as_str(), first.version, first.changed.len()), ("e1", 0, 0));
        let waiting = tokio::spawn({
            let states = states.clone();
            async move { states.newer("e1", 0).await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        states.put(&id("a"), "", Arc::default());
        assert_eq!(ids(&waiting.await.unwrap().changed), ["a"]);
        assert_eq!(ids(&states.newer("old", 77).await.changed), ["a"]);
    }
}
