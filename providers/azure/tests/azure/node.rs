//! Runs the real peerpod-node with this provider, against the fake. The tests simulate shims, but no guests: no pod gets
//! ready, but each gets its VM, its addresses, and its deletion.
//!
//! With `PEERPOD_TEST_LONG` there are 500 pods and 100 kills.

use std::collections::BTreeMap;
use std::time::Duration;

use peerpod_client::Annotations;
use peerpod_test_clouds::{Azure, Cloud, Fault, Rate};
use peerpod_tests::cloud_node::{CloudNode, is_full, place, report_makespan};
use peerpod_tests::report;
use peerpod_world::Settings;

use super::common::{CREATE, Site, name};

async fn start(more: impl FnOnce(Settings) -> Settings) -> CloudNode<Site> {
    let (world, listener) = place();
    let site = Site { cloud: Cloud::start_on(listener, Azure::default()).await.unwrap() };
    set_times(&site);
    CloudNode::start(world, site, more).await
}

fn set_times(site: &Site) {
    site.cloud.set_times(Duration::from_millis(300), Duration::from_millis(200));
}

/// Creates 50 pods at once behind Azure's limits, waits until each has a VM with an address, and stops them all.
#[tokio::test(flavor = "multi_thread")]
async fn fifty_pods_at_once_have_one_vm_each_and_few_calls() {
    let count = if is_full() { 500 } else { 50 };
    let node = start(|settings| settings).await;
    let pods = node.pods(count);
    node.site.cloud.set_rates(1.0);
    node.site.cloud.forget_calls();
    node.burst(&pods).await;
    let calls = node.site.cloud.calls();
    let mut by_action: BTreeMap<&str, usize> = BTreeMap::new();
    for call in &calls {
        *by_action.entry(&call.action).or_default() += 1;
    }
    println!("{count} pods: {} calls: {by_action:?}", calls.len());
    let per_pod = calls.len() as f64 / count as f64;
    report(&format!("azure_calls_per_pod_{count}"), per_pod);
    // A PUT, some looks until Azure has decided, and a share of the lists.
    assert_eq!(by_action.get(CREATE), Some(&count));
    assert!(per_pod <= 6.0 && calls.iter().all(|call| !call.throttled), "{per_pod} calls per pod");
    node.stop(&pods).await;
    assert_eq!(node.site.parts(), (0, 0, 0));
}

