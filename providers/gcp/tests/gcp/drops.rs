//! Drops creates at random instants and repeats them from another provider, as after a restart. (`node.rs` does the same
//! with the real node.)

use std::time::Duration;

use peerpod_provider_api::Provider;
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
    drop_creates(&site, processes, Duration::from_millis(100), disturb).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_whose_request_id_was_forgotten_finds_its_vm_by_name() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let first = provider.create(&wish, &key("forgotten", 0)).await.unwrap();
    site.cloud.with(|gcp, _| gcp.forget_requests());
    let again = provider.create(&wish, &key("forgotten", 0)).await.unwrap();
    assert_eq!(first.id, again.id);
    let other = peerpod_provider_api::CreateRequest { name: "web-1".to_owned(), ..wish };
    let error = provider.create(&other, &key("forgotten", 0)).await.unwrap_err();
    assert_eq!(error.class(), "key_reused", "{error}");
    assert_eq!(site.machines().len(), 1);
}
