//! Advertises the number of peer pods that fit, as an extended resource of the Node, again whenever it is lost (a
//! kubelet that registers anew drops it), and removes it at exit, unless another daemon has claimed it. An annotation
//! of the Node ([`OWNER`]) names the owner, the newest daemon: an exiting one removes the resource only together with a
//! test of it, in one patch. A daemon that advertises nothing removes a resource that a killed daemon left there. While
//! the node is not ready, [`super::health`] withdraws it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{Patch, PatchParams};
use kube::runtime::{WatchStreamExt, watcher};
use peerpod_kube::client::{Error, explain};
use serde_json::{Value, json};
use tokio::sync::{Mutex, watch};
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{debug, info, warn};

use super::calls::{Calls, unencodable};
use super::config::ClusterConfig;
use super::health::{ReadyCondition, status_of};

/// The Node's annotation that names the owner of the capacity; the key of the replaced system.
pub(crate) const OWNER: &str = "kata.peerpods.io/caa-owner";
/// Interval of checks without a change signal.
const EVERY: Duration = Duration::from_secs(60);
const RETRY: Duration = Duration::from_secs(2);

#[derive(Clone)]
pub(super) struct Capacity {
    pub(super) calls: Calls,
    pub(super) nodes: Api<Node>,
    pub(super) node: String,
    resource: String,
    /// `None`: nothing is advertised.
    amount: Option<u32>,
    owner: String,
    /// Whether the node offers peer pods; `None`: not known yet, and the capacity stays as it is.
    offered: watch::Receiver<Option<bool>>,
    /// Whether the capacity is being removed; held while it is set or removed, so that the two do not cross.
    pub(super) closed: Arc<Mutex<bool>>,
    /// Whether a Node without the condition was seen, as one that was made anew.
    pub(super) is_new: Arc<AtomicBool>,
    claim: Arc<Claim>,
}

/// Claim of a daemon that does not serve yet.
#[derive(Default)]
struct Claim {
    /// Owner before the claim; the outer `None`: nothing was claimed.
    before: parking_lot::Mutex<Option<Option<String>>>,
    /// Whether no other daemon of this node runs.
    is_alone: AtomicBool,
}

impl Capacity {
    pub(super) fn new(
        calls: Calls,
        config: &ClusterConfig,
        offered: watch::Receiver<Option<bool>>,
    ) -> Capacity {
        let nodes = Api::all(calls.client.clone());
        // Without a UID, each daemon still has an owner mark of its own.
        let owner = config.pod_uid.clone().unwrap_or_else(|| {
            let mut bytes = [0; 16];
            match getrandom::fill(&mut bytes) {
                Ok(()) => hex::encode(bytes),
                Err(_) => format!("process-{}", std::process::id()),
            }
        });
        let (node, resource) = (config.node_name.clone(), config.resource.clone());
        let amount = config.capacity;
        let (closed, is_new, claim) = Default::default();
        Capacity { calls, nodes, node, resource, amount, owner, offered, closed, is_new, claim }
    }

    /// Whether this daemon advertises a capacity.
    pub(super) fn is_advertised(&self) -> bool {
        self.amount.is_some()
    }

    pub(super) async fn node(&self) -> Result<Node, Error> {
        self.calls.call("capacity", format!("look at Node {}", self.node), self.nodes.get(&self.node)).await
    }

    async fn patch_status(&self, what: &str, steps: Vec<Value>) -> Result<Node, Error> {
        let (params, patch) = (PatchParams::default(), patch(steps)?);
        let patched = self.nodes.patch_status(&self.node, &params, &patch);
        self.calls.call("capacity", format!("{what} Node {}", self.node), patched).await
    }

    async fn patch_owner(&self, what: &str, owner: Option<&str>) -> Result<(), Error> {
        let patch = Patch::Merge(json!({"metadata": {"annotations": {OWNER: owner}}}));
        let params = PatchParams::default();
        let patched = self.nodes.patch(&self.node, &params, &patch);
        self.calls.call("own", format!("{what} Node {}", self.node), patched).await.map(drop)
    }

    /// Writes this daemon as the owner, until it holds.
    pub(super) async fn claim(&self) {
        if self.amount.is_none() {
            return;
        }
        let mut said = false;
        while let Err(error) = self.claim_once().await {
            if !std::mem::replace(&mut said, true) {
                warn!(%error, "cannot claim the node's capacity for peer pods; trying again");
            }
            sleep(RETRY).await;
        }
    }

