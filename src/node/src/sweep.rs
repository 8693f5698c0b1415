//! PeerPods of this node that no sandbox speaks for: left by a crash, by an API server that was away for longer than a
//! tombstone stands, or by a call that arrived after its caller had given up. What the ledger knows decides, and the cloud
//! where the ledger knows nothing.

use std::{collections::HashSet, time::Duration};

use peerpod_provider_api::{IdempotencyKey, Owned};
use tracing::{info, warn};

use crate::{
    cluster::{Cluster, Recorded},
    sandbox::{
        Sandboxes,
        phase::{MAX_ATTEMPTS, Phase},
    },
    spec::SandboxId,
};

/// How often they are looked at.
const EVERY: Duration = Duration::from_secs(600);
/// Before the next look after one that failed.
const RETRY: Duration = Duration::from_secs(15);

/// Looks now and then, for ever. `unread`: sandboxes whose record cannot be read; nobody knows what they have.
pub(crate) async fn run(cluster: Cluster, table: Sandboxes, unread: Vec<SandboxId>, cluster_id: String) {
    let unread: HashSet<String> = unread.iter().map(ToString::to_string).collect();
    let mut said = false;
    loop {
        let pause = match pass(&cluster, &table, &unread, &cluster_id).await {
            Ok(()) => {
                said = false;
                EVERY
            }
            Err(error) => {
                if !std::mem::replace(&mut said, true) {
                    warn!(error, "cannot compare this node's PeerPods with the ledger; trying again");
                }
                RETRY
            }
        };
        tokio::time::sleep(pause).await;
    }
}

async fn pass(
    cluster: &Cluster,
    table: &Sandboxes,
    unread: &HashSet<String>,
    cluster_id: &str,
) -> Result<(), String> {
    let recorded = cluster.recorded().await.map_err(|error| error.to_string())?;
    let mut strange = Vec::new();
    for object in recorded {
        match phase(table, &object.sandbox) {
            Some(Phase::Gone) => remove(cluster, &object, "its sandbox is gone"),
            Some(_) => {}
            None => strange.push(object),
        }
    }
    strange.retain(|object| !unread.contains(&object.sandbox));
    if strange.is_empty() {
        return Ok(());
    }
    let owned = table.owned().await.map_err(|error| error.to_string())?;
    for object in strange {
        // One that was made meanwhile is known now. A VM without a record is deleted by the look for orphans first.
        if phase(table, &object.sandbox).is_none()
            && !owned.iter().any(|vm| may_be_its(vm, &object, cluster_id))
        {
            remove(cluster, &object, "its sandbox is unknown, and the provider has no VM of it");
        }
    }
    Ok(())
}

fn phase(table: &Sandboxes, sandbox: &str) -> Option<Phase> {
    let id: SandboxId = sandbox.parse().ok()?;
    Some(table.view(&id)?.borrow().phase.clone())
}

/// One that lost its mark may be anybody's.
fn may_be_its(vm: &Owned, object: &Recorded, cluster_id: &str) -> bool {
    let Some(key) = &vm.key else { return true };
    let attempts =
        (0..MAX_ATTEMPTS).map(|attempt| IdempotencyKey::derive(cluster_id, &object.sandbox, attempt));
    object.instance.as_deref() == Some(vm.id.as_str())
        || object.key.as_deref() == Some(key.as_str())
        || attempts.into_iter().any(|other| other == *key)
}

fn remove(cluster: &Cluster, object: &Recorded, why: &str) {
    info!(
        sandbox = object.sandbox,
        object = format!("{}/{}", object.namespace, object.name),
        why,
        "a PeerPod goes"
    );
    cluster.remove(object);
}
