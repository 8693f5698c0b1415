//! Takes part in the election for one Lease and renews it for as long as it can.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use tokio::sync::{Mutex, watch};
use tokio::task::AbortHandle;
use tokio::time::{sleep, sleep_until, timeout};

use super::{Held, LeaseOwner, Taken, Watched, release, renew, take, take_over};
use crate::client::Error;

/// Limit of one renewal. The next renewal uses a new connection.
const ONE_TRY: Duration = Duration::from_secs(3);

/// Lease of an election, and its times.
#[derive(Clone, Debug)]
pub struct ElectionConfig {
    /// Name of the Lease.
    pub name: String,
    /// Identity of this candidate: the pod's name, which one process at a time has.
    pub identity: String,
    /// How long other candidates wait after the leader's last renewal; whole seconds.
    pub duration: Duration,
    /// How long the leader acts after its last renewal; shorter than `duration`.
    pub renew_deadline: Duration,
    /// Time between renewals, and between the reads of a waiting candidate; much shorter than `renew_deadline`.
    pub retry: Duration,
}

/// State of the election, for display.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// No answer yet.
    Asking,
    /// Another process leads.
    Waiting {
        /// Identity of the leader.
        holder: String,
    },
    /// This process leads.
    Leading,
    /// The API server cannot be reached.
    Unreachable {
        /// The cause.
        why: String,
    },
}

/// The Lease is not held (any more): the process must not act in its name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the lease is not held any more (token {token})")]
pub struct NotHeld {
    /// Token of the term that is over.
    pub token: i32,
}

/// One candidate of an election.
pub struct Election {
    leases: Api<Lease>,
    config: ElectionConfig,
    owner: LeaseOwner,
    standing: watch::Sender<Standing>,
}

/// Leadership, which lasts until this is dropped or [`Term::lost`] returns.
pub struct Leader {
    term: Term,
    renewals: AbortHandle,
}

/// One period of leadership. Clones share the term.
#[derive(Clone)]
pub struct Term {
    shared: Arc<Shared>,
}

struct Shared {
    leases: Api<Lease>,
    token: i32,
    renew_deadline: Duration,
    held: Mutex<Held>,
    /// `None`: the term is over.
    until: watch::Sender<Option<Instant>>,
}

impl Election {
    /// Makes a candidate for one of these Leases. Sends no request.
    pub fn new(leases: Api<Lease>, config: ElectionConfig) -> Election {
        // The standard library has no random source but the fresh keys of a hasher.
        let chance = RandomState::new().build_hasher().finish();
        let owner = LeaseOwner {
            identity: config.identity.clone(),
            incarnation: format!("{}-{chance:016x}", std::process::id()),
            node: String::new(),
        };
        Election { leases, config, owner, standing: watch::Sender::new(Standing::Asking) }
    }

    /// Returns the state of the election and its changes.
    pub fn standing(&self) -> watch::Receiver<Standing> {
        self.standing.subscribe()
    }

    /// Waits until this process holds the Lease, without a time limit. Errors of the API server are retried.
    pub async fn lead(&self) -> Leader {
        let mut watched = Watched::default();
        loop {
            // Counted from before the request, so that this term ends before another candidate may begin one.
            let asked = Instant::now();
            match self.attempt(&mut watched).await {
                Ok(Some(held)) => return self.begin(held, asked),
                Ok(None) => {}
                Err(error) => self.stands(Standing::Unreachable { why: error.to_string() }),
            }
            sleep(self.config.retry).await;
        }
    }

    /// Publishes only changes.
    fn stands(&self, now: Standing) {
        self.standing.send_if_modified(|before| {
            let news = *before != now;
            *before = now;
            news
        });
    }

    async fn attempt(&self, watched: &mut Watched) -> Result<Option<Held>, Error> {
        let duration = Some(self.config.duration);
        match take(&self.leases, &self.config.name, &self.owner, duration).await? {
            Taken::Ours(held) => Ok(Some(held)),
            Taken::Others { holder, seen } => {
                self.stands(Standing::Waiting { holder });
                // Uses the time after the answer: the Lease was in this state at that time at the latest.
                if !watched.expired(&seen, Instant::now()) {
                    return Ok(None);
                }
                match take_over(&self.leases, &seen, &self.owner, duration).await {
                    Ok(held) => Ok(Some(held)),
                    // Another candidate was first.
                    Err(error) if error.is_conflict() || error.is_not_found() => Ok(None),
                    Err(error) => Err(error),
                }
            }
        }
    }

