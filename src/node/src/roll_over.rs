//! Rolls the node's CA over, one step at a time, each when everybody followed the one before.
//!
//! What a step means is with [`crate::trust`]. Here is only when: the first when it is due, each further one when the
//! relay has its new configuration and every sandbox's guest was told of the last step. A guest that cannot be
//! reached therefore holds the roll-over up; nobody is cut off by it.

use std::{
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard},
    time::{Duration, SystemTime},
};

use tokio::sync::watch;
use tracing::{info, warn};

use crate::{
    relay_client::RelayClient,
    sandbox::{Sandboxes, effects::Trusted},
    trust::{Error, Stage, Trust},
};

/// How often it looks whether a step is due.
const EVERY: Duration = Duration::from_millis(500);

/// The CA, and what guests are to know of it. Clones are the same one.
#[derive(Clone)]
pub struct SharedTrust {
    trust: Arc<RwLock<Trust>>,
    told: Arc<watch::Sender<Arc<Trusted>>>,
}

impl SharedTrust {
    /// Shares it.
    pub fn new(trust: Trust) -> SharedTrust {
        let told = Arc::new(watch::Sender::new(Arc::new(trusted(&trust))));
        SharedTrust { trust: Arc::new(RwLock::new(trust)), told }
    }

    /// For a look; not to be held across an await.
    pub fn read(&self) -> RwLockReadGuard<'_, Trust> {
        // A step that panicked left the old CA or the new one, both whole.
        self.trust.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whom guests are to trust.
    pub fn trusted(&self) -> watch::Receiver<Arc<Trusted>> {
        self.told.subscribe()
    }

    /// One step on. Blocks for a write to the disk.
    fn step(&self) -> Result<Stage, Error> {
        let mut trust = self.trust.write().unwrap_or_else(PoisonError::into_inner);
        let stage = trust.roll_over(SystemTime::now())?;
        self.told.send_replace(Arc::new(trusted(&trust)));
        Ok(stage)
    }
}

fn trusted(trust: &Trust) -> Trusted {
    // Names the set and who signs: both change within a roll-over, and a guest must follow each.
    let prints = trust.ca_sha256();
    let short = prints.iter().map(|print| peerpod_link::birth::to_hex(&print[..6])).collect::<Vec<_>>();
    let id = format!("{:?}:{}", trust.stage(), short.join("+")).to_lowercase();
    Trusted { id, cas: trust.trusted_cas().iter().map(|der| der.to_vec()).collect() }
}

/// Looks now and then, for ever. `every`: how often to roll over; `None`: when the CA says that it is time.
pub async fn run(trust: SharedTrust, relay: RelayClient, sandboxes: Sandboxes, every: Option<Duration>) {
    // A node that died in the middle may not have told the relay of the last step.
    let mut relay_knows = trust.read().stage() == Stage::Stable;
    loop {
        tokio::time::sleep(EVERY).await;
        if !relay_knows {
            match relay.configure().await {
                Ok(()) => relay_knows = true,
                Err(error) => {
                    warn!(error = error.text, "the relay does not have its new identity yet");
                    continue;
                }
            }
        }
        if !is_due(&trust, &sandboxes, every) {
            continue;
        }
        let stepping = trust.clone();
        match tokio::task::spawn_blocking(move || stepping.step()).await {
            Ok(Ok(stage)) => {
                info!(?stage, "the node's CA is rolled over by one step");
                relay_knows = false;
            }
            Ok(Err(error)) => warn!(%error, "the node's CA cannot be rolled over; trying again"),
            Err(error) => warn!(%error, "rolling the CA over ended early"),
        }
    }
}

fn is_due(trust: &SharedTrust, sandboxes: &Sandboxes, every: Option<Duration>) -> bool {
    let now = SystemTime::now();
    let (stage, since, due) = {
        let trust = trust.read();
        (trust.stage(), trust.stage_since(), trust.is_roll_over_due(now))
    };
    match stage {
        Stage::Stable => {
            let age = now.duration_since(since).unwrap_or_default();
            (due || every.is_some_and(|every| age >= every)) && all_follow(trust, sandboxes)
        }
        Stage::Announced | Stage::Overlap => all_follow(trust, sandboxes),
    }
}

fn all_follow(trust: &SharedTrust, sandboxes: &Sandboxes) -> bool {
    let id = trust.told.borrow().id.clone();
    sandboxes.views().iter().all(|view| !view.phase.is_live() || view.trust.as_deref() == Some(&id))
}
