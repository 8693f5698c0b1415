//! Has a machine rebooted, which deletes its VM and frees it.

use peerpod_provider_api::{Error, InstanceId};

use super::Pool;
use super::claim::VmId;

/// Deletes the VM. Returns when the machine has the request for its reboot.
pub(crate) async fn delete(pool: &Pool, id: &InstanceId) -> Result<(), Error> {
    let Some(vm) = VmId::parse(id) else { return Ok(()) };
    let Some(machine) = pool.machine(&vm.machine) else {
        tracing::warn!(%id, "the machine is not in provider.byom.machines; its VM ends with its lease");
        return Ok(());
    };
    let unreachable = |fault| Error::transient(format!("{}: {fault}", vm.machine));
    let mut session = match machine.look(pool).await {
        Ok(session) => session,
        // It has the request already, and reboots.
        Err(_) if machine.known.lock().is_leaving(&vm.boot_id) => return Ok(()),
        Err(fault) => return Err(unreachable(fault)),
    };
    let asks =
        session.ours(&pool.owner).is_some_and(|found| found.claim.boot_id == vm.boot_id && !found.reboots);
    if asks { session.reboot().await.map_err(unreachable) } else { Ok(()) }
}
