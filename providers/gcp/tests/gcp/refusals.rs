//! Checks that each refusal of Google Cloud, at once or later, ends in an error that names the cause and the remedy, and
//! that no failure on the way makes two VMs or loses one.

use std::time::Duration;

use peerpod_provider_api::{CreateRequest, Market, OwnedState, Provider};
use peerpod_test_clouds::gcp::ZONES;
use peerpod_test_clouds::{Answer, Fault};
use serde_json::json;

use super::common::{Site, key, placed, request, says, within};

#[tokio::test(flavor = "multi_thread")]
async fn errors_of_capacity_quotas_rights_and_names_give_a_remedy() {
    let site = Site::start().await;
    let refusals = [
        ("rateLimitExceeded", 403, "transient", "caller waits"),
        ("quotaExceeded", 403, "quota", "ask for a higher quota"),
        ("resourcePoolExhausted", 503, "capacity", "more instance-types or zones"),
        ("forbidden", 403, "auth", "role.yaml"),
        ("accessNotConfigured", 403, "auth", "gcloud services enable"),
        ("authError", 401, "auth", "renew the key"),
        ("invalid", 400, "invalid", "correct the settings"),
        ("resourceInUseByAnotherResource", 400, "transient", "uses the disk"),
        ("resourceNotReady", 400, "transient", "tried again"),
        ("backendError", 503, "transient", "tried again"),
        ("somethingNew", 500, "transient", "tried again"),
    ];
    for (number, (code, status, class, remedy)) in (0..).zip(refusals) {
        let provider = site.provider(&[("market", "on-demand")]);
        let wish = placed(&*provider, &request("web-0")).await.unwrap();
        // A throttled call is repeated in the next minute; its caller does not wait so long.
        site.cloud.fail("compute.instances.insert", Fault::refuse(status, code, "Because."), 1000);
        let key = key("codes", number);
        let create = within(Duration::from_secs(1), provider.create(&wish, &key));
        let error = create.await.unwrap_err();
        says(&error, class, &["create of web-0", remedy]);
        if class != "transient" {
            says(&error, class, &[code, "Because"]);
        }
        site.cloud.heal();
    }
    assert!(site.machines().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_refusal_has_the_class_of_an_early_one_and_leaves_nothing() {
    let site = Site::start().await;
    site.cloud.set_times(Duration::from_millis(50), Duration::from_millis(10));
    let refusals = [
        ("ZONE_RESOURCE_POOL_EXHAUSTED", "capacity", "more instance-types or zones"),
        ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", "capacity", "more instance-types or zones"),
        ("RESOURCE_POOL_EXHAUSTED", "capacity", "more instance-types or zones"),
        ("STOCKOUT", "capacity", "more instance-types or zones"),
        ("QUOTA_EXCEEDED", "quota", "ask for a higher quota"),
        ("IP_SPACE_EXHAUSTED", "quota", "larger subnetwork"),
        ("PERMISSIONS_ERROR", "auth", "role.yaml"),
        ("UNSUPPORTED_OPERATION", "invalid", "fit each other"),
        // The call's id is used up: only another attempt helps.
        ("INTERNAL_ERROR", "capacity", "another attempt is needed"),
        ("RESOURCE_NOT_READY", "capacity", "another attempt is needed"),
    ];
    for (number, (code, class, remedy)) in (0..).zip(refusals) {
        let provider = site.provider(&[("market", "on-demand")]);
        let wish = placed(&*provider, &request("web-0")).await.unwrap();
        site.cloud.fail("compute.instances.insert", Fault::refuse_late(code, "Because."), 1);
        let key = key("late", number);
        let create = async || within(Duration::from_secs(2), provider.create(&wish, &key)).await;
        let error = create().await.unwrap_err();
        says(&error, class, &["create of web-0", code, "Because", remedy]);
        // The same call gets the same answer, also from another process.
        let other = site.provider(&[("market", "on-demand")]);
        let again = within(Duration::from_secs(2), other.create(&wish, &key)).await.unwrap_err();
        says(&again, class, &[code]);
        assert!(provider.list_owned().await.unwrap().is_empty(), "{code}");
    }
    assert!(site.machines().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exhausted_offering_is_skipped_for_a_while() {
    let site = Site::start().await;
    let provider = site.provider(&[("market", "on-demand")]);
    let mut zones = Vec::new();
    site.cloud.set_stock("*", "*", "*", 0);
    for number in 0..2 {
        let wish = placed(&*provider, &request("web-0")).await.unwrap();
        zones.push(wish.placement.clone().unwrap());
        let error = provider.create(&wish, &key("skipped", number)).await.unwrap_err();
        says(&error, "capacity", &["create of web-0", "ZONE_RESOURCE_POOL_EXHAUSTED"]);
    }
    assert_ne!(zones[0], zones[1], "the second attempt is in another zone");
    let error = provider.place(&request("web-0")).await.unwrap_err();
    says(&error, "capacity", &["exhausted for the moment", "ZONE_RESOURCE_POOL_EXHAUSTED"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn spot_falls_back_to_on_demand() {
    let site = Site::start().await;
    let provider = site.provider(&[("zones", ZONES[0])]);
    site.cloud.set_stock("*", "*", "spot", 0);
    let first = placed(&*provider, &request("web-0")).await.unwrap();
    let error = provider.create(&first, &key("spot", 0)).await.unwrap_err();
    assert_eq!(error.class(), "capacity", "{error}");
    let second = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&second, &key("spot", 1)).await.unwrap();
    let vm = site.vm(made.id.as_str()).unwrap();
    assert_eq!(vm["scheduling"]["provisioningModel"], "STANDARD");
    let spot = CreateRequest { market: Some(Market::Spot), ..request("web-1") };
    assert_eq!(provider.place(&spot).await.unwrap_err().class(), "capacity");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quota_ends_a_pod_only_when_no_offering_is_left() {
    let site = Site::start().await;
    let provider = site.provider(&[("instance-types", "n2d-standard-2,e2-standard-2")]);
    let quota = |metric: &str| format!("Quota '{metric}' exceeded.  Limit: 0.0 in region europe-west4.");
    let refusals = [
        // No spot VM in any zone, and then none of one family.
        Fault::refuse(403, "quotaExceeded", &quota("PREEMPTIBLE_CPUS")),
        Fault::refuse_late("QUOTA_EXCEEDED", &quota("CPUS")),
    ];
    let mut tried = Vec::new();
    for (number, refusal) in (0..).zip(refusals) {
        let wish = placed(&*provider, &request("web-0")).await.unwrap();
        site.cloud.fail("compute.instances.insert", refusal, 1);
        let error = provider.create(&wish, &key("quota", number)).await.unwrap_err();
        says(&error, "capacity", &["ask for a higher quota"]);
        tried.push(wish.placement.unwrap().as_str().to_owned());
    }
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("quota", 2)).await.unwrap();
    let vm = site.vm(made.id.as_str()).unwrap();
    assert_eq!(vm["scheduling"]["provisioningModel"], "STANDARD");
    let machine = vm["machineType"].as_str().unwrap().rsplit('/').next().unwrap();
    assert!(!tried[1].contains(machine), "{machine} is of the refused family: {tried:?}");
    let wish = placed(&*provider, &request("web-1")).await.unwrap();
    site.cloud.fail("compute.instances.insert", Fault::refuse_late("QUOTA_EXCEEDED", &quota("CPUS")), 1);
    let error = provider.create(&wish, &key("quota", 3)).await.unwrap_err();
    says(&error, "quota", &["create of web-1", "ask for a higher quota"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_google_refused_late_is_no_vm_of_a_stale_list() {
    let site = Site::start().await;
    site.cloud.set_times(Duration::from_secs(1), Duration::ZERO);
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    site.cloud.fail("compute.instances.insert", Fault::refuse_late("STOCKOUT", "Because."), 1);
    let error = provider.create(&wish, &key("stale", 0)).await.unwrap_err();
    says(&error, "capacity", &["STOCKOUT"]);
    // The list has the VM's beginning, and misses its end.
    site.cloud.stop_time();
    site.cloud.set_lag(Duration::from_secs(600));
    site.cloud.advance(Duration::from_secs(599));
    let listed = provider.list_owned().await.unwrap();
    assert!(listed.len() == 1 && listed[0].state == OwnedState::Deleting, "{listed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_list_does_not_lack_a_vm_that_was_made() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    site.cloud.set_lag(Duration::from_secs(600));
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("lag", 0)).await.unwrap();
    assert_eq!(provider.list_owned().await.unwrap()[0].id, made.id);
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_answers_and_broken_connections_are_transient_and_make_one_vm() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    for fault in [Fault::Reset, Fault::LostAnswer, Fault::Answer(Answer::text(502, "<html>"))] {
        site.cloud.fail("compute.instances.insert", fault, 1);
        let error = provider.create(&wish, &key("lost", 0)).await.unwrap_err();
        says(&error, "transient", &["create of web-0"]);
    }
    let made = provider.create(&wish, &key("lost", 0)).await.unwrap();
    assert_eq!(site.machines(), [made.id.as_str()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_that_google_does_not_decide_in_time_gives_its_id() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    site.cloud.set_times(Duration::from_secs(600), Duration::ZERO);
    let key = key("open", 0);
    let made = within(Duration::from_secs(2), provider.create(&wish, &key)).await.unwrap();
    assert!(made.addresses.is_empty());
    assert_eq!(provider.list_owned().await.unwrap()[0].id, made.id);
    provider.delete(&made.id).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_google_does_not_show_yet_is_made() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    site.cloud.with(|gcp, _| gcp.hidden = Duration::from_secs(2));
    site.cloud.set_lag(Duration::from_secs(2));
    let made = provider.create(&wish, &key("hidden", 0)).await.unwrap();
    assert!(!made.addresses.is_empty());
    assert_eq!(site.machines(), [made.id.as_str()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_creates_in_progress_are_a_throttle() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    site.cloud.with(|gcp, _| gcp.most_operations = Some(0));
    let key = key("progress", 0);
    let error = within(Duration::from_secs(1), provider.create(&wish, &key)).await.unwrap_err();
    // The bucket waits for the next minute, longer than this caller.
    says(&error, "transient", &["create of web-0", "instances.insert"]);
    let place = provider.place(&request("web-1")).await.unwrap();
    assert_eq!(place, wish.placement, "a throttle does not concern the offering");
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_answers_are_errors_and_no_panics() {
    let site = Site::start().await;
    let bodies = [
        Answer::text(200, "<html>"),
        Answer::json(200, &json!([])),
        Answer::json(200, &json!({"name": 7, "status": ["DONE"]})),
        Answer::json(200, &json!({"items": {"zones/x": 7, "y": {"instances": [7, {"name": "../x"}]}}})),
        Answer::json(500, &json!({"error": "no object"})),
        Answer::json(403, &json!({"error": {"errors": 7, "details": "x", "message": ["x"]}})),
    ];
    for (number, body) in (0..).zip(bodies) {
        let provider = site.provider(&[]);
        let wish = placed(&*provider, &request("web-0")).await.unwrap();
        for action in ["insert", "get", "aggregatedList"] {
            site.cloud.fail(&format!("compute.instances.{action}"), Fault::Answer(body.clone()), 1);
        }
        let key = key("odd", number);
        drop(within(Duration::from_secs(1), provider.create(&wish, &key)).await);
        drop(provider.list_owned().await);
        site.cloud.heal();
        provider.list_owned().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn preflight_reports_settings_that_name_missing_objects() {
    let site = Site::start().await;
    type Settings = [(&'static str, &'static str)];
    let cases: [(&Settings, &[&str]); 7] = [
        (&[("instance-type", "zz9-large")], &["zz9-large", "instance-types or zones"]),
        (&[("image", "none")], &["look at the image none", "set image"]),
        (&[("image", "family/none")], &["look at the image none", "set image"]),
        (&[("image", "peerpod-arm")], &["aarch64", "x86_64", "provider.gcp.arch"]),
        (&[("subnetwork", "none")], &["subnetwork none", "set network and subnetwork"]),
        (&[("network", "second")], &["it is in the network pods, not in second"]),
        (&[("network", "pods"), ("subnetwork", "")], &["set provider.gcp.subnetwork to one in europe-west4"]),
    ];
    for (settings, parts) in cases {
        let error = site.provider(settings).preflight().await.unwrap_err();
        says(&error, "invalid", parts);
    }
    let found = site.provider(&[("confidential", "tdx")]).preflight().await.unwrap();
    assert!(found.warnings.iter().any(|one| one.contains("can be confidential by tdx")), "{found:?}");
    let found = site.provider(&[("confidential", "sev_snp"), ("image", "plain")]).preflight().await.unwrap();
    assert!(found.warnings.iter().any(|one| one.contains("lacks the feature SEV_SNP_CAPABLE")), "{found:?}");
    assert!(found.facts.iter().any(|fact| fact.contains("CPUS")), "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_without_a_zone_is_an_error() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    site.cloud.with(|gcp, _| gcp.unreachable.insert(ZONES[1].to_owned()));
    let error = provider.list_owned().await.unwrap_err();
    says(&error, "transient", &[ZONES[1], "does not answer"]);
    // The outage of another region is no matter of ours.
    site.cloud.with(|gcp, _| gcp.unreachable = [String::from("asia-east1-a")].into());
    provider.list_owned().await.unwrap();
    let error = site.collector().list_owned().await.unwrap_err();
    says(&error, "transient", &["asia-east1-a"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_of_another_owner_with_our_labels_is_not_ours() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("marks", 0)).await.unwrap();
    provider.addresses(&made.id).await.unwrap();
    // Another user edits the description. The labels alone prove nothing.
    site.cloud.with(|gcp, _| {
        let vm = gcp.instances.get_mut(made.id.as_str()).unwrap();
        vm.body["description"] = json!("my own VM");
    });
    assert!(provider.list_owned().await.unwrap().is_empty());
    provider.delete(&made.id).await.unwrap();
    assert_eq!(site.machines().len(), 1);
    assert_eq!(provider.create(&wish, &key("marks", 0)).await.unwrap_err().class(), "key_reused");
}
