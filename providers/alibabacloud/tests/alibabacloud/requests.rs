//! Checks that each field of a request and each setting is in the VM.

use std::time::Duration;

use peerpod_provider_api::{Confidential, CreateRequest, DiskIdentity, DiskRequest, Market, Provider, Size};
use peerpod_test_clouds::alibaba::{IMAGES, KEY_PAIR, State, VSWITCHES, ZONES};
use peerpod_test_clouds::{Fault, alibaba::OTHER_VSWITCH};

use super::common::{Site, TYPE, key, placed, request, says, within};

#[tokio::test(flavor = "multi_thread")]
async fn each_field_of_a_request_is_in_its_vm() {
    let site = Site::start().await;
    let settings = [
        ("instance-types", "ecs.g8i.xlarge,ecs.g8i.2xlarge"),
        ("tags", "team=blue"),
        ("key-name", KEY_PAIR),
        ("root-volume-size", "50"),
        ("root-volume-type", "cloud_auto"),
    ];
    let provider = site.provider(&settings);
    let wish = CreateRequest {
        size: Size { vcpus: 6, memory_mib: 1024, ..Size::default() },
        confidential: Some(Confidential::Tdx),
        market: Some(Market::Spot),
        zones: vec![ZONES[1].to_owned()],
        second_nic: true,
        public_ip: true,
        ..request("web-0")
    };
    let wish = placed(&*provider, &wish).await.unwrap();
    let made = provider.create(&wish, &key("fields", 0)).await.unwrap();
    assert_eq!(made.chosen.instance_type.as_deref(), Some("ecs.g8i.2xlarge"));
    let vm = site.vm(made.id.as_str()).unwrap();
    let get = |name: &str| vm.parameters.get(name).map_or("", String::as_str);
    for (name, value) in [
        ("InstanceType", "ecs.g8i.2xlarge"),
        ("ImageId", IMAGES[0]),
        ("InstanceName", "web-0"),
        ("SecurityOptions.ConfidentialComputingMode", "TDX"),
        ("SpotStrategy", "SpotAsPriceGo"),
        ("SpotInterruptionBehavior", "Terminate"),
        ("NetworkInterface.1.VSwitchId", VSWITCHES[1]),
        ("NetworkInterface.2.VSwitchId", VSWITCHES[1]),
        ("NetworkInterface.2.InstanceType", "Secondary"),
        ("NetworkInterface.2.DeleteOnRelease", "true"),
        ("InternetMaxBandwidthOut", "100"),
        ("HttpTokens", "required"),
        ("KeyPairName", KEY_PAIR),
        ("SystemDisk.Size", "50"),
        ("SystemDisk.Category", "cloud_auto"),
    ] {
        assert_eq!(get(name), value, "{name}");
    }
    assert_eq!(vm.user_data, wish.user_data.as_bytes());
    let tag = |name: &str| vm.tags.get(name).map_or("", String::as_str);
    assert_eq!((tag("peerpod.cluster"), tag("peerpod.node"), tag("team")), ("c", "n", "blue"));
    assert_eq!((tag("peerpod.pod"), tag("peerpod.key")), ("web-0", key("fields", 0).as_str()));
    // Neither user-data nor another parameter of the create is in a URL.
    let call = site.cloud.calls().into_iter().find(|call| call.action == "RunInstances").unwrap();
    assert!(call.request.query.is_empty() && !call.request.form().is_empty(), "{:?}", call.request.query);
    let addresses = provider.addresses(&made.id).await.unwrap();
    assert!(addresses.iter().all(|one| one.to_string().starts_with("10.0.")), "{addresses:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_public_address_is_the_nodes_address_where_it_is_configured() {
    let site = Site::start().await;
    let provider = site.provider(&[("use-public-ip", "true")]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("public", 0)).await.unwrap();
    let addresses = provider.addresses(&made.id).await.unwrap();
    assert!(addresses[0].to_string().starts_with("203.0.113."), "{addresses:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pods_image_is_used_for_its_vm_alone() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let image = |id: &str| CreateRequest { image: Some(id.to_owned()), ..request("web-0") };
    let wish = placed(&*provider, &image(IMAGES[2])).await.unwrap();
    let made = provider.create(&wish, &key("image", 0)).await.unwrap();
    let vm = site.vm(made.id.as_str()).unwrap();
    assert_eq!((&vm.parameters["ImageId"][..], &vm.parameters["SystemDisk.Size"][..]), (IMAGES[2], "30"));
    let wish = placed(&*provider, &request("web-1")).await.unwrap();
    let made = provider.create(&wish, &key("image", 1)).await.unwrap();
    assert_eq!(site.vm(made.id.as_str()).unwrap().parameters["ImageId"], IMAGES[0]);
    for (id, part) in [
        (IMAGES[1], "aarch64, the pods are for x86_64"),
        ("m-none00000000", "there is none"),
        ("../x", "not the id"),
    ] {
        let wish = placed(&*provider, &image(id)).await.unwrap();
        let error = provider.create(&wish, &key("image", 2)).await.unwrap_err();
        says(&error, "invalid", &["create of web-0", part]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_are_attached_while_the_guest_boots_and_stay_after_its_end() {
    let site = Site::start().await;
    site.cloud.set_times(Duration::from_millis(100), Duration::from_millis(200));
    site.cloud.with(|alibaba, _| alibaba.attach_time = Duration::from_millis(100));
    let provider = site.provider(&[]);
    let volumes = [site.disk(ZONES[1]), site.disk(ZONES[1])];
    let disk = |volume: &String| DiskRequest { volume: volume.clone(), ..DiskRequest::default() };
    let wish = CreateRequest { disks: volumes.iter().map(disk).collect(), ..request("web-0") };
    let wish = placed(&*provider, &wish).await.unwrap();
    let made = provider.create(&wish, &key("disks", 0)).await.unwrap();
    assert_eq!(made.chosen.zone.as_deref(), Some(ZONES[1]), "the zone of its disks");
    for volume in &volumes {
        let identity = provider.extensions().volumes.unwrap().attach(&made.id, &disk(volume)).await.unwrap();
        assert_eq!(identity, DiskIdentity::Serial(volume.trim_start_matches("d-").to_owned()));
    }
    let asked =
        site.cloud.calls().into_iter().filter(|call| call.action == "AttachDisk" && call.status == 200);
    assert_eq!(asked.count(), 2, "each disk is attached once");
    provider.delete(&made.id).await.unwrap();
    let left = |volume: &String| site.cloud.with(|alibaba, _| alibaba.disks.get(volume).unwrap().on.clone());
    assert_eq!(volumes.iter().map(left).collect::<Vec<_>>(), [None, None]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_is_not_free_or_elsewhere_is_named_before_any_cost() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let disk = |volume: &str| DiskRequest { volume: volume.to_owned(), ..DiskRequest::default() };
    let wish = |volume: &str| CreateRequest { disks: vec![disk(volume)], ..request("web-0") };
    let (used, far) = (site.disk(ZONES[0]), site.disk(ZONES[2]));
    site.cloud.with(|alibaba, _| alibaba.disks.get_mut(&used).unwrap().on = Some("i-another".to_owned()));
    for (volume, part) in [
        (used.as_str(), "in use by i-another"),
        ("d-none00000000", "there is no disk d-none00000000"),
        ("vol-1", "they look like d-"),
        (far.as_str(), "ecs.g8i.xlarge"),
    ] {
        let error = provider.place(&wish(volume)).await.unwrap_err();
        says(&error, "invalid", &["create of web-0", part]);
    }
    assert!(site.machines().is_empty());
    // Another process attaches it between the look and the call.
    let volume = site.disk(ZONES[0]);
    let plain = CreateRequest { zones: vec![ZONES[0].to_owned()], ..request("web-1") };
    let plain = placed(&*provider, &plain).await.unwrap();
    let made = provider.create(&plain, &key("race", 0)).await.unwrap();
    site.cloud.fail("AttachDisk", Fault::refuse(403, "IncorrectDiskStatus", "The current disk status."), 1);
    provider.extensions().volumes.unwrap().attach(&made.id, &disk(&volume)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_is_still_being_made_is_deleted_when_it_can_be_and_delays_no_other() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let mut ids = Vec::new();
    for number in 0..3 {
        let wish = placed(&*provider, &request("web-0")).await.unwrap();
        ids.push(provider.create(&wish, &key("pending", number)).await.unwrap().id);
    }
    site.cloud.set_times(Duration::from_secs(600), Duration::ZERO);
    let wish = placed(&*provider, &request("web-1")).await.unwrap();
    let pending = provider.create(&wish, &key("pending", 9)).await.unwrap().id;
    // The cloud refuses a whole list because of one VM.
    site.cloud.fail(
        "DeleteInstances",
        Fault::refuse(403, "IncorrectInstanceStatus", "The current status."),
        1,
    );
    let all = [&ids[0], &ids[1], &ids[2], &pending].map(|id| provider.delete(id));
    let answers = futures_util::future::join_all(all).await;
    says(answers[3].as_ref().unwrap_err(), "transient", &["present state", "tried again"]);
    assert!(answers[..3].iter().all(Result::is_ok), "{answers:?}");
    assert_eq!(site.machines(), [pending.as_str()]);
    site.cloud.advance(Duration::from_secs(600));
    provider.delete(&pending).await.unwrap();
    assert!(site.machines().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_powers_itself_off_has_ended() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("off", 0)).await.unwrap();
    site.cloud.with(|alibaba, _| alibaba.instances.get_mut(made.id.as_str()).unwrap().state = State::Stopped);
    let listed = provider.list_owned().await.unwrap();
    assert_eq!(listed[0].state, peerpod_provider_api::OwnedState::Ended);
    says(&provider.addresses(&made.id).await.unwrap_err(), "not_found", &["it has ended"]);
    provider.delete(&made.id).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn preflight_reports_settings_that_name_missing_objects_and_what_does_not_fit() {
    let site = Site::start().await;
    type Settings = [(&'static str, &'static str)];
    let cases: [(&Settings, &[&str]); 7] = [
        (&[("instance-type", "ecs.zz9.large")], &["ecs.zz9.large", "instance-types"]),
        (&[("image-id", "m-none00000000")], &["look at the image m-none00000000", "set image-id"]),
        (&[("image-id", IMAGES[1])], &["aarch64", "provider.alibabacloud.arch"]),
        (&[("vswitch-ids", "vsw-none00000000")], &["vSwitch vsw-none00000000", "correct vswitch-ids"]),
        (&[("second-vswitch-ids", OTHER_VSWITCH)], &["vpc-pods", "vpc-other", "one VPC"]),
        (
            &[("security-group-ids", "sg-none00000000")],
            &["InvalidSecurityGroupId.NotFound", "security-group-ids"],
        ),
        (&[("key-name", "none")], &["InvalidKeyPairName.NotFound", "set key-name"]),
    ];
    for (settings, parts) in cases {
        let error = site.provider(settings).preflight().await.unwrap_err();
        says(&error, "invalid", parts);
    }
    let warns = async |settings: &[(&str, &str)], part: &str| {
        let found = site.provider(settings).preflight().await.unwrap();
        assert!(found.warnings.iter().any(|one| one.contains(part)), "{part} in {found:?}");
    };
    warns(&[("image-id", IMAGES[2])], "BootMode=UEFI").await;
    site.cloud.with(|alibaba, _| alibaba.free = 3);
    warns(&[], "has 3 free addresses").await;
    site.cloud.with(|alibaba, _| alibaba.quota = Some(0));
    warns(&[], "QuotaExceed.ElasticQuota").await;
    let plain = [("disable-cvm", "false"), ("instance-type", "ecs.g7.large")];
    let error = site.provider(&plain).preflight().await.unwrap_err();
    says(&error, "invalid", &["NotSupportConfidential", "disable-cvm"]);
    assert!(site.machines().is_empty(), "a dry run makes nothing");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_minute_without_calls_left_ends_no_pod_and_makes_one_vm() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    // Also those of the next minute, which may begin now.
    site.cloud.fail("RunInstances", Fault::refuse(400, "Throttling.User", "Request was denied."), 100);
    let key = key("minute", 0);
    let error = within(Duration::from_secs(5), provider.create(&wish, &key)).await.unwrap_err();
    says(&error, "transient", &["create of web-0", "RunInstances"]);
    let place = provider.place(&request("web-1")).await.unwrap();
    assert_eq!(place, wish.placement, "a throttle does not concern the offering");
    site.cloud.heal();
    let made = site.provider(&[]).create(&wish, &key).await.unwrap();
    assert_eq!(site.machines(), [made.id.as_str()]);
    assert_eq!(site.shown(made.id.as_str())["InstanceType"], TYPE);
}
