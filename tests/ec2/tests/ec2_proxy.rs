//! Tests that the proxy behaves like EC2, because other tests rely on it.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use peerpod_test_ec2::{Fault, Proxy, xml};

const IMAGE: &str = "ami-0aaaaaaaaaaaaaaa2";

/// Returns the code of a refusal.
fn code((status, answer): &(u16, String)) -> (u16, &str) {
    (*status, xml::value(answer, "Code").unwrap_or("(none)"))
}

async fn run(proxy: &Proxy, more: &[(&str, &str)]) -> (u16, String) {
    let mut params =
        vec![("MinCount", "1"), ("MaxCount", "1"), ("ImageId", IMAGE), ("InstanceType", "m6a.large")];
    params.retain(|(key, _)| !more.iter().any(|(other, _)| other == key));
    params.extend(more);
    proxy.call("RunInstances", &params).await.unwrap()
}

async fn subnet(proxy: &Proxy, zone: &str) -> String {
    let filter = [("Filter.1.Name", "availability-zone"), ("Filter.1.Value.1", zone)];
    let found = proxy.ask("DescribeSubnets", &filter).await.unwrap();
    xml::value(&found, "subnetId").unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_moto_takes_and_ec2_does_not_is_refused() {
    let proxy = Proxy::start().await.unwrap();
    let long = STANDARD.encode("x".repeat(17 << 10));
    let limit = STANDARD.encode("x".repeat(16 << 10));
    assert_eq!(code(&run(&proxy, &[("UserData", &long)]).await), (400, "InvalidUserData.Malformed"));
    assert_eq!(run(&proxy, &[("UserData", &limit)]).await.0, 200);
    assert_eq!(code(&run(&proxy, &[("InstanceType", "zz9.large")]).await), (400, "InvalidParameterValue"));
    let absent = [("ImageId", "ami-0123456789abcdef0")];
    assert_eq!(code(&run(&proxy, &absent).await), (400, "InvalidAMIID.NotFound"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_token_is_good_for_one_launch() {
    let proxy = Proxy::start().await.unwrap();
    let first = run(&proxy, &[("ClientToken", "t")]).await;
    let second = run(&proxy, &[("ClientToken", "t")]).await;
    assert_eq!(first, second);
    let other = run(&proxy, &[("ClientToken", "t"), ("InstanceType", "c6a.large")]).await;
    assert_eq!(code(&other), (400, "IdempotentParameterMismatch"));
    let all = proxy.ask("DescribeInstances", &[]).await.unwrap();
    assert_eq!(xml::items(&all, "instancesSet").len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_attaches_once_in_its_zone_to_a_vm_that_runs() {
    let proxy = Proxy::start().await.unwrap();
    proxy.set_boot(Duration::from_secs(3600));
    let here = subnet(&proxy, "eu-central-1a").await;
    let made = run(&proxy, &[("SubnetId", &here)]).await.1;
    let vm = xml::value(&made, "instanceId").unwrap().to_owned();
    let volume = async |zone: &str| {
        let made = proxy.ask("CreateVolume", &[("AvailabilityZone", zone), ("Size", "1")]).await.unwrap();
        xml::value(&made, "volumeId").unwrap().to_owned()
    };
    let (near, far) = (volume("eu-central-1a").await, volume("eu-central-1b").await);
    let attach = async |volume: &str, device: &str| {
        let params = [("InstanceId", vm.as_str()), ("VolumeId", volume), ("Device", device)];
        proxy.call("AttachVolume", &params).await.unwrap()
    };
    assert_eq!(code(&attach(&near, "/dev/xvdba").await), (400, "IncorrectState"));
    proxy.set_boot(Duration::ZERO);
    assert_eq!(code(&attach(&far, "/dev/xvdba").await), (400, "InvalidVolume.ZoneMismatch"));
    assert_eq!(attach(&near, "/dev/xvdba").await.0, 200);
    assert_eq!(code(&attach(&near, "/dev/xvdbb").await), (400, "VolumeInUse"));
    let other = volume("eu-central-1a").await;
    assert_eq!(code(&attach(&other, "/dev/xvdba").await), (400, "InvalidParameterValue"));
}

#[tokio::test(flavor = "multi_thread")]
async fn there_is_as_much_as_the_stock_says_and_the_bucket_holds() {
    let proxy = Proxy::start().await.unwrap();
    let (a, b) = (subnet(&proxy, "eu-central-1a").await, subnet(&proxy, "eu-central-1b").await);
    proxy.set_stock("m6a.large", "eu-central-1a", "on-demand", 1);
    assert_eq!(run(&proxy, &[("SubnetId", &a)]).await.0, 200);
    assert_eq!(code(&run(&proxy, &[("SubnetId", &a)]).await), (500, "InsufficientInstanceCapacity"));
    assert_eq!(run(&proxy, &[("SubnetId", &b)]).await.0, 200);
    proxy.heal();
    // A hundredth of EC2's refill: on a busy machine the calls come slowly.
    proxy.set_buckets(0.01);
    let mut answers = Vec::new();
    for _ in 0..7 {
        answers.push(run(&proxy, &[("SubnetId", &b), ("DryRun", "true")]).await);
    }
    let throttled = answers.iter().filter(|answer| code(answer) == (503, "RequestLimitExceeded")).count();
    assert!(throttled >= 1, "{answers:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_made_is_seen_late_and_answers_can_be_lost() {
    let proxy = Proxy::start().await.unwrap();
    proxy.set_lag(Duration::from_millis(800));
    let made = run(&proxy, &[]).await.1;
    let vm = xml::value(&made, "instanceId").unwrap().to_owned();
    let by_id = [("InstanceId.1", vm.as_str())];
    let unseen = proxy.call("DescribeInstances", &by_id).await.unwrap();
    assert_eq!(code(&unseen), (400, "InvalidInstanceID.NotFound"));
    let listed = proxy.call("DescribeInstances", &[]).await.unwrap().1;
    assert!(xml::items(&listed, "instancesSet").is_empty());
    let end = std::time::Instant::now() + Duration::from_secs(20);
    while proxy.call("DescribeInstances", &by_id).await.unwrap().0 != 200 {
        assert!(std::time::Instant::now() < end, "it is never seen");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    proxy.fail("RunInstances", Fault::LostAnswer, 1);
    let params = [("MinCount", "1"), ("MaxCount", "1"), ("ImageId", IMAGE), ("InstanceType", "m6a.large")];
    assert!(proxy.call("RunInstances", &params).await.is_err(), "the connection breaks");
    let all = proxy.ask("DescribeInstances", &[]).await.unwrap();
    assert_eq!(xml::items(&all, "instancesSet").len(), 2, "and yet it was done");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_has_pages_and_a_later_page_can_be_lost() {
    let proxy = Proxy::start().await.unwrap();
    for _ in 0..3 {
        assert_eq!(run(&proxy, &[]).await.0, 200);
    }
    proxy.set_page(2);
    let list = async |more: &[(&str, &str)]| {
        let params = [&[("MaxResults", "1000")][..], more].concat();
        proxy.call("DescribeInstances", &params).await.map(|(_, answer)| answer)
    };
    let first = list(&[]).await.unwrap();
    let next = [("NextToken", xml::value(&first, "nextToken").unwrap())];
    proxy.fail("DescribeInstances second page", Fault::Reset, 1);
    list(&[]).await.unwrap();
    list(&next).await.unwrap_err();
    let second = list(&next).await.unwrap();
    let vms = |answer: &str| xml::items(answer, "instancesSet").len();
    assert_eq!((vms(&first), vms(&second)), (2, 1));
}
