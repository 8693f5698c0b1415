//! Drops creates at random instants and repeats them from another provider, as after a restart. (`node.rs` does the same
//! with the real node.)

use std::time::Duration;

use peerpod_provider_api::{CreateRequest, Provider};
use peerpod_test_clouds::Fault;
use peerpod_tests::cloud::drop_creates;

use super::common::{CREATE, Site, key, placed, request};

#[tokio::test(flavor = "multi_thread")]
async fn a_create_dropped_at_a_hundred_random_instants_and_repeated_by_another_process_makes_one_vm() {
    let site = Site::start().await;
    site.cloud.set_times(Duration::from_millis(40), Duration::from_millis(20));
    site.cloud.set_lag(Duration::from_millis(200));
    site.cloud.set_latency(Duration::from_millis(10), Duration::from_millis(10));
    // The connection breaks, too, before and after the cloud has made the VM.
    let disturb = |number| match number % 5 {
        0 => site.cloud.fail(CREATE, Fault::LostAnswer, 1),
        1 => site.cloud.fail(CREATE, Fault::Reset, 1),
        2 => site.cloud.fail(CREATE, Fault::Late(Duration::from_millis(30)), 1),
        _ => {}
    };
    let processes = [site.provider(&[]), site.provider(&[])];
    drop_creates(&site, processes, Duration::from_millis(60), disturb).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_repeated_with_newer_settings_finds_its_vm_by_its_tag() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let first = provider.create(&wish, &key("newer", 0)).await.unwrap();
    let newer = site.provider(&[("root-volume-size", "60"), ("tags", "team=blue")]);
    let again = newer.create(&wish, &key("newer", 0)).await.unwrap();
    assert_eq!(first.id, again.id);
    let other = CreateRequest { name: "web-1".to_owned(), ..wish };
    let error = provider.create(&other, &key("newer", 0)).await.unwrap_err();
    assert_eq!(error.class(), "key_reused", "{error}");
    assert_eq!(site.machines().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_repeated_by_another_process_has_the_same_vms() {
    let site = Site::start().await;
    let provider = site.provider(&[("market", "on-demand")]);
    let wish = placed(&*provider, &request("batch")).await.unwrap();
    let count = 5.try_into().unwrap();
    site.cloud.set_stock("*", "*", "*", 3);
    let made =
        provider.extensions().batch.unwrap().create_many(&wish, count, &key("batch", 0)).await.unwrap();
    assert_eq!(made.made.len(), 3);
    let rest = made.rest.unwrap();
    super::common::says(&rest, "capacity", &["create of batch", "3 of 5 VMs", "vswitch-ids in more zones"]);
    assert_ne!(provider.place(&request("batch")).await.unwrap(), wish.placement, "the offering is exhausted");
    site.cloud.heal();
    for settings in [&[("market", "on-demand")][..], &[("root-volume-size", "60")]] {
        let other = site.provider(settings);
        let again =
            other.extensions().batch.unwrap().create_many(&wish, count, &key("batch", 0)).await.unwrap();
        let ids = |many: &[peerpod_provider_api::Created]| {
            many.iter().map(|one| one.id.clone()).collect::<Vec<_>>()
        };
        assert!(ids(&again.made) == ids(&made.made) && again.rest.is_some(), "{again:?}");
    }
    assert_eq!(site.machines().len(), 3);
    assert_eq!(site.cloud.calls().iter().filter(|call| call.action == "RunInstances").count(), 3);
}
