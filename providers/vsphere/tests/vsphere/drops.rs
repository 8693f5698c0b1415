//! Drops creates at random instants and repeats them from another provider, as after a restart. (`node.rs` does the same
//! with the real node.)

use std::time::Duration;

use peerpod_provider_api::{CreateRequest, Provider};
use peerpod_test_clouds::Fault;
use peerpod_tests::cloud::drop_creates;

use super::common::{CREATE, Site, key, placed, request};

#[tokio::test(flavor = "multi_thread")]
async fn a_create_dropped_at_a_hundred_random_instants_and_repeated_by_another_process_makes_one_vm() {
    let site = Site::start();
    site.vcsim.set_task_time(Duration::from_millis(30));
    // The connection breaks, too, before and after the vCenter has made the VM.
    let disturb = |number| match number % 5 {
        0 => site.vcsim.fail(CREATE, Fault::LostAnswer, 1),
        1 => site.vcsim.fail(CREATE, Fault::Reset, 1),
        2 => site.vcsim.fail(CREATE, Fault::Late(Duration::from_millis(30)), 1),
        _ => {}
    };
    let processes = [site.provider(&[]), site.provider(&[])];
    drop_creates(&site, processes, Duration::from_millis(150), disturb).await;
}

/// The creator may die between the clone and its power-on.
#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_is_off_is_switched_on_by_a_repeated_create() {
    let site = Site::start();
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let first = provider.create(&wish, &key("off", 0)).await.unwrap();
    site.vcsim.order(&serde_json::json!({"op": "power-off", "name": first.id.as_str()}));
    let again = site.provider(&[]).create(&wish, &key("off", 0)).await.unwrap();
    assert_eq!(first.id, again.id);
    assert_eq!(site.vcsim.vm(first.id.as_str()).unwrap()["Power"], "poweredOn");
    let other = CreateRequest { name: "web-1".to_owned(), ..wish };
    let error = provider.create(&other, &key("off", 0)).await.unwrap_err();
    assert_eq!(error.class(), "key_reused", "{error}");
    assert_eq!(site.vcsim.vms().len(), 1);
}
