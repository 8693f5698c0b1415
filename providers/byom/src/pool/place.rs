//! Chooses a free machine for a request, and keeps it for that for a while.
//!
//! Nodes do not know each other's choices. A rendezvous hash of request and machine spreads their pods, so that two nodes
//! seldom choose the same machine at once. If they do, the machine decides.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use peerpod_provider_api::{CreateRequest, Error, Rejected};
use tokio::time::Instant;

use super::Pool;
use super::claim::Boot;
use super::known::Seen;
use super::machine::{Machine, MachineState};

/// Age up to which a machine that answered as free counts as free.
const FRESH: Duration = Duration::from_secs(3);
/// Age up to which another machine is not asked again. It is asked last, because it may be free by now.
const ASKED: Duration = Duration::from_millis(500);
/// Number of machines that are asked at first, for each one that is not free, and at most at once. Most places need one.
const FIRST: usize = 2;
const MORE: usize = 2;
const MOST: usize = 16;
/// Most machines that an error names for one reason.
const MAX_NAMED: usize = 5;

/// Reason why a machine is not chosen.
struct Reason {
    text: String,
    /// Whether the machine is too small for the request, whatever happens.
    is_final: bool,
}

impl Reason {
    fn now(text: impl Into<String>) -> Reason {
        Reason { text: text.into(), is_final: false }
    }
}

/// Returns a machine that was free a moment ago, and keeps it for `holder`.
pub(crate) async fn choose(
    pool: &Arc<Pool>,
    request: &CreateRequest,
    holder: &str,
) -> Result<Arc<Machine>, Error> {
    let mut rejected: Vec<(Arc<Machine>, Reason)> = Vec::new();
    let now = Instant::now();
    let mut order = Vec::new();
    for machine in &pool.machines {
        match chances(pool, machine, request, holder, now) {
            Ok(class) => order.push((class, rank(holder, machine), machine.clone())),
            Err(reason) => rejected.push((machine.clone(), reason)),
        }
    }
    order.sort_by_key(|(class, rank, _)| (*class, *rank));
    let mut order = order.into_iter().map(|(_, _, machine)| machine);
    let mut asked = FuturesUnordered::new();
    let mut more = FIRST;
    loop {
        for machine in order.by_ref().take(more.min(MOST.saturating_sub(asked.len()))) {
            asked.push(ask_detached(pool, machine, request, holder));
        }
        let Some((machine, answer)) = asked.next().await else { break };
        match answer {
            // Several may be free; the first one is kept.
            Ok(()) if machine.known.lock().hold(holder, Instant::now()) => return Ok(machine),
            Ok(()) => rejected.push((machine, Reason::now(CHOSEN))),
            Err(reason) => rejected.push((machine, reason)),
        }
        more = MORE;
    }
    Err(none_is_free(request, rejected))
}

/// Asks a machine in a task of its own: another one may answer first, and the look is finished then.
async fn ask_detached(
    pool: &Arc<Pool>,
    machine: Arc<Machine>,
    request: &CreateRequest,
    holder: &str,
) -> (Arc<Machine>, Result<(), Reason>) {
    let (pool, request, holder) = (pool.clone(), request.clone(), holder.to_owned());
    let asked = {
        let machine = machine.clone();
        tokio::spawn(async move { ask(&pool, &machine, &request, &holder).await })
    };
    let answer = asked.await;
    (machine, answer.unwrap_or_else(|error| Err(Reason::now(format!("the look broke off: {error}")))))
}

/// Returns how likely a machine is free: 0 is the most likely. An error is the reason why it is not asked.
fn chances(
    pool: &Pool,
    machine: &Machine,
    request: &CreateRequest,
    holder: &str,
    now: Instant,
) -> Result<u8, Reason> {
    let known = machine.known.lock();
    if !known.is_free_for(holder, now) {
        return Err(Reason::now(CHOSEN));
    }
    if let Some(down) = known.down().filter(|_| !known.is_worth_a_place(pool.config.quarantine, now)) {
        return Err(Reason::now(down.fault.to_string()));
    }
    match known.recent(ASKED, now) {
        None | Some(Seen::Free(_)) => {}
        Some(Seen::Resting(why)) => return Err(Reason::now(*why)),
        Some(_) => return Err(Reason::now(TAKEN)),
    }
    match known.seen() {
        _ if known.down().is_some() => Ok(3),
        Seen::Free(boot) => fits(boot, request).map(|()| 0),
        Seen::Never => Ok(1),
        Seen::Resting(_) | Seen::Taken | Seen::Ours(..) => Ok(2),
    }
}

const TAKEN: &str = "it has a pod";
const CHOSEN: &str = "chosen for another pod";

async fn ask(pool: &Pool, machine: &Machine, request: &CreateRequest, holder: &str) -> Result<(), Reason> {
    let now = Instant::now();
    {
        let known = machine.known.lock();
        if !known.is_free_for(holder, now) {
            return Err(Reason::now(CHOSEN));
        }
        if let Some(Seen::Free(boot)) = known.recent(FRESH, now) {
            return fits(boot, request);
        }
    }
    let session = machine.look(pool).await.map_err(|fault| Reason::now(fault.to_string()))?;
    match &session.state {
        MachineState::Free(boot) => fits(boot, request),
        MachineState::Resting(why) => Err(Reason::now(*why)),
        MachineState::Claimed(_) => Err(Reason::now(TAKEN)),
    }
}

fn fits(boot: &Boot, request: &CreateRequest) -> Result<(), Reason> {
    boot.lacks(request).map_or(Ok(()), |text| Err(Reason { text, is_final: true }))
}

fn rank(holder: &str, machine: &Machine) -> u64 {
    let mut hasher = DefaultHasher::new();
    (holder, machine.address).hash(&mut hasher);
    hasher.finish()
}

fn none_is_free(request: &CreateRequest, rejected: Vec<(Arc<Machine>, Reason)>) -> Error {
    let are_final = !rejected.is_empty() && rejected.iter().all(|(_, reason)| reason.is_final);
    let mut by_reason: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (machine, reason) in rejected {
        by_reason.entry(reason.text).or_default().push(machine.address.to_string());
    }
    let named = |machines: &[String]| match machines.len() {
        0..=MAX_NAMED => machines.join(", "),
        count => format!("{count} machines"),
    };
    let mut entries: Vec<Rejected> = by_reason
        .into_iter()
        .map(|(reason, machines)| Rejected { offerings: named(&machines), reason })
        .collect();
    entries.truncate(Error::MAX_REJECTED);
    let told: Vec<String> =
        entries.iter().take(MAX_NAMED).map(|one| format!("{}: {}", one.offerings, one.reason)).collect();
    let told = told.join("; ");
    if are_final {
        return Error::invalid(format!(
            "place {}: no machine of the pool is large enough ({told}); ask for less, or add machines",
            request.name
        ));
    }
    let text = format!("place {}: no machine of the pool is free ({told})", request.name);
    Error::Capacity { offering: "the pool of machines".to_owned(), rejected: entries, text }
}