    async fn claim_once(&self) -> Result<(), Error> {
        let node = self.node().await?;
        let owner = node.metadata.annotations.and_then(|mut annotations| annotations.remove(OWNER));
        // A failed claim may have had its effect: the first owner counts.
        self.claim.before.lock().get_or_insert(owner);
        self.own().await
    }

    /// Notes that no other daemon of this node runs.
    pub(super) fn is_alone(&self) {
        self.claim.is_alone.store(true, Ordering::Relaxed);
    }

    /// Undoes the claim of a daemon that will not serve. A predecessor that runs owns the capacity again; without one, the
    /// capacity is removed.
    pub(super) async fn unclaim(&self) -> Result<(), Error> {
        let before = self.claim.before.lock().clone();
        let Some(before) = before else { return Ok(()) };
        let is_alone = self.claim.is_alone.load(Ordering::Relaxed);
        let predecessor = before.filter(|owner| *owner != self.owner && !is_alone);
        if predecessor.is_none() {
            self.give_back().await?;
        }
        let path = format!("/metadata/annotations/{}", escaped(OWNER));
        let step = match predecessor {
            Some(owner) => json!({"op": "replace", "path": path, "value": owner}),
            None => json!({"op": "remove", "path": path}),
        };
        let steps = vec![json!({"op": "test", "path": path, "value": self.owner}), step];
        let (params, patch) = (PatchParams::default(), patch(steps)?);
        let patched = self.nodes.patch(&self.node, &params, &patch);
        let what = format!("withdraw the claim on the capacity of Node {}", self.node);
        match self.calls.call("own", what, patched).await {
            // A newer daemon has claimed it.
            Err(error) if error.status() == Some(422) || error.is_not_found() => Ok(()),
            done => done.map(drop),
        }
    }

    async fn own(&self) -> Result<(), Error> {
        self.patch_owner("claim the capacity of", Some(&self.owner)).await
    }

    /// Maintains the capacity, for ever. A daemon without one clears that of daemons that were killed, for ever too:
    /// during an update, an exiting daemon may set it again until it ends.
    pub(super) async fn run(&self) {
        let only = watcher::Config::default().fields(&format!("metadata.name={}", self.node)).timeout(120);
        let mut news = watcher(self.nodes.clone(), only).default_backoff().boxed();
        let mut next = Instant::now();
        let mut failed = false;
        let mut offered = self.offered.clone();
        loop {
            tokio::select! {
                () = sleep_until(next) => {}
                Ok(()) = offered.changed() => {}
                seen = news.next(), if self.amount.is_some() => match seen {
                    Some(Ok(watcher::Event::Apply(node) | watcher::Event::InitApply(node)))
                        if !failed && !self.steps(&node).is_empty() => {}
                    // Also a Node that was deleted: it may come back at any time, and the watch then reports it.
                    Some(Ok(_)) => continue,
                    Some(Err(error)) => {
                        debug!(error = explain(&error), "the watch of this Node failed");
                        continue;
                    }
                    None => {}
                },
            }
            let done = if self.amount.is_some() { self.assert().await } else { self.clear().await };
            if let Err(error) = &done
                && !failed
            {
                let attempt = if self.amount.is_some() { "set" } else { "clear" };
                warn!(%error, "cannot {attempt} the node's capacity for peer pods; trying again");
            }
            failed = done.is_err();
            next = Instant::now() + if failed { RETRY } else { EVERY };
        }
    }

    async fn clear(&self) -> Result<(), Error> {
        let node = self.node().await?;
        let Some(steps) = self.leftover(&node) else { return Ok(()) };
        match self.patch_status("clear the capacity of", steps).await {
            Ok(_) => {
                info!(resource = self.resource, "cleared the capacity that an earlier daemon advertised")
            }
            // Another client was first; the next check decides.
            Err(error) if error.status() == Some(422) || error.is_not_found() => return Ok(()),
            Err(error) => return Err(error),
        }
        // Without an owner, a value that a person sets by hand stays.
        self.patch_owner("remove the capacity's owner from", None).await
    }

    /// Returns the patch that removes a daemon's capacity; `None`: there is none, or it belongs to no daemon.
    fn leftover(&self, node: &Node) -> Option<Vec<Value>> {
        let owner = node.metadata.annotations.as_ref()?.get(OWNER)?;
        node.status.as_ref()?.capacity.as_ref()?.get(&self.resource)?;
        Some(self.removal(owner))
    }

