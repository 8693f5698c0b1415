//! Restores a restarted node's state before any call: the stops that the relay promised, then the ledger's records.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use peerpod_provider_api::{IdempotencyKey, InstanceId, Owned, OwnedState};
use tokio::time::Instant;
use tracing::{error, info, warn};

use crate::cluster::Recorded;
use crate::ledger::{Batch, Note, Record};
use crate::sandbox::Sandboxes;
use crate::sandbox::error::Error;
use crate::sandbox::lifecycle::{MAX_ATTEMPTS, Phase, PhaseEvent, Stop, next};
use crate::sandbox::ports::PodEvent;
use crate::spec::SandboxId;

/// Contents of the state directory at the start.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    pub records: Vec<Record>,
    pub batches: Vec<Batch>,
    /// Sandboxes with an unreadable record, found now or at an earlier start.
    pub unread: Vec<SandboxId>,
    pub unread_batches: Vec<String>,
    pub notes: Vec<Note>,
    pub quarantined: usize,
}

impl Kept {
    /// Whether a VM of this node may exist, as far as the state directory shows.
    pub(crate) fn may_have_vms(&self) -> bool {
        let unread = !self.unread.is_empty() || !self.unread_batches.is_empty();
        unread || !self.batches.is_empty() || self.records.iter().any(|record| record.phase != Phase::Gone)
    }
}

/// Adds every record to the table, after it has applied the inbox's stops: no sandbox makes a further step towards
/// running after its stop. Returns the notes that are durable now and may be removed.
pub(crate) async fn recover(table: &Sandboxes, kept: Kept) -> Vec<Note> {
    let Kept { records, batches, unread, notes, .. } = kept;
    let mut by_id: HashMap<SandboxId, Record> =
        records.into_iter().map(|record| (record.id.clone(), record)).collect();
    let mut done = Vec::new();
    for note in notes {
        let record = by_id.remove(&note.id);
        match stopped(table, &note.id, record.clone()).await {
            Ok(record) => {
                by_id.insert(note.id.clone(), record);
                done.push(note);
            }
            Err(error) => {
                let pod = record.as_ref().map_or_else(|| "-".to_owned(), Record::pod_name);
                warn!(sandbox = %note.id, pod, %error, "cannot record an acknowledged stop yet; trying again");
                by_id.extend(record.map(|record| (note.id.clone(), record)));
            }
        }
    }
    // Batches first: the record of a member does not name the batch until it has its VM.
    table.0.batches.adopt(batches, &by_id, &unread.into_iter().collect());
    // Leaving sandboxes first: a live one in the same network namespace waits for them.
    let (live, rest): (Vec<_>, Vec<_>) = by_id.into_values().partition(|record| record.phase.is_live());
    for record in rest.into_iter().chain(live) {
        table.adopt(&mut table.state(), record);
    }
    done
}

async fn stopped(table: &Sandboxes, id: &SandboxId, record: Option<Record>) -> Result<Record, Error> {
    let ports = &table.0.ports;
    let mut record = record.unwrap_or_else(|| Record::tombstone(id.clone(), ports.clock.now_ms()));
    let phase = next(&record.phase, PhaseEvent::Stop).map_err(|e| Error::Unavailable(e.to_string()))?;
    if record.phase != Phase::Gone {
        record.end.cause.get_or_insert_with(|| Stop::Inbox.sentence().into());
        table.0.metrics.sandboxes.stops.count(Stop::Inbox.reason());
    }
    record.phase = phase;
    ports.store.save(&record).await?;
    info!(sandbox = %id, pod = record.pod_name(), phase = %record.phase, "stopped by a note in the inbox");
    Ok(record)
}

/// Deletes VMs of this node that no record claims, after two passes, some time apart, have found them. A VM that a
/// PeerPod of an unknown sandbox names is only reported: the ledger was lost, and a pod may run in the VM. It is deleted
/// after the stop of that sandbox, which leaves a tombstone.
pub(crate) struct Orphans {
    suspects: HashMap<InstanceId, Instant>,
    /// VMs that have been reported.
    reported: HashSet<InstanceId>,
    /// Sandboxes with an unreadable record: their VMs may be in use.
    protected: Vec<SandboxId>,
    /// Batches with an unreadable file: their VMs may be in use, too.
    batches: Vec<String>,
    grace: Duration,
}

impl Orphans {
    /// Spares the VMs of `protected` sandboxes and of `batches`, and those that were unclaimed for less than `grace`.
    pub(crate) fn new(protected: Vec<SandboxId>, batches: Vec<String>, grace: Duration) -> Orphans {
        Orphans { suspects: HashMap::new(), reported: HashSet::new(), protected, batches, grace }
    }

    /// Runs a pass at every interval, forever.
    pub(crate) async fn run(mut self, table: Sandboxes, every: Duration) {
        loop {
            let pause = match self.pass(&table).await {
                // The second pass follows soon, so that an orphan of the last crash does not exist for long.
                Ok(_) if self.suspects.keys().any(|id| !self.reported.contains(id)) => self.grace.min(every),
                Ok(_) => every,
                Err(error) => {
                    warn!(error, "cannot compare the cloud's VMs with the ledger; trying again");
                    every.min(Duration::from_secs(30))
                }
            };
            tokio::time::sleep(pause.max(Duration::from_millis(100))).await;
        }
    }