/// The subscription has a burst of a fifth of the pods, and Azure's own 500 creates a minute. The pods therefore wait for
/// most of their creates: 48 seconds for 500 pods.
#[tokio::test(flavor = "multi_thread")]
async fn pods_beyond_the_burst_are_as_fast_as_the_bucket_permits() {
    let count = if is_full() { 500 } else { 60 };
    let node = start(|settings| settings).await;
    let pods = node.pods(count);
    let rate = Rate::Bucket { per_minute: 500.0, burst: count as f64 / 5.0 };
    node.site.cloud.set_rates(1.0);
    node.site.cloud.set_limit("Microsoft.Compute/PutVMSubscriptionMaximum", rate);
    let took = node.burst(&pods).await;
    let calls = node.site.cloud.calls();
    let throttled = calls.iter().filter(|call| call.throttled).count();
    let creates = calls.iter().filter(|call| call.action == CREATE && !call.throttled);
    let at = creates.map(|call| call.at.as_secs_f64());
    let (first, last) = at.fold((f64::MAX, 0.0_f64), |(first, last), at| (first.min(at), last.max(at)));
    println!("{count} pods: {took:?}, the creates {:.1} s, {throttled} calls throttled", last - first);
    report_makespan::<Site>(took, rate.least(count, Duration::ZERO, 1.0), 1.2);
    // Azure refuses the calls that are in flight when its bucket gets empty, and few of those that follow.
    assert!(throttled <= 2 * count, "{throttled} calls throttled");
    node.stop(&pods).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_while_azure_answers_has_one_vm_for_each_pod_afterwards() {
    let mut node = start(|settings| settings).await;
    let prepare = |site: &Site| {
        site.cloud.set_lag(Duration::from_millis(300));
        set_times(site);
    };
    node.kill_while_creating(prepare).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_refusal_leads_to_the_next_zone() {
    let node = start(|settings| settings.set("provider.azure.market", "on-demand")).await;
    let late = Fault::refuse_late("ZonalAllocationFailed", "We do not have sufficient capacity.");
    node.site.cloud.fail(CREATE, late, 1);
    let pods = node.pods(1);
    node.answered(node.create(&pods)).await;
    node.all_located(&pods).await;
    assert_eq!(node.site.cloud.count(Some(CREATE)), 2, "one attempt for each zone");
    assert_eq!(node.site.parts(), (1, 1, 1));
    node.stop(&pods).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_of_azure_reaches_the_pods_error() {
    let node =
        start(|settings| settings.set("provider.azure.instance-types", "Standard_D2s_v5,Standard_D4s_v5"))
            .await;
    let refusals = [
        ("AuthorizationFailed", 403, "providers/azure/role.json"),
        ("InvalidResourceReference", 400, "subnet-id"),
        ("PlatformImageNotFound", 404, "image-id"),
        ("RequestDisallowedByPolicy", 403, "policy"),
        ("InvalidParameter", 400, "correct the settings"),
    ];
    let pods = node.pods(refusals.len() + 4);
    let plain = || Annotations::new("default", "refused").size("1", 512);
    for (number, (code, status, remedy)) in refusals.into_iter().enumerate() {
        node.site.cloud.fail(CREATE, Fault::refuse(status, code, "Because."), 1);
        let error = node.refused(&pods[number], plain()).await;
        assert!(error.contains(code) && error.contains("Because") && error.contains(remedy), "{error}");
    }
    let number = refusals.len();
    let error = node.refused(&pods[number], plain().machine_type("Standard_M416ms_v2")).await;
    assert!(error.contains("Standard_M416ms_v2") && error.contains("not part of"), "{error}");
    let error = node.refused(&pods[number + 1], plain().size("96", 1 << 20)).await;
    assert!(error.contains("vcpus (96)"), "{error}");
    node.site.cloud.set_stock("*", "*", "*", 0);
    let error = node.refused(&pods[number + 2], plain().machine_type("Standard_D2s_v5")).await;
    assert!(error.contains("ZonalAllocationFailed") && error.contains("SkuNotAvailable"), "{error}");
    node.site.cloud.heal();
    node.site.cloud.with(|azure, _| azure.quota = Some(0));
    let error = node.refused(&pods[number + 3], plain().machine_type("Standard_D4s_v5")).await;
    for part in ["Total Regional Cores quota", "ask for a higher quota"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    node.until("no VM is left", || async { node.site.machines().is_empty().then_some(()) }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pods_wishes_are_in_its_vm_and_a_refused_one_is_named() {
    let types = "Standard_D2s_v5,Standard_DC2as_v5";
    let node = start(|settings| settings.set("provider.azure.instance-types", types)).await;
    let shim = node.daemons.shim().await.unwrap();
    let wishes = [
        ("io.peerpod/market", "on-demand"),
        ("io.peerpod/zones", "westeurope-2"),
        ("io.peerpod/confidential", "sev-snp"),
        ("io.peerpod/arch", "amd64"),
    ];
    let pods = node.pods(2);
    let all =
        wishes.iter().fold(Annotations::new("default", "had"), |all, (key, value)| all.raw(key, Some(value)));
    shim.create_vm(&pods[0].0, all, &pods[0].1).await.unwrap();
    let vm = node.all_located(&pods[..1]).await.remove(&pods[0].0).unwrap();
    let body = node.site.cloud.with(|azure, _| azure.vms.get(name(&vm)).unwrap().body.clone());
    assert_eq!(body["zones"], serde_json::json!(["2"]));
    assert_eq!(body["properties"]["hardwareProfile"]["vmSize"], "Standard_DC2as_v5");
    assert_eq!(body["properties"]["securityProfile"]["securityType"], "ConfidentialVM");
    assert!(body["properties"].get("priority").is_none());
    let annotations = Annotations::new("default", "no").raw("io.peerpod/arch", Some("arm64"));
    shim.create_vm(&pods[1].0, annotations, &pods[1].1).await.unwrap();
    let error = shim.start_vm(&pods[1].0).await.unwrap_err().to_string();
    assert!(error.contains("aarch64 cannot be had from provider azure, which has x86_64"), "{error}");
    node.stop(&pods[..1]).await;
}
