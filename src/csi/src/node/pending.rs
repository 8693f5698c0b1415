//! What waits for a VM: a volume that the driver attaches, until the VM is known and then until it is attached; a volume
//! whose target is gone, until its VM is. Looked at often only while something waits.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use peerpod_volume::{descriptor, records::Attached};
use tokio::{sync::Notify, time::sleep};
use tracing::warn;

use super::{Node, disk, publications::Publication};
use crate::grpc::Status;

/// A VM's id is a file that another process writes; a pod's start waits for what follows.
const SOON: Duration = Duration::from_millis(50);
/// A VM takes seconds to go.
const LATER: Duration = Duration::from_millis(500);
/// After a failure.
const AFTER_FAILURE: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub(super) struct Pending {
    all: Mutex<BTreeMap<PathBuf, Publication>>,
    changed: Notify,
}

impl Pending {
    /// A driver's volume is published: its VM is to be found.
    pub(super) fn watch(&self, publication: &Publication) {
        if publication.driver_attached {
            self.put(publication);
        } else {
            self.all().remove(&publication.target);
        }
    }

    /// A target is gone, its VM is not.
    pub(super) fn leave(&self, publication: &Publication) {
        self.put(publication);
    }

    fn put(&self, publication: &Publication) {
        self.all().insert(publication.target.clone(), publication.clone());
        self.changed.notify_one();
    }

    fn all(&self) -> std::sync::MutexGuard<'_, BTreeMap<PathBuf, Publication>> {
        // Each step leaves the map whole.
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Node {
    /// Never ends.
    pub(super) async fn follow(self) {
        self.take_up().await;
        loop {
            let waiting: Vec<Publication> = self.0.pending.all().values().cloned().collect();
            if waiting.is_empty() {
                self.0.pending.changed.notified().await;
                continue;
            }
            let mut pause = LATER;
            for publication in waiting {
                match self.step(&publication).await {
                    Ok(Some(soon)) => pause = pause.min(soon),
                    Ok(None) => {
                        self.0.pending.all().remove(&publication.target);
                    }
                    Err(why) => {
                        warn!(volume = %publication.name, error = %why, "tried again");
                        self.0.metrics.retries.inc();
                        pause = AFTER_FAILURE;
                    }
                }
            }
            tokio::select! {
                () = sleep(pause) => {}
                () = self.0.pending.changed.notified() => {}
            }
        }
    }

    /// What a predecessor left.
    async fn take_up(&self) {
        loop {
            let found = match self.0.driver.name().await {
                Ok(driver) => {
                    self.0.files.all().map(|all| (driver.to_owned(), all)).map_err(|why| why.to_string())
                }
                Err(why) => Err(why.to_string()),
            };
            match found {
                Ok((driver, all)) => {
                    for publication in all.iter().filter(|publication| publication.driver == driver) {
                        if !publication.leaving {
                            self.0.metrics.published.inc();
                        }
                        if publication.leaving || publication.driver_attached {
                            self.0.pending.put(publication);
                        }
                    }
                    return;
                }
                Err(why) => {
                    warn!(error = why, "what was published before is not known yet");
                    sleep(AFTER_FAILURE).await;
                }
            }
        }
    }

    /// One look at what waits: when to look again, none when nothing waits any more.
    async fn step(&self, publication: &Publication) -> Result<Option<Duration>, Status> {
        let _turn = self.0.turns.turn(publication.volume.as_str()).await;
        // Another call may have been faster.
        let now = self.0.files.get(&publication.volume, &publication.target);
        let Some(now) = now.map_err(|why| disk("read what is published", &why))? else { return Ok(None) };
        if now.leaving {
            return Ok(if self.finish(&now).await? { None } else { Some(LATER) });
        }
        if !now.driver_attached {
            return Ok(None);
        }
        self.attach(&now).await
    }

    /// Tells the cluster of the pod's VM, and the node of the attached disk.
    async fn attach(&self, publication: &Publication) -> Result<Option<Duration>, Status> {
        let Some(cluster) = &self.0.cluster else { return Ok(None) };
        let (uid, volume) = (&publication.pod.uid, &publication.volume);
        let read = |why| disk("read the pod's VM", &why);
        let vm = self.0.records.vm(uid).map_err(read)?.filter(|vm| !vm.gone);
        let Some(instance) = vm.and_then(|vm| vm.instance) else { return Ok(Some(SOON)) };
        let known = self.0.records.attached(uid, volume).map_err(read)?;
        if known.is_some_and(|known| known.instance == instance) {
            // The pod's next VM may be another one.
            return Ok(Some(LATER));
        }
        let Some(identity) = cluster.attached(publication, &instance).await? else { return Ok(Some(SOON)) };
        let attached = Attached { version: descriptor::VERSION, instance, identity };
        let done = self.0.records.put_attached(uid, volume, &attached);
        done.map_err(|why| disk("record where the volume is attached", &why))?;
        Ok(Some(LATER))
    }
}
