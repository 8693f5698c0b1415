//! Ownership by a Lease: whose a thing is now, and a number that grows with each owner.
//!
//! * [`take`], [`renew`], [`release`] and [`remove`] are one compare-and-swap each, for whoever owns something without being
//!   there all the time (a volume that belongs to a VM: without a duration, until it is given back).
//! * [`Election`] keeps a Lease for as long as the process can, and says when it no longer does: several replicas, one
//!   leader.
//!
//! **Fencing.** A holder acts only until a moment of its own clock, counted from *before* it sent the renewal that
//! succeeded; others take a Lease over only when they have themselves seen it unchanged for its whole duration, which is
//! longer. No two clocks are compared. A process that was stopped and goes on finds its moment passed before it does
//! anything else: [`Term::check`] stands before each effect, [`Term::confirm`] (which asks the API server) before those
//! that could do harm late. [`Term::token`] is the Lease's `leaseTransitions`: it grows with each change of hands.
//!
//! An owner that comes back under its own name (a container that is started again in its pod) has its Lease at once, as
//! a new owner with a new token; one of the same name that is not dead after all is pushed out, and notices with its
//! next renewal.

mod election;

use std::time::{Duration, Instant};

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api,
    api::{DeleteParams, ObjectMeta, PostParams, Preconditions},
};

use crate::client::{Error, within};

pub use election::{Election, ElectionConfig, Leader, NotHeld, Standing, Term};

/// Which of the processes of one name holds it.
const INCARNATION: &str = "peerpod.io/incarnation";

/// Who wants to own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The Lease's `holderIdentity`.
    pub identity: String,
    /// Which of those that had this name one after the other; empty where there is only one ever.
    pub incarnation: String,
}

impl Owner {
    /// One of whom there is only one ever: a VM, a pod.
    pub fn only(identity: impl Into<String>) -> Owner {
        Owner { identity: identity.into(), incarnation: String::new() }
    }
}

/// A Lease that is held: what the next [`renew`] or [`release`] compares with.
#[derive(Clone, Debug)]
pub struct Held {
    lease: Lease,
}

impl Held {
    /// `leaseTransitions`: greater than that of each owner before.
    pub fn token(&self) -> i32 {
        spec(&self.lease).lease_transitions.unwrap_or_default()
    }
}

/// What came of [`take`].
#[derive(Debug)]
pub enum Taken {
    /// It is ours.
    Ours(Held),
    /// It is somebody else's.
    Others {
        /// Whose.
        holder: String,
        /// The Lease as it is: seen unchanged for [`lasts`] it may be taken, by [`take_over`].
        seen: Lease,
    },
}

/// How long a Lease is its holder's after a renewal; `None`: until it is given back.
pub fn lasts(lease: &Lease) -> Option<Duration> {
    let seconds = spec(lease).lease_duration_seconds?;
    u64::try_from(seconds).ok().map(Duration::from_secs)
}

/// Whose a Lease is; `None`: nobody's.
pub fn holder(lease: &Lease) -> Option<&str> {
    lease.spec.as_ref()?.holder_identity.as_deref().filter(|holder| !holder.is_empty())
}

/// Whether these are the same Lease with nothing done to it in between.
pub fn unchanged(one: &Lease, other: &Lease) -> bool {
    one.metadata.uid == other.metadata.uid && one.metadata.resource_version == other.metadata.resource_version
}

/// Takes a Lease that is nobody's, or ours under an earlier incarnation; makes it where there is none. `duration`: how
/// long it stays ours without a renewal, in whole seconds; `None`: until it is given back.
///
/// # Errors
/// The API server refused or did not answer. After [`Error::Late`] it may be ours: ask again.
pub async fn take(
    leases: &Api<Lease>,
    name: &str,
    owner: &Owner,
    duration: Option<Duration>,
) -> Result<Taken, Error> {
    loop {
        let found = within(format!("read lease {name}"), leases.get_opt(name)).await?;
        let Some(found) = found else {
            let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
            let mut new = Lease { metadata, spec: None };
            hand_to(&mut new, owner, duration);
            match within(format!("make lease {name}"), leases.create(&PostParams::default(), &new)).await {
                Ok(lease) => return Ok(Taken::Ours(Held { lease })),
                Err(error) if error.is_conflict() => continue,
                Err(error) => return Err(error),
            }
        };
        if holder(&found).is_some_and(|holder| holder != owner.identity) {
            let holder = holder(&found).unwrap_or_default().to_owned();
            return Ok(Taken::Others { holder, seen: found });
        }
        match take_over(leases, &found, owner, duration).await {
            Ok(held) => return Ok(Taken::Ours(held)),
            Err(error) if error.is_conflict() || error.is_not_found() => {}
            Err(error) => return Err(error),
        }
    }
}

/// Takes a Lease exactly as it was seen, whoever holds it. The caller knows that its time is over.
///
/// # Errors
/// A conflict when it is not as it was seen any more; as [`take`].
pub async fn take_over(
    leases: &Api<Lease>,
    seen: &Lease,
    owner: &Owner,
    duration: Option<Duration>,
) -> Result<Held, Error> {
    let mut lease = seen.clone();
    hand_to(&mut lease, owner, duration);
    replace(leases, lease, "take").await
}

