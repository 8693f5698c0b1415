//! Drops creates at random instants and repeats them from another provider, as after a restart, and makes the list late.
//! (`node.rs` does the same with the real node.)

use std::time::Duration;

use peerpod_provider_api::{OwnedState, Provider};
use peerpod_test_clouds::Fault;
use peerpod_tests::cloud::drop_creates;

use super::common::{CREATE, Site, TestCloud, key, request};

#[tokio::test(flavor = "multi_thread")]
async fn a_create_dropped_at_a_hundred_random_instants_and_repeated_by_another_process_makes_one_vm() {
    let site = Site::start().await;
    site.cloud.set_times(Duration::from_millis(5), Duration::from_millis(5));
    site.cloud.set_lag(Duration::from_millis(20));
    site.cloud.set_latency(Duration::from_millis(5), Duration::from_millis(5));
    let processes = [site.provider(&[]), site.provider(&[])];
    // A create of a young process lists twice first, in two windows and the time between.
    drop_creates(&site, processes, Duration::from_millis(400), |_| {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_makes_no_second_vm_although_the_list_is_late() {
    let site = Site::start().await;
    let provider = site.provider(&[("settle-time", "400ms")]);
    site.cloud.fail(CREATE, Fault::LostAnswer, 1);
    let error = provider.create(&request("web-0"), &key("lost", 0)).await.unwrap_err();
    assert!(error.class() == "transient" && error.to_string().contains("its effect is unknown"), "{error}");
    site.cloud.fail("pvminstances.getall", Fault::StaleList(Duration::from_secs(60)), 1);
    let made = provider.create(&request("web-0"), &key("lost", 0)).await.unwrap();
    assert_eq!((site.machines(), site.creates()), (vec![made.id.as_str().to_owned()], 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_vms_of_one_name_the_oldest_stays() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let made = provider.create(&request("web-0"), &key("twin", 0)).await.unwrap();
    let name = site.cloud.with(|power, _| power.instances.get(made.id.as_str()).unwrap().name.clone());
    // Another process's POST, whose list was late, and a stranger's VM of the same name.
    let mut sent = site.cloud.calls().into_iter().find(|call| call.action == CREATE).unwrap().body();
    let headers: Vec<(String, String)> =
        site.cloud.calls().last().unwrap().request.headers.clone().into_iter().collect();
    let crn = headers.iter().find(|(name, _)| name == "crn").unwrap().1.clone();
    let path =
        format!("/pcloud/v1/cloud-instances/{}/pvm-instances", peerpod_test_clouds::powervs::WORKSPACE);
    let post =
        |body: &serde_json::Value| site.cloud.call("POST", &path, &[("crn", &crn)], Some(body)).unwrap();
    assert_eq!(post(&sent).status, 202);
    sent["userTags"] = serde_json::json!(["owner:another"]);
    assert_eq!(post(&sent).status, 202);
    assert_eq!(site.machines().len(), 3);
    site.cloud.with(|power, _| {
        power.delete_time = Duration::from_secs(3600);
        // The stranger's VM is the oldest.
        let theirs = power.instances.all_mut().filter(|(_, one)| one.body["userTags"] == sent["userTags"]);
        theirs.for_each(|(_, one)| one.made = Duration::ZERO);
    });
    let listed = provider.list_owned().await.unwrap();
    let of_key: Vec<_> =
        listed.iter().filter(|one| one.key == Some(key("twin", 0))).map(|one| &one.id).collect();
    assert_eq!(of_key, [&made.id], "one VM has the key: {listed:?}");
    assert!(listed.iter().filter(|one| one.key.is_none()).all(|one| one.state == OwnedState::Deleting));
    assert_eq!(provider.create(&request("web-0"), &key("twin", 0)).await.unwrap().id, made.id);
    site.cloud.advance(Duration::from_secs(3601));
    let left: Vec<String> = site
        .cloud
        .with(|power, _| power.instances.all().map(|(_, one)| one.body["userTags"].to_string()).collect());
    assert_eq!(
        (left.len(), left.iter().filter(|tags| tags.contains("owner:another")).count()),
        (2, 1),
        "{name}"
    );
}
