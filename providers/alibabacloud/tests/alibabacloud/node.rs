//! Runs the real peerpod-node with this provider, against the fake. The tests simulate shims, but no guests: no pod gets
//! ready, but each gets its VM, its addresses, and its deletion.
//!
//! With `PEERPOD_TEST_LONG` the counts are those of the issue: 500 pods, 100 kills.

use std::collections::BTreeMap;
use std::time::Duration;

use peerpod_client::Annotations;
use peerpod_test_clouds::{Alibaba, Cloud, Fault};
use peerpod_tests::cloud_node::{CloudNode, is_full, place};
use peerpod_tests::report;
use peerpod_world::Settings;

use super::common::{CREATE, Site};

async fn start(more: impl FnOnce(Settings) -> Settings) -> CloudNode<Site> {
    let (world, listener) = place();
    let site = Site { cloud: Cloud::start_on(listener, Alibaba::default()).await.unwrap() };
    set_times(&site);
    CloudNode::start(world, site, more).await
}

fn set_times(site: &Site) {
    site.cloud.set_times(Duration::from_millis(300), Duration::from_millis(200));
    site.cloud.with(|alibaba, _| alibaba.free = 1_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_pods_at_once_cost_less_than_half_a_call_each() {
    let count = if is_full() { 500 } else { 50 };
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
    report(&format!("alibabacloud_calls_per_pod_{count}"), per_pod);
    assert!(per_pod <= 0.5, "{per_pod} calls per pod");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_while_the_cloud_answers_has_one_vm_for_each_pod_afterwards() {
    let mut node = start(|settings| settings).await;
    let prepare = |site: &Site| {
        site.cloud.set_lag(Duration::from_millis(300));
        set_times(site);
    };
    node.kill_while_creating(prepare).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_of_the_cloud_reaches_the_pods_error_or_leads_to_the_next_zone() {
    let more = |settings: Settings| {
        settings
            .set("provider.alibabacloud.instance-types", "ecs.g8i.xlarge,ecs.g7.xlarge")
            .set("provider.alibabacloud.market", "on-demand")
    };
    let node = start(more).await;
    let refusals = [
        ("Forbidden.RAM", 403, "ram-policy.json"),
        ("InvalidAccountStatus.NotEnoughBalance", 403, "top up"),
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
    let error = node.refused(&pods[number], plain().machine_type("ecs.g5.large")).await;
    assert!(error.contains("ecs.g5.large") && error.contains("not part of"), "{error}");
    // The first offering has nothing left: another attempt gets another one.
    node.site.cloud.fail(CREATE, Fault::refuse(403, "OperationDenied.NoStock", "Because."), 1);
    let before = node.site.cloud.count(Some(CREATE));
    node.answered(node.create(&pods[number + 1..number + 2])).await;
    node.all_located(&pods[number + 1..number + 2]).await;
    assert_eq!(node.site.cloud.count(Some(CREATE)) - before, 2, "one attempt for each offering");
    node.stop(&pods[number + 1..number + 2]).await;
    node.site.cloud.set_stock("*", "*", "*", 0);
    let error = node.refused(&pods[number + 2], plain()).await;
    assert!(error.contains("OperationDenied.NoStock"), "{error}");
    assert!(node.site.machines().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pods_wishes_are_in_its_vm_and_a_refused_one_is_named() {
    let node = start(|settings| settings).await;
    let shim = node.daemons.shim().await.unwrap();
    let wishes = [
        ("io.peerpod/market", "on-demand"),
        ("io.peerpod/zones", "cn-beijing-i"),
        ("io.peerpod/confidential", "tdx"),
        ("io.peerpod/arch", "amd64"),
    ];
    let pods = node.pods(2);
    let all =
        wishes.iter().fold(Annotations::new("default", "had"), |all, (key, value)| all.raw(key, Some(value)));
    shim.create_vm(&pods[0].0, all, &pods[0].1).await.unwrap();
    let vm = node.all_located(&pods[..1]).await.remove(&pods[0].0).unwrap();
    let vm = node.site.vm(&vm).unwrap();
    assert_eq!(vm.zone, "cn-beijing-i");
    assert_eq!(vm.parameters["SecurityOptions.ConfidentialComputingMode"], "TDX");
    assert!(!vm.parameters.contains_key("SpotStrategy"));
    let annotations = Annotations::new("default", "no").raw("io.peerpod/arch", Some("arm64"));
    shim.create_vm(&pods[1].0, annotations, &pods[1].1).await.unwrap();
    let error = shim.start_vm(&pods[1].0).await.unwrap_err().to_string();
    assert!(error.contains("aarch64 cannot be had from provider alibabacloud, which has x86_64"), "{error}");
    node.stop(&pods[..1]).await;
}
