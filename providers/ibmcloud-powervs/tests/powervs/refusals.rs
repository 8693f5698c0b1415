//! Checks that every refusal of PowerVS has its class, names cause and remedy, and leaves nothing.

use std::time::Duration;

use peerpod_provider_api::{CreateRequest, Error, OwnedState, Provider};
use peerpod_test_clouds::{Answer, Fault};
use peerpod_tests::cloud::within;
use serde_json::json;

use super::common::{CREATE, Site, TestCloud, key, request};

fn says(error: &Error, class: &str, parts: &[&str]) {
    assert_eq!(error.class(), class, "{error}");
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(!text.contains("userData") && !text.contains("not a secret"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_refusal_has_its_class_and_remedy_and_leaves_nothing() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let at_once = [
        (400, "imageID is not valid", "invalid", "correct the settings"),
        (403, "no right", "auth", "role Manager"),
        (403, "the processors exceed the quota", "quota", "higher limit"),
        (404, "network does not exist", "invalid", "correct the settings"),
        (409, "Insufficient processors", "capacity", "system-type"),
        (422, "no available IP in the network", "quota", "more free addresses"),
        (500, "oops", "transient", "tried again"),
        (504, "timeout", "transient", "tried again"),
    ];
    for (number, (status, message, class, remedy)) in (0..).zip(at_once) {
        site.cloud.fail(CREATE, Fault::refuse(status, "refused", message), 1);
        let error = provider.create(&request("web-0"), &key("refused", number)).await.unwrap_err();
        says(&error, class, &["create of web-0", message, remedy]);
        assert!(site.machines().is_empty(), "{message}");
    }
    let late = [
        ("No valid host was found.", "capacity", "system-type"),
        ("Not enough memory: insufficient resources", "capacity", "system-type"),
        ("Exceeded the memory quota", "quota", "higher limit"),
        ("The image is broken", "invalid", "correct the settings"),
    ];
    for (number, (message, class, remedy)) in (100..).zip(late) {
        site.cloud.fail(CREATE, Fault::refuse_late("ERROR", message), 1);
        let error = provider.create(&request("web-0"), &key("refused", number)).await.unwrap_err();
        says(&error, class, &["create of web-0", message.trim_end_matches('.'), remedy]);
        assert!(site.machines().is_empty(), "{message}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_throttled_create_is_sent_again_later_and_makes_one_vm() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let throttle = Answer::json(429, &json!({"error": "too many requests", "message": "slow down"}));
    site.cloud.fail(CREATE, Fault::Answer(throttle.header("retry-after", "0")), 2);
    provider.create(&request("web-0"), &key("slow", 0)).await.unwrap();
    assert_eq!((site.machines().len(), site.creates()), (1, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_with_another_request_is_refused() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    provider.create(&request("web-0"), &key("reused", 0)).await.unwrap();
    let other = CreateRequest { name: "web-1".to_owned(), ..request("web-0") };
    let error = provider.create(&other, &key("reused", 0)).await.unwrap_err();
    says(&error, "key_reused", &["create of web-1", "another request"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_is_built_for_minutes_has_its_id_at_the_deadline_and_goes_later() {
    let site = Site::start().await;
    site.cloud.set_times(Duration::from_secs(600), Duration::ZERO);
    site.cloud.with(|power, _| power.refuses_early_deletes = true);
    let provider = site.provider(&[]);
    site.cloud.fail(CREATE, Fault::refuse_late("ERROR", "No valid host was found."), 1);
    let made =
        within(Duration::from_secs(3), provider.create(&request("web-0"), &key("open", 0))).await.unwrap();
    let listed = provider.list_owned().await.unwrap();
    assert_eq!((listed.len(), &listed[0].id, listed[0].state), (1, &made.id, OwnedState::Pending));
    says(&provider.delete(&made.id).await.unwrap_err(), "transient", &["is being built", "tried again"]);
    site.cloud.advance(Duration::from_secs(601));
    says(&provider.addresses(&made.id).await.unwrap_err(), "not_found", &["it has ended", "No valid host"]);
    assert_eq!(provider.list_owned().await.unwrap()[0].state, OwnedState::Ended);
    says(
        &provider.create(&request("web-0"), &key("open", 0)).await.unwrap_err(),
        "capacity",
        &["No valid host"],
    );
    assert!(site.machines().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_make_no_sense_end_in_errors_or_are_left_out() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let made = provider.create(&request("web-0"), &key("odd", 0)).await.unwrap();
    let odd = [
        json!(null),
        json!([]),
        json!({"pvmInstances": 5}),
        json!({"pvmInstances": [null, 5, {"pvmInstanceID": 7}, {"pvmInstanceID": "a/b", "serverName": "pp-a"}]}),
        json!({"pvmInstanceID": "other", "serverName": "pp-a", "status": "ACTIVE"}),
    ];
    for body in &odd {
        site.cloud.fail("pvminstances.getall", Fault::Answer(Answer::json(200, body)), 1);
        match provider.list_owned().await {
            Ok(owned) => assert!(owned.len() <= 1, "{owned:?}"),
            Err(error) => assert_eq!(error.class(), "transient", "{error}"),
        }
        // Without a list, and without the VM's own answer.
        site.cloud.fail(
            "pvminstances.getall",
            Fault::Answer(Answer::json(200, &json!({"pvmInstances": []}))),
            1,
        );
        site.cloud.fail("pvminstances.get", Fault::Answer(Answer::json(200, body)), 1);
        assert_eq!(provider.delete(&made.id).await.unwrap_err().class(), "transient");
        site.cloud.fail("token", Fault::Answer(Answer::json(200, body)), 1);
        let error = site.provider(&[]).list_owned().await.unwrap_err();
        assert_eq!(error.class(), "transient", "{error}");
    }
    assert_eq!(site.machines().len(), 1, "no such answer deletes a VM");
}
