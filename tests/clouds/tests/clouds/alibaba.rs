//! Tests of the fake of Alibaba Cloud.

use std::time::Duration;

use peerpod_test_clouds::alibaba::{GROUP, IMAGES, OTHER_VSWITCH, REGION, State, VSWITCHES};
use peerpod_test_clouds::{Alibaba, Answer, Cloud};
use serde_json::{Value, json};

const SECOND: Duration = Duration::from_secs(1);

/// Starts a cloud and stops its time. It decides after a second, and an instance boots in ten more.
async fn start() -> Cloud<Alibaba> {
    let cloud = Cloud::start(Alibaba::default()).await.unwrap();
    cloud.stop_time();
    cloud.set_times(SECOND, 10 * SECOND);
    cloud
}

/// Parameters that the cloud accepts, with these changes; an empty value leaves one out.
pub(super) fn run(changes: &[(&str, &str)]) -> Vec<(String, String)> {
    let mut all: std::collections::BTreeMap<&str, &str> = [
        ("ImageId", IMAGES[0]),
        ("InstanceType", "ecs.g7.large"),
        ("ClientToken", "one"),
        ("NetworkInterface.1.InstanceType", "Primary"),
        ("NetworkInterface.1.VSwitchId", VSWITCHES[0]),
        ("NetworkInterface.1.SecurityGroupIds.1", GROUP),
        ("SystemDisk.Category", "cloud_essd"),
        ("SystemDisk.Size", "20"),
        ("UserData", "e30="),
        ("Tag.1.Key", "peerpod.cluster"),
        ("Tag.1.Value", "c"),
    ]
    .into();
    all.extend(changes.iter().copied());
    all.into_iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

fn call(cloud: &Cloud<Alibaba>, action: &str, parameters: &[(String, String)]) -> Answer {
    let encode =
        |text: &str| text.replace('%', "%25").replace('+', "%2B").replace('=', "%3D").replace('"', "%22");
    let query: Vec<String> =
        parameters.iter().map(|(name, value)| format!("{name}={}", encode(value))).collect();
    let target = format!("/?Action={action}&RegionId={REGION}&{}", query.join("&"));
    cloud.ask("POST", &target, None)
}

fn pairs(parameters: &[(&str, &str)]) -> Vec<(String, String)> {
    parameters.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

fn ids(answer: &Answer) -> Vec<String> {
    let ids = answer.value()["InstanceIdSets"]["InstanceIdSet"].as_array().cloned().unwrap_or_default();
    ids.iter().map(|id| id.as_str().unwrap().to_owned()).collect()
}

fn code(answer: &Answer) -> String {
    answer.value()["Code"].as_str().unwrap_or_default().to_owned()
}

fn state(cloud: &Cloud<Alibaba>, id: &str) -> Option<State> {
    cloud.with(|alibaba, _| alibaba.instances.get(id).map(|one| one.state))
}

#[tokio::test]
async fn a_client_token_makes_one_instance() {
    let cloud = start().await;
    let first = ids(&call(&cloud, "RunInstances", &run(&[])));
    assert_eq!((first.len(), ids(&call(&cloud, "RunInstances", &run(&[])))), (1, first.clone()));
    let other = call(&cloud, "RunInstances", &run(&[("SystemDisk.Size", "30")]));
    assert_eq!((other.status, code(&other).as_str()), (400, "IdempotentParameterMismatch"));
    cloud.with(|alibaba, _| alibaba.forget_tokens());
    assert_ne!(ids(&call(&cloud, "RunInstances", &run(&[]))), first);
}

#[tokio::test]
async fn an_instance_has_its_states_and_cannot_be_deleted_while_it_is_made() {
    let cloud = start().await;
    let id = ids(&call(&cloud, "RunInstances", &run(&[]))).remove(0);
    let delete =
        |force: &str| call(&cloud, "DeleteInstances", &pairs(&[("InstanceId.1", &id), ("Force", force)]));
    assert_eq!(
        (state(&cloud, &id), code(&delete("true")).as_str()),
        (Some(State::Pending), "IncorrectInstanceStatus")
    );
    cloud.advance(SECOND);
    assert_eq!(state(&cloud, &id), Some(State::Starting));
    cloud.advance(10 * SECOND);
    assert_eq!(
        (state(&cloud, &id), code(&delete("false")).as_str()),
        (Some(State::Running), "IncorrectInstanceStatus")
    );
    cloud.with(|alibaba, _| alibaba.delete_time = SECOND);
    assert_eq!((delete("true").status, state(&cloud, &id)), (200, Some(State::Stopping)));
    cloud.advance(SECOND);
    assert_eq!(state(&cloud, &id), None);
    assert_eq!(code(&delete("true")), "InvalidInstanceId.NotFound");
}

#[tokio::test]
async fn what_the_cloud_refuses_is_refused() {
    let cloud = start().await;
    let long = "A".repeat(43_692);
    for (changes, expected) in [
        (&[("ImageId", "m-none")][..], "InvalidImageId.NotFound"),
        (&[("ImageId", IMAGES[1])], "ImageNotSupportInstanceType"),
        (&[("InstanceType", "ecs.none")], "InvalidInstanceType.ValueNotSupported"),
        (&[("NetworkInterface.1.VSwitchId", "vsw-none")], "InvalidVSwitchId.NotFound"),
        (&[("NetworkInterface.1.VSwitchId", OTHER_VSWITCH)], "InvalidSecurityGroupId.NotFound"),
        (&[("VSwitchId", VSWITCHES[0])], "InvalidParameter.Conflict"),
        (
            &[("NetworkInterface.1.DeleteOnRelease", "true")],
            "InvalidNetworkInterface.DeleteOnRelease.Malformed",
        ),
        (
            &[
                ("NetworkInterface.2.InstanceType", "Secondary"),
                ("NetworkInterface.2.VSwitchId", VSWITCHES[1]),
            ],
            "InvalidVSwitchId.ZoneMismatch",
        ),
        (&[("SystemDisk.Size", "10")], "InvalidSystemDiskSize.LessThanImageSize"),
        (&[("UserData", &long)], "InvalidUserData.SizeExceeded"),
        (&[("UserData", "?")], "InvalidUserData.SizeExceeded"),
        (&[("Tag.1.Key", "acs:x")], "InvalidTagKey.Malformed"),
        (&[("Amount", "101")], "InvalidAmount.Malformed"),
        (&[("MinAmount", "2")], "InvalidMinAmount.Malformed"),
        (&[("SecurityOptions.ConfidentialComputingMode", "TDX")], "InvalidParameter.NotSupportConfidential"),
        (&[("InstanceName", "a[1,2]")], "InvalidInstanceName.Malformed"),
        (&[("HttpToken", "required")], "InvalidParameter"),
        (&[("DryRun", "true")], "DryRunOperation"),
    ] {
        let answer = call(&cloud, "RunInstances", &run(changes));
        assert_eq!(code(&answer), expected, "{changes:?}");
    }
    assert_eq!(code(&call(&cloud, "RunInstance", &[])), "InvalidAction.NotFound");
    assert_eq!(cloud.with(|alibaba, _| alibaba.instances.all().count()), 0);
}

#[tokio::test]
async fn stock_quota_and_addresses_end_and_fewer_instances_are_an_answer() {
    let cloud = start().await;
    cloud.set_stock("ecs.g7.large", "*", "spot", 0);
    let spot = call(&cloud, "RunInstances", &run(&[("SpotStrategy", "SpotAsPriceGo")]));
    assert_eq!(code(&spot), "OperationDenied.NoStock");
    cloud.set_stock("ecs.g7.large", "*", "on-demand", 3);
    let some = call(&cloud, "RunInstances", &run(&[("Amount", "5"), ("MinAmount", "1")]));
    assert_eq!(ids(&some).len(), 3);
    let sold = call(
        &cloud,
        "RunInstances",
        &run(&[("InstanceType", "ecs.g8y.large"), ("ImageId", IMAGES[1]), ("ClientToken", "x")]),
    );
    assert_eq!(code(&sold), "InvalidResourceType.NotSupported", "this zone does not sell it");
    cloud.heal();
    cloud.with(|alibaba, _| alibaba.quota = Some(0));
    assert_eq!(
        code(&call(&cloud, "RunInstances", &run(&[("ClientToken", "y")]))),
        "QuotaExceed.ElasticQuota"
    );
    cloud.with(|alibaba, _| alibaba.free = 0);
    assert_eq!(
        code(&call(&cloud, "RunInstances", &run(&[("ClientToken", "y")]))),
        "InvalidVSwitchId.IpNotEnough"
    );
}

#[tokio::test]
async fn lists_have_pages_and_a_limit_by_tags() {
    let cloud = start().await;
    call(&cloud, "RunInstances", &run(&[("Amount", "12")]));
    let list = |more: &[(&str, &str)]| -> Value {
        let by_tag = [("Tag.1.Key", "peerpod.cluster"), ("Tag.1.Value", "c")];
        call(&cloud, "DescribeInstances", &pairs(&[&by_tag[..], more].concat())).value()
    };
    let count = |page: &Value| page["Instances"]["Instance"].as_array().unwrap().len();
    let first = list(&[]);
    let next = first["NextToken"].as_str().unwrap().to_owned();
    assert_eq!((count(&first), count(&list(&[("NextToken", &next)]))), (10, 2));
    assert_eq!(list(&[("NextToken", &next)])["NextToken"], "");
    cloud.with(|alibaba, _| alibaba.most_by_tags = 7);
    let shown = list(&[("MaxResults", "100")]);
    assert_eq!((count(&shown), &shown["NextToken"]), (7, &json!("")), "the limit is not shown");
    let tags = [("ResourceType", "instance"), ("Tag.1.Key", "peerpod.cluster"), ("Tag.1.Value", "c")];
    let all = call(&cloud, "ListTagResources", &pairs(&tags)).value();
    assert_eq!(all["TagResources"]["TagResource"].as_array().unwrap().len(), 12);
}
