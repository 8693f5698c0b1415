//! A node with a provider of a cloud: the real peerpod-relay and peerpod-node, in a world without guests. No pod gets
//! ready, but each gets its VM, its addresses, and its deletion. Shims are simulated.

#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use peerpod_client::{Annotations, Error, ShimClient};
use peerpod_world::{Daemons, Settings, World, eventually, many};
use tokio::task::JoinHandle;

use crate::{fresh_id, stop_in_time};

/// Concurrent calls of StopVM. One by one they would come too slowly on a busy machine to be deleted together.
const AT_ONCE: usize = 32;
/// Time limit of one answer. A wait for all pods has five times as much.
const PATIENCE: Duration = Duration::from_secs(60);

/// Running node. Its processes end when it is dropped.
pub struct CloudNode {
    /// Relay and node.
    pub daemons: Daemons,
    /// Namespaces of node and pods.
    pub world: World,
}

impl CloudNode {
    /// Returns a world, and a listener in its node's network namespace: the cloud serves where the node can reach it.
    pub fn place() -> (World, TcpListener) {
        let world = World::bare().unwrap();
        let listener = world.node().run(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).unwrap().unwrap();
        (world, listener)
    }

    /// Starts relay and node with this provider, and waits for the end of preflight. `own`: settings of the provider.
    pub async fn start(
        world: World,
        kind: &str,
        own: Vec<(String, String)>,
        more: impl FnOnce(Settings) -> Settings,
    ) -> CloudNode {
        let mut settings = Settings::none()
            .set("provider.kind", kind)
            .set("node.relay-addresses", vec!["192.0.2.1:15151"])
            .set("node.boot-timeout", "20m")
            .set("node.ticket-ttl", "30m")
            .set("log.level", "info");
        for (key, value) in own {
            settings = settings.set(&format!("provider.{kind}.{key}"), value);
        }
        let mut daemons = Daemons::prepare(&world, more(settings)).unwrap();
        daemons.start_relay().unwrap();
        daemons.start_node().unwrap();
        daemons.ready().await.unwrap();
        let node = CloudNode { daemons, world };
        node.settled().await;
        node
    }

    /// Waits for the end of preflight, so that later calls are those of pods.
    async fn settled(&self) {
        self.until("preflight is over", || async {
            let metrics = self.daemons.metrics("node").ok()?;
            let done = |line: &str| {
                line.starts_with("peerpod_provider_calls_total")
                    && line.contains("preflight")
                    && line.contains("\"ok\"")
            };
            metrics.lines().any(done).then_some(())
        })
        .await;
    }

    /// Waits until `probe` returns a value.
    pub async fn until<T, F: Future<Output = Option<T>>>(&self, what: &str, probe: impl Fn() -> F) -> T {
        let found = eventually(what, PATIENCE * 5, async || {
            let found = probe().await;
            if found.is_none() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            found
        });
        found.await.unwrap_or_else(|error| panic!("{error}\n{}", self.daemons.log_tails()))
    }

    /// Returns sandboxes with names of their own, each with a network namespace.
    pub fn pods(&self, count: usize) -> Vec<(String, PathBuf)> {
        (0..count).map(|number| (fresh_id("pod"), many::attach(&self.world, number).unwrap())).collect()
    }

    /// Calls CreateVM for all pods at once, each on a connection of its own, as shims do.
    pub fn create(&self, pods: &[(String, PathBuf)]) -> Vec<JoinHandle<Result<PathBuf, Error>>> {
        let create = |(id, netns): &(String, PathBuf)| {
            let (id, netns, socket) = (id.clone(), netns.clone(), self.daemons.hypervisor_socket());
            tokio::spawn(async move {
                let shim = ShimClient::connect(&socket).await?;
                shim.create_vm(&id, Annotations::new("default", &id).size("1", 512), &netns).await
            })
        };
        pods.iter().map(create).collect()
    }

    /// Waits for the answers of CreateVM, which are no errors.
    pub async fn answered(&self, calls: Vec<JoinHandle<Result<PathBuf, Error>>>) {
        for call in calls {
            let answered = tokio::time::timeout(PATIENCE, call).await;
            answered.unwrap_or_else(|_| panic!("{}", self.daemons.log_tails())).unwrap().unwrap();
        }
    }

    /// Returns sandbox → VM, for the sandboxes that have a VM with an address.
    fn located(&self) -> BTreeMap<String, String> {
        let entries = self.daemons.ledger().unwrap().into_iter();
        let of = |record: &serde_json::Value| {
            record["addresses"].as_array().filter(|addresses| !addresses.is_empty())?;
            let phase = record["phase"].as_object()?;
            phase
                .get("vm")
                .or_else(|| phase.values().find_map(|inner| inner.get("vm")))?
                .as_str()
                .map(str::to_owned)
        };
        entries.filter_map(|entry| Some((entry.id.clone(), of(&entry.record)?))).collect()
    }

    /// Waits until all pods have a VM with an address; returns these VMs.
    pub async fn all_located(&self, pods: &[(String, PathBuf)]) -> BTreeMap<String, String> {
        self.until("every pod has a VM and its address", || async {
            let located = self.located();
            pods.iter().map(|(id, _)| Some((id.clone(), located.get(id)?.clone()))).collect()
        })
        .await
    }

    /// Calls StopVM for all pods, many at once, and waits until the cloud has no VM and each pod is a tombstone.
    pub async fn stop(&self, pods: &[(String, PathBuf)], machines: impl AsyncFn() -> usize) {
        let shim = self.daemons.shim().await.unwrap();
        let stop = async |id| stop_in_time(&shim, id).await.unwrap();
        stream::iter(pods).for_each_concurrent(AT_ONCE, |(id, _)| stop(id)).await;
        self.until("no VM is left", || async { (machines().await == 0).then_some(()) }).await;
        for (id, _) in pods {
            self.daemons.gone(id, PATIENCE).await.unwrap();
        }
    }
}
