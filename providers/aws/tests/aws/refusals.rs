//! Checks that each refusal of EC2 ends in an error that names the cause and the remedy, and that no failure on the way
//! makes two VMs or loses one.

use super::common;
use std::time::{Duration, Instant};

use common::{Cloud, OTHER_IMAGE, PATIENCE, key, owner, placed, request, until, within};
use peerpod_provider_api::{CreateRequest, DiskRequest, Error, Provider};
use peerpod_provider_aws::{AwsConfig, AwsProvider};
use peerpod_test_ec2::Fault;
use serde_json::json;

/// Asserts the class of an error, and every part of its text.
#[track_caller]
fn says(error: &Error, class: &str, parts: &[&str]) {
    assert_eq!(error.class(), class, "{error}");
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part} in: {text}");
    }
    assert!(text.len() < 3000, "{} bytes: {text}", text.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_exhausted_type_is_skipped_for_a_while() {
    let cloud = Cloud::start().await;
    let provider = cloud.provider(&[("instance-types", "m6a.large,c6a.large,r6a.large")]);
    cloud.proxy.set_stock("c6a.large", "*", "*", 0);
    cloud.proxy.set_stock("m6a.large", "eu-central-1a", "*", 0);
    let first = placed(&*provider, &request("a")).await.unwrap();
    let made = provider.create(&first, &key("fallback", 0)).await.unwrap();
    assert_eq!(made.chosen.instance_type.as_deref(), Some("m6a.large"), "in another zone");
    // The next placement does not contain the type that had no capacity.
    let second = placed(&*provider, &request("b")).await.unwrap();
    let placement = second.placement.as_ref().unwrap().as_str();
    assert!(!placement.contains("c6a.large"), "{placement}");
    provider.create(&second, &key("fallback", 1)).await.unwrap();
    assert_eq!(cloud.proxy.count(Some("CreateFleet")), 2, "the fallback is inside one call");
}

#[tokio::test(flavor = "multi_thread")]
async fn spot_falls_back_to_on_demand() {
    let cloud = Cloud::start().await;
    let provider = cloud.provider(&[("market", "spot-first")]);
    cloud.proxy.set_stock("*", "*", "spot", 1);
    for number in 0..2 {
        let request = placed(&*provider, &request("a")).await.unwrap();
        provider.create(&request, &key("spot", number)).await.unwrap();
    }
    let vms = cloud.proxy.ask("DescribeInstances", &[]).await.unwrap();
    assert_eq!(vms.matches("<instanceLifecycle>spot").count(), 1, "the second one is on demand");
    assert_eq!(cloud.machines().await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_any_capacity_the_error_names_all_tried_offerings() {
    let cloud = Cloud::start().await;
    for launch in ["fleet", "run"] {
        let provider = cloud.provider(&[("instance-types", "m6a.large,c6a.large"), ("launch", launch)]);
        cloud.proxy.heal();
        cloud.proxy.set_stock("*", "*", "*", 0);
        let request = placed(&*provider, &request("web-0")).await.unwrap();
        cloud.proxy.forget_calls();
        let error = provider.create(&request, &key(launch, 0)).await.unwrap_err();
        let parts = [
            "create of web-0",
            "m6a.large in eu-central-1a",
            "InsufficientInstanceCapacity",
            "more instance-types",
        ];
        says(&error, "capacity", &parts);
        let (action, calls) = if launch == "fleet" { ("CreateFleet", 1) } else { ("RunInstances", 6) };
        assert_eq!(
            cloud.proxy.count(Some(action)),
            calls,
            "each offering is asked for once, and a 500 not again"
        );
        let again = provider.place(&request).await.unwrap_err();
        says(&again, "capacity", &["InsufficientInstanceCapacity"]);
    }
    assert!(cloud.machines().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_of_quotas_rights_and_names_give_a_remedy() {
    let cloud = Cloud::start().await;
    let refusals = [
        ("VcpuLimitExceeded", 400, "quota", "ask for a higher quota"),
        ("MaxSpotInstanceCountExceeded", 400, "quota", "ask for a higher quota"),
        ("UnauthorizedOperation", 403, "auth", "allow ec2:CreateFleet"),
        ("AuthFailure", 401, "auth", "check the access key"),
        ("InvalidClientTokenId", 403, "auth", "an access key that exists"),
        ("SignatureDoesNotMatch", 403, "auth", "check the node's clock"),
        ("InvalidParameterValue", 400, "invalid", "correct the settings"),
        ("InvalidSubnetID.NotFound", 400, "invalid", "set subnet-ids"),
        ("InvalidGroup.NotFound", 400, "invalid", "set security-group-ids"),
        ("InvalidKeyPair.NotFound", 400, "invalid", "set key-name"),
        ("InternalError", 500, "transient", "tried again"),
        ("Unavailable", 503, "transient", "tried again"),
    ];
    for (number, (code, status, class, remedy)) in (0..).zip(refusals) {
        let provider = cloud.provider(&[]);
        let request = placed(&*provider, &request("web-0")).await.unwrap();
        cloud.proxy.fail("CreateFleet", Fault::refuse(status, code, "Because."), 1);
        let error = provider.create(&request, &key("codes", number)).await.unwrap_err();
        says(&error, class, &["create of web-0", code, "Because", remedy]);
    }
    assert!(cloud.machines().await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn preflight_reports_all_expired_and_forbidden_things_at_once() {
    let cloud = Cloud::start().await;
    for action in ["DescribeImages", "DescribeInstanceTypes", "DescribeInstances"] {
        cloud.proxy.deny(action);
    }
    let error = cloud.provider(&[]).preflight().await.unwrap_err();
    let parts = [
        "allow ec2:DescribeImages",
        "allow ec2:DescribeInstanceTypes",
        "allow ec2:DescribeInstances",
        "not authorized",
    ];
    says(&error, "auth", &parts);
    assert!(!error.to_string().contains("Encoded"), "{error}");
    cloud.proxy.heal();
    cloud.proxy.deny("CreateFleet");
    says(&cloud.provider(&[]).preflight().await.unwrap_err(), "auth", &["allow ec2:CreateFleet"]);
    cloud.proxy.heal();
    cloud.proxy.expire();
    let expired = cloud.provider(&[]).preflight().await.unwrap_err();
    says(&expired, "auth", &["RequestExpired", "renew the credentials", "clock"]);
    cloud.proxy.heal();
    // Missing rights for the cleanup alone are a warning.
    cloud.proxy.deny("DescribeNetworkInterfaces");
    let found = cloud.provider(&[]).preflight().await.unwrap();
    assert!(
        found.warnings.iter().any(|warning| warning.contains("allow ec2:DescribeNetworkInterfaces")),
        "{found:?}"
    );
    assert!(found.facts.iter().any(|fact| fact.contains("eu-central-1")), "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_preflight_needs_no_quota() {
    let cloud = Cloud::start().await;
    let settings = [("disable-cvm", "true"), ("market", "spot-first")];
    cloud.proxy.deny("GetServiceQuota");
    // On a busy machine moto needs longer than EC2.
    let patient = cloud.provider(&[settings[0], settings[1], ("quota-wait", "60s")]);
    let found = patient.preflight().await.unwrap();
    let quotas: Vec<_> = found.facts.iter().filter(|fact| fact.starts_with("quota ")).collect();
    assert_eq!((quotas.len(), found.warnings.len()), (1, 0), "{found:?}");
    for part in
        ["not readable (", "AccessDeniedException", "allow servicequotas:GetServiceQuota to this identity"]
    {
        assert!(quotas[0].contains(part), "{part} in {quotas:?}");
    }
    assert!(quotas[0].starts_with("quota vCPUs of standard types: "), "{quotas:?}");
    cloud.proxy.heal();
    // As in a VPC without a route to Service Quotas.
    cloud.proxy.fail("GetServiceQuota", Fault::Late(Duration::from_secs(60)), u32::MAX);
    let start = Instant::now();
    let found = cloud.provider(&settings).preflight().await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    let quotas: Vec<_> = found.facts.iter().filter(|fact| fact.starts_with("quota ")).collect();
    assert_eq!((quotas.len(), found.warnings.len()), (1, 0), "{found:?}");
    assert!(quotas[0].contains("no answer from Service Quotas in time; check the route"), "{quotas:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_preflight_makes_nothing_and_asks_for_the_rights() {
    let cloud = Cloud::start().await;
    let dry = || AwsProvider::new(AwsConfig { dry: true, ..cloud.config(&[]) }, owner("n"));
    cloud.proxy.forget_calls();
    dry().preflight().await.unwrap();
    let asked = cloud.proxy.actions();
    let reads = |action: &str| action.starts_with("Describe") || action.starts_with("Get");
    let made: Vec<_> = asked.iter().filter(|action| !reads(action)).collect();
    assert_eq!(made, ["CreateLaunchTemplate", "RunInstances"]);
    let templates = cloud.proxy.boto3("describe_launch_templates", &json!({})).await.unwrap();
    assert_eq!((&templates["LaunchTemplates"], cloud.machines().await), (&json!([]), Vec::new()));
    for action in made {
        cloud.proxy.deny(action);
        says(&dry().preflight().await.unwrap_err(), "auth", &[&format!("allow ec2:{action}")]);
        cloud.proxy.heal();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn preflight_reports_settings_that_name_missing_objects() {
    let cloud = Cloud::start().await;
    type Settings = [(&'static str, &'static str)];
    let cases: [(&Settings, &[&str]); 5] = [
        (&[("instance-type", "zz9.large")], &["zz9.large", "correct"]),
        (&[("image-id", "ami-0123456789abcdef0")], &["ami-0123456789abcdef0", "image"]),
        (&[("image-id", common::ARM_IMAGE)], &["arm64", "x86_64", "provider.aws.arch"]),
        (&[("subnet-ids", "subnet-0123456789abcdef0")], &["subnet-0123456789abcdef0", "subnet-ids"]),
        (
            &[("image-id", ""), ("image-name", "nothing-*"), ("image-owners", "self")],
            &["nothing-*", "image-name"],
        ),
    ];
    for (settings, parts) in cases {
        let error = cloud.provider(settings).preflight().await.unwrap_err();
        says(&error, "invalid", parts);
    }
    let plain = cloud.provider(&[("instance-type", "t3.large")]);
    let found = plain.preflight().await.unwrap();
    assert!(found.warnings.iter().any(|warning| warning.contains("disable-cvm")), "{found:?}");
    let error = plain.place(&request("web-0")).await.unwrap_err();
    says(&error, "invalid", &["web-0", "t3.large"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_or_late_answer_and_a_reset_make_one_vm() {
    let cloud = Cloud::start().await;
    let provider = cloud.provider(&[("call-timeout", "8s")]);
    let faults = [Fault::LostAnswer, Fault::Reset, Fault::Late(Duration::from_secs(12)), Fault::LostAnswer];
    for (number, fault) in (0..).zip(faults) {
        let request = placed(&*provider, &request("web-0")).await.unwrap();
        let key = key("lost", number);
        cloud.proxy.fail("CreateFleet", fault.clone(), 1);
        let error = provider.create(&request, &key).await.unwrap_err();
        says(
            &error,
            "transient",
            &["create of web-0", "no answer from EC2 to CreateFleet", "check the route"],
        );
        // As after a restart of the node: another provider with the same request and key.
        let later = cloud.provider(&[]);
        let made = later.create(&request, &key).await.unwrap();
        until("EC2 has one VM of the key", || async {
            later.list_owned().await.unwrap().iter().filter(|vm| vm.key.as_ref() == Some(&key)).count() == 1
        })
        .await;
        assert_eq!(cloud.machines().await.len(), number as usize + 1, "{fault:?}");
        assert!(cloud.machines().await.contains(&made.id.to_string()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeated_create_with_newer_settings_finds_what_the_older_ones_made() {
    let cloud = Cloud::start().await;
    cloud.proxy.set_lag(Duration::from_secs(2));
    let provider = cloud.provider(&[]);
    let request = placed(&*provider, &request("web-0")).await.unwrap();
    let key = key("newer", 0);
    cloud.proxy.fail("CreateFleet", Fault::LostAnswer, 1);
    provider.create(&request, &key).await.unwrap_err();
    // The client token is the same, but the tags differ: EC2 refuses the call, and its list does not show the VM yet.
    let newer = cloud.provider(&[("tags", "team=blue")]);
    let made = newer.create(&request, &key).await.unwrap();
    assert_eq!(cloud.machines().await, [made.id.to_string()]);
    let other = CreateRequest { user_data: "other".into(), ..request };
    let error = newer.create(&other, &key).await.unwrap_err();
    says(&error, "key_reused", &["another request", made.id.as_str()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_ec2_does_not_list_yet_is_kept() {
    let cloud = Cloud::start().await;
    cloud.proxy.set_lag(Duration::from_secs(2));
    let provider = cloud.provider(&[]);
    let key = key("lag", 0);
    let made = provider.create(&request("web-0"), &key).await.unwrap();
    let listed = provider.list_owned().await.unwrap();
    assert!(listed.iter().any(|vm| vm.id == made.id && vm.key.as_ref() == Some(&key)), "{listed:?}");
    // A delete fails while EC2 does not know the VM yet, and is repeated.
    let denied = provider.delete(&made.id).await.unwrap_err();
    says(&denied, "transient", &["EC2 does not know it yet"]);
    assert!(!provider.addresses(&made.id).await.unwrap().is_empty(), "it waits until it is seen");
    provider.delete(&made.id).await.unwrap();
    until("it is gone", || async { cloud.machines().await.is_empty() }).await;
    until("it is not listed", || async { provider.list_owned().await.unwrap().is_empty() }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_caller_without_a_turn_in_time_gets_the_reason() {
    let cloud = Cloud::start().await;
    let provider = cloud.provider(&[("launch", "run")]);
    provider.preflight().await.unwrap();
    cloud.proxy.set_buckets(1.0);
    let creates = (0..12).map(|number| {
        let (provider, request) = (provider.clone(), request(&format!("web-{number}")));
        tokio::spawn(within(Duration::from_secs(2), async move {
            provider.create(&request, &key("turns", number)).await
        }))
    });
    let mut refused = Vec::new();
    for create in creates.collect::<Vec<_>>() {
        let made = tokio::time::timeout(PATIENCE, create).await.unwrap().unwrap();
        // On a busy machine the answer of a call with a turn may come late. This test is not about that error.
        refused.extend(made.err().filter(|error| !error.to_string().contains("its effect is unknown")));
    }
    assert!(!refused.is_empty());
    for error in &refused {
        says(error, "transient", &["create of web-", "RunInstances", "create fewer pods at once"]);
    }
    // Without turns EC2 would throttle seven of the twelve. On a busy machine calls with a turn arrive together.
    let in_vain = cloud.proxy.calls().iter().filter(|call| call.status == 503).count();
    assert!(in_vain <= 4, "{in_vain} calls in vain");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_in_use_or_in_another_zone_is_refused_before_any_launch() {
    let cloud = Cloud::start().await;
    let provider = cloud.provider(&[("subnet-ids", cloud.subnets[0].as_str())]);
    let disk = |volume: &str| CreateRequest {
        disks: vec![DiskRequest { volume: volume.to_owned(), ..DiskRequest::default() }],
        ..request("web-0")
    };
    let elsewhere = cloud.volume("eu-central-1b").await;
    let error = provider.place(&disk(&elsewhere)).await.unwrap_err();
    says(&error, "invalid", &["web-0", "eu-central-1b"]);
    let used = cloud.volume("eu-central-1a").await;
    let other = provider.create(&disk(&used), &key("disks", 0)).await.unwrap();
    let volumes = provider.extensions().volumes.unwrap();
    volumes.attach(&other.id, &disk(&used).disks[0]).await.unwrap();
    let error = provider.place(&disk(&used)).await.unwrap_err();
    says(&error, "invalid", &[&used, other.id.as_str(), "one VM only"]);
    let error = provider.place(&disk("vol-0123456789abcdef0")).await.unwrap_err();
    says(&error, "invalid", &["vol-0123456789abcdef0", "correct the pod's volume"]);
    let error = provider.place(&disk("pvc-1")).await.unwrap_err();
    says(&error, "invalid", &["pvc-1", "they look like vol-"]);
    assert_eq!(cloud.machines().await.len(), 1, "nothing else was made");
    // An attachment to a VM in another zone is refused.
    let error = volumes.attach(&other.id, &disk(&elsewhere).disks[0]).await.unwrap_err();
    says(&error, "invalid", &["eu-central-1b", "give a subnet in the volume's zone"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_lookups_of_one_vm_and_one_disk_all_succeed() {
    let cloud = Cloud::start().await;
    let provider = cloud.provider(&[]);
    let made = provider.create(&request("web-0"), &key("several", 0)).await.unwrap();
    let looks = (0..5).map(|_| {
        let (provider, id) = (provider.clone(), made.id.clone());
        tokio::spawn(async move { provider.addresses(&id).await })
    });
    for inspect in looks.collect::<Vec<_>>() {
        assert!(!inspect.await.unwrap().unwrap().is_empty());
    }
    let volume = cloud.volume("eu-central-1a").await;
    let disk = DiskRequest { volume, ..DiskRequest::default() };
    let wish = CreateRequest { disks: vec![disk], ..request("web-1") };
    let places = (0..5).map(|_| {
        let (provider, wish) = (provider.clone(), wish.clone());
        tokio::spawn(async move { provider.place(&wish).await })
    });
    for place in places.collect::<Vec<_>>() {
        assert!(place.await.unwrap().unwrap().is_some());
    }
    assert_eq!(cloud.proxy.count(Some("DescribeVolumes")), 1, "by one call");
}

#[tokio::test(flavor = "multi_thread")]
async fn user_data_that_ec2_would_refuse_is_refused_before_any_call() {
    let cloud = Cloud::start().await;
    let provider = cloud.provider(&[]);
    let long = CreateRequest { user_data: "x".repeat(17 << 10), ..request("web-0") };
    says(&provider.create(&long, &key("long", 0)).await.unwrap_err(), "invalid", &["17408 bytes", "16384"]);
    assert!(cloud.proxy.calls().is_empty());
    // The proxy refuses such a call as EC2 does. If the provider's own check failed, this error would be returned.
    cloud.proxy.fail(
        "CreateFleet",
        Fault::refuse(400, "InvalidUserData.Malformed", "User data is limited"),
        1,
    );
    let error = provider.create(&request("web-0"), &key("long", 1)).await.unwrap_err();
    says(&error, "invalid", &["InvalidUserData.Malformed", "16 KiB"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_image_is_the_pods_mistake() {
    let cloud = Cloud::start().await;
    let provider = cloud.provider(&[]);
    let absent = CreateRequest { image: Some("ami-0123456789abcdef0".into()), ..request("web-0") };
    let error = provider.create(&absent, &key("image", 0)).await.unwrap_err();
    says(&error, "invalid", &["ami-0123456789abcdef0"]);
    let other = CreateRequest { image: Some(OTHER_IMAGE.into()), ..request("web-1") };
    provider.create(&other, &key("image", 1)).await.unwrap();
}
