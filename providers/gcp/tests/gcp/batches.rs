//! Checks batches of which Google refuses all or some VMs, attachments that it refuses late, and minutes without calls.

use std::time::Duration;

use peerpod_provider_api::{CreateRequest, DiskRequest, Provider};
use peerpod_test_clouds::Fault;
use peerpod_test_clouds::gcp::{PROJECT, ZONES};

use super::common::{Site, key, placed, request, says, within};

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_without_capacity_for_all_says_so_and_a_repeated_call_makes_no_more() {
    let site = Site::start().await;
    let provider = site.provider(&[("market", "on-demand")]);
    let batch = provider.extensions().batch.unwrap();
    let wish = placed(&*provider, &request("batch")).await.unwrap();
    site.cloud.set_stock("*", "*", "*", 3);
    let count = 5.try_into().unwrap();
    let made = batch.create_many(&wish, count, &key("batch", 0)).await.unwrap();
    assert_eq!(made.made.len(), 3);
    says(made.rest.as_ref().unwrap(), "capacity", &["create of batch", "3 of 5 VMs"]);
    site.cloud.heal();
    let again = site.provider(&[]);
    let again = again.extensions().batch.unwrap().create_many(&wish, count, &key("batch", 0)).await.unwrap();
    let ids = |many: &peerpod_provider_api::CreatedMany| {
        many.made.iter().map(|one| one.id.clone()).collect::<Vec<_>>()
    };
    assert_eq!((ids(&made), made.rest.is_some()), (ids(&again), again.rest.is_some()));
    assert_eq!(site.machines().len(), 3);
    site.cloud.set_stock("*", "*", "*", 0);
    let error = batch.create_many(&wish, count, &key("batch", 1)).await.unwrap_err();
    assert_eq!(error.class(), "capacity", "{error}");
    assert!(site.machines().len() == 3 && !error.to_string().contains("for\":"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_google_refuses_at_once_is_a_lack_of_capacity_and_marks_its_offering() {
    let site = Site::start().await;
    let provider = site.provider(&[("market", "on-demand")]);
    let batch = provider.extensions().batch.unwrap();
    let wish = placed(&*provider, &request("batch")).await.unwrap();
    site.cloud.fail(
        "compute.instances.bulkInsert",
        Fault::refuse(503, "insufficientCapacity", "Because."),
        1,
    );
    let error = batch.create_many(&wish, 5.try_into().unwrap(), &key("at-once", 0)).await.unwrap_err();
    says(&error, "capacity", &["create of batch", "insufficientCapacity", "more instance-types or zones"]);
    assert_ne!(provider.place(&request("batch")).await.unwrap(), wish.placement);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_whose_id_google_has_forgotten_finds_its_vms() {
    let site = Site::start().await;
    let provider = site.provider(&[("market", "on-demand")]);
    let batch = provider.extensions().batch.unwrap();
    let wish = placed(&*provider, &request("batch")).await.unwrap();
    let (key, count) = (key("forgotten", 0), 5.try_into().unwrap());
    let first = batch.create_many(&wish, count, &key).await.unwrap();
    site.cloud.with(|gcp, _| gcp.forget_requests());
    let again = batch.create_many(&wish, count, &key).await.unwrap();
    let ids = |many: &peerpod_provider_api::CreatedMany| {
        many.made.iter().map(|one| one.id.clone()).collect::<Vec<_>>()
    };
    assert!(ids(&first) == ids(&again) && again.rest.is_none(), "{again:?}");
    assert_eq!(site.machines().len(), 5);
    assert_eq!(provider.place(&request("batch")).await.unwrap(), wish.placement, "nothing is exhausted");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_made_when_the_count_of_its_vms_has_grown_to_all() {
    let site = Site::start().await;
    site.cloud.set_times(Duration::from_secs(2), Duration::from_secs(1));
    let provider = site.provider(&[]);
    let batch = provider.extensions().batch.unwrap();
    let wish = placed(&*provider, &request("batch")).await.unwrap();
    let made = batch.create_many(&wish, 9.try_into().unwrap(), &key("grows", 0)).await.unwrap();
    assert!(made.made.len() == 9 && made.rest.is_none(), "{made:?}");
    let looks = site.cloud.calls().into_iter().filter(|call| call.action == "compute.zoneOperations.get");
    let counts: Vec<_> = looks
        .filter_map(|look| {
            let zones =
                look.answer.value()["instancesBulkInsertOperationMetadata"]["perLocationStatus"].clone();
            zones.as_object()?.values().next()?["createdVmCount"].as_u64()
        })
        .collect();
    assert!(counts.iter().any(|count| (1..9).contains(count)), "a look saw some of the VMs: {counts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attachment_that_google_refuses_late_fails_and_is_repeated() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = CreateRequest { zones: vec![ZONES[0].to_owned()], ..request("web-0") };
    let wish = placed(&*provider, &wish).await.unwrap();
    let made = provider.create(&wish, &key("attach", 0)).await.unwrap();
    let disk = DiskRequest { volume: site.disk(ZONES[0], "pvc-1"), ..DiskRequest::default() };
    let volumes = provider.extensions().volumes.unwrap();
    for (code, class, remedy) in [
        ("RESOURCE_IN_USE_BY_ANOTHER_RESOURCE", "transient", "uses the disk"),
        ("PERMISSIONS_ERROR", "auth", "role.yaml"),
        ("UNSUPPORTED_OPERATION", "invalid", "fit each other"),
    ] {
        site.cloud.fail("compute.instances.attachDisk", Fault::refuse_late(code, "Because."), 1);
        let error = volumes.attach(&made.id, &disk).await.unwrap_err();
        says(&error, class, &["attach of", code, "Because", remedy]);
    }
    volumes.attach(&made.id, &disk).await.unwrap();
    // Another process detached it between the look and the call.
    let gone = "Invalid value for field 'disk': 'x'. No attached disk found with device name 'x'";
    site.cloud.fail("compute.instances.detachDisk", Fault::refuse(400, "invalid", gone), 1);
    volumes.detach(&made.id, &disk.volume).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_minute_without_calls_left_ends_no_pod_and_makes_one_vm() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    site.cloud.set_rates(1.0);
    site.cloud.stop_time();
    // Others in the project use up the minute.
    let path = format!("/compute/v1/projects/{PROJECT}/zones/{}/instances/none", ZONES[0]);
    let call = || site.cloud.call("DELETE", &path, &[], None).unwrap().status;
    for _ in 0..1_500 {
        assert_eq!(call(), 404);
    }
    assert_eq!(call(), 403);
    let key = key("minute", 0);
    let error = within(Duration::from_secs(1), provider.create(&wish, &key)).await.unwrap_err();
    says(&error, "transient", &["create of web-0", "instances.insert"]);
    assert!(site.machines().is_empty());
    site.cloud.advance(Duration::from_secs(60));
    let made = site.provider(&[]).create(&wish, &key).await.unwrap();
    assert_eq!(site.machines(), [made.id.as_str()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_google_does_not_decide_in_time_is_repeated() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let batch = provider.extensions().batch.unwrap();
    let wish = placed(&*provider, &request("batch")).await.unwrap();
    site.cloud.set_times(Duration::from_secs(600), Duration::ZERO);
    let (key, count) = (key("slow", 0), 3.try_into().unwrap());
    let error = within(Duration::from_secs(2), batch.create_many(&wish, count, &key)).await.unwrap_err();
    says(&error, "transient", &["create of batch", "not decided on all 3 VMs", "repeated"]);
    site.cloud.advance(Duration::from_secs(600));
    let made = batch.create_many(&wish, count, &key).await.unwrap();
    assert!(made.made.len() == 3 && made.rest.is_none(), "{made:?}");
    assert_eq!(site.machines().len(), 3);
}
