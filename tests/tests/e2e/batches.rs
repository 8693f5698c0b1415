//! Tests batches: pods that start together get their VMs by few calls, and each its own VM, whenever the node dies.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use peerpod_client::{AgentClient, Annotations, ShimClient};
use peerpod_proto::agent::CreateSandboxRequest;
use peerpod_tests::{CONTAINER, Dice, PATIENCE, Sandbox, fresh_id, long, sample};
use peerpod_world::{Daemons, Pod, Settings, World, eventually};

const MANY: usize = 50;

fn fake(max_batch: u32, takes: &str) -> Settings {
    Settings::none()
        .set("provider.kind", "fake")
        .set("provider.fake.max-batch", max_batch)
        .set("provider.fake.takes", takes)
        .set("node.relay-addresses", vec!["192.0.2.1:15151"])
        // No guest ever connects, so none gets ready.
        .set("node.boot-timeout", "10m")
        .set("node.ticket-ttl", "30m")
}

/// Returns the files with this extension in the fake provider's folder.
fn fake_vm(daemons: &Daemons, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(daemons.state_dir().join("fake")).unwrap();
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.filter(|path| path.extension().is_some_and(|found| found == extension)).collect()
}

type Call = tokio::task::JoinHandle<Result<PathBuf, peerpod_client::Error>>;

/// Calls CreateVM for all pods at once, each on a separate connection, as shims do.
fn create_all(daemons: &Daemons, ids: &[String], pods: &[Pod]) -> Vec<Call> {
    let create = |(id, pod): (&String, &Pod)| {
        let (id, socket, netns) = (id.clone(), daemons.hypervisor_socket(), pod.namespace().path());
        tokio::spawn(async move {
            let shim = ShimClient::connect(&socket).await?;
            shim.create_vm(&id, Annotations::new("default", &id), &netns).await
        })
    };
    ids.iter().zip(pods).map(create).collect()
}

async fn answered(calls: Vec<Call>, daemons: &Daemons) {
    for call in calls {
        let answered = tokio::time::timeout(PATIENCE, call).await;
        answered.unwrap_or_else(|_| panic!("{}", daemons.log_tails())).unwrap().unwrap();
    }
}

/// Returns the VM of each sandbox, once each has one.
async fn vms(daemons: &Daemons, ids: &[String]) -> BTreeSet<String> {
    let shim = daemons.shim().await.unwrap();
    let mut vms = BTreeSet::new();
    for id in ids {
        let vm = shim.vm_id("default", id, true, PATIENCE).await;
        vms.insert(vm.unwrap_or_else(|error| panic!("{id}: {error}\n{}", daemons.log_tails())));
    }
    vms
}

fn made(daemons: &Daemons) -> BTreeSet<String> {
    let name = |path: PathBuf| path.file_stem().unwrap().to_string_lossy().into_owned();
    fake_vm(daemons, "json").into_iter().map(name).collect()
}

async fn stop_all(daemons: &Daemons, ids: &[String]) {
    let shim = daemons.shim().await.unwrap();
    for id in ids {
        shim.stop_vm(id).await.unwrap();
    }
    for id in ids {
        daemons.gone(id, PATIENCE).await.unwrap();
    }
    assert_eq!(made(daemons), BTreeSet::new(), "no VM is left");
    eventually("the batches' files are gone", PATIENCE, async || {
        let left = std::fs::read_dir(daemons.state_dir().join("batches")).ok()?.count();
        (left == 0).then_some(())
    })
    .await
    .unwrap();
}

