//! What a restarted node does before it answers anybody: the stops that were promised for it, then every record of
//! the ledger; and, when the cloud can be asked, the VMs that no record claims.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use peerpod_provider_api::{IdempotencyKey, InstanceId, Owned, OwnedState};
use tokio::time::Instant;
use tracing::{info, warn};

use super::{
    Sandboxes,
    batch::Claimed,
    error::Error,
    phase::{Event, MAX_ATTEMPTS, Phase, next},
};
use crate::{
    ledger::{Batch, Note, Record},
    spec::SandboxId,
};

/// What is found on the disk at the start.
#[derive(Debug, Default)]
pub struct Kept {
    /// Every record that can be read.
    pub records: Vec<Record>,
    /// Every batch that can be read.
    pub batches: Vec<Batch>,
    /// Sandboxes whose record cannot be read, now or since an earlier start.
    pub unread: Vec<SandboxId>,
    /// The inbox.
    pub notes: Vec<Note>,
}

/// Takes every record into the table, with the stops of the inbox carried out first: no sandbox makes one more step
/// towards running after its stop. Returns the notes that are durable now and may be removed.
pub async fn recover(table: &Sandboxes, kept: Kept) -> Vec<Note> {
    let Kept { records, batches, unread, notes } = kept;
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
                warn!(sandbox = %note.id, pod, %error, "a stop that was promised cannot be recorded yet; trying again");
                by_id.extend(record.map(|record| (note.id.clone(), record)));
            }
        }
    }
    // The batches first: a record does not say that its VM is one of theirs until it has it.
    table.0.batches.adopt(batches, &by_id, &unread.into_iter().collect());
    // Those that leave first: one that lives in the same network namespace must know whom to wait for.
    let (live, rest): (Vec<_>, Vec<_>) = by_id.into_values().partition(|record| record.phase.is_live());
    for record in rest.into_iter().chain(live) {
        table.adopt(record);
    }
    done
}

async fn stopped(table: &Sandboxes, id: &SandboxId, record: Option<Record>) -> Result<Record, Error> {
    let fx = &table.0.fx;
    let mut record = match record {
        Some(record) => record,
        None => Record::tombstone(id.clone(), fx.now_ms()),
    };
    let (phase, _) = next(&record.phase, Event::Stop).map_err(|e| Error::Unavailable(e.to_string()))?;
    let known = record.phase != Phase::Gone;
    if known {
        record.cause.get_or_insert_with(|| "StopVM was called while the node was away".into());
        table.0.metrics.stopped("inbox");
    }
    record.phase = phase;
    fx.save(&record).await?;
    info!(sandbox = %id, pod = record.pod_name(), phase = %record.phase, "stopped by the inbox");
    Ok(record)
}

impl Sandboxes {
    /// Every VM that this node made and that has not vanished, as the provider says.
    ///
    /// # Errors
    /// When it cannot be asked.
    pub async fn owned(&self) -> Result<Vec<Owned>, super::effects::CloudError> {
        self.0.fx.owned().await
    }
}

/// Finds VMs of ours that no record claims, and deletes them when they were seen twice, some time apart.
pub struct Orphans {
    suspects: HashMap<InstanceId, Instant>,
    /// Sandboxes whose record cannot be read: their VMs are somebody's.
    protected: Vec<SandboxId>,
    /// Batches whose file cannot be read, the same.
    batches: Vec<String>,
    grace: Duration,
}

impl Orphans {
    /// `protected`: sandboxes in quarantine. `grace`: how long a VM must have been unclaimed.
    pub fn new(protected: Vec<SandboxId>, grace: Duration) -> Orphans {
        Orphans { suspects: HashMap::new(), protected, batches: Vec::new(), grace }
    }

    /// With these batches in quarantine.
    #[must_use]
    pub fn sparing(self, batches: Vec<String>) -> Orphans {
        Orphans { batches, ..self }
    }

    /// Looks now and then, for ever.
    pub async fn run(mut self, table: Sandboxes, every: Duration) {
        loop {
            let pause = match self.pass(&table).await {
                // The second look is soon, so that an orphan of the last crash does not live on for long.
                Ok(_) if !self.suspects.is_empty() => self.grace.min(every),
                Ok(_) => every,
                Err(error) => {
                    warn!(error, "cannot compare the cloud's VMs with the ledger; trying again");
                    every.min(Duration::from_secs(30))
                }
            };
            tokio::time::sleep(pause.max(Duration::from_millis(100))).await;
        }
    }

    /// Looks once. Returns how many VMs were deleted.
    ///
    /// # Errors
    /// When the cloud cannot be asked.
    pub async fn pass(&mut self, table: &Sandboxes) -> Result<usize, String> {
        // The list first: what comes to be claimed meanwhile is claimed.
        let owned = table.0.fx.owned().await.map_err(|error| error.to_string())?;
        let unclaimed = self.unclaimed(&owned, table);
        self.suspects.retain(|id, _| unclaimed.contains(id));
        let mut deleted = 0;
        for id in unclaimed {
            let since = *self.suspects.entry(id.clone()).or_insert_with(Instant::now);
            if since.elapsed() < self.grace {
                continue;
            }
            warn!(vm = %id, "no sandbox claims this VM of ours; deleting it");
            match table.0.fx.delete(&id).await {
                Ok(()) => {
                    deleted += 1;
                    self.suspects.remove(&id);
                    table.0.metrics.orphans.inc();
                }
                Err(error) => warn!(vm = %id, %error, "it could not be deleted; trying again"),
            }
        }
        Ok(deleted)
    }

    fn unclaimed(&self, owned: &[Owned], table: &Sandboxes) -> Vec<InstanceId> {
        let key = |id: &SandboxId, attempt| {
            IdempotencyKey::derive(&table.0.settings.cluster_id, id.as_str(), attempt)
        };
        let mut keys: HashSet<IdempotencyKey> = HashSet::new();
        let mut vms: HashSet<InstanceId> = HashSet::new();
        // One that was stopped since is known again, as a tombstone: then its VM is nobody's.
        let protected: Vec<_> = self.protected.iter().filter(|id| table.view(id).is_none()).collect();
        for id in &protected {
            keys.extend((0..MAX_ATTEMPTS).map(|attempt| key(id, attempt)));
        }
        let mut open = !protected.is_empty() || !self.batches.is_empty();
        keys.extend(self.batches.iter().map(|id| table.0.batches.key(id)));
        for claimed in table.0.batches.claimed() {
            match claimed {
                Claimed::Key(key) => {
                    keys.insert(key);
                    open = true;
                }
                Claimed::Vm(id, vm) => {
                    let gone = table.view(&id).is_some_and(|view| view.borrow().phase == Phase::Gone);
                    vms.extend((!gone).then_some(vm));
                }
            }
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
                // It lost its mark: it may be anybody's whose VM is not known yet.
                None => open,
            };
            vm.state != OwnedState::Deleting && !vms.contains(&vm.id) && !by_key
        });
        unclaimed.map(|vm| vm.id.clone()).collect()
    }
}
