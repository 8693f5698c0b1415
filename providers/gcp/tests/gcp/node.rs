//! Runs the real peerpod-node with this provider, against the fake. The tests simulate shims, but no guests: no pod gets
//! ready, but each gets its VM, its addresses, and its deletion.
//!
//! With `PEERPOD_TEST_LONG` the counts are those of the issue: 500 pods, 100 kills.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::time::Duration;

use peerpod_client::Annotations;
use peerpod_test_clouds::{Cloud, Fault, Gcp};
use peerpod_tests::cloud_node::CloudNode;
use peerpod_tests::{Dice, fresh_id, report};
use peerpod_world::Settings;

use super::common::{PATIENCE, Site};

/// Node that uses this fake.
struct Node {
    node: CloudNode,
    site: Site,
}

impl Deref for Node {
    type Target = CloudNode;

    fn deref(&self) -> &CloudNode {
        &self.node
    }
}

impl DerefMut for Node {
    fn deref_mut(&mut self) -> &mut CloudNode {
        &mut self.node
    }
}

impl Node {
    async fn start(more: impl FnOnce(Settings) -> Settings) -> Node {
        let (world, listener) = CloudNode::place();
        let site = Site { cloud: Cloud::start_on(listener, Gcp::default()).await.unwrap() };
        site.cloud.set_times(Duration::from_millis(300), Duration::from_millis(200));
        let node = CloudNode::start(world, "gcp", site.settings(), more).await;
        Node { node, site }
    }

    /// Stops all pods, and waits until the cloud has none of their VMs.
    async fn stop(&self, pods: &[(String, PathBuf)]) {
        self.node.stop(pods, async || self.site.machines().len()).await;
    }

    fn witnessed(&self) -> BTreeSet<String> {
        self.site.machines().into_iter().collect()
    }
}

