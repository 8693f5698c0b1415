//! Records ownership in a Lease: the present owner, and a number that grows with each owner.
//!
//! * [`take`] and [`remove`] are one compare-and-swap each, for an owner that does not run all the time. A volume that
//!   belongs to a VM has a Lease without a duration, until it is given back.
//! * [`Election`] holds a Lease for as long as the process can renew it, and reports its loss: several replicas, one
//!   leader.
//!
//! **Fencing.** A holder acts only until a deadline of its own clock, counted from *before* it sent the last successful
//! renewal. Others take a Lease over only after they have themselves seen it unchanged for its whole duration, which is
//! longer. No two clocks are compared. A process that was stopped and continues finds its deadline passed before it
//! does anything else: callers use [`Term::check`] before each effect, and [`Term::confirm`], which asks the API
//! server, before effects that could do harm late. [`Term::token`] is the Lease's `leaseTransitions`, which grows with
//! each change of owner.
//!
//! An owner that returns under its own name (a container restarted in its pod) gets its Lease at once, as a new owner
//! with a new token. If the earlier process of that name still runs, it loses the Lease and notices with its next
//! renewal.

mod election;

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ObjectMeta, PostParams, Preconditions};
use kube::{Api, ResourceExt};

use crate::client::{Error, within};

pub use election::{Election, ElectionConfig, Leader, NotHeld, Standing, Term};

/// Annotation that distinguishes successive processes of one name.
const INCARNATION: &str = "peerpod.io/incarnation";
/// Annotation with the node of an owner; the chart's policy compares it with the node in the caller's token.
const NODE: &str = "peerpod.io/node";

/// Identity that takes a Lease.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseOwner {
    /// The Lease's `holderIdentity`.
    pub identity: String,
    /// Distinguishes successive processes of this name; empty where there is only ever one: a VM, a pod.
    pub incarnation: String,
    /// Node of the owner, if only that node may change the Lease; otherwise empty.
    pub node: String,
}

/// A Lease that is held: the state that the next renewal or release compares with.
#[derive(Clone, Debug)]
pub struct Held {
    lease: Lease,
}

impl Held {
    /// Returns `leaseTransitions`, which is greater than that of each earlier owner.
    pub fn token(&self) -> i32 {
        transitions(&self.lease)
    }
}

/// Result of [`take`].
#[derive(Debug)]
pub enum Taken {
    /// The caller holds the Lease.
    Ours(Held),
    /// Another owner holds the Lease.
    Others {
        /// Identity of that owner.
        holder: String,
        /// The Lease as it was read. It may be taken over once it was seen unchanged for [`lasts`].
        seen: Lease,
    },
}

/// Returns how long a Lease belongs to its holder after a renewal; `None`: until it is given back.
pub fn lasts(lease: &Lease) -> Option<Duration> {
    let seconds = lease.spec.as_ref()?.lease_duration_seconds?;
    u64::try_from(seconds).ok().map(Duration::from_secs)
}

/// Returns the owner of a Lease; `None`: it has no holder, or does not exist.
///
/// # Errors
/// The API server refused or did not answer.
pub async fn owner(leases: &Api<Lease>, name: &str) -> Result<Option<LeaseOwner>, Error> {
    let found = within(format!("read lease {name}"), leases.get_opt(name)).await?;
    Ok(found.as_ref().and_then(owner_of))
}

fn owner_of(lease: &Lease) -> Option<LeaseOwner> {
    let note = |key| lease.annotations().get(key).cloned().unwrap_or_default();
    Some(LeaseOwner { identity: holder(lease)?.to_owned(), incarnation: note(INCARNATION), node: note(NODE) })
}

fn holder(lease: &Lease) -> Option<&str> {
    lease.spec.as_ref()?.holder_identity.as_deref().filter(|holder| !holder.is_empty())
}

