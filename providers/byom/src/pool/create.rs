//! Claims a machine for a pod and delivers the user-data: one pod per boot of a machine, one machine per key.
//!
//! Each step may be the last one of this process. A claim without user-data runs no pod, and its machine frees itself
//! after the first lease. The same call finds the claim, whatever a crash left, and goes on. A machine that fails before
//! user-data were sent is given up: it cannot run the pod any more, because user-data never follow.

use std::sync::Arc;

use peerpod_provider_api::{Chosen, CreateRequest, Created, Error, IdempotencyKey};
use tokio::time::Instant;

use super::claim::{Claim, VmId};
use super::fault::Fault;
use super::known::Step;
use super::machine::{Claimed, Machine, MachineState, Session};
use super::place;
use super::{Pool, list};
use crate::config::MachineAddress;

/// Reason why an attempt made no VM.
enum Failure {
    /// A fault of the machine.
    Fault(Fault),
    /// The machine answered and has no user-data, and cannot take them.
    Unfit(Fault),
    /// The machine is not free; nothing was made.
    Taken(&'static str),
    /// Any other error.
    Error(Error),
}

/// Returns the meaning of a fault after the machine has shown that it has no user-data.
fn after_look(fault: Fault) -> Failure {
    match fault {
        Fault::Refused(_) => Failure::Unfit(fault),
        fault => Failure::Fault(fault),
    }
}

/// Makes the VM on the machine of the request's placement.
pub(crate) async fn create(
    pool: &Arc<Pool>,
    request: &CreateRequest,
    key: &IdempotencyKey,
) -> Result<Created, Error> {
    let Some(placement) = &request.placement else { return unplaced(pool, request, key).await };
    let Some(address) = MachineAddress::parse(placement.as_str()) else {
        let text = "its placement is no machine; another provider chose it, so create the pod again";
        return Err(Error::invalid(text));
    };
    let Some(machine) = pool.machine(&address) else {
        let text = format!("{address} is no longer in provider.byom.machines");
        return Err(Error::capacity(address.to_string(), text));
    };
    let holder = holder_of(request);
    attempt(pool, machine, request, key, &holder).await
}

/// Returns the text by which a machine is kept for a request: that of the call that chooses, which has no placement yet.
pub(crate) fn holder_of(request: &CreateRequest) -> String {
    CreateRequest { placement: None, ..request.clone() }.digest()
}

/// Makes the VM on any machine. Such a call is not safe to repeat after a crash; within a process it is.
async fn unplaced(pool: &Arc<Pool>, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
    let _turn = pool.turns.lock(key).await;
    let made = list::find(pool, key).await?;
    let machine = match made.and_then(|address| pool.machine(&address).cloned()) {
        Some(machine) => machine,
        None => place::choose(pool, request, key.as_str()).await?,
    };
    attempt(pool, &machine, request, key, key.as_str()).await
}

async fn attempt(
    pool: &Pool,
    machine: &Machine,
    request: &CreateRequest,
    key: &IdempotencyKey,
    holder: &str,
) -> Result<Created, Error> {
    let address = machine.address;
    let capacity = |why: &str| Error::capacity(address.to_string(), format!("{address}: {why}"));
    let failure = match run(pool, machine, request, key, holder).await {
        Ok(created) => {
            machine.known.lock().release(holder);
            return Ok(created);
        }
        Err(failure) => failure,
    };
    let mut known = machine.known.lock();
    match failure {
        Failure::Error(error) => Err(error),
        Failure::Taken(why) => {
            known.release(holder);
            Err(capacity(why))
        }
        Failure::Unfit(fault) => {
            known.abandon(key);
            known.release(holder);
            Err(capacity(&fault.to_string()))
        }
        Failure::Fault(fault) => match known.step_of(holder) {
            Some(step) if step < Step::Delivering => {
                if step == Step::Claiming {
                    known.abandon(key);
                }
                known.release(holder);
                Err(capacity(&fault.to_string()))
            }
            _ => Err(Error::transient(format!("{address}: {fault}"))),
        },
    }
}

async fn run(
    pool: &Pool,
    machine: &Machine,
    request: &CreateRequest,
    key: &IdempotencyKey,
    holder: &str,
) -> Result<Created, Failure> {
    machine.known.lock().step(holder, Step::Chosen, Instant::now());
    let mut session = machine.look(pool).await.map_err(Failure::Fault)?;
    let claimed = claimed(pool, &mut session, request, key, holder).await?;
    if !claimed.has_user_data {
        session.deliver(&request.user_data, holder).await.map_err(after_look)?;
    }
    let id = VmId { machine: machine.address, boot_id: claimed.claim.boot_id };
    Ok(Created {
        id: id.id().map_err(Failure::Error)?,
        addresses: vec![machine.address.socket().ip()],
        chosen: Chosen::default(),
        disks: Vec::new(),
    })
}

/// Returns the claim of this call, made now or earlier.
async fn claimed(
    pool: &Pool,
    session: &mut Session<'_>,
    request: &CreateRequest,
    key: &IdempotencyKey,
    holder: &str,
) -> Result<Claimed, Failure> {
    let claimed = match &session.state {
        MachineState::Claimed(claimed) => claimed.clone(),
        MachineState::Resting(why) => return Err(Failure::Taken(why)),
        MachineState::Free(boot) => {
            let claim = Claim::new(request, key, &pool.owner, boot);
            session.claim(&claim, holder).await.map_err(after_look)?
        }
    };
    let marks = &claimed.claim.marks;
    if !marks.are_of(&pool.owner) || marks.key.as_ref() != Some(key) {
        return Err(Failure::Taken("another pod has claimed it"));
    }
    if marks.digest.as_deref() != Some(request.digest().as_str()) {
        let text = "its key had another request; this is a mistake of the caller, report it";
        return Err(Failure::Error(Error::key_reused(text)));
    }
    if claimed.reboots {
        return Err(Failure::Error(Error::transient("the VM of this key is being deleted; try again later")));
    }
    Ok(claimed)
}