    /// Runs one pass. Returns the number of deleted VMs.
    pub(crate) async fn pass(&mut self, table: &Sandboxes) -> Result<usize, String> {
        // The list is fetched first, so that a VM that is claimed meanwhile counts as claimed.
        let owned = table.0.ports.cloud.owned().await.map_err(|error| error.to_string())?;
        let mut unclaimed = self.unclaimed(&owned, table);
        // No pod runs in these, so that they are deleted even while the API server is away.
        unclaimed.sort_by_key(|vm| vm.state != OwnedState::Ended);
        self.suspects.retain(|id, _| unclaimed.iter().any(|vm| vm.id == *id));
        self.reported.retain(|id| unclaimed.iter().any(|vm| vm.id == *id));
        let (mut deleted, mut unknown) = (0, None::<Vec<Recorded>>);
        for vm in unclaimed {
            let id = &vm.id;
            let since = *self.suspects.entry(id.clone()).or_insert_with(Instant::now);
            if since.elapsed() < self.grace {
                continue;
            }
            if vm.state != OwnedState::Ended && unknown.is_none() {
                unknown = Some(unknown_peerpods(table).await?);
            }
            let mut named = unknown.iter().flatten().filter(|_| vm.state != OwnedState::Ended);
            if let Some(peerpod) = named.find(|one| one.may_have(vm, &table.0.settings.cluster_id)) {
                self.report(table, id, peerpod);
                continue;
            }
            warn!(vm = %id, "no sandbox owns this VM of the node; deleting it");
            match table.0.ports.cloud.delete(id).await {
                Ok(()) => {
                    deleted += 1;
                    self.suspects.remove(id);
                    table.0.metrics.sandboxes.orphans.inc();
                }
                Err(error) => warn!(vm = %id, %error, "cannot delete the VM; trying again"),
            }
        }
        Ok(deleted)
    }

    fn report(&mut self, table: &Sandboxes, vm: &InstanceId, peerpod: &Recorded) {
        if !self.reported.insert(vm.clone()) {
            return;
        }
        let Recorded { namespace, name, sandbox, pod, .. } = peerpod;
        let text = format!(
            "PeerPod {namespace}/{name} names VM {vm}, and this node's ledger has no record of its sandbox: the VM is kept \
             without a node that manages it; delete the pod, and the VM is deleted with it"
        );
        error!(%vm, sandbox, "{text}");
        if let Some(pod) = pod {
            table.0.ports.kubernetes.tell(pod, PodEvent::warning("RecordLost", text));
        }
    }

    /// Returns those of the provider's VMs that no sandbox, no batch and no unreadable record claims.
    pub(crate) fn unclaimed<'o>(&self, owned: &'o [Owned], table: &Sandboxes) -> Vec<&'o Owned> {
        let key = |id: &SandboxId, attempt| {
            IdempotencyKey::derive(&table.0.settings.cluster_id, id.as_str(), attempt)
        };
        let (open_batches, made) = table.0.batches.claimed();
        let is_gone = |id: &SandboxId| table.view(id).is_some_and(|view| view.borrow().phase == Phase::Gone);
        let made = made.into_iter().filter(|(id, _)| !is_gone(id));
        let mut vms: HashSet<InstanceId> = made.map(|(_, vm)| vm).collect();
        // A sandbox that was stopped since is known as a tombstone; its VM has no owner any more.
        let protected: Vec<_> = self.protected.iter().filter(|id| table.view(id).is_none()).collect();
        let mut open = !protected.is_empty() || !self.batches.is_empty() || !open_batches.is_empty();
        let mut keys: HashSet<IdempotencyKey> = open_batches.into_iter().collect();
        keys.extend(self.batches.iter().map(|id| table.0.batches.key(id)));
        for id in protected {
            keys.extend((0..MAX_ATTEMPTS).map(|attempt| key(id, attempt)));
        }
        for view in table.views() {
            vms.extend(view.vm().cloned());
            if let Phase::Booting { attempt } | Phase::Unwanted { attempt } = view.phase {
                keys.insert(key(&view.id, attempt));
                open = true;
            }
        }
        let unclaimed = owned.iter().filter(|vm| {
            let by_key = match &vm.key {
                Some(key) => keys.contains(key),
                // The VM has lost its key: it may belong to any sandbox without a known VM.
                None => open,
            };
            vm.state != OwnedState::Deleting && !vms.contains(&vm.id) && !by_key
        });
        unclaimed.collect()
    }
}

/// Returns the PeerPods of this node with a sandbox that the table does not know, not even as a tombstone, and that a
/// pod may still need. A pod with another sandbox in the table needs no earlier one.
async fn unknown_peerpods(table: &Sandboxes) -> Result<Vec<Recorded>, String> {
    let mut peerpods = table.0.ports.kubernetes.recorded().await?;
    let views = table.views();
    let pods: HashSet<&str> =
        views.iter().filter(|view| view.phase.is_live()).filter_map(|view| view.pod_uid.as_deref()).collect();
    peerpods.retain(|one| {
        let is_unknown = one.sandbox.parse::<SandboxId>().map_or(true, |id| table.view(&id).is_none());
        let uid = one.pod.as_ref().and_then(|pod| pod.uid.as_deref());
        is_unknown && !one.is_over && !uid.is_some_and(|uid| pods.contains(uid))
    });
    Ok(peerpods)
}
