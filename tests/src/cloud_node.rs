//! A node with a provider of a cloud: the real peerpod-relay and peerpod-node, in a world without guests. No pod gets
//! ready, but each gets its VM, its addresses, and its deletion. Shims are simulated.

#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use peerpod_client::{Annotations, Error, ShimClient};
use peerpod_world::{Daemons, Settings, World, eventually, many};
use tokio::task::JoinHandle;

use crate::cloud::{PATIENCE, TestCloud};
use crate::{Dice, fresh_id, is_bench, report, stop_in_time};

/// Concurrent calls of StopVM. One by one they would come too slowly on a busy machine to be deleted together.
const AT_ONCE: usize = 32;

/// Returns whether the counts are those of the benchmarks: 500 pods, 100 kills.
pub fn is_full() -> bool {
    crate::long() || is_bench()
}

/// Returns a world, and a listener in its node's network namespace: the cloud serves where the node can reach it.
pub fn place() -> (World, TcpListener) {
    let world = World::bare().unwrap();
    let listener = world.node().run(|| TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).unwrap().unwrap();
    (world, listener)
}

/// Reports `<kind>_makespan_vs_buckets`: the time from the first CreateVM until the last pod has a VM with an address,
/// divided by the least time in which the cloud's limit admits one create for each pod (`Rate::least` of
/// `peerpod-test-clouds`). Other load on the machine distorts the ratio, so only a benchmark asserts it.
pub fn report_makespan<S: TestCloud>(took: Duration, permitted: Duration, most: f64) {
    let ratio = took.as_secs_f64() / permitted.as_secs_f64();
    report(&format!("{}_makespan_vs_buckets", S::KIND), ratio);
    assert!(!is_bench() || ratio <= most, "{took:?} where the limit permits {permitted:?}");
}

/// Returns the settings of a node with the provider of this cloud.
pub fn settings<S: TestCloud>(site: &S) -> Settings {
    let kind = S::KIND;
    let settings = Settings::none()
        .set("provider.kind", kind)
        .set("node.relay-addresses", vec!["192.0.2.1:15151"])
        .set("node.boot-timeout", "20m")
        .set("node.ticket-ttl", "30m")
        .set("log.level", "info");
    site.settings()
        .into_iter()
        .fold(settings, |all, (key, value)| all.set(&format!("provider.{kind}.{key}"), value))
}

/// Running node, and the cloud of its provider. Its processes end when it is dropped.
pub struct CloudNode<S> {
    /// Relay and node.
    pub daemons: Daemons,
    /// Namespaces of node and pods.
    pub world: World,
    /// The cloud.
    pub site: S,
}

impl<S: TestCloud> CloudNode<S> {
    /// Starts relay and node with the provider of this cloud, and waits for the end of preflight.
    pub async fn start(world: World, site: S, more: impl FnOnce(Settings) -> Settings) -> CloudNode<S> {
        let settings = settings(&site);
        let mut daemons = Daemons::prepare(&world, more(settings)).unwrap();
        daemons.start_relay().unwrap();
        daemons.start_node().unwrap();
        daemons.ready().await.unwrap();
        let node = CloudNode { daemons, world, site };
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

    /// Creates the pods at once, and waits until each has a VM of its own with an address. The cloud has no others, and no
    /// pod failed. Returns the time.
    pub async fn burst(&self, pods: &[(String, PathBuf)]) -> Duration {
        let began = Instant::now();
        self.answered(self.create(pods)).await;
        let vms = self.all_located(pods).await;
        let took = began.elapsed();
        self.has_only(pods, vms).await;
        let ledger = self.daemons.ledger().unwrap();
        let failures = ledger.iter().filter(|entry| !entry.record["cause"].is_null()).count();
        report(&format!("{}_burst{}_failures", S::KIND, pods.len()), failures as f64);
        assert_eq!(failures, 0);
        took
    }

    /// Asserts that each pod has a VM of its own, and that the cloud has no others. Returns the number of others.
    async fn has_only(&self, pods: &[(String, PathBuf)], vms: BTreeMap<String, String>) -> i64 {
        let each: BTreeSet<String> = vms.into_values().collect();
        let all: BTreeSet<String> = self.site.ids().await.into_iter().collect();
        assert_eq!((each.len(), &all), (pods.len(), &each), "one VM each\n{}", self.daemons.log_tails());
        all.len() as i64 - pods.len() as i64
    }

    /// Kills the node in each round while the cloud creates VMs for one to four pods. In every second round the cloud has
    /// executed the create and not answered it. Each pod has one VM afterwards, and the cloud has no others. `prepare`
    /// sets the cloud's times before each round.
    pub async fn kill_while_creating(&mut self, prepare: impl Fn(&S)) {
        let rounds = if is_full() { 100 } else { 6 };
        let mut dice = Dice(0x5eed_1234_abcd_0001);
        let netns: Vec<PathBuf> = self.pods(4).into_iter().map(|(_, netns)| netns).collect();
        let mut extra = 0;
        for round in 0..rounds {
            self.site.heal();
            prepare(&self.site);
            // The node may create a single pod alone, and several as a batch.
            let count = 1 + usize::try_from(dice.roll(4)).unwrap();
            let pods: Vec<(String, PathBuf)> =
                netns.iter().take(count).map(|netns| (fresh_id("killed"), netns.clone())).collect();
            let in_between = round % 2 == 0;
            if in_between {
                self.site.delay_answer();
            }
            // The relay keeps the calls that the killed node has not answered.
            let calls = self.create(&pods);
            if in_between {
                self.until("the cloud is late", || async { (self.site.late() > 0).then_some(()) }).await;
            }
            tokio::time::sleep(Duration::from_millis(dice.roll(400))).await;
            self.daemons.kill_node().unwrap();
            self.daemons.start_node().unwrap();
            self.answered(calls).await;
            let vms = self.all_located(&pods).await;
            extra += self.has_only(&pods, vms).await;
            self.stop(&pods).await;
            self.until("no answer is late", || async { (self.site.late() == 0).then_some(()) }).await;
        }
        println!("{rounds} kills");
        report(&format!("{}_crash100_extra_vms", S::KIND), extra as f64);
    }

    /// Calls CreateVM and StartVM for a pod that gets no VM; returns the error.
    pub async fn refused(&self, (id, netns): &(String, PathBuf), annotations: Annotations) -> String {
        let shim = self.daemons.shim().await.unwrap();
        shim.create_vm(id, annotations, netns).await.unwrap();
        let started = tokio::time::timeout(PATIENCE, shim.start_vm(id)).await;
        started.unwrap_or_else(|_| panic!("{}", self.daemons.log_tails())).unwrap_err().to_string()
    }

    /// Calls StopVM for all pods, many at once, and waits until the cloud has no VM and each pod is a tombstone.
    pub async fn stop(&self, pods: &[(String, PathBuf)]) {
        let shim = self.daemons.shim().await.unwrap();
        let stop = async |id| stop_in_time(&shim, id).await.unwrap();
        stream::iter(pods).for_each_concurrent(AT_ONCE, |(id, _)| stop(id)).await;
        self.until("no VM is left", || async { self.site.ids().await.is_empty().then_some(()) }).await;
        for (id, _) in pods {
            self.daemons.gone(id, PATIENCE).await.unwrap();
        }
    }
}