    /// Returns the patch that removes the capacity if this daemon is its owner.
    fn removal(&self, owner: &str) -> Vec<Value> {
        let annotation = format!("/metadata/annotations/{}", escaped(OWNER));
        vec![
            json!({"op": "test", "path": annotation, "value": owner}),
            json!({"op": "remove", "path": self.path()}),
        ]
    }

    /// Reads the Node, and corrects its capacity.
    async fn assert(&self) -> Result<(), Error> {
        let closed = self.closed.lock().await;
        let offered = *self.offered.borrow();
        if *closed || offered.is_none() {
            return Ok(());
        }
        let node = self.node().await?;
        if status_of(&node).is_none() {
            self.is_new.store(true, Ordering::Relaxed);
        }
        if offered == Some(false) {
            return self.withdraw(&node).await;
        }
        let annotations = node.metadata.annotations.as_ref();
        // The claim of another daemon stands: it is newer.
        if annotations.is_none_or(|annotations| !annotations.contains_key(OWNER)) {
            self.own().await?;
        }
        let steps = self.steps(&node);
        if steps.is_empty() {
            return Ok(());
        }
        self.patch_status("set the capacity of", steps).await?;
        info!(resource = self.resource, amount = self.amount, "capacity set");
        Ok(())
    }

    /// Removes the capacity while the node offers no peer pods, unless it belongs to another daemon.
    async fn withdraw(&self, node: &Node) -> Result<(), Error> {
        let there = node.status.as_ref().and_then(|status| status.capacity.as_ref()?.get(&self.resource));
        if there.is_none() {
            return Ok(());
        }
        match self.patch_status("withdraw the capacity of", self.removal(&self.owner)).await {
            Ok(_) => info!(resource = self.resource, "capacity withdrawn"),
            Err(error) if error.status() == Some(422) => {
                warn!(resource = self.resource, "the capacity belongs to another daemon and stays");
            }
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Returns the patch that corrects this Node's capacity; empty, if it is right.
    fn steps(&self, node: &Node) -> Vec<Value> {
        let amount = self.amount.filter(|_| *self.offered.borrow() == Some(true));
        let Some(amount) = amount.map(|amount| amount.to_string()) else { return Vec::new() };
        let capacity = node.status.as_ref().and_then(|status| status.capacity.as_ref());
        let Some(capacity) = capacity else {
            // The parent is made together with it, unless another client was first.
            let version = &node.metadata.resource_version;
            let mut steps =
                vec![json!({"op": "test", "path": "/metadata/resourceVersion", "value": version})];
            if node.status.is_none() {
                steps.push(json!({"op": "add", "path": "/status", "value": {}}));
            }
            let value = json!({self.resource.as_str(): amount});
            steps.push(json!({"op": "add", "path": "/status/capacity", "value": value}));
            return steps;
        };
        match capacity.get(&self.resource) {
            Some(there) if there.0 == amount => Vec::new(),
            _ => vec![
                // Not for a Node that was made anew since it was read.
                json!({"op": "test", "path": "/metadata/uid", "value": node.metadata.uid}),
                json!({"op": "add", "path": self.path(), "value": amount}),
            ],
        }
    }

    /// Removes the capacity; `false`: it no longer belongs to this daemon.
    pub(super) async fn give_back(&self) -> Result<bool, Error> {
        if self.amount.is_none() {
            return Ok(false);
        }
        let mut closed = self.closed.lock().await;
        *closed = true;
        match self.patch_status("remove the capacity of", self.removal(&self.owner)).await {
            Ok(_) => {
                // The capacity is gone; a condition that is not written is no fault of that.
                if let Err(error) = self.write_condition(&ReadyCondition::stopped()).await {
                    warn!(%error, "cannot show on the Node that peerpod-node stops");
                }
                Ok(true)
            }
            // The test failed, or there was nothing to remove.
            Err(error) if error.status() == Some(422) || error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn path(&self) -> String {
        format!("/status/capacity/{}", escaped(&self.resource))
    }
}

/// Escapes a key as one segment of a JSON pointer.
fn escaped(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

pub(super) fn patch(steps: Vec<Value>) -> Result<Patch<Value>, Error> {
    let read = serde_json::from_value(Value::Array(steps));
    read.map(Patch::Json).map_err(|error| unencodable("make a patch", error))
}
