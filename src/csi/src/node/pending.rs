//! Polls for VMs. A volume that the driver attaches waits until the VM is known, and then until it is attached. A
//! volume without a target waits until its VM is gone. Polling is frequent only while a volume waits.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use peerpod_volume::descriptor;
use peerpod_volume::records::Attached;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::warn;

use super::NodeRole;
use super::publications::Publication;
use crate::grpc::Status;

/// First pause, doubled each time: a pod's start waits for the result.
const SOON: Duration = Duration::from_millis(50);
/// Longest pause: rare enough for the API server, and a VM takes seconds to disappear.
const LATER: Duration = Duration::from_millis(500);
/// Pause after a failure; doubled each time, up to the longest.
const AFTER_FAILURE: Duration = Duration::from_secs(2);
const LONGEST_AFTER_FAILURE: Duration = Duration::from_secs(30);
/// Checks at once: each may wait for the API server.
const TOGETHER: usize = 16;

/// Event that a publication waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
    /// The pod's VM; another process writes its id to a file.
    Vm,
    /// The driver, which attaches the disk.
    Disk,
    /// The pod's next VM, or the end of its last.
    Change,
}

#[derive(Clone, Debug)]
struct Waiting {
    publication: Publication,
    /// Number of this entry. A result for an earlier entry of the same target does not apply.
    turn: u64,
    wait: Option<Wait>,
    pause: Duration,
    due: Instant,
}

impl Waiting {
    /// Sets the time of the next check, after a check with this result.
    fn put_off(&mut self, found: Option<Wait>) {
        self.pause = match found {
            None => (self.pause * 2).clamp(AFTER_FAILURE, LONGEST_AFTER_FAILURE),
            Some(Wait::Change) => LATER,
            same if same == self.wait => (self.pause * 2).min(LATER),
            Some(_) => SOON,
        };
        self.wait = found;
        self.due = Instant::now() + self.pause;
    }
}

#[derive(Debug, Default)]
struct All {
    waiting: BTreeMap<PathBuf, Waiting>,
    turns: u64,
}

#[derive(Debug, Default)]
pub(super) struct Pending {
    all: Mutex<All>,
    changed: Notify,
}

impl Pending {
    /// Adds a published volume that the driver attaches, to find its VM.
    pub(super) fn watch(&self, publication: &Publication) {
        if publication.driver_attached {
            self.put(publication);
        } else {
            self.all.lock().waiting.remove(&publication.target);
        }
    }

    /// Adds a volume: one that the driver attaches, or one without a target, to wait for the end of its VM.
    pub(super) fn put(&self, publication: &Publication) {
        let mut all = self.all.lock();
        all.turns += 1;
        let (turn, due) = (all.turns, Instant::now());
        let waiting = Waiting { publication: publication.clone(), turn, wait: None, pause: SOON, due };
        all.waiting.insert(publication.target.clone(), waiting);
        drop(all);
        self.changed.notify_one();
    }

    fn due(&self) -> Vec<Waiting> {
        let now = Instant::now();
        self.all.lock().waiting.values().filter(|waiting| waiting.due <= now).cloned().collect()
    }

    /// Returns the next due time; `None` when nothing waits.
    fn next(&self) -> Option<Instant> {
        self.all.lock().waiting.values().map(|waiting| waiting.due).min()
    }

    /// Applies the result of a check: nothing more to wait for, a wait, or a failure.
    fn looked(&self, seen: &Waiting, found: &Result<Option<Wait>, Status>) {
        let mut all = self.all.lock();
        let target = &seen.publication.target;
        let Some(waiting) = all.waiting.get_mut(target).filter(|waiting| waiting.turn == seen.turn) else {
            return;
        };
        match found {
            Ok(None) => drop(all.waiting.remove(target)),
            Ok(wait) => waiting.put_off(*wait),
            Err(_) => waiting.put_off(None),
        }
    }
}

impl NodeRole {
    pub(super) async fn follow(self) {
        self.take_up().await;
        loop {
            let pending = &self.0.pending;
            let Some(next) = pending.next() else {
                pending.changed.notified().await;
                continue;
            };
            tokio::select! {
                () = sleep_until(next) => {}
                () = pending.changed.notified() => {}
            }
            let looks: Vec<_> = pending.due().into_iter().map(|waiting| self.inspect(waiting)).collect();
            stream::iter(looks).buffer_unordered(TOGETHER).collect::<()>().await;
        }
    }

    async fn inspect(&self, waiting: Waiting) {
        let found = self.step(&waiting.publication).await;
        if let Err(why) = &found {
            warn!(volume = %waiting.publication.name, error = %why, "tried again");
            self.0.metrics.retries.inc();
        }
        self.0.pending.looked(&waiting, &found);
    }

