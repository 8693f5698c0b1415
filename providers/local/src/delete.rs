//! Deletes a VM: mark → kill → wait → disks → network devices → directory → address → bridges. The steps after the mark
//! run in the background. If this node dies, the next one continues them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use peerpod_common::backoff::Backoff;
use peerpod_provider_api::{Error, InstanceId, detached};
use tokio::task::JoinHandle;
use tracing::Instrument;

use crate::process::boot_id;
use crate::store::{Machine, VmStatus};
use crate::{Shared, blocking, cgroup, disk, network};

/// Longest time that `delete` waits for the deletion before it answers. Most deletions take some 50 ms, and the caller
/// then finds nothing left.
const COURTESY: Duration = Duration::from_secs(1);
/// Time for the hypervisor process to record the end and exit, before it is killed too.
const FAREWELL: Duration = Duration::from_secs(1);
/// Time after which the wait is logged.
const SLOW: Duration = Duration::from_secs(10);

impl Shared {
    pub(crate) async fn delete(self: Arc<Shared>, id: InstanceId) -> Result<(), Error> {
        let (marking, vm) = (Arc::clone(&self), id.clone());
        if detached(async move { marking.mark(&vm).await }).await? {
            // A timeout is fine: the mark is on disk and the work continues.
            drop(tokio::time::timeout(COURTESY, self.finish_later(id)).await);
        }
        Ok(())
    }

    /// Records that the VM is to be deleted. `false` if there is nothing to delete.
    async fn mark(&self, id: &InstanceId) -> Result<bool, Error> {
        let _turn = self.ids.lock(id).await;
        match self.status(id)? {
            VmStatus::Absent => Ok(false),
            // Without a record there is nothing to mark; the lock excludes a late hypervisor process.
            VmStatus::Deleting(_) | VmStatus::Pending(None) | VmStatus::Unreadable(_) => Ok(true),
            VmStatus::Pending(Some(record)) | VmStatus::Running(record) | VmStatus::Ended(record, _) => {
                let (store, vm) = (self.store.clone(), id.clone());
                let record = crate::VmRecord { deleting: true, ..record };
                let mark = move || store.write(&vm, &record);
                blocking(move || mark().map_err(|error| disk(error).during("mark it as deleted"))).await?;
                Ok(true)
            }
        }
    }

    /// Finishes a deletion in the background.
    pub(crate) fn finish_later(self: Arc<Shared>, id: InstanceId) -> JoinHandle<()> {
        let work = async move {
            let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
            while let Err(error) = self.finish(&id).await {
                let pause = backoff.pause();
                tracing::warn!(instance = %id, "delete of local VM: {error}; tried again in {pause:?}");
                tokio::time::sleep(pause).await;
            }
        };
        // Keeps the log context of the caller.
        tokio::spawn(work.in_current_span())
    }

    async fn finish(self: &Arc<Shared>, id: &InstanceId) -> Result<(), Error> {
        let _turn = self.ids.lock(id).await;
        match self.status(id)? {
            VmStatus::Deleting(_) | VmStatus::Pending(None) | VmStatus::Unreadable(_) => {}
            // Finished by another call, or made again, in which case it must not be deleted.
            _ => return Ok(()),
        }
        let Some(lock) = self.end_processes(id).await? else { return Ok(()) };
        Arc::clone(self).detach_all(id.clone()).await?;
        let vm = id.clone();
        blocking(move || {
            let gone = network::client().and_then(|mut client| {
                let mut links = network::host_links(vm.as_str()).into_iter();
                links.try_for_each(|link| network::remove(&mut client, &link))
            });
            gone.map_err(|error| Error::transient(error.to_string()))?;
            cgroup::remove(vm.as_str()).map_err(|error| disk(error).during("remove its cgroups"))
        })
        .await?;
        self.network.lock().await.retain(|_, owner| owner != id);
        self.remove_bridges_if_unused().await?;
        // Last, because `list_owned` shows the VM by its directory until nothing else is left.
        let (store, vm) = (self.store.clone(), id.clone());
        blocking(move || {
            let removed = store.remove(&vm).map_err(|error| disk(error).during("remove its directory"));
            drop(lock);
            removed
        })
        .await?;
        tracing::debug!(instance = %id, "local VM is gone");
        Ok(())
    }

    /// Kills the VM and waits until none of its processes is left. Returns its lock, so that nothing can start; `None`
    /// if its directory vanished meanwhile.
    async fn end_processes(
        &self,
        id: &InstanceId,
    ) -> Result<Option<nix::fcntl::Flock<std::fs::File>>, Error> {
        let failed = |error| disk(error).during("end its processes");
        let boot = boot_id().map_err(failed)?;
        let start = Instant::now();
        let mut backoff = Backoff::new(Duration::from_millis(2), Duration::from_millis(100));
        let mut said = false;
        loop {
            let machine = self.store.machine(id).map_err(failed)?.filter(|machine| machine.boot == boot);
            let alive = match &machine {
                Some(machine) => end(machine, start.elapsed() > FAREWELL).map_err(failed)?,
                None => false,
            };
            // The holder of the lock may be about to start the VM.
            if !alive && let Some(lock) = self.store.lock(id).map_err(failed)? {
                return Ok(Some(lock));
            }
            if !self.store.dir(id).exists() {
                return Ok(None);
            }
            if !said && start.elapsed() > SLOW {
                said = true;
                tracing::warn!(instance = %id, "delete of local VM: its processes do not end; still waiting");
            }
            tokio::time::sleep(backoff.pause()).await;
        }
    }
}

/// Kills the processes of the VM and returns whether any of them still exists. When pid 1 of a pid namespace is gone,
/// all others in it are gone too.
fn end(machine: &Machine, impatient: bool) -> std::io::Result<bool> {
    let guest = match machine.guest {
        Some(guest) if guest.alive()? => {
            guest.kill()?;
            true
        }
        _ => false,
    };
    let hypervisor = machine.hypervisor.alive()?;
    // Without a pid 1 it is still making the VM; with one it exits by itself after pid 1 is gone.
    if hypervisor && (machine.guest.is_none() || impatient) {
        machine.hypervisor.kill()?;
    }
    Ok(guest || hypervisor)
}
