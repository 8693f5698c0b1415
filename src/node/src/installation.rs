//! Finds the id of this installation, which marks VMs beside the names of cluster and node: two clusters may have equal
//! names. In a cluster it is the UID of the namespace `kube-system`; elsewhere it is random and made once. May touch
//! `installation.json` in the state folder.

use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use peerpod_base::admin::{self, Ready};
use peerpod_common::files;
use serde::{Deserialize, Serialize};
use tokio::time::{sleep, timeout};
use tracing::error;

use crate::cluster::Cluster;

const FILE: &str = "installation.json";
/// Name in the readiness.
const NAME: &str = "installation";
const VERSION: u32 = 1;
/// Size limit of the file.
const MOST: u64 = 4096;
/// Time for the cluster's answer where an id is kept.
const PATIENCE: Duration = Duration::from_secs(1);
/// Pause between two requests to an API server that is away.
const RETRY: Duration = Duration::from_secs(15);

#[derive(Serialize, Deserialize)]
struct Kept {
    version: u32,
    id: String,
}

/// Returns the id, and keeps it. A kept id stands while this node may have VMs, because they carry it: such a start
/// needs no API server. Otherwise the cluster's answer replaces it. Only a start without a kept id waits for the answer,
/// and then answers on the admin port.
pub(crate) async fn find(
    state_dir: &Path,
    may_have_vms: bool,
    cluster: Option<&Cluster>,
    admin: (SocketAddr, &Ready),
) -> Result<String> {
    let file = state_dir.join(FILE);
    let kept = read(&file)?;
    let id = match (kept, cluster) {
        (Some(id), None) => return Ok(id),
        (Some(id), Some(_)) if may_have_vms => return Ok(id),
        (None, None) => random()?,
        (Some(kept), Some(cluster)) => match timeout(PATIENCE, cluster.uid()).await {
            Ok(Ok(uid)) => uid,
            Ok(Err(_)) | Err(_) => kept,
        },
        (None, Some(cluster)) => admin::wait_for(NAME, admin, || cluster.uid()).await?,
    };
    let content = serde_json::to_vec(&Kept { version: VERSION, id: id.clone() })?;
    files::write(&file, &content).with_context(|| format!("write {}", file.display()))?;
    Ok(id)
}

/// Reports an id that is not the cluster's: the state folder came from another cluster, and the controller cannot see
/// the VMs of this node. Never ends.
pub(crate) fn compare(cluster: &Cluster, id: &str, ready: &Ready) -> impl Future<Output = ()> + use<> {
    let (cluster, id, ready) = (cluster.clone(), id.to_owned(), ready.clone());
    async move {
        let uid = loop {
            match cluster.uid().await {
                Ok(uid) => break uid,
                Err(_) => sleep(RETRY).await,
            }
        };
        if uid != id {
            let text = format!(
                "this node's VMs carry the installation {id} of {FILE}, and this cluster is {uid}: the controller \
                 does not see them; drain the node and restart peerpod-node when its VMs are gone"
            );
            error!("{text}");
            ready.warn(NAME, &text);
        }
        std::future::pending().await
    }
}

fn read(file: &Path) -> Result<Option<String>> {
    let remedy = || {
        format!(
            "read {}: restore it; if this node has no VM, remove it, and the node makes another id",
            file.display()
        )
    };
    let Some(bytes) = files::read(file, MOST).with_context(remedy)? else { return Ok(None) };
    let Kept { version, id } = serde_json::from_slice(&bytes).with_context(remedy)?;
    if version != VERSION || id.is_empty() {
        bail!("{}: version {version}, and this program knows {VERSION}", remedy());
    }
    Ok(Some(id))
}

fn random() -> Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).context("make a random id of this installation")?;
    Ok(hex::encode(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_id_outside_a_cluster_is_made_once_and_differs_elsewhere() {
        let dir = |name: &str| std::env::temp_dir().join(format!("peerpod-id-{name}-{}", std::process::id()));
        let (one, other) = (dir("one"), dir("other"));
        let ready = Ready::default();
        let admin = (SocketAddr::from(([127, 0, 0, 1], 0)), &ready);
        for dir in [&one, &other] {
            std::fs::create_dir_all(dir).unwrap();
        }
        let id = find(&one, false, None, admin).await.unwrap();
        assert_eq!(id.len(), 32);
        assert_eq!(find(&one, false, None, admin).await.unwrap(), id);
        assert_eq!(find(&one, true, None, admin).await.unwrap(), id);
        assert_ne!(find(&other, false, None, admin).await.unwrap(), id);
        for bad in ["", "{}", r#"{"version":2,"id":"x"}"#, r#"{"version":1,"id":""}"#] {
            std::fs::write(one.join(FILE), bad).unwrap();
            let error = format!("{:#}", find(&one, false, None, admin).await.unwrap_err());
            assert!(error.contains(FILE) && error.contains("restore it"), "{error}");
        }
        for dir in [one, other] {
            std::fs::remove_dir_all(dir).unwrap();
        }
    }
}