fn many(world: &World, name: &str) -> (Vec<String>, Vec<Pod>) {
    (0..MANY).map(|_| (fresh_id(name), world.pod().unwrap())).unzip()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_burst_of_pods_is_few_calls_and_a_vm_for_each() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, fake(500, "200ms")).await.unwrap();
    let (ids, pods) = many(&world, "burst");
    let began = Instant::now();
    answered(create_all(&daemons, &ids, &pods), &daemons).await;
    let vms = vms(&daemons, &ids).await;
    let took = began.elapsed();
    assert_eq!(vms.len(), MANY, "each has its own");
    assert_eq!(vms, made(&daemons), "and there are no others");
    let calls = fake_vm(&daemons, "batch").len();
    let alone = made(&daemons).iter().filter(|id| id.matches('-').count() == 1).count();
    println!("{MANY} pods: {calls} calls for several, {alone} for one, {took:?} to the last VM");
    assert!(calls + alone <= MANY / 5, "{calls} + {alone} calls for {MANY} pods");
    let metrics = daemons.metrics("node").unwrap();
    assert_eq!(sample(&metrics, "peerpod_node_batch_size_sum").unwrap() as usize, MANY - alone);
    stop_all(&daemons, &ids).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_in_the_middle_of_a_burst_makes_exactly_one_vm_for_each() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, fake(20, "300ms")).await.unwrap();
    let mut dice = Dice(23);
    let pods: Vec<Pod> = (0..MANY).map(|_| world.pod().unwrap()).collect();
    for round in 0..if long() { 100 } else { 4 } {
        let ids: Vec<String> = (0..MANY).map(|_| fresh_id("killed")).collect();
        // The relay keeps the calls that a dead node has not answered.
        let calls = create_all(&daemons, &ids, &pods);
        for _ in 0..1 + dice.roll(2) {
            tokio::time::sleep(Duration::from_millis(dice.roll(700))).await;
            daemons.kill_node().unwrap();
            daemons.start_node().unwrap();
        }
        answered(calls, &daemons).await;
        let vms = vms(&daemons, &ids).await;
        assert_eq!(vms.len(), MANY, "round {round}: each has its own");
        assert_eq!(vms, made(&daemons), "round {round}: and there are no others");
        stop_all(&daemons, &ids).await;
    }
    daemons.terminate_node().unwrap();
}

/// Boots a sandbox in this pod, with a container.
async fn boot(daemons: &Daemons, pod: Pod) -> Sandbox {
    let (id, shim) = (fresh_id("batched"), daemons.shim().await.unwrap());
    let created = shim.create_vm(&id, Annotations::new("default", &id), &pod.namespace().path()).await;
    let socket = created.unwrap();
    let started = tokio::time::timeout(PATIENCE, shim.start_vm(&id)).await;
    started.unwrap_or_else(|_| panic!("{}", daemons.log_tails())).unwrap();
    let agent = AgentClient::connect(&socket).await.unwrap();
    let request = CreateSandboxRequest { sandbox_id: id.clone(), ..CreateSandboxRequest::default() };
    agent.create_sandbox(&request).await.unwrap();
    let sandbox = Sandbox { id, socket, shim, agent, pod };
    sandbox.create_container(CONTAINER, &["sleep", "infinity"]).await.unwrap();
    sandbox
}

#[tokio::test(flavor = "multi_thread")]
async fn guests_of_one_batch_are_each_in_their_own_pod() {
    const PODS: usize = 4;
    let world = World::new().unwrap();
    let mut daemons =
        Daemons::start(&world, Settings::none().set("provider.local.max-batch", 8)).await.unwrap();
    let pods: Vec<Pod> = (0..PODS).map(|_| world.pod().unwrap()).collect();
    let sandboxes = join_all(pods.into_iter().map(|pod| boot(&daemons, pod))).await;
    let metrics = daemons.metrics("node").unwrap();
    let batched = sample(&metrics, "peerpod_node_batch_size_sum").unwrap() as usize;
    assert!(batched >= 2, "{batched} of {PODS} were made together");
    for again in ["first", "after the node died"] {
        let mut vms = BTreeSet::new();
        for sandbox in &sandboxes {
            let output = sandbox.shell(&fresh_id("where"), "cat /proc/net/fib_trie").await.unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            for other in &sandboxes {
                let there = text.contains(&format!("|-- {}\n", other.pod.v4()));
                assert_eq!(there, other.id == sandbox.id, "{again}: {} in {}: {text}", other.id, sandbox.id);
            }
            vms.insert(sandbox.shim.vm_id("default", &sandbox.id, true, PATIENCE).await.unwrap());
        }
        assert_eq!(vms.len(), PODS, "{again}");
        daemons.kill_node().unwrap();
        daemons.start_node().unwrap();
        daemons.ready().await.unwrap();
    }
    for sandbox in sandboxes {
        sandbox.stop(&daemons).await.unwrap();
    }
}