    /// Loads the publications of an earlier process.
    async fn take_up(&self) {
        let all = loop {
            match self.left_by_predecessor().await {
                Ok(all) => break all,
                Err(why) => warn!(error = %why, "earlier publications are not known yet"),
            }
            sleep(AFTER_FAILURE).await;
        };
        for publication in &all {
            if !publication.leaving {
                self.0.metrics.published.inc();
            }
            if publication.leaving || publication.driver_attached {
                self.0.pending.put(publication);
            }
        }
    }

    /// Returns this driver's publications. Unreadable ones are reported and block no other.
    async fn left_by_predecessor(&self) -> Result<Vec<Publication>, Status> {
        let driver = self.0.upstream.driver().await?;
        let (mut all, bad) = self.on_disk("read the publications", |inner| inner.files.all()).await?;
        for why in &bad {
            warn!(error = %why, "the volume of this file is not given back; remove the file when its pod's \
                 VM is gone");
        }
        self.0.metrics.unreadable.set(i64::try_from(bad.len()).unwrap_or(i64::MAX));
        all.retain(|publication| publication.driver == driver);
        Ok(all)
    }

    /// Runs one check and returns the next wait; `None` when there is nothing more to wait for.
    async fn step(&self, publication: &Publication) -> Result<Option<Wait>, Status> {
        let _turn = self.0.turns.lock(&publication.volume).await;
        // Another call may have been faster.
        let now = self.at(publication.volume.clone(), publication.target.clone()).await?;
        let Some(now) = now else { return Ok(None) };
        if now.leaving {
            return Ok(if self.finish(&now).await? { None } else { Some(Wait::Change) });
        }
        if !now.driver_attached {
            return Ok(None);
        }
        self.attach(&now).await
    }

    /// Writes the pod's VM to the cluster's object, and records the attached disk for the node.
    async fn attach(&self, publication: &Publication) -> Result<Option<Wait>, Status> {
        let Some(cluster) = &self.0.cluster else { return Ok(None) };
        let (uid, volume) = (publication.pod.uid.clone(), publication.volume.clone());
        let read = self.on_disk("read the pod's VM", move |inner| {
            let vm = inner.records.vm(&uid)?.filter(|vm| !vm.gone);
            Ok((vm.and_then(|vm| vm.instance), inner.records.attached(&uid, &volume)?))
        });
        let (Some(instance), known) = read.await? else { return Ok(Some(Wait::Vm)) };
        if known.is_some_and(|known| known.instance == instance) {
            // The pod's next VM may be another one.
            return Ok(Some(Wait::Change));
        }
        let Some(identity) = cluster.attached(publication, &instance).await? else {
            return Ok(Some(Wait::Disk));
        };
        let attached = Attached { version: descriptor::VERSION, instance, identity };
        let (uid, volume) = (publication.pod.uid.clone(), publication.volume.clone());
        let noted = self.on_disk("record where the volume is attached", move |inner| {
            inner.records.put_attached(&uid, &volume, &attached)
        });
        noted.await?;
        Ok(Some(Wait::Change))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longer_waits_are_polled_less_often() {
        let publication = serde_json::from_value(serde_json::json!({
            "version": 1, "volume": "0123456789abcdef0123456789abcdef", "driver": "d", "handle": "h", "name": "n",
            "pod": {"uid": "u", "namespace": "n", "name": "p"}, "target": "/t", "wanted": {}, "read_only": false,
            "marker": "m", "exclusive": true, "driver_attached": true, "leaving": false,
        }));
        let publication: Publication = publication.unwrap();
        let pending = Pending::default();
        pending.watch(&publication);
        let mut paused = Vec::new();
        for found in [Wait::Vm; 6].into_iter().chain([Wait::Disk; 2]).chain([Wait::Change, Wait::Disk]) {
            let seen = pending.all.lock().waiting.values().next().unwrap().clone();
            pending.looked(&seen, &Ok(Some(found)));
            paused.push(pending.all.lock().waiting.values().next().unwrap().pause.as_millis());
        }
        assert_eq!(paused, [50, 100, 200, 400, 500, 500, 50, 100, 500, 50]);
        let failed = Err(crate::grpc::Code::Unavailable.status("away"));
        let mut paused = Vec::new();
        for found in [&failed; 7].into_iter().chain([&Ok(Some(Wait::Disk)), &failed]) {
            let seen = pending.all.lock().waiting.values().next().unwrap().clone();
            pending.looked(&seen, found);
            paused.push(pending.all.lock().waiting.values().next().unwrap().pause.as_millis());
        }
        assert_eq!(paused, [2000, 4000, 8000, 16000, 30000, 30000, 30000, 50, 2000]);
        let seen = pending.all.lock().waiting.values().next().unwrap().clone();
        pending.put(&publication);
        pending.looked(&seen, &Ok(None));
        assert_eq!(pending.due().len(), 1, "a publication put meanwhile stays");
    }
}