/// Says that we still hold it.
///
/// # Errors
/// A conflict when it is not ours any more; as [`take`].
pub async fn renew(leases: &Api<Lease>, held: &Held) -> Result<Held, Error> {
    let mut lease = held.lease.clone();
    lease.spec.get_or_insert_default().renew_time = Some(now());
    match replace(leases, lease, "renew").await {
        // Somebody put a label on it, or an answer was lost: still ours if its holder is.
        Err(error) if error.is_conflict() => {
            let name = name(&held.lease);
            let found = within(format!("read lease {name}"), leases.get(name)).await?;
            if !same_owner(&found, &held.lease) {
                return Err(error);
            }
            let mut lease = found;
            lease.spec.get_or_insert_default().renew_time = Some(now());
            replace(leases, lease, "renew").await
        }
        other => other,
    }
}

/// Gives it back; the object stays, and with it the count of its owners. Not ours any more is fine.
///
/// # Errors
/// As [`take`], but never a conflict.
pub async fn release(leases: &Api<Lease>, held: &Held) -> Result<(), Error> {
    let name = name(&held.lease);
    loop {
        let found = within(format!("read lease {name}"), leases.get_opt(name)).await?;
        let Some(mut lease) = found.filter(|found| same_owner(found, &held.lease)) else { return Ok(()) };
        lease.spec.get_or_insert_default().holder_identity = None;
        match replace(leases, lease, "give back").await {
            Err(error) if error.is_conflict() => {}
            Err(error) if error.is_not_found() => return Ok(()),
            other => return other.map(drop),
        }
    }
}

/// Gives it back and deletes the object, and with it the count of its owners: for a thing of which nothing is to be left
/// and whose owners never compare tokens. It is deleted as it was read, so never another owner's. Not ours any more is fine.
///
/// # Errors
/// As [`take`], but never a conflict.
pub async fn remove(leases: &Api<Lease>, name: &str, identity: &str) -> Result<(), Error> {
    loop {
        let found = within(format!("read lease {name}"), leases.get_opt(name)).await?;
        let Some(lease) = found.filter(|found| holder(found) == Some(identity)) else { return Ok(()) };
        let as_read =
            Preconditions { uid: lease.metadata.uid, resource_version: lease.metadata.resource_version };
        let params = DeleteParams { preconditions: Some(as_read), ..DeleteParams::default() };
        match within(format!("delete lease {name}"), leases.delete(name, &params)).await {
            Err(error) if error.is_conflict() => {}
            Err(error) if error.is_not_found() => return Ok(()),
            other => return other.map(drop),
        }
    }
}

/// By holder, incarnation and count.
fn same_owner(one: &Lease, other: &Lease) -> bool {
    let incarnation = |lease: &Lease| {
        lease
            .metadata
            .annotations
            .as_ref()
            .and_then(|notes| notes.get(INCARNATION))
            .cloned()
            .unwrap_or_default()
    };
    one.metadata.uid == other.metadata.uid
        && holder(one) == holder(other)
        && incarnation(one) == incarnation(other)
        && spec(one).lease_transitions == spec(other).lease_transitions
}

fn hand_to(lease: &mut Lease, owner: &Owner, duration: Option<Duration>) {
    let spec = lease.spec.get_or_insert_default();
    spec.lease_transitions = Some(spec.lease_transitions.map_or(1, |count| count.saturating_add(1)));
    spec.holder_identity = Some(owner.identity.clone());
    spec.lease_duration_seconds =
        duration.map(|duration| i32::try_from(duration.as_secs().max(1)).unwrap_or(i32::MAX));
    spec.acquire_time = Some(now());
    spec.renew_time = Some(now());
    let notes = lease.metadata.annotations.get_or_insert_default();
    if owner.incarnation.is_empty() {
        notes.remove(INCARNATION);
    } else {
        notes.insert(INCARNATION.to_owned(), owner.incarnation.clone());
    }
}

async fn replace(leases: &Api<Lease>, lease: Lease, verb: &str) -> Result<Held, Error> {
    let what = format!("{verb} lease {}", name(&lease));
    // With its resourceVersion in it, this is the compare-and-swap.
    let done = within(what, leases.replace(name(&lease), &PostParams::default(), &lease)).await?;
    Ok(Held { lease: done })
}

fn name(lease: &Lease) -> &str {
    lease.metadata.name.as_deref().unwrap_or_default()
}

fn spec(lease: &Lease) -> LeaseSpec {
    lease.spec.clone().unwrap_or_default()
}

/// For people, and for those who watch it change: nobody compares it with a clock of their own.
fn now() -> MicroTime {
    MicroTime(Timestamp::now())
}

/// Watches a Lease that is somebody else's: when it was seen to change last, by our clock.
#[derive(Debug, Default)]
pub struct Watched {
    last: Option<(Lease, Instant)>,
}

impl Watched {
    /// Takes note of what was read, at this moment. True when it has not changed for all of its duration: it may be taken.
    pub fn expired(&mut self, seen: &Lease, at: Instant) -> bool {
        match &self.last {
            Some((last, since)) if unchanged(last, seen) => {
                lasts(seen).is_some_and(|lasts| at.duration_since(*since) >= lasts)
            }
            _ => {
                self.last = Some((seen.clone(), at));
                false
            }
        }
    }
}

#[cfg(test)]
mod tests;
