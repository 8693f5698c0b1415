//! Rolls the node's CA over, one step at a time, each when everybody followed the one before.
//!
//! What a step means is with [`crate::trust`]. Here is only when: the first when it is due, each further one when the
//! relay has its new configuration and every sandbox's guest was told of the last step. A guest that cannot be
//! reached therefore holds the roll-over up, so that nobody is cut off by it; but not for ever, because a CA that cannot
//! be replaced is worse for all others. After `node.ca-follow-timeout` a step goes on without those who do not follow.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use parking_lot::{RwLock, RwLockReadGuard};
use tokio::sync::watch;
use tracing::{error, info, warn};

use crate::{
    relay_client::RelayClient,
    sandbox::{Sandboxes, View, effects::Trusted},
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
        self.trust.read()
    }

    /// Whom guests are to trust.
    pub fn trusted(&self) -> watch::Receiver<Arc<Trusted>> {
        self.told.subscribe()
    }

    /// One step on. Blocks for a write to the disk.
    pub(crate) fn step(&self) -> Result<Stage, Error> {
        let mut trust = self.trust.write();
        let stage = trust.roll_over(SystemTime::now())?;
        self.told.send_replace(Arc::new(trusted(&trust)));
        Ok(stage)
    }
}

fn trusted(trust: &Trust) -> Trusted {
    // Names the set and who signs: both change within a roll-over, and a guest must follow each.
    let prints = trust.ca_sha256();
    let short = prints.iter().map(|print| hex::encode(&print[..6])).collect::<Vec<_>>();
    let id = format!("{:?}:{}", trust.stage(), short.join("+")).to_lowercase();
    Trusted { id, cas: trust.trusted_cas().iter().map(|der| der.to_vec()).collect() }
}

/// Looks now and then, for ever. `every`: how often to roll over; `None`: when the CA says that it is time. `patience`:
/// how long a step waits for guests that do not follow.
pub async fn run(
    trust: SharedTrust,
    relay: RelayClient,
    sandboxes: Sandboxes,
    every: Option<Duration>,
    patience: Duration,
) {
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
        if !is_due(&trust, &sandboxes, every, patience) {
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

/// Whether the next step is due.
pub(crate) fn is_due(
    trust: &SharedTrust,
    sandboxes: &Sandboxes,
    every: Option<Duration>,
    patience: Duration,
) -> bool {
    let now = SystemTime::now();
    let (stage, since, due) = {
        let trust = trust.read();
        (trust.stage(), trust.stage_since(), trust.is_roll_over_due(now))
    };
    let age = now.duration_since(since).unwrap_or_default();
    let wanted = match stage {
        Stage::Stable => due || every.is_some_and(|every| age >= every),
        Stage::Announced | Stage::Overlap => true,
    };
    if !wanted {
        return false;
    }
    let behind = behind(trust, sandboxes);
    if behind.is_empty() {
        return true;
    }
    // A stable CA may have stood for years when a new one is due: what counts then is how much of it is left.
    if stage == Stage::Stable || age < patience {
        return false;
    }
    for view in &behind {
        sandboxes.left_behind();
        error!(sandbox = %view.id, pod = &*view.pod, ?stage, waited = ?age, "its guest does not follow the node's CA; the roll-over goes on without it, and it may not come back when its link is cut");
    }
    true
}

/// Live sandboxes whose guests do not know yet what everybody must.
fn behind(trust: &SharedTrust, sandboxes: &Sandboxes) -> Vec<View> {
    let id = trust.told.borrow().id.clone();
    let mut views = sandboxes.views();
    views.retain(|view| view.phase.is_live() && view.trust.as_deref() != Some(&id));
    views
}
