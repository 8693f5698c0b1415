//! Holds the table's entries and the indexes into them, which always change together.

use std::collections::{HashMap, HashSet, hash_map};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use peerpod_volume::VolumeId;

use crate::ledger::{NetnsRef, Record};
use crate::sandbox::guest::tickets::Tickets;
use crate::sandbox::lifecycle::{Command, View};
use crate::sandbox::recovery::restart::Panics;
use crate::spec::SandboxId;
use crate::tunnel::NetnsId;
use crate::volumes::PodVolumes;

#[derive(Default)]
pub(crate) struct State {
    pub(crate) entries: HashMap<SandboxId, Entry>,
    tickets: Arc<Tickets>,
    pods: HashMap<(String, String), Vec<SandboxId>>,
    pub(crate) netns: HashMap<NetnsId, SandboxId>,
    /// Sandbox that has each single-writer volume, even while it is leaving.
    pub(crate) writers: HashMap<VolumeId, SandboxId>,
    /// The newest sandbox of each pod with volumes, by the pod's UID.
    pub(crate) uids: HashMap<String, SandboxId>,
    /// Tombstones that are not on disk yet.
    pub(crate) unwritten: HashSet<SandboxId>,
    pub(crate) count: usize,
    pub(crate) tasks: JoinSet<()>,
    /// Sandboxes with a task that panicked, and the number of panics.
    pub(crate) panics: HashMap<SandboxId, Panics>,
    /// Whether the table is closed: its tasks were aborted, and no call waits for a new task any more.
    pub(crate) closed: bool,
}

#[derive(Clone)]
pub(crate) enum Entry {
    Task(Running),
    /// Expiry (ms since 1970), and the last view with the cause of the stop.
    Tombstone {
        until_ms: u64,
        view: Box<View>,
    },
}

impl Entry {
    pub(crate) fn view(&self) -> watch::Receiver<View> {
        match self {
            Entry::Task(running) => running.view.clone(),
            Entry::Tombstone { view, .. } => watch::Sender::new((**view).clone()).subscribe(),
        }
    }
}

#[derive(Clone)]
pub(crate) struct Running {
    pub(crate) commands: mpsc::Sender<Command>,
    pub(crate) view: watch::Receiver<View>,
    pub(crate) netns: Option<NetnsRef>,
    pub(crate) pod: Option<(String, String)>,
    /// As they were when the task began; an index needs no more.
    pub(crate) volumes: Option<Arc<PodVolumes>>,
}

impl State {
    pub(crate) fn new(tickets: Arc<Tickets>) -> State {
        State { tickets, ..State::default() }
    }

    pub(crate) fn running(&self) -> impl Iterator<Item = (&SandboxId, &Running)> {
        self.entries.iter().filter_map(|(id, entry)| match entry {
            Entry::Task(running) => Some((id, running)),
            Entry::Tombstone { .. } => None,
        })
    }

    pub(crate) fn task(&self, id: &SandboxId) -> Option<&Running> {
        match self.entries.get(id)? {
            Entry::Task(running) => Some(running),
            Entry::Tombstone { .. } => None,
        }
    }

    /// Adds a task under its id, ticket, pod, network namespace and volumes.
    pub(crate) fn link(&mut self, record: &Record, running: Running) {
        let (id, is_live) = (&record.id, record.phase.is_live());
        self.tickets.enter(record);
        if let Some(pod) = &running.pod {
            self.pods.entry(pod.clone()).or_default().push(id.clone());
        }
        if let Some(netns) = &running.netns {
            // A leaving sandbox does not take the namespace from a live one.
            let owner = self.netns.entry(netns.identity()).or_insert_with(|| id.clone());
            if is_live {
                *owner = id.clone();
            }
        }
        if let Some(volumes) = &running.volumes {
            for volume in volumes.single_writers() {
                self.writers.entry(volume.id.clone()).or_insert_with(|| id.clone());
            }
            self.uids.insert(volumes.uid.clone(), id.clone());
        }
        self.entries.insert(id.clone(), Entry::Task(running));
        self.count += 1;
    }

    /// Removes a task from the indexes; its entry stays until it is removed or becomes a tombstone.
    pub(crate) fn unlink(&mut self, id: &SandboxId) {
        let Some(running) = self.task(id).cloned() else { return };
        self.count -= 1;
        self.tickets.leave(id);
        if let Some(pod) = running.pod
            && let hash_map::Entry::Occupied(mut ids) = self.pods.entry(pod)
        {
            ids.get_mut().retain(|other| other != id);
            if ids.get().is_empty() {
                ids.remove();
            }
        }
        if let Some(volumes) = &running.volumes {
            for volume in volumes.single_writers() {
                if self.writers.get(&volume.id) == Some(id) {
                    self.writers.remove(&volume.id);
                }
            }
            if self.uids.get(&volumes.uid) == Some(id) {
                self.uids.remove(&volumes.uid);
            }
        }
        if let Some(netns) = &running.netns
            && self.netns.get(&netns.identity()) == Some(id)
        {
            self.netns.remove(&netns.identity());
        }
    }

    /// Removes a sandbox from the table and from all indexes.
    pub(crate) fn remove(&mut self, id: &SandboxId) {
        self.unlink(id);
        self.entries.remove(id);
    }

    /// Turns the entry into a tombstone for `ttl` from the time the sandbox was gone.
    pub(crate) fn write_tombstone(&mut self, record: &Record, ttl: Duration) {
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        let until_ms = record.end.gone_ms.unwrap_or(record.created_ms).saturating_add(ttl_ms);
        let view = Box::new(View::of(record, true));
        self.panics.remove(&record.id);
        self.entries.insert(record.id.clone(), Entry::Tombstone { until_ms, view });
    }

    pub(crate) fn newest_of(&self, pod: &(String, String)) -> Option<watch::Receiver<View>> {
        let views = self.pods.get(pod)?.iter().filter_map(|id| Some(self.task(id)?.view.clone()));
        let live = views.filter(|view| view.borrow().phase.is_live());
        live.max_by_key(|view| view.borrow().created_ms)
    }
}
