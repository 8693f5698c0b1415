//! Checks that every refusal of IBM has its class, names cause and remedy, and leaves nothing.

use std::sync::Arc;
use std::time::Duration;

use peerpod_provider_api::{CreateRequest, Error, InstanceId, OwnedState, Provider};
use peerpod_provider_ibmcloud::IbmCloudProvider;
use peerpod_test_clouds::{Answer, Fault};
use peerpod_tests::cloud::within;
use serde_json::json;

use super::common::{CREATE, Site, TYPE, key, placed, request, stranger};

fn says(error: &Error, class: &str, parts: &[&str]) {
    assert_eq!(error.class(), class, "{error}");
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(!text.contains("user_data") && !text.contains("not a secret"), "{text}");
}

/// Creates a VM as the node does, once.
async fn once(
    provider: &Arc<IbmCloudProvider>,
    request: &CreateRequest,
    number: u32,
) -> Result<InstanceId, Error> {
    let request = placed(&**provider, request).await?;
    provider.create(&request, &key("refused", number)).await.map(|made| made.id)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_code_has_its_class_and_remedy_and_leaves_nothing() {
    let site = Site::start().await;
    let at_once = [
        ("over_quota", 400, "quota", "higher quota"),
        ("not_authorized", 403, "auth", "providers/ibmcloud/role.json"),
        ("subnet_not_found", 404, "invalid", "subnet-ids"),
        ("image_not_found", 404, "invalid", "image-ids"),
        ("instance_profile_not_found", 404, "invalid", "instance-types"),
        ("dedicated_host_not_found", 404, "invalid", "dedicated-host-ids"),
        ("not_found", 404, "invalid", "correct the settings"),
        ("bad_field", 400, "invalid", "correct the settings"),
        ("conflict", 409, "transient", "tried again"),
        ("service_error", 500, "transient", "tried again"),
        ("backend_service_unavailable", 503, "transient", "tried again"),
    ];
    let late = [
        ("cannot_start_capacity", "capacity", "more instance-types or zones"),
        ("cannot_start_reservation_capacity", "capacity", "more instance-types or zones"),
        ("cannot_start_ip_address", "capacity", "more free addresses"),
        ("stopped_by_preemption", "capacity", "more instance-types or zones"),
        ("cannot_start_reservation_expired", "invalid", "renew the reservation"),
        ("encryption_key_deleted", "invalid", "restore the key"),
        ("cannot_start", "transient", "tried again"),
        ("cannot_start_storage", "transient", "tried again"),
    ];
    let mut faults = Vec::new();
    for (code, status, class, remedy) in at_once {
        faults.push((Fault::refuse(status, code, "Because."), code, class, remedy));
    }
    for (code, class, remedy) in late {
        faults.push((Fault::refuse_late(code, "Because."), code, class, remedy));
    }
    for (number, (fault, code, class, remedy)) in (0..).zip(faults) {
        let provider = site.provider(&[("market", "on-demand")]);
        site.cloud.fail(CREATE, fault, 1);
        let error = once(&provider, &request("web-0"), number).await.unwrap_err();
        says(&error, class, &["create of web-0", code, "Because", remedy]);
        assert_eq!(site.parts(), (0, 0), "{code}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_vm_may_be_shown_as_stopped() {
    let site = Site::start().await;
    site.cloud.with(|ibm, _| ibm.stops_refused = true);
    site.cloud.fail(CREATE, Fault::refuse_late("cannot_start_capacity", "none left"), 1);
    let error = once(&site.provider(&[]), &request("web-0"), 0).await.unwrap_err();
    says(&error, "capacity", &["cannot_start_capacity", "none left"]);
    assert_eq!(site.parts(), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exhausted_offering_leads_to_the_next_one_until_all_are() {
    let site = Site::start().await;
    site.cloud.set_stock("*", "*", "*", 0);
    let provider = site.provider(&[]);
    let mut tried = Vec::new();
    let error = loop {
        let placed = match placed(&*provider, &request("web-0")).await {
            Ok(placed) => placed,
            Err(error) => break error,
        };
        let number = u32::try_from(tried.len()).unwrap();
        let error = provider.create(&placed, &key("tried", number)).await.unwrap_err();
        assert_eq!(error.class(), "capacity", "{error}");
        tried.push(placed.placement.unwrap());
    };
    let markets: Vec<bool> = tried.iter().map(|one| one.as_str().contains("spot")).collect();
    assert_eq!(markets, [true, true, true, false, false, false], "spot first, in all zones: {tried:?}");
    says(&error, "capacity", &["create of web-0", TYPE, "cannot_start_capacity"]);
    assert_eq!(site.parts(), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_subnet_without_addresses_closes_the_subnet_alone() {
    let site = Site::start().await;
    let provider = site.provider(&[("instance-types", "bxf-2x8,bxf-4x16"), ("market", "spot")]);
    site.cloud.fail(CREATE, Fault::refuse_late("cannot_start_ip_address", "no address"), 1);
    once(&provider, &request("web-0"), 0).await.unwrap_err();
    let next = placed(&*provider, &request("web-0")).await.unwrap();
    assert!(next.placement.unwrap().as_str().contains("us-south-2"), "all types in the subnet");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quota_of_the_region_is_one_refusal_for_all_offerings() {
    let site = Site::start().await;
    site.cloud.with(|ibm, _| ibm.quota = Some(0));
    let provider = site.provider(&[("market", "on-demand")]);
    says(&once(&provider, &request("web-0"), 0).await.unwrap_err(), "quota", &["over_quota", "higher quota"]);
    says(
        &once(&provider, &request("web-1"), 1).await.unwrap_err(),
        "capacity",
        &["create of web-1", "higher quota"],
    );
    assert_eq!(site.cloud.count(Some(CREATE)), 1, "the next pod costs no call");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_throttled_create_is_sent_again_later_and_makes_one_vm() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let throttle =
        Answer::json(429, &json!({"errors": [{"code": "too_many_requests", "message": "slow down"}]}));
    site.cloud.fail(CREATE, Fault::Answer(throttle.header("retry-after", "0")), 2);
    once(&provider, &request("web-0"), 0).await.unwrap();
    assert_eq!((site.machines().len(), site.cloud.count(Some(CREATE))), (1, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_is_transient_and_the_same_call_finds_the_vm() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    for fault in [Fault::LostAnswer, Fault::Reset] {
        site.cloud.fail(CREATE, fault, 1);
        let error = provider.create(&wish, &key("lost", 0)).await.unwrap_err();
        says(&error, "transient", &["create of web-0", "its effect is unknown"]);
    }
    let made = provider.create(&wish, &key("lost", 0)).await.unwrap();
    assert_eq!((site.machines().len(), made.chosen.instance_type.as_deref()), (1, Some(TYPE)));
    let other = CreateRequest { name: "web-1".to_owned(), ..wish };
    let error = provider.create(&other, &key("lost", 0)).await.unwrap_err();
    says(&error, "key_reused", &["create of web-1", "another request"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_the_list_does_not_show_yet_is_no_error_for_good() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("lag", 0)).await.unwrap();
    site.cloud.fail("list_instances", Fault::StaleList(Duration::from_secs(60)), 1);
    let after = site.provider(&[]);
    says(&after.create(&wish, &key("lag", 0)).await.unwrap_err(), "transient", &["does not show the VM"]);
    assert_eq!(after.create(&wish, &key("lag", 0)).await.unwrap().id, made.id);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_ends_by_itself_has_no_addresses() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let id = once(&provider, &request("web-0"), 0).await.unwrap();
    assert_eq!(provider.addresses(&id).await.unwrap().len(), 1);
    site.cloud.with(|ibm, _| {
        ibm.instances.all_mut().for_each(|(_, one)| {
            one.state = peerpod_test_clouds::ibmcloud::State::Stopped;
            one.refusal = Some(("stopped_by_preemption".to_owned(), "spot".to_owned()));
        });
    });
    says(
        &provider.addresses(&id).await.unwrap_err(),
        "not_found",
        &["it has ended", "stopped_by_preemption"],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_before_its_deadline_returns_the_id_of_an_undecided_vm() {
    let site = Site::start().await;
    site.cloud.set_times(Duration::from_secs(3600), Duration::ZERO);
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = within(Duration::from_secs(2), provider.create(&wish, &key("open", 0))).await.unwrap();
    let listed = provider.list_owned().await.unwrap();
    assert_eq!((listed.len(), &listed[0].id, listed[0].state), (1, &made.id, OwnedState::Pending));
    site.cloud.with(|ibm, _| ibm.refuses_early_deletes = true);
    says(&provider.delete(&made.id).await.unwrap_err(), "transient", &["delete of VM", "tried again"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_boot_volume_without_its_vm_goes_at_the_second_search_and_a_strangers_stays() {
    let site = Site::start().await;
    let (provider, stranger) = (site.provider(&[]), site.provider_of(stranger(), &[]));
    site.cloud.with(|ibm, _| ibm.keeps_volumes = true);
    for (number, one) in (0..).zip([&provider, &stranger]) {
        let id = once(one, &request("web-0"), number).await.unwrap();
        one.delete(&id).await.unwrap();
    }
    site.volume("pvc-1", "us-south-1");
    assert_eq!(site.parts(), (0, 3));
    provider.preflight().await.unwrap();
    assert_eq!(site.parts(), (0, 3), "it may belong to a create in progress");
    site.cloud.fail("delete_volume", Fault::refuse(409, "volume_busy", "busy"), 1);
    let found = provider.preflight().await.unwrap();
    assert!(found.warnings.iter().any(|warning| warning.contains("volume_busy")), "{:?}", found.warnings);
    let found = provider.preflight().await.unwrap();
    assert!(found.facts.iter().any(|fact| fact.starts_with("1 boot volumes")), "{:?}", found.facts);
    assert_eq!(site.parts(), (0, 2), "the stranger's and the pod's");
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_make_no_sense_end_in_errors_or_are_left_out() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let id = once(&provider, &request("web-0"), 0).await.unwrap();
    let odd = [
        json!(null),
        json!([]),
        json!({"instances": 5, "volumes": 5}),
        json!({"instances": [null, 5, {"id": 7}, {"id": "a/b"}], "volumes": [null], "next": 5}),
        json!({"instances": [], "volumes": [], "next": {"href": "https://evil.test/v1/instances"}}),
        json!({"id": "0717_other", "name": "pp-a", "status": "running"}),
    ];
    for body in &odd {
        for action in ["list_instances", "list_volumes"] {
            site.cloud.fail(action, Fault::Answer(Answer::json(200, body)), 1);
            match provider.list_owned().await {
                Ok(owned) => assert!(owned.len() <= 1, "{owned:?}"),
                Err(error) => assert_eq!(error.class(), "transient", "{error}"),
            }
            site.cloud.heal();
        }
        site.cloud.fail("get_instance", Fault::Answer(Answer::json(200, body)), 1);
        let error = provider.delete(&id).await.unwrap_err();
        assert_eq!(error.class(), "transient", "{error}");
        site.cloud.fail("token", Fault::Answer(Answer::json(200, body)), 1);
        let error = site.provider(&[]).list_owned().await.unwrap_err();
        assert_eq!(error.class(), "transient", "{error}");
        site.cloud.fail("list_instance_profiles", Fault::Answer(Answer::json(200, body)), 1);
        let error = site.provider(&[]).preflight().await.unwrap_err();
        assert!(matches!(error.class(), "transient" | "invalid"), "{error}");
    }
    assert_eq!(site.machines().len(), 1, "no such answer deletes a VM");
}
