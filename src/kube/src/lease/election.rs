//! Keeps one Lease for as long as it can.

use std::{
    collections::hash_map::RandomState,
    fmt,
    hash::{BuildHasher, Hasher},
    sync::Arc,
    time::{Duration, Instant},
};

use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use tokio::{
    sync::{Mutex, watch},
    task::AbortHandle,
    time::{sleep, timeout},
};

use super::{Held, Owner, Taken, Watched, release, renew, take, take_over};
use crate::client::Error;

/// For one renewal; the next one begins with a connection that works.
const ONE_TRY: Duration = Duration::from_secs(3);

/// Which Lease, and how fast.
#[derive(Clone, Debug)]
pub struct ElectionConfig {
    /// Where the Lease is.
    pub namespace: String,
    /// The Lease.
    pub name: String,
    /// Who we are: the pod's name. One process at a time has it.
    pub identity: String,
    /// How long others wait after our last renewal; whole seconds.
    pub duration: Duration,
    /// How long we act after our last renewal; shorter than `duration`.
    pub renew_deadline: Duration,
    /// Between renewals, and between looks of those who wait; much shorter than `renew_deadline`.
    pub retry: Duration,
}

/// How it stands with the Lease, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Nothing is known yet.
    Asking,
    /// Somebody else leads.
    Waiting {
        /// Who.
        holder: String,
    },
    /// We lead.
    Leading {
        /// With this token.
        token: i32,
    },
    /// The API server cannot be asked.
    Unreachable {
        /// Why.
        why: String,
    },
}

/// The Lease is not ours (any more): nothing may be done in its name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the lease is not held any more (token {token})")]
pub struct NotHeld {
    /// Of the term that is over.
    pub token: i32,
}

/// Takes part in one election.
pub struct Election {
    leases: Api<Lease>,
    config: ElectionConfig,
    owner: Owner,
    standing: watch::Sender<Standing>,
}

impl fmt::Debug for Election {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Election").field("config", &self.config).field("owner", &self.owner).finish()
    }
}

/// We lead until this is dropped, or [`Term::lost`].
#[derive(Debug)]
pub struct Leader {
    term: Term,
    renewals: AbortHandle,
}

/// One time of leading. Clones are the same term.
#[derive(Clone)]
pub struct Term {
    shared: Arc<Shared>,
}

struct Shared {
    leases: Api<Lease>,
    token: i32,
    renew_deadline: Duration,
    held: Mutex<Held>,
    /// `None`: over.
    until: watch::Sender<Option<Instant>>,
}

impl fmt::Debug for Term {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Term").field("token", &self.shared.token).finish_non_exhaustive()
    }
}

impl Election {
    /// Nothing is asked yet.
    pub fn new(client: Client, config: ElectionConfig) -> Election {
        // Fresh keys of a hasher are the standard library's source of chance.
        let chance = RandomState::new().build_hasher().finish();
        let owner = Owner {
            identity: config.identity.clone(),
            incarnation: format!("{}-{chance:016x}", std::process::id()),
        };
        let leases = Api::namespaced(client, &config.namespace);
        Election { leases, config, owner, standing: watch::Sender::new(Standing::Asking) }
    }

    /// How it stands, now and later.
    pub fn standing(&self) -> watch::Receiver<Standing> {
        self.standing.subscribe()
    }

    /// Waits until the Lease is ours, however long: an API server that is away is waited for.
    pub async fn lead(&self) -> Leader {
        let mut watched = Watched::default();
        loop {
            // Counted from before it was asked: so we end before others may begin.
            let asked = Instant::now();
            match self.attempt(&mut watched).await {
                Ok(Some(held)) => return self.begin(held, asked),
                Ok(None) => {}
                Err(error) => {
                    self.stands(Standing::Unreachable { why: error.to_string() });
                }
            }
            sleep(self.config.retry).await;
        }
    }

    /// Only news is told.
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
                // By the moment after the answer: the Lease was as we saw it at that time at the latest.
                if !watched.expired(&seen, Instant::now()) {
                    return Ok(None);
                }
                match take_over(&self.leases, &seen, &self.owner, duration).await {
                    Ok(held) => Ok(Some(held)),
                    // Somebody was first.
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
        self.standing.send_replace(Standing::Leading { token });
        let (kept, retry, standing) = (term.clone(), self.config.retry, self.standing.clone());
        let renewals = tokio::spawn(async move {
            let why = kept.keep(retry).await;
            standing.send_replace(Standing::Unreachable { why });
        });
        Leader { term, renewals: renewals.abort_handle() }
    }
}

impl Leader {
    /// What to check before each effect.
    pub fn term(&self) -> &Term {
        &self.term
    }

    /// Ends the term and gives the Lease back, so that another need not wait. Call it when nothing is under way.
    ///
    /// # Errors
    /// The API server could not be told; the Lease ends by itself.
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
    /// Greater than that of each leader before us.
    pub fn token(&self) -> i32 {
        self.shared.token
    }

    /// Whether we may act at this moment. Cheap; call it right before each effect.
    ///
    /// # Errors
    /// We may not.
    pub fn check(&self) -> Result<(), NotHeld> {
        let until = *self.shared.until.borrow();
        match until {
            Some(until) if Instant::now() < until => Ok(()),
            _ => Err(NotHeld { token: self.shared.token }),
        }
    }

    /// The same by the API server's word: renews the Lease now. For effects that would do harm if another led already.
    ///
    /// # Errors
    /// We may not act, or could not make sure in time.
    pub async fn confirm(&self) -> Result<(), NotHeld> {
        self.check()?;
        // Whatever keeps the server from answering: without its word we do not act.
        match self.renew().await {
            Ok(()) => self.check(),
            Err(_) => Err(NotHeld { token: self.shared.token }),
        }
    }

    /// Returns when the term is over, at once if it is.
    pub async fn lost(&self) {
        let mut until = self.shared.until.subscribe();
        loop {
            let Some(at) = *until.borrow_and_update() else { return };
            tokio::select! {
                () = tokio::time::sleep_until(at.into()) => {
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
        // Never longer than it was: a term that has ended stays ended.
        self.shared.until.send_if_modified(|until| match until {
            Some(at) if Instant::now() < *at => {
                *until = Some(asked + self.shared.renew_deadline);
                true
            }
            _ => {
                *until = None;
                true
            }
        });
        Ok(())
    }

    /// Renews until it cannot; says why.
    async fn keep(&self, retry: Duration) -> String {
        let mut why = "the process was stopped for longer than the lease".to_owned();
        loop {
            sleep(retry).await;
            let Some(until) = *self.shared.until.borrow() else { return why };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            // A connection that hangs leaves time for another.
            match timeout(left.min(retry.max(ONE_TRY)), self.renew()).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) if error.is_conflict() || error.is_not_found() => {
                    why = format!("somebody else has taken the lease: {error}");
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
