//! Checks that each refusal of Alibaba Cloud ends in an error that names the cause and the remedy, and that no failure on
//! the way makes two VMs or loses one.

use std::time::Duration;

use peerpod_provider_api::{CreateRequest, Market, Provider};
use peerpod_test_clouds::alibaba::VSWITCHES;
use peerpod_test_clouds::{Answer, Fault};
use serde_json::json;

use super::common::{CREATE, Site, key, placed, request, says, within};

#[tokio::test(flavor = "multi_thread")]
async fn errors_of_capacity_quotas_rights_and_names_give_a_remedy() {
    let site = Site::start().await;
    let refusals = [
        ("Throttling", 400, "transient", "caller waits"),
        ("Throttling.User", 400, "transient", "caller waits"),
        ("Throttling.Api", 400, "transient", "caller waits"),
        ("ServiceUnavailable", 503, "transient", "caller waits"),
        ("OperationDenied.NoStock", 403, "capacity", "vswitch-ids in more zones"),
        ("Zone.NotOnSale", 403, "capacity", "vswitch-ids in more zones"),
        ("Zone.NotOpen", 403, "capacity", "vswitch-ids in more zones"),
        ("OperationDenied.ZoneNotAllowed", 403, "capacity", "that these zones sell"),
        ("InvalidResourceType.NotSupported", 403, "capacity", "that these zones sell"),
        ("InvalidInstanceType.ZoneNotSupported", 403, "capacity", "that these zones sell"),
        ("InvalidVpcZone.NotSupported", 400, "capacity", "that these zones sell"),
        ("ResourceNotAvailable", 403, "capacity", "vswitch-ids in more zones"),
        ("OperationDenied.CloudSSDNotSupported", 403, "capacity", "vswitch-ids in more zones"),
        ("OperationDenied.ZoneSystemCategoryNotMatch", 403, "capacity", "root-volume-type"),
        ("InvalidVSwitchId.IpNotEnough", 403, "capacity", "larger or more vswitch-ids"),
        ("InvalidAccountStatus.NotEnoughBalance", 403, "quota", "top up"),
        ("Forbidden.RAM", 403, "auth", "ram-policy.json"),
        ("InvalidAccessKeyId.NotFound", 404, "auth", "exists and is active"),
        ("SignatureDoesNotMatch", 400, "auth", "secret key"),
        ("LastTokenProcessing", 403, "transient", "tried again"),
        ("IncorrectInstanceStatus", 403, "transient", "tried again"),
        ("InvalidParameter", 400, "invalid", "correct the settings"),
        ("InternalError", 500, "transient", "tried again"),
        ("SomethingNew", 503, "transient", "tried again"),
    ];
    for (number, (code, status, class, remedy)) in (0..).zip(refusals) {
        let provider = site.provider(&[("market", "on-demand")]);
        let wish = placed(&*provider, &request("web-0")).await.unwrap();
        // A throttled call is repeated in the next minute; its caller does not wait so long.
        site.cloud.fail(CREATE, Fault::refuse(status, code, "Because."), 1000);
        let key = key("codes", number);
        let create = within(Duration::from_secs(5), provider.create(&wish, &key));
        let error = create.await.unwrap_err();
        says(&error, class, &["create of web-0", remedy]);
        if remedy != "caller waits" {
            says(&error, class, &[code, "Because"]);
        }
        site.cloud.heal();
    }
    assert!(site.machines().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exhausted_offering_is_skipped_for_a_while() {
    let site = Site::start().await;
    let provider = site.provider(&[("market", "on-demand")]);
    let mut places = Vec::new();
    site.cloud.set_stock("*", "*", "*", 0);
    for number in 0..2 {
        let wish = placed(&*provider, &request("web-0")).await.unwrap();
        places.push(wish.placement.clone().unwrap());
        let error = provider.create(&wish, &key("skipped", number)).await.unwrap_err();
        says(&error, "capacity", &["create of web-0", "OperationDenied.NoStock"]);
    }
    assert_ne!(places[0], places[1], "the second attempt is in another zone");
    let error = provider.place(&request("web-0")).await.unwrap_err();
    says(&error, "capacity", &["exhausted for the moment", "OperationDenied.NoStock"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vswitch_without_addresses_is_skipped_for_all_types() {
    let site = Site::start().await;
    let provider =
        site.provider(&[("market", "on-demand"), ("instance-types", "ecs.g8i.xlarge,ecs.g7.xlarge")]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    site.cloud.fail(CREATE, Fault::refuse(403, "InvalidVSwitchId.IpNotEnough", "None left."), 1);
    let error = provider.create(&wish, &key("addresses", 0)).await.unwrap_err();
    says(&error, "capacity", &["larger or more vswitch-ids"]);
    for machine in ["ecs.g8i.xlarge", "ecs.g7.xlarge"] {
        let wish = CreateRequest { instance_type: Some(machine.to_owned()), ..request("web-1") };
        let place = provider.place(&wish).await.unwrap().unwrap();
        assert!(!place.as_str().contains(VSWITCHES[0]), "{place:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn spot_falls_back_to_on_demand() {
    let site = Site::start().await;
    let provider = site.provider(&[("vswitch-ids", VSWITCHES[0])]);
    site.cloud.set_stock("*", "*", "spot", 0);
    let first = placed(&*provider, &request("web-0")).await.unwrap();
    let error = provider.create(&first, &key("spot", 0)).await.unwrap_err();
    assert_eq!(error.class(), "capacity", "{error}");
    let second = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&second, &key("spot", 1)).await.unwrap();
    assert_eq!(site.shown(made.id.as_str())["SpotStrategy"], "NoSpot");
    let spot = CreateRequest { market: Some(Market::Spot), ..request("web-1") };
    assert_eq!(provider.place(&spot).await.unwrap_err().class(), "capacity");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quota_ends_a_pod_only_when_no_offering_is_left() {
    let site = Site::start().await;
    let provider =
        site.provider(&[("market", "on-demand"), ("instance-types", "ecs.g8i.xlarge,ecs.g7.xlarge")]);
    let refused = || Fault::refuse(403, "QuotaExceed.ElasticQuota", "No additional quota is available.");
    let mut tried = Vec::new();
    for (number, class) in [(0, "capacity"), (1, "quota")] {
        let wish = placed(&*provider, &request("web-0")).await.unwrap();
        tried.push(wish.placement.clone().unwrap());
        site.cloud.fail(CREATE, refused(), 1);
        let error = provider.create(&wish, &key("quota", number)).await.unwrap_err();
        says(&error, class, &["create of web-0", "Quota Center"]);
    }
    let other = |place: &str| ["g7", "g8i"].iter().filter(|family| place.contains(**family)).count();
    assert!(tried[0] != tried[1] && tried.iter().all(|place| other(place.as_str()) == 1), "{tried:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stale_list_does_not_lack_a_vm_that_was_made() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    site.cloud.with(|alibaba, _| alibaba.hidden = Duration::from_secs(600));
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("lag", 0)).await.unwrap();
    assert_eq!(provider.list_owned().await.unwrap()[0].id, made.id);
    let error = provider.delete(&made.id).await.unwrap_err();
    says(&error, "transient", &["made a moment ago"]);
    assert_eq!(site.machines().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_answers_and_broken_connections_are_transient_and_make_one_vm() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    for fault in [Fault::Reset, Fault::LostAnswer, Fault::Answer(Answer::text(502, "<html>"))] {
        site.cloud.fail(CREATE, fault, 1);
        let error = provider.create(&wish, &key("lost", 0)).await.unwrap_err();
        says(&error, "transient", &["create of web-0"]);
    }
    let made = provider.create(&wish, &key("lost", 0)).await.unwrap();
    assert_eq!(site.machines(), [made.id.as_str()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn odd_answers_are_errors_and_no_panics() {
    let site = Site::start().await;
    let bodies = [
        Answer::text(200, "<html>"),
        Answer::json(200, &json!([])),
        Answer::json(200, &json!({"InstanceIdSets": {"InstanceIdSet": [7, "../x"]}})),
        Answer::json(200, &json!({"Instances": {"Instance": [7, {"InstanceId": "../x"}]}, "NextToken": 7})),
        Answer::json(500, &json!({"Code": {"x": 1}})),
        Answer::json(403, &json!({"Code": 7, "Message": ["x"]})),
    ];
    for (number, body) in (0..).zip(bodies) {
        let provider = site.provider(&[]);
        let wish = placed(&*provider, &request("web-0")).await.unwrap();
        for action in [CREATE, "DescribeInstances", "DeleteInstances"] {
            site.cloud.fail(action, Fault::Answer(body.clone()), 1);
        }
        let key = key("odd", number);
        drop(within(Duration::from_millis(300), provider.create(&wish, &key)).await);
        drop(provider.list_owned().await);
        site.cloud.heal();
        provider.list_owned().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_that_names_itself_as_the_next_one_is_an_error() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let page = Answer::json(200, &json!({"Instances": {"Instance": []}, "NextToken": "page-0"}));
    site.cloud.fail("DescribeInstances", Fault::Answer(page.clone()), 1);
    site.cloud.fail("DescribeInstances second page", Fault::Answer(page), 10);
    let error = provider.list_owned().await.unwrap_err();
    says(&error, "transient", &["names an earlier one as the next one"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_quotes_no_user_data() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let message = "The specified UserData eyJwZWVycG9kIjoxLCJmb3IiOiJ3ZWItMCJ9 is not valid.";
    site.cloud.fail(CREATE, Fault::refuse(400, "InvalidUserData.Format", message), 1);
    let error = provider.create(&wish, &key("quoted", 0)).await.unwrap_err();
    says(&error, "invalid", &["InvalidUserData.Format", "may quote user-data"]);
    assert!(!error.to_string().contains("eyJwZ"), "{error}");
}