    fn begin(&self, held: Held, asked: Instant) -> Leader {
        let token = held.token();
        let shared = Shared {
            leases: self.leases.clone(),
            token,
            renew_deadline: self.config.renew_deadline,
            held: Mutex::new(held),
            until: watch::Sender::new(Some(asked + self.config.renew_deadline)),
        };
        let term = Term { shared: Arc::new(shared) };
        self.standing.send_replace(Standing::Leading);
        let (kept, retry, standing) = (term.clone(), self.config.retry, self.standing.clone());
        let renewals = tokio::spawn(async move {
            let why = kept.keep(retry).await;
            standing.send_replace(Standing::Unreachable { why });
        });
        Leader { term, renewals: renewals.abort_handle() }
    }
}

impl Leader {
    /// Returns the term, to be checked before each effect.
    pub fn term(&self) -> &Term {
        &self.term
    }

    /// Ends the term and gives the Lease back, so that another candidate need not wait. Call it when no effect is in
    /// flight.
    ///
    /// # Errors
    /// The API server could not be reached; the Lease lapses by itself.
    pub async fn resign(self) -> Result<(), Error> {
        self.renewals.abort();
        self.term.end();
        let held = self.term.shared.held.lock().await;
        release(&self.term.shared.leases, &held).await
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        self.renewals.abort();
        self.term.end();
    }
}

impl Term {
    /// Returns the token, which is greater than that of each earlier leader.
    pub fn token(&self) -> i32 {
        self.shared.token
    }

    /// Returns whether this process may act at this moment. It is cheap; call it right before each effect.
    ///
    /// # Errors
    /// The term is over.
    pub fn check(&self) -> Result<(), NotHeld> {
        let holds = self.shared.until.borrow().is_some_and(|until| Instant::now() < until);
        if holds { Ok(()) } else { Err(NotHeld { token: self.shared.token }) }
    }

    /// As [`Term::check`], but confirmed by the API server with a renewal. For effects that would do harm if another
    /// process led already.
    ///
    /// # Errors
    /// The term is over, or the API server did not confirm it in time.
    pub async fn confirm(&self) -> Result<(), NotHeld> {
        self.check()?;
        // Any failure counts: without a confirmation the process does not act.
        self.renew().await.map_err(|_| NotHeld { token: self.shared.token })?;
        self.check()
    }

    /// Returns when the term is over, or at once if it is.
    pub async fn lost(&self) {
        let mut until = self.shared.until.subscribe();
        loop {
            let Some(at) = *until.borrow_and_update() else { return };
            tokio::select! {
                () = sleep_until(at.into()) => {
                    if self.check().is_err() {
                        return;
                    }
                }
                changed = until.changed() => if changed.is_err() { return },
            }
        }
    }

    fn end(&self) {
        self.shared.until.send_replace(None);
    }

    async fn renew(&self) -> Result<(), Error> {
        let mut held = self.shared.held.lock().await;
        let asked = Instant::now();
        let renewed = renew(&self.shared.leases, &held).await?;
        *held = renewed;
        // Never revives a term: one that has ended stays ended.
        self.shared.until.send_modify(|until| {
            *until = until.filter(|at| Instant::now() < *at).map(|_| asked + self.shared.renew_deadline);
        });
        Ok(())
    }

    /// Renews until that is no longer possible; returns the reason.
    async fn keep(&self, retry: Duration) -> String {
        let mut why = "the process was stopped for longer than the lease".to_owned();
        loop {
            sleep(retry).await;
            let Some(until) = *self.shared.until.borrow() else { return why };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            // Limited, so that one hung connection leaves time for another.
            match timeout(left.min(retry.max(ONE_TRY)), self.renew()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) if error.is_conflict() || error.is_not_found() => {
                    why = format!("another holder has taken the lease: {error}");
                    break;
                }
                Ok(Err(error)) => why = error.to_string(),
                Err(_) => {
                    why = "the lease could not be renewed in time: the API server does not answer".to_owned();
                }
            }
        }
        self.end();
        why
    }
}
