//! Runs the real peerpod-node with this provider, against the simulator. The tests simulate shims, but no guests: no pod
//! gets ready, but each gets its VM, its addresses, and its deletion.
//!
//! With `PEERPOD_TEST_LONG` the counts are those of the issue: 100 kills.

use std::time::Duration;

use peerpod_client::Annotations;
use peerpod_test_clouds::{Fault, Vcsim};
use peerpod_tests::cloud_node::{CloudNode, is_full, place};
use peerpod_tests::report;
use peerpod_world::Settings;

use super::common::{CREATE, Site};

async fn start(more: impl FnOnce(Settings) -> Settings) -> CloudNode<Site> {
    let (world, listener) = place();
    let site = Site { vcsim: Vcsim::start_on(listener, false).unwrap() };
    CloudNode::start(world, site, more).await
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_pods_at_once_get_a_vm_each() {
    let node = start(|settings| settings).await;
    let pods = node.pods(if is_full() { 200 } else { 50 });
    node.site.vcsim.forget_calls();
    node.burst(&pods).await;
    let per_pod = node.site.vcsim.calls().len() as f64 / pods.len() as f64;
    report("vsphere_calls_per_pod_50", per_pod);
    assert!(per_pod <= 4.0, "{per_pod} calls per pod");
    assert_eq!(node.site.vcsim.count(CREATE), pods.len());
    node.stop(&pods).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_while_the_vcenter_answers_has_one_vm_for_each_pod_afterwards() {
    let mut node = start(|settings| settings).await;
    node.kill_while_creating(|site| site.vcsim.set_task_time(Duration::from_millis(100))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_refusal_leads_to_the_next_place_and_others_reach_the_pods_error() {
    let node = start(|settings| settings).await;
    let pods = node.pods(3);
    node.site.vcsim.fail(CREATE, Fault::refuse_late("NoDiskSpace", ""), 1);
    node.answered(node.create(&pods[..1])).await;
    node.all_located(&pods[..1]).await;
    assert_eq!(node.site.vcsim.count(CREATE), 2, "one attempt for each place");
    let plain = || Annotations::new("default", "refused").size("1", 512);
    for (pod, (fault, remedy)) in
        pods[1..].iter().zip([("NoPermission", "role.txt"), ("NotEnoughLicenses", "license")])
    {
        node.site.vcsim.fail(CREATE, Fault::refuse_late(fault, ""), 1);
        let error = node.refused(pod, plain()).await;
        assert!(error.contains(fault) && error.contains(remedy), "{error}");
    }
    node.stop(&pods[..1]).await;
}