/// Takes a Lease that has no holder or that an earlier incarnation of the owner holds; makes it where there is none.
/// `duration` is the time until it lapses without a renewal, in whole seconds; `None`: until it is given back.
///
/// # Errors
/// The API server refused or did not answer. After [`Error::Late`] the Lease may have been taken: call again.
pub async fn take(
    leases: &Api<Lease>,
    name: &str,
    owner: &LeaseOwner,
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

/// Takes a Lease exactly as it was seen, from any holder. The caller has made sure that it has lapsed. Fails with a
/// conflict if the Lease has changed since.
async fn take_over(
    leases: &Api<Lease>,
    seen: &Lease,
    owner: &LeaseOwner,
    duration: Option<Duration>,
) -> Result<Held, Error> {
    let mut lease = seen.clone();
    hand_to(&mut lease, owner, duration);
    replace(leases, lease, "take").await
}

/// Renews a Lease that is held. Fails with a conflict if another owner holds it.
async fn renew(leases: &Api<Lease>, held: &Held) -> Result<Held, Error> {
    let renewed = |mut lease: Lease| {
        lease.spec.get_or_insert_default().renew_time = Some(now());
        replace(leases, lease, "renew")
    };
    match renewed(held.lease.clone()).await {
        // The Lease was modified (a label, for instance), or an earlier answer was lost. It is still held if the owner
        // is the same.
        Err(error) if error.is_conflict() => {
            let name = held.lease.name_any();
            let found = within(format!("read lease {name}"), leases.get(&name)).await?;
            if same_owner(&found, &held.lease) { renewed(found).await } else { Err(error) }
        }
        other => other,
    }
}

/// Gives the Lease back. The object stays, and with it the count of its owners. A Lease that is no longer held is no
/// error.
async fn release(leases: &Api<Lease>, held: &Held) -> Result<(), Error> {
    let name = held.lease.name_any();
    loop {
        let found = within(format!("read lease {name}"), leases.get_opt(&name)).await?;
        let Some(mut lease) = found.filter(|found| same_owner(found, &held.lease)) else { return Ok(()) };
        lease.spec.get_or_insert_default().holder_identity = None;
        match replace(leases, lease, "give back").await {
            Err(error) if error.is_conflict() => {}
            Err(error) if error.is_not_found() => return Ok(()),
            other => return other.map(drop),
        }
    }
}

/// Deletes the Lease, and with it the count of its owners. It serves resources that must leave no object behind and
/// owners that never compare tokens. The deletion names the version that was read, so it never deletes another owner's
/// Lease. A Lease that is no longer held is no error.
///
/// # Errors
/// As [`take`], but never a conflict.
pub async fn remove(leases: &Api<Lease>, name: &str, owner: &LeaseOwner) -> Result<(), Error> {
    loop {
        let found = within(format!("read lease {name}"), leases.get_opt(name)).await?;
        let Some(lease) = found.filter(|found| owner_of(found).as_ref() == Some(owner)) else {
            return Ok(());
        };
        let as_read = Preconditions { uid: lease.uid(), resource_version: lease.resource_version() };
        let params = DeleteParams::default().preconditions(as_read);
        match within(format!("delete lease {name}"), leases.delete(name, &params)).await {
            Err(error) if error.is_conflict() => {}
            Err(error) if error.is_not_found() => return Ok(()),
            other => return other.map(drop),
        }
    }
}

/// Compares owner and count.
fn same_owner(one: &Lease, other: &Lease) -> bool {
    one.uid() == other.uid() && owner_of(one) == owner_of(other) && transitions(one) == transitions(other)
}

fn hand_to(lease: &mut Lease, owner: &LeaseOwner, duration: Option<Duration>) {
    let count = transitions(lease).saturating_add(1);
    let spec = lease.spec.get_or_insert_default();
    spec.lease_transitions = Some(count);
    spec.holder_identity = Some(owner.identity.clone());
    spec.lease_duration_seconds =
        duration.map(|duration| i32::try_from(duration.as_secs().max(1)).unwrap_or(i32::MAX));
    spec.acquire_time = Some(now());
    spec.renew_time = Some(now());
    let notes = lease.metadata.annotations.get_or_insert_default();
    for (key, value) in [(INCARNATION, &owner.incarnation), (NODE, &owner.node)] {
        if value.is_empty() {
            notes.remove(key);
        } else {
            notes.insert(key.to_owned(), value.clone());
        }
    }
}

async fn replace(leases: &Api<Lease>, lease: Lease, verb: &str) -> Result<Held, Error> {
    let name = lease.name_any();
    // The Lease contains its resourceVersion, which makes this the compare-and-swap.
    let post = PostParams::default();
    let done = within(format!("{verb} lease {name}"), leases.replace(&name, &post, &lease)).await?;
    Ok(Held { lease: done })
}

fn transitions(lease: &Lease) -> i32 {
    lease.spec.as_ref().and_then(|spec| spec.lease_transitions).unwrap_or_default()
}

/// The time is written for people, and so that watchers see a change. No process compares it with its own clock.
fn now() -> MicroTime {
    MicroTime(Timestamp::now())
}

/// Watches a Lease of another owner: records, by the local clock, when it was last seen to change.
#[derive(Default)]
struct Watched {
    last: Option<(Lease, Instant)>,
}

impl Watched {
    /// Records the Lease as read at `at`. Returns true when it has not changed for its whole duration and may be taken.
    fn expired(&mut self, seen: &Lease, at: Instant) -> bool {
        match &self.last {
            Some((last, since))
                if last.uid() == seen.uid() && last.resource_version() == seen.resource_version() =>
            {
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
