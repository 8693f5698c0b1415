//! Runs the real peerpod-node with this provider, against the fake. The tests simulate shims, but no guests: no pod gets
//! ready, but each gets its VM, its addresses, and its deletion.
//!
//! With `PEERPOD_TEST_LONG` there are 500 pods and 100 kills.

use std::collections::BTreeMap;
use std::time::Duration;

use peerpod_client::Annotations;
use peerpod_test_clouds::{Cloud, Fault, IbmCloud};
use peerpod_tests::cloud_node::{CloudNode, is_full, place};
use peerpod_tests::report;
use peerpod_world::Settings;

use super::common::{CREATE, Site};

async fn start(more: impl FnOnce(Settings) -> Settings) -> CloudNode<Site> {
    let (world, listener) = place();
    let site = Site { cloud: Cloud::start_on(listener, IbmCloud::default()).await.unwrap() };
    set_times(&site);
    CloudNode::start(world, site, more).await
}

fn set_times(site: &Site) {
    site.cloud.set_times(Duration::from_millis(300), Duration::from_millis(200));
}

/// Creates 50 pods at once behind limits, waits until each has a VM with an address, and stops them all.
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
    for call in calls.iter().filter(|call| !call.throttled) {
        *by_action.entry(&call.action).or_default() += 1;
    }
    println!("{count} pods: {} calls: {by_action:?}", calls.len());
    let per_pod = calls.len() as f64 / count as f64;
    report(&format!("ibmcloud_calls_per_pod_{count}"), per_pod);
    // A POST, and a share of the lists until IBM has decided.
    assert_eq!(by_action.get(CREATE), Some(&count));
    assert!(per_pod <= 4.0, "{per_pod} calls per pod");
    node.stop(&pods).await;
    assert_eq!(node.site.parts(), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_while_ibm_answers_has_one_vm_for_each_pod_afterwards() {
    let mut node = start(|settings| settings).await;
    let prepare = |site: &Site| {
        site.cloud.set_lag(Duration::from_millis(300));
        set_times(site);
    };
    node.kill_while_creating(prepare).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_refusal_leads_to_the_next_zone() {
    let node = start(|settings| settings.set("provider.ibmcloud.market", "on-demand")).await;
    node.site.cloud.fail(CREATE, Fault::refuse_late("cannot_start_capacity", "none left"), 1);
    let pods = node.pods(1);
    node.answered(node.create(&pods)).await;
    node.all_located(&pods).await;
    assert_eq!(node.site.cloud.count(Some(CREATE)), 2, "one attempt for each zone");
    assert_eq!(node.site.parts(), (1, 1));
    node.stop(&pods).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_of_ibm_reaches_the_pods_error() {
    let node = start(|settings| settings.set("provider.ibmcloud.instance-types", "bxf-2x8,bx3d-2x10")).await;
    let refusals = [
        ("not_authorized", 403, "providers/ibmcloud/role.json"),
        ("subnet_not_found", 404, "subnet-ids"),
        ("image_not_found", 404, "image-ids"),
        ("bad_field", 400, "correct the settings"),
    ];
    let pods = node.pods(refusals.len() + 4);
    let plain = || Annotations::new("default", "refused").size("1", 512);
    for (number, (code, status, remedy)) in refusals.into_iter().enumerate() {
        node.site.cloud.fail(CREATE, Fault::refuse(status, code, "Because."), 1);
        let error = node.refused(&pods[number], plain()).await;
        assert!(error.contains(code) && error.contains("Because") && error.contains(remedy), "{error}");
    }
    let number = refusals.len();
    let error = node.refused(&pods[number], plain().machine_type("bx3d-24x120")).await;
    assert!(error.contains("bx3d-24x120") && error.contains("not part of"), "{error}");
    let error = node.refused(&pods[number + 1], plain().size("96", 1 << 20)).await;
    assert!(error.contains("vcpus (96)"), "{error}");
    node.site.cloud.set_stock("*", "*", "*", 0);
    let error = node.refused(&pods[number + 2], plain().machine_type("bxf-2x8")).await;
    assert!(error.contains("cannot_start_capacity"), "{error}");
    node.site.cloud.heal();
    node.site.cloud.with(|ibm, _| ibm.quota = Some(0));
    let error = node.refused(&pods[number + 3], plain().machine_type("bx3d-2x10")).await;
    for part in ["over_quota", "higher quota"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    node.until("no VM is left", || async { node.site.machines().is_empty().then_some(()) }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pods_wishes_are_in_its_vm_and_a_refused_one_is_named() {
    let types = "bxf-2x8,bx3dc-2x10";
    let node = start(|settings| settings.set("provider.ibmcloud.instance-types", types)).await;
    let shim = node.daemons.shim().await.unwrap();
    let wishes = [
        ("io.peerpod/market", "on-demand"),
        ("io.peerpod/zones", "us-south-2"),
        ("io.peerpod/confidential", "tdx"),
        ("io.peerpod/arch", "amd64"),
    ];
    let pods = node.pods(2);
    let all =
        wishes.iter().fold(Annotations::new("default", "had"), |all, (key, value)| all.raw(key, Some(value)));
    shim.create_vm(&pods[0].0, all, &pods[0].1).await.unwrap();
    let vm = node.all_located(&pods[..1]).await.remove(&pods[0].0).unwrap();
    let body = node.site.cloud.with(|ibm, _| ibm.instances.get(&vm).unwrap().body.clone());
    assert_eq!(body["zone"]["name"], "us-south-2");
    assert_eq!(body["profile"]["name"], "bx3dc-2x10");
    assert_eq!(body["confidential_compute_mode"], "tdx");
    assert!(body.get("availability").is_none());
    let annotations = Annotations::new("default", "no").raw("io.peerpod/public-ip", Some("true"));
    let error = match shim.create_vm(&pods[1].0, annotations, &pods[1].1).await {
        Err(error) => error.to_string(),
        Ok(_) => shim.start_vm(&pods[1].0).await.unwrap_err().to_string(),
    };
    assert!(error.contains("public"), "{error}");
    node.stop(&pods[..1]).await;
}
