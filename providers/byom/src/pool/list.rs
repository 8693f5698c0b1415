//! Lists the machines with claims of this owner.

use std::sync::Arc;

use futures_util::{StreamExt, stream};
use peerpod_provider_api::{Error, IdempotencyKey, Owned, OwnedState};
use tokio::time::Instant;

use super::Pool;
use super::known::Seen;
use super::machine::Machine;
use crate::config::MachineAddress;

/// Number of machines that are asked at once.
const AT_ONCE: usize = 32;

/// Lists all VMs of this owner. A machine that does not answer counts with its last answer.
pub(crate) async fn all(pool: &Arc<Pool>) -> Result<Vec<Owned>, Error> {
    look_at_all(pool).await;
    let now = Instant::now();
    let mut owned = Vec::new();
    for machine in &pool.machines {
        if let Some((claim, state)) = vm_of(pool, machine, now)? {
            owned.extend(claim.owned(&machine.address, state));
        }
    }
    Ok(owned)
}

/// Returns the machine with the claim of this key.
pub(crate) async fn find(pool: &Arc<Pool>, key: &IdempotencyKey) -> Result<Option<MachineAddress>, Error> {
    look_at_all(pool).await;
    let now = Instant::now();
    for machine in &pool.machines {
        let vm = vm_of(pool, machine, now)?;
        if vm.is_some_and(|(claim, _)| claim.marks.key.as_ref() == Some(key)) {
            return Ok(Some(machine.address));
        }
    }
    Ok(None)
}

/// Looks at all machines, many at once. One that did not answer a moment ago is left out.
pub(crate) async fn look_at_all(pool: &Arc<Pool>) {
    let (quarantine, now) = (pool.config.quarantine, Instant::now());
    let machines: Vec<Arc<Machine>> = pool.machines.clone();
    let looks = machines
        .into_iter()
        .filter(|machine| machine.known.lock().is_worth_a_look(quarantine, now))
        .map(|machine| {
            let pool = pool.clone();
            // A task of its own: a caller that leaves does not break a look off. A fault is in the machine's memory.
            async move { drop(tokio::spawn(async move { machine.look(&pool).await.is_ok() }).await) }
        });
    stream::iter(looks).buffer_unordered(AT_ONCE).collect::<()>().await;
}

/// Returns the VM of this owner on a machine, as it answered last.
///
/// A machine that does not answer may have a VM that this process does not know. A list without it would make that VM
/// gone, so the list fails, until the machine has been silent for longer than any boot takes.
fn vm_of(
    pool: &Pool,
    machine: &Machine,
    now: Instant,
) -> Result<Option<(super::claim::Claim, OwnedState)>, Error> {
    let known = machine.known.lock();
    if let Seen::Ours(claim, state) = known.seen() {
        return Ok(Some((claim.clone(), *state)));
    }
    let Some(down) = known.down() else { return Ok(None) };
    // Only this process makes claims of its node. Those of a cluster are made by others.
    let is_known = pool.config.creates && *known.seen() != Seen::Never;
    if is_known || down.lasts(now) >= pool.config.list_patience {
        return Ok(None);
    }
    Err(Error::transient(format!(
        "{} may have a VM, and cannot be asked: {}; remove it from provider.byom.machines if it is gone for good",
        machine.address, down.fault
    )))
}
