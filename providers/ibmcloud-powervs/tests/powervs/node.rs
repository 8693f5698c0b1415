//! Runs the real peerpod-node with this provider, against the fake. The tests simulate shims, but no guests: no pod gets
//! ready, but each gets its VM, its addresses, and its deletion.
//!
//! With `PEERPOD_TEST_LONG` there are 500 pods and 100 kills.

use std::time::Duration;

use peerpod_client::Annotations;
use peerpod_test_clouds::{Cloud, Fault, PowerVs};
use peerpod_tests::cloud_node::{CloudNode, is_full, place};
use peerpod_tests::report;

use super::common::{CREATE, Site};

async fn start() -> CloudNode<Site> {
    let (world, listener) = place();
    let site = Site { cloud: Cloud::start_on(listener, PowerVs::default()).await.unwrap() };
    set_times(&site);
    CloudNode::start(world, site, |settings| settings).await
}

fn set_times(site: &Site) {
    site.cloud.set_times(Duration::from_millis(300), Duration::from_millis(200));
}

/// Creates 50 pods at once behind limits, waits until each has a VM with an address, and stops them all.
#[tokio::test(flavor = "multi_thread")]
async fn fifty_pods_at_once_have_one_vm_each_and_few_calls() {
    let count = if is_full() { 500 } else { 50 };
    let node = start().await;
    let pods = node.pods(count);
    node.site.cloud.set_rates(1.0);
    node.site.cloud.forget_calls();
    node.burst(&pods).await;
    let per_pod = node.site.cloud.calls().len() as f64 / count as f64;
    report(&format!("ibmcloud-powervs_calls_per_pod_{count}"), per_pod);
    // A POST, a look for the tags, and a share of the lists.
    assert_eq!(node.site.cloud.count(Some(CREATE)), count);
    assert!(per_pod <= 5.0, "{per_pod} calls per pod");
    node.stop(&pods).await;
    assert!(node.site.machines().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_while_powervs_answers_has_one_vm_for_each_pod_afterwards() {
    let mut node = start().await;
    let prepare = |site: &Site| {
        site.cloud.set_lag(Duration::from_millis(20));
        set_times(site);
    };
    node.kill_while_creating(prepare).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_of_powervs_reaches_the_pods_error() {
    let node = start().await;
    let pods = node.pods(4);
    let plain = || Annotations::new("default", "refused").size("1", 512);
    for (number, (status, message, remedy)) in
        [(403, "no right", "Manager"), (404, "no such image", "correct the settings")].into_iter().enumerate()
    {
        node.site.cloud.fail(CREATE, Fault::refuse(status, "refused", message), 1);
        let error = node.refused(&pods[number], plain()).await;
        assert!(error.contains(message) && error.contains(remedy), "{error}");
    }
    let error = node.refused(&pods[2], plain().machine_type("large")).await;
    assert!(error.contains("write it like s922-0.5x2"), "{error}");
    node.site.cloud.set_stock("*", "*", "*", 0);
    let error = node.refused(&pods[3], plain()).await;
    assert!(error.contains("No valid host was found") && error.contains("system-type"), "{error}");
    node.until("no VM is left", || async { node.site.machines().is_empty().then_some(()) }).await;
}