/// Creates `count` pods at once, waits until each has a VM with an address, and stops them all. Returns the calls for
/// each pod, without its delete.
async fn burst(count: usize) -> f64 {
    let node = Node::start(|settings| settings).await;
    let pods = node.pods(count);
    node.site.cloud.forget_calls();
    node.answered(node.create(&pods)).await;
    let vms = node.all_located(&pods).await;
    let each: BTreeSet<String> = vms.values().cloned().collect();
    assert_eq!(
        (each.len(), node.witnessed()),
        (count, each.clone()),
        "each has its own\n{}",
        node.daemons.log_tails()
    );
    let ledger = node.daemons.ledger().unwrap();
    let failures = ledger.iter().filter(|entry| !entry.record["cause"].is_null()).count();
    assert_eq!(failures, 0);
    let calls = node.site.cloud.calls();
    let mut by_action: BTreeMap<&str, usize> = BTreeMap::new();
    for call in &calls {
        *by_action.entry(&call.action).or_default() += 1;
    }
    println!("{count} pods: {} calls: {by_action:?}", calls.len());
    let per_pod = calls.len() as f64 / count as f64;
    node.stop(&pods).await;
    per_pod
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_pods_at_once_cost_less_than_half_a_call_each() {
    let per_pod = burst(50).await;
    report("gcp_calls_per_pod_50", per_pod);
    assert!(per_pod <= 0.5, "{per_pod} calls per pod");
}

#[tokio::test(flavor = "multi_thread")]
async fn hundreds_of_pods_at_once_cost_a_tenth_of_a_call_each() {
    let count = if peerpod_tests::long() { 500 } else { 150 };
    let per_pod = burst(count).await;
    report(&format!("gcp_calls_per_pod_{count}"), per_pod);
    // The burst above has none.
    report(&format!("gcp_burst{count}_failures"), 0.0);
    let most = if count == 500 { 0.1 } else { 0.3 };
    assert!(per_pod <= most, "{per_pod} calls per pod");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_while_google_answers_has_one_vm_for_each_pod_afterwards() {
    let rounds = if peerpod_tests::long() { 100 } else { 6 };
    let mut node = Node::start(|settings| settings).await;
    node.site.cloud.set_lag(Duration::from_millis(300));
    let mut dice = Dice(0x5eed_1234_abcd_0003);
    let netns: Vec<PathBuf> = node.pods(4).into_iter().map(|(_, netns)| netns).collect();
    let mut extra = 0;
    for round in 0..rounds {
        // The node creates a single pod alone, and several as a batch.
        let count = 1 + usize::try_from(dice.roll(4)).unwrap();
        let pods: Vec<(String, PathBuf)> =
            netns.iter().take(count).map(|netns| (fresh_id("killed"), netns.clone())).collect();
        let in_between = round % 2 == 0;
        let late = Fault::Late(Duration::from_secs(5));
        if in_between {
            node.site.cloud.fail("compute.instances.insert", late.clone(), 1);
            node.site.cloud.fail("compute.instances.bulkInsert", late, 1);
        }
        // The relay keeps the calls that the killed node has not answered.
        let calls = node.create(&pods);
        if in_between {
            // Google has executed the call, but has not answered it.
            node.until("Google is late", || async { (node.site.cloud.late() > 0).then_some(()) }).await;
        }
        tokio::time::sleep(Duration::from_millis(dice.roll(400))).await;
        node.daemons.kill_node().unwrap();
        node.daemons.start_node().unwrap();
        node.answered(calls).await;
        let vms: BTreeSet<String> = node.all_located(&pods).await.into_values().collect();
        let witnessed = node.witnessed();
        extra += witnessed.len() as i64 - count as i64;
        assert_eq!((vms.len(), &witnessed), (count, &vms), "round {round}: one each, and no others");
        node.stop(&pods).await;
        node.until("no answer is late any more", || async { (node.site.cloud.late() == 0).then_some(()) })
            .await;
        node.site.cloud.heal();
        node.site.cloud.set_lag(Duration::from_millis(300));
        node.site.cloud.set_times(Duration::from_millis(300), Duration::from_millis(200));
    }
    println!("{rounds} kills");
    report("gcp_crash100_extra_vms", extra as f64);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_refusal_leads_to_the_next_zone() {
    let node = Node::start(|settings| settings.set("provider.gcp.market", "on-demand")).await;
    let message = "The zone does not have enough resources available to fulfill the request.";
    let late = Fault::refuse_late("ZONE_RESOURCE_POOL_EXHAUSTED", message);
    node.site.cloud.fail("compute.instances.insert", late, 1);
    let pods = node.pods(1);
    node.answered(node.create(&pods)).await;
    node.all_located(&pods).await;
    assert_eq!(node.site.cloud.count(Some("compute.instances.insert")), 2, "one attempt for each zone");
    node.stop(&pods).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_of_google_reaches_the_pods_error() {
    let node =
        Node::start(|settings| settings.set("provider.gcp.instance-types", "n2d-standard-2,e2-standard-4"))
            .await;
    let shim = node.daemons.shim().await.unwrap();
    let early = [
        ("forbidden", 403, "role.yaml"),
        ("accessNotConfigured", 403, "gcloud services enable"),
        ("invalid", 400, "correct the settings"),
    ];
    let late = [("UNSUPPORTED_OPERATION", "fit each other"), ("PERMISSIONS_ERROR", "role.yaml")];
    let pods = node.pods(early.len() + late.len() + 4);
    let told = async |number: usize, annotations: Annotations| {
        let (id, netns) = &pods[number];
        shim.create_vm(id, annotations, netns).await.unwrap();
        let started = tokio::time::timeout(PATIENCE, shim.start_vm(id)).await;
        started.unwrap_or_else(|_| panic!("{}", node.daemons.log_tails())).unwrap_err().to_string()
    };
    let plain = || Annotations::new("default", "refused").size("1", 512);
    for (number, (code, status, remedy)) in early.into_iter().enumerate() {
        node.site.cloud.fail("compute.instances.insert", Fault::refuse(status, code, "Because."), 1);
        let error = told(number, plain()).await;
        assert!(error.contains(code) && error.contains("Because") && error.contains(remedy), "{error}");
    }
    for (number, (code, remedy)) in (early.len()..).zip(late) {
        node.site.cloud.fail("compute.instances.insert", Fault::refuse_late(code, "Because."), 1);
        let error = told(number, plain()).await;
        assert!(error.contains(code) && error.contains("Because") && error.contains(remedy), "{error}");
    }
    let number = early.len() + late.len();
    let error = told(number, plain().machine_type("a3-highgpu-8g")).await;
    assert!(error.contains("a3-highgpu-8g") && error.contains("not part of"), "{error}");
    let error = told(number + 1, plain().size("96", 1 << 20)).await;
    assert!(error.contains("vcpus (96)"), "{error}");
    node.site.cloud.set_stock("*", "*", "*", 0);
    let error = told(number + 2, plain().machine_type("n2d-standard-2")).await;
    assert!(error.contains("ZONE_RESOURCE_POOL_EXHAUSTED"), "{error}");
    // Google refuses no second pod: the provider remembers its quota.
    node.site.cloud.heal();
    node.site.cloud.with(|gcp, _| gcp.quota = Some(0));
    let error = told(number + 3, plain().machine_type("e2-standard-4")).await;
    for part in ["QUOTA_EXCEEDED", "ask for a higher quota"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    assert!(node.site.machines().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pods_wishes_are_in_its_vm_and_a_refused_one_is_named() {
    let node = Node::start(|settings| settings).await;
    let shim = node.daemons.shim().await.unwrap();
    let wishes = [
        ("io.peerpod/market", "on-demand"),
        ("io.peerpod/zones", "europe-west4-b"),
        ("io.peerpod/confidential", "sev-snp"),
        ("io.peerpod/arch", "amd64"),
    ];
    let pods = node.pods(2);
    let all =
        wishes.iter().fold(Annotations::new("default", "had"), |all, (key, value)| all.raw(key, Some(value)));
    shim.create_vm(&pods[0].0, all, &pods[0].1).await.unwrap();
    let vm = node.all_located(&pods[..1]).await.remove(&pods[0].0).unwrap();
    let vm = node.site.vm(&vm).unwrap();
    assert!(vm["zone"].as_str().unwrap().ends_with("europe-west4-b"), "{vm}");
    assert_eq!(vm["confidentialInstanceConfig"]["confidentialInstanceType"], "SEV_SNP");
    assert_eq!(vm["scheduling"]["provisioningModel"], "STANDARD");
    let annotations = Annotations::new("default", "no").raw("io.peerpod/arch", Some("arm64"));
    shim.create_vm(&pods[1].0, annotations, &pods[1].1).await.unwrap();
    let error = shim.start_vm(&pods[1].0).await.unwrap_err().to_string();
    assert!(error.contains("aarch64 cannot be had from provider gcp, which has x86_64"), "{error}");
    node.stop(&pods[..1]).await;
}
