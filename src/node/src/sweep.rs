//! Removes PeerPods of this node that have no sandbox. A crash may leave one, or a call that arrived after its caller
//! had given up. An API server that was unreachable for longer than a tombstone is kept leaves them too. The ledger
//! decides; where it has no record, the provider's list of VMs decides.

use std::collections::HashSet;
use std::time::Duration;

use tracing::{info, warn};

use crate::cluster::{Cluster, Recorded};
use crate::sandbox::Sandboxes;
use crate::sandbox::phase::Phase;
use crate::spec::SandboxId;

const EVERY: Duration = Duration::from_secs(600);
const RETRY: Duration = Duration::from_secs(15);

/// Runs passes for ever. `unread`: sandboxes with an unreadable record, of which the resources are unknown.
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
    let owned = table.0.ports.cloud.owned().await.map_err(|error| error.to_string())?;
    for object in strange {
        // A sandbox created meanwhile is in the table now. The search for orphans keeps a VM without a record, too.
        if phase(table, &object.sandbox).is_none() && !owned.iter().any(|vm| object.may_have(vm, cluster_id))
        {
            remove(cluster, &object, "its sandbox is unknown, and the provider has no VM for it");
        }
    }
    Ok(())
}

fn phase(table: &Sandboxes, sandbox: &str) -> Option<Phase> {
    let id: SandboxId = sandbox.parse().ok()?;
    Some(table.view(&id)?.borrow().phase.clone())
}

fn remove(cluster: &Cluster, object: &Recorded, why: &str) {
    let name = format!("{}/{}", object.namespace, object.name);
    info!(sandbox = object.sandbox, object = name, why, "removing a PeerPod");
    cluster.remove(object);
}
