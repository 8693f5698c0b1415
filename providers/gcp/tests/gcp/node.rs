//! Runs the real peerpod-node with this provider, against the fake. The tests simulate shims, but no guests: no pod gets
//! ready, but each gets its VM, its addresses, and its deletion.
//!
//! With `PEERPOD_TEST_LONG` the counts are those of the issue: 500 pods, 100 kills.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use peerpod_client::Annotations;
use peerpod_test_clouds::{Cloud, Fault, Gcp, Rate};
use peerpod_tests::cloud::TestCloud;
use peerpod_tests::cloud_node::{CloudNode, is_full, place, report_makespan};
use peerpod_tests::report;
use peerpod_world::Settings;

use super::common::{CREATE, Site};

async fn start(more: impl FnOnce(Settings) -> Settings) -> CloudNode<Site> {
    let (world, listener) = place();
    let site = Site { cloud: Cloud::start_on(listener, Gcp::default()).await.unwrap() };
    set_times(&site);
    CloudNode::start(world, site, more).await
}

fn set_times(site: &Site) {
    site.cloud.set_times(Duration::from_millis(300), Duration::from_millis(200));
}

/// Creates `count` pods at once, waits until each has a VM with an address, and stops them all. Returns the calls for
/// each pod, without its delete.
async fn burst(count: usize) -> f64 {
    let node = start(|settings| settings).await;
    let pods = node.pods(count);
    node.site.cloud.forget_calls();
    node.burst(&pods).await;
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
    let count = if is_full() { 500 } else { 150 };
    let per_pod = burst(count).await;
    report(&format!("gcp_calls_per_pod_{count}"), per_pod);
    let most = if count == 500 { 0.1 } else { 0.3 };
    assert!(per_pod <= most, "{per_pod} calls per pod");
}

/// The project has 200 mutations in each minute instead of Google's 1500, and each pod has an insert of its own. The
/// minutes are those of the machine's clock, as the provider counts them. 500 pods need the third minute, so this test
/// runs in benchmarks and long tests only.
#[tokio::test(flavor = "multi_thread")]
async fn pods_beyond_the_minute_are_as_fast_as_the_minutes_permit() {
    const MINUTE: Duration = Duration::from_secs(60);
    if !is_full() {
        println!("not run without PEERPOD_TEST_LONG or PEERPOD_TEST_BENCH");
        return;
    }
    let node = start(|settings| settings.set("node.batch", "off")).await;
    let pods = node.pods(500);
    let of_minute = |time: Duration| Duration::from_secs_f64(time.as_secs_f64() % MINUTE.as_secs_f64());
    let second = || of_minute(SystemTime::now().duration_since(UNIX_EPOCH).unwrap());
    // The pods begin early in a minute: the node calls for 200 of them before its end.
    node.until("a minute begins", || async { (second() < MINUTE / 3).then_some(()) }).await;
    let cloud = &node.site.cloud;
    let now = || cloud.with(|_, world| world.now);
    cloud.advance(MINUTE + second() - of_minute(now()));
    let rate = Rate::Minute { calls: 200 };
    cloud.set_rates(1.0);
    cloud.set_limit("Queries", rate);
    let permitted = rate.least(pods.len(), now(), 1.0);
    let took = node.burst(&pods).await;
    println!("{took:?}, {permitted:?} permitted");
    report_makespan::<Site>(took, permitted, 1.1);
    node.site.heal();
    node.stop(&pods).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_while_google_answers_has_one_vm_for_each_pod_afterwards() {
    let mut node = start(|settings| settings).await;
    let prepare = |site: &Site| {
        site.cloud.set_lag(Duration::from_millis(300));
        set_times(site);
    };
    node.kill_while_creating(prepare).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_refusal_leads_to_the_next_zone() {
    let node = start(|settings| settings.set("provider.gcp.market", "on-demand")).await;
    let message = "The zone does not have enough resources available to fulfill the request.";
    let late = Fault::refuse_late("ZONE_RESOURCE_POOL_EXHAUSTED", message);
    node.site.cloud.fail(CREATE, late, 1);
    let pods = node.pods(1);
    node.answered(node.create(&pods)).await;
    node.all_located(&pods).await;
    assert_eq!(node.site.cloud.count(Some(CREATE)), 2, "one attempt for each zone");
    node.stop(&pods).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_of_google_reaches_the_pods_error() {
    let node =
        start(|settings| settings.set("provider.gcp.instance-types", "n2d-standard-2,e2-standard-4")).await;
    let early = [
        ("forbidden", 403, "role.yaml"),
        ("accessNotConfigured", 403, "gcloud services enable"),
        ("invalid", 400, "correct the settings"),
    ];
    let late = [("UNSUPPORTED_OPERATION", "fit each other"), ("PERMISSIONS_ERROR", "role.yaml")];
    let pods = node.pods(early.len() + late.len() + 4);
    let plain = || Annotations::new("default", "refused").size("1", 512);
    for (number, (code, status, remedy)) in early.into_iter().enumerate() {
        node.site.cloud.fail(CREATE, Fault::refuse(status, code, "Because."), 1);
        let error = node.refused(&pods[number], plain()).await;
        assert!(error.contains(code) && error.contains("Because") && error.contains(remedy), "{error}");
    }
    for (number, (code, remedy)) in (early.len()..).zip(late) {
        node.site.cloud.fail(CREATE, Fault::refuse_late(code, "Because."), 1);
        let error = node.refused(&pods[number], plain()).await;
        assert!(error.contains(code) && error.contains("Because") && error.contains(remedy), "{error}");
    }
    let number = early.len() + late.len();
    let error = node.refused(&pods[number], plain().machine_type("a3-highgpu-8g")).await;
    assert!(error.contains("a3-highgpu-8g") && error.contains("not part of"), "{error}");
    let error = node.refused(&pods[number + 1], plain().size("96", 1 << 20)).await;
    assert!(error.contains("vcpus (96)"), "{error}");
    node.site.cloud.set_stock("*", "*", "*", 0);
    let error = node.refused(&pods[number + 2], plain().machine_type("n2d-standard-2")).await;
    assert!(error.contains("ZONE_RESOURCE_POOL_EXHAUSTED"), "{error}");
    // Google refuses no second pod: the provider remembers its quota.
    node.site.cloud.heal();
    node.site.cloud.with(|gcp, _| gcp.quota = Some(0));
    let error = node.refused(&pods[number + 3], plain().machine_type("e2-standard-4")).await;
    for part in ["QUOTA_EXCEEDED", "ask for a higher quota"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    assert!(node.site.machines().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pods_wishes_are_in_its_vm_and_a_refused_one_is_named() {
    let node = start(|settings| settings).await;
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
