//! Rotates the node's CA ([`crate::trust`]) one step at a time: the first when it is due, each further one when the
//! relay has its new configuration and every sandbox's guest has followed the last one. An unreachable guest delays the
//! rotation, so that it is not cut off, but not for ever: a CA that cannot be replaced is worse for all other guests.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::{RwLock, RwLockReadGuard};
use tokio::sync::watch;
use tracing::{error, info, warn};

use crate::relay_client::RelayClient;
use crate::sandbox::ports::Trusted;
use crate::sandbox::{Sandboxes, View};
use crate::trust::{Error, RotationStage, Trust};

const EVERY: Duration = Duration::from_millis(500);

/// The CA, and the list of CAs that guests must trust. Clones share one CA.
#[derive(Clone)]
pub(crate) struct SharedTrust {
    trust: Arc<RwLock<Trust>>,
    told: Arc<watch::Sender<Arc<Trusted>>>,
}

impl SharedTrust {
    pub(crate) fn new(trust: Trust) -> SharedTrust {
        let told = Arc::new(watch::Sender::new(Arc::new(trusted(&trust))));
        SharedTrust { trust: Arc::new(RwLock::new(trust)), told }
    }

    /// Read access to the CA; must not be held across an await.
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Trust> {
        self.trust.read()
    }

    pub(crate) fn trusted(&self) -> watch::Receiver<Arc<Trusted>> {
        self.told.subscribe()
    }

    /// Takes one rotation step. Blocks for a write to the disk.
    pub(crate) fn step(&self) -> Result<RotationStage, Error> {
        let mut trust = self.trust.write();
        let stage = trust.rotate(SystemTime::now())?;
        self.told.send_replace(Arc::new(trusted(&trust)));
        Ok(stage)
    }
}

fn trusted(trust: &Trust) -> Trusted {
    // The id covers the stage too, which decides the signing CA: a guest must follow each change.
    let prints = trust.ca_sha256();
    let short = prints.iter().map(|print| hex::encode(&print[..6])).collect::<Vec<_>>();
    let id = format!("{:?}:{}", trust.stage(), short.join("+")).to_lowercase();
    Trusted { id, cas: trust.trusted_cas().iter().map(|der| der.to_vec()).collect() }
}

/// Takes due steps, `every` so often, for ever. A step waits at most `patience` for guests that do not follow.
pub(crate) async fn run(
    trust: SharedTrust,
    relay: RelayClient,
    sandboxes: Sandboxes,
    every: Duration,
    patience: Duration,
) {
    // A node that died during a rotation may not have configured the relay for the last step.
    let mut relay_knows = trust.read().stage() == RotationStage::Stable;
    loop {
        tokio::time::sleep(EVERY).await;
        if !relay_knows {
            match relay.configure().await {
                Ok(()) => relay_knows = true,
                Err(error) => {
                    warn!(error, "cannot give the relay its new identity yet");
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
                info!(?stage, "the rotation of the node's CA took a step");
                relay_knows = false;
            }
            Ok(Err(error)) => warn!(%error, "cannot rotate the node's CA; trying again"),
            Err(error) => warn!(%error, "the step of the CA's rotation ended early"),
        }
    }
}

pub(crate) fn is_due(trust: &SharedTrust, table: &Sandboxes, every: Duration, patience: Duration) -> bool {
    let now = SystemTime::now();
    let (stage, since, due) = {
        let trust = trust.read();
        (trust.stage(), trust.stage_since(), trust.is_rotation_due(now, every))
    };
    let age = now.duration_since(since).unwrap_or_default();
    let wanted = match stage {
        RotationStage::Stable => due,
        RotationStage::Announced | RotationStage::Overlap => true,
    };
    if !wanted {
        return false;
    }
    let behind = behind(trust, table);
    if behind.is_empty() {
        return true;
    }
    // The age of a stable CA may be years, so it does not measure the wait: the first step waits for all guests.
    if stage == RotationStage::Stable || age < patience {
        return false;
    }
    for view in &behind {
        table.0.metrics.guests.left_behind.inc();
        error!(sandbox = %view.id, pod = &*view.pod, ?stage, waited = ?age, "the sandbox's guest does not follow the node's CA; the rotation goes on without it, and the guest may not reconnect after a cut link");
    }
    true
}

/// Returns the live sandboxes with guests that have not received the current list of CAs.
fn behind(trust: &SharedTrust, sandboxes: &Sandboxes) -> Vec<View> {
    let id = trust.told.borrow().id.clone();
    let mut views = sandboxes.views();
    views.retain(|view| view.phase.is_live() && view.trust.as_deref() != Some(&id));
    views
}
