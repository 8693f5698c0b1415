//! Checks with boto3 that a create made the requested VM.

use super::common;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use common::{ARM_IMAGE, Cloud, IMAGE, OTHER_IMAGE, key, placed, request, until};
use peerpod_provider_api::{Arch, CreateRequest, DiskIdentity, DiskRequest, Provider, Size};
use serde_json::{Value, json};

/// Returns the only VM with this name.
async fn vm(cloud: &Cloud, name: &str) -> Value {
    let filters = json!({"Filters": [{"Name": "tag:Name", "Values": [name]}]});
    let mut found = cloud.proxy.boto3("describe_instances", &filters).await.unwrap();
    let reservations = found["Reservations"].as_array_mut().unwrap();
    assert_eq!(reservations.len(), 1, "{reservations:?}");
    reservations[0]["Instances"][0].take()
}

fn tag<'v>(vm: &'v Value, name: &str) -> &'v str {
    let tags = vm["Tags"].as_array().unwrap();
    tags.iter().find(|tag| tag["Key"] == name).and_then(|tag| tag["Value"].as_str()).unwrap_or("(none)")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fleet_makes_the_requested_vm() {
    let cloud = Cloud::start().await;
    let provider = cloud.provider(&[
        ("instance-types", "m6a.large,m6a.2xlarge,c6a.large"),
        ("tags", "team=blue"),
        ("key-name", "me"),
        ("instance-profile", "pods"),
        ("root-volume-size", "40"),
        ("root-volume-encrypted", "true"),
    ]);
    let wish = CreateRequest {
        size: Size { vcpus: 4, memory_mib: 16384, ..Size::default() },
        zones: vec!["eu-central-1b".into()],
        ..request("web-0")
    };
    let key = key("witness", 0);
    let wish = placed(&*provider, &wish).await.unwrap();
    let made = provider.create(&wish, &key).await.unwrap();
    let seen = vm(&cloud, "web-0").await;
    assert_eq!(seen["InstanceId"], made.id.as_str());
    assert_eq!((&seen["InstanceType"], &seen["ImageId"]), (&json!("m6a.2xlarge"), &json!(IMAGE)));
    assert_eq!((&seen["SubnetId"], &seen["KeyName"]), (&json!(cloud.subnets[1]), &json!("me")));
    assert_eq!(seen["Placement"]["AvailabilityZone"], "eu-central-1b");
    let marks = [
        ("peerpod.cluster", "c"),
        ("peerpod.node", "n"),
        ("peerpod.pod", "web-0"),
        ("peerpod.key", key.as_str()),
        ("peerpod.digest", &wish.digest()),
        ("team", "blue"),
    ];
    for (name, value) in marks {
        assert_eq!(tag(&seen, name), value, "{name}");
    }
    let addresses = provider.addresses(&made.id).await.unwrap();
    assert_eq!(seen["PrivateIpAddress"], addresses[0].to_string());
    let ask = json!({"InstanceId": made.id.as_str(), "Attribute": "userData"});
    let data = cloud.proxy.boto3("describe_instance_attribute", &ask).await.unwrap();
    let data = STANDARD.decode(data["UserData"]["Value"].as_str().unwrap()).unwrap();
    assert_eq!(data, wish.user_data.as_bytes());
    // Moto does not give these properties to the VMs of a fleet; EC2 does. So the test checks the template.
    let templates = cloud.proxy.boto3("describe_launch_templates", &json!({})).await.unwrap();
    let templates = templates["LaunchTemplates"].as_array().unwrap();
    assert_eq!(templates.len(), 1, "{templates:?}");
    assert_eq!(tag(&templates[0], "peerpod.cluster"), "c");
    let ask = json!({"LaunchTemplateName": templates[0]["LaunchTemplateName"], "Versions": ["1"]});
    let versions = cloud.proxy.boto3("describe_launch_template_versions", &ask).await.unwrap();
    let data = &versions["LaunchTemplateVersions"][0]["LaunchTemplateData"];
    assert_eq!(data["SecurityGroupIds"], json!([cloud.group]));
    assert_eq!(data["MetadataOptions"]["HttpTokens"], "required");
    assert_eq!(data["MetadataOptions"]["HttpPutResponseHopLimit"], 1);
    assert_eq!(data["MetadataOptions"]["InstanceMetadataTags"], "disabled");
    assert_eq!(data["CpuOptions"]["AmdSevSnp"], "enabled");
    assert_eq!(data["InstanceInitiatedShutdownBehavior"], "terminate");
    assert_eq!(data["IamInstanceProfile"]["Name"], "pods");
    let root = &data["BlockDeviceMappings"][0];
    assert_eq!(root["DeviceName"], "/dev/xvda");
    let ebs = json!({"DeleteOnTermination": true, "Encrypted": true, "VolumeSize": 40});
    assert_eq!(root["Ebs"], ebs);
}

#[tokio::test(flavor = "multi_thread")]
async fn allowed_annotations_reach_the_vm() {
    let cloud = Cloud::start().await;
    let provider = cloud.provider(&[("instance-types", "m6a.large,c6a.large"), ("market", "spot-first")]);
    let mut wish = CreateRequest {
        instance_type: Some("c6a.large".into()),
        image: Some(OTHER_IMAGE.into()),
        market: Some(peerpod_provider_api::Market::Spot),
        ..request("web-0")
    };
    wish = placed(&*provider, &wish).await.unwrap();
    provider.create(&wish, &key("wishes", 0)).await.unwrap();
    let seen = vm(&cloud, "web-0").await;
    assert_eq!((&seen["InstanceType"], &seen["ImageId"]), (&json!("c6a.large"), &json!(OTHER_IMAGE)));
    assert_eq!(seen["InstanceLifecycle"], "spot");
    // The root device is that of the other image, not that of the template.
    let calls = cloud.proxy.calls();
    let fleet = calls.iter().find(|call| call.action == "CreateFleet").unwrap();
    let root = fleet.params.iter().find(|(key, _)| key.ends_with("DeviceName")).unwrap();
    assert_eq!(root.1, "/dev/sda1", "{root:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn run_instances_makes_the_same_vm_as_a_fleet() {
    let cloud = Cloud::start().await;
    let provider = cloud.provider(&[("second-subnet-ids", cloud.subnets[2].as_str()), ("tags", "team=blue")]);
    let wish = CreateRequest { second_nic: true, ..request("web-0") };
    let wish = placed(&*provider, &wish).await.unwrap();
    let made = provider.create(&wish, &key("run", 0)).await.unwrap();
    let again = provider.create(&wish, &key("run", 0)).await.unwrap();
    assert_eq!(made.id, again.id);
    let seen = vm(&cloud, "web-0").await;
    assert_eq!(seen["Placement"]["AvailabilityZone"], "eu-central-1c", "where the second NIC's subnet is");
    let nics = seen["NetworkInterfaces"].as_array().unwrap();
    assert_eq!(nics.len(), 2, "{nics:?}");
    for nic in nics {
        assert_eq!(nic["Groups"][0]["GroupId"], json!(cloud.group));
    }
    assert_eq!(made.addresses.first().map(ToString::to_string).as_deref(), seen["PrivateIpAddress"].as_str());
    let call = cloud.proxy.calls().into_iter().find(|call| call.action == "RunInstances").unwrap();
    let said = |key: &str| call.params.get(key).cloned().unwrap_or_default();
    assert_eq!(said("ClientToken"), key("run", 0).as_str());
    assert_eq!(
        (said("MetadataOptions.HttpTokens").as_str(), said("CpuOptions.AmdSevSnp").as_str()),
        ("required", "enabled")
    );
    assert_eq!(said("MetadataOptions.HttpPutResponseHopLimit"), "1");
    assert_eq!(said("InstanceInitiatedShutdownBehavior"), "terminate");
    assert_eq!((tag(&seen, "team"), tag(&seen, "peerpod.node")), ("blue", "n"));
    provider.delete(&made.id).await.unwrap();
    until("it is gone", || async { cloud.machines().await.is_empty() }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_gets_a_public_address_and_uses_it() {
    let cloud = Cloud::start().await;
    let provider = cloud.provider(&[("use-public-ip", "true"), ("launch", "run")]);
    let made = provider.create(&request("web-0"), &key("public", 0)).await.unwrap();
    let addresses = provider.addresses(&made.id).await.unwrap();
    let seen = vm(&cloud, "web-0").await;
    assert_eq!(seen["PublicIpAddress"], addresses[0].to_string());
    assert_eq!(seen["PrivateIpAddress"], addresses[1].to_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_are_attached_during_boot_and_found_by_serial() {
    let cloud = Cloud::start().await;
    cloud.proxy.set_boot(std::time::Duration::from_secs(2));
    let provider = cloud.provider(&[]);
    let mut disks = Vec::new();
    for read_only in [false, true] {
        disks.push(DiskRequest { volume: cloud.volume("eu-central-1b").await, read_only, zone: None });
    }
    let wish = CreateRequest { disks: disks.clone(), ..request("web-0") };
    let wish = placed(&*provider, &wish).await.unwrap();
    let made = provider.create(&wish, &key("disks", 0)).await.unwrap();
    until("both are attached without a request", || async {
        vm(&cloud, "web-0").await["BlockDeviceMappings"].as_array().is_some_and(|all| all.len() == 3)
    })
    .await;
    let volumes = provider.extensions().volumes.unwrap();
    for disk in &disks {
        let identity = volumes.attach(&made.id, disk).await.unwrap();
        assert_eq!(identity, DiskIdentity::Serial(disk.volume.replace("vol-", "vol")));
    }
    let seen = vm(&cloud, "web-0").await;
    assert_eq!(seen["Placement"]["AvailabilityZone"], "eu-central-1b", "where the disks are");
    for mapping in seen["BlockDeviceMappings"].as_array().unwrap() {
        let volume = mapping["Ebs"]["VolumeId"].as_str().unwrap();
        if disks.iter().any(|disk| disk.volume == volume) {
            assert_eq!(mapping["Ebs"]["DeleteOnTermination"], false, "a pod's disk outlives its VM");
        }
    }
    assert_eq!(cloud.proxy.count(Some("AttachVolume")), 2, "each is asked for once");
    for _ in 0..2 {
        volumes.detach(&made.id, &disks[0].volume).await.unwrap();
    }
    provider.delete(&made.id).await.unwrap();
    volumes.detach(&made.id, &disks[1].volume).await.unwrap();
    for disk in &disks {
        let ask = json!({"VolumeIds": [disk.volume]});
        let seen = cloud.proxy.boto3("describe_volumes", &ask).await.unwrap();
        assert_eq!(seen["Volumes"][0]["State"], "available");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_newest_image_of_a_name_is_found_for_the_pods_processors() {
    let cloud = Cloud::start().await;
    let named = [("image-id", ""), ("image-name", "podvm-*"), ("image-owners", "801119661308")];
    let provider = cloud.provider(&named);
    provider.create(&request("web-0"), &key("named", 0)).await.unwrap();
    assert_eq!(vm(&cloud, "web-0").await["ImageId"], IMAGE);
    let arm: Vec<_> = named
        .into_iter()
        .chain([("arch", "arm64"), ("instance-type", "m7g.large"), ("disable-cvm", "true")])
        .collect();
    let provider = cloud.provider(&arm);
    provider.create(&request("web-1"), &key("named", 1)).await.unwrap();
    assert_eq!(vm(&cloud, "web-1").await["ImageId"], ARM_IMAGE);
    assert_eq!(cloud.proxy.count(Some("DescribeImages")), 2, "once per provider, not per pod");
    // One provider for both architectures: the name matches an image of each.
    let both: Vec<_> = named
        .into_iter()
        .chain([("instance-types", "m6a.large,m7g.large"), ("disable-cvm", "true")])
        .collect();
    let provider = cloud.provider(&both);
    for number in 2..5 {
        let wish = CreateRequest { arch: Some(Arch::Aarch64), ..request(&format!("web-{number}")) };
        let wish = placed(&*provider, &wish).await.unwrap();
        provider.create(&wish, &key("named", number)).await.unwrap();
        let vm = vm(&cloud, &format!("web-{number}")).await;
        assert_eq!((&vm["ImageId"], &vm["InstanceType"]), (&ARM_IMAGE.into(), &"m7g.large".into()));
    }
    assert_eq!(cloud.proxy.count(Some("DescribeImages")), 4, "once for each of the two");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_one_call_and_its_key_finds_all_vms() {
    let cloud = Cloud::start().await;
    let provider = cloud.provider(&[("instance-types", "m6a.large,c6a.large"), ("market", "spot-first")]);
    cloud.proxy.set_stock("*", "*", "spot", 5);
    let wish = placed(&*provider, &request("batch")).await.unwrap();
    let (batch, key) = (provider.extensions().batch.unwrap(), key("batch", 0));
    let made = batch.create_many(&wish, 20.try_into().unwrap(), &key).await.unwrap();
    assert_eq!((made.made.len(), made.rest), (20, None), "15 of them on demand");
    assert_eq!(cloud.proxy.count(Some("CreateFleet")), 2);
    let again = cloud.provider(&[("instance-types", "m6a.large,c6a.large"), ("market", "spot-first")]);
    let same =
        again.extensions().batch.unwrap().create_many(&wish, 20.try_into().unwrap(), &key).await.unwrap();
    assert_eq!(same.made, made.made);
    assert_eq!(cloud.machines().await.len(), 20);
    let owned = again.list_owned().await.unwrap();
    assert!(owned.len() == 20 && owned.iter().all(|vm| vm.key.as_ref() == Some(&key)));
    assert!(batch.create_many(&wish, 501.try_into().unwrap(), &key).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_partial_batch_gives_the_reason() {
    let cloud = Cloud::start().await;
    let provider = cloud.provider(&[("subnet-ids", cloud.subnets[0].as_str())]);
    cloud.proxy.set_stock("m6a.large", "*", "*", 7);
    let wish = placed(&*provider, &request("batch")).await.unwrap();
    let made = provider
        .extensions()
        .batch
        .unwrap()
        .create_many(&wish, 20.try_into().unwrap(), &key("few", 0))
        .await
        .unwrap();
    assert_eq!(made.made.len(), 7);
    let rest = made.rest.unwrap();
    assert!(rest.class() == "capacity" && rest.to_string().contains("m6a.large in eu-central-1a"), "{rest}");
    let again = provider
        .extensions()
        .batch
        .unwrap()
        .create_many(&wish, 20.try_into().unwrap(), &key("few", 0))
        .await
        .unwrap();
    assert_eq!(again.made, made.made);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_removed_template_is_made_again() {
    let cloud = Cloud::start().await;
    let provider = cloud.provider(&[]);
    provider.create(&request("web-0"), &key("template", 0)).await.unwrap();
    let templates = cloud.proxy.boto3("describe_launch_templates", &json!({})).await.unwrap();
    let name = &templates["LaunchTemplates"][0]["LaunchTemplateName"];
    cloud.proxy.boto3("delete_launch_template", &json!({"LaunchTemplateName": name})).await.unwrap();
    provider.create(&request("web-1"), &key("template", 1)).await.unwrap();
    assert_eq!(cloud.machines().await.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configured_template_is_used_and_none_is_made() {
    let cloud = Cloud::start().await;
    let data = json!({
        "LaunchTemplateName": "mine",
        "LaunchTemplateData": {"ImageId": OTHER_IMAGE, "SecurityGroupIds": [cloud.group], "KeyName": "mine"}
    });
    cloud.proxy.boto3("create_launch_template", &data).await.unwrap();
    let provider = cloud.provider(&[("launch-template", "mine"), ("image-id", "")]);
    provider.preflight().await.unwrap();
    provider.create(&request("web-0"), &key("own", 0)).await.unwrap();
    let seen = vm(&cloud, "web-0").await;
    assert_eq!((&seen["ImageId"], &seen["KeyName"]), (&json!(OTHER_IMAGE), &json!("mine")));
    assert_eq!(cloud.proxy.count(Some("CreateLaunchTemplate")), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn preflight_deletes_only_our_unattached_nics() {
    let cloud = Cloud::start().await;
    let nic = |node: &str, installation: &str| {
        json!({"SubnetId": cloud.subnets[0], "TagSpecifications": [{"ResourceType": "network-interface", "Tags": [
            {"Key": "peerpod.cluster", "Value": "c"}, {"Key": "peerpod.node", "Value": node},
            {"Key": "peerpod.installation", "Value": installation}]}]})
    };
    for (node, installation) in [("n", "i"), ("another", "i"), ("n", "another")] {
        cloud.proxy.boto3("create_network_interface", &nic(node, installation)).await.unwrap();
    }
    let provider = cloud.provider(&[]);
    let found = provider.preflight().await.unwrap();
    assert!(found.facts.iter().any(|fact| fact.starts_with("1 NICs")), "{found:?}");
    let left = cloud.proxy.boto3("describe_network_interfaces", &json!({})).await.unwrap();
    assert_eq!(left["NetworkInterfaces"].as_array().unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn preflight_shows_the_vcpus_in_use_of_each_market() {
    let cloud = Cloud::start().await;
    // Any VM of the account counts, in any zone and of any owner.
    for (machine, count) in [("t3.xlarge", 1), ("c5.2xlarge", 2), ("g4dn.xlarge", 1)] {
        let vms = json!({"ImageId": IMAGE, "InstanceType": machine, "MinCount": count, "MaxCount": count});
        cloud.proxy.boto3("run_instances", &vms).await.unwrap();
    }
    let spot = cloud.provider_of("m", &[("market", "spot")]);
    let made = spot.create(&request("spot"), &key("quota", 0)).await.unwrap();
    let quotas = async |settings: &[(&str, &str)]| {
        // On a busy machine moto needs longer than EC2.
        let settings: Vec<_> = settings.iter().copied().chain([("quota-wait", "60s")]).collect();
        let found = cloud.provider(&settings).preflight().await.unwrap();
        found.facts.into_iter().filter(|fact| fact.starts_with("quota ")).collect::<Vec<_>>()
    };
    let (on_demand, on_spot) = (
        "quota vCPUs of standard types on demand: 20 of 64 in use",
        "quota vCPUs of standard types on spot: 2 of 32 in use",
    );
    assert_eq!(quotas(&[]).await, [on_demand]);
    assert_eq!(quotas(&[("market", "spot")]).await, [on_spot]);
    cloud.proxy.set_page(1);
    assert_eq!(quotas(&[("market", "spot-first")]).await, [on_spot, on_demand]);
    assert!(quotas(&[("instance-type", "g4dn.xlarge"), ("disable-cvm", "true")]).await.is_empty());
    assert!(quotas(&[("tenancy", "host")]).await.is_empty());
    spot.delete(&made.id).await.unwrap();
    let none = "quota vCPUs of standard types on spot: 0 of 32 in use";
    assert_eq!(quotas(&[("market", "spot")]).await, [none]);
    for _ in 0..10 {
        let vm = json!({"ImageId": IMAGE, "InstanceType": "t3.large", "MinCount": 1, "MaxCount": 1});
        cloud.proxy.boto3("run_instances", &vm).await.unwrap();
    }
    // Thirteen VMs on pages of one VM: the look-up ends after ten pages.
    let found = quotas(&[]).await;
    assert!(found[0].starts_with("quota vCPUs of standard types on demand: at least "), "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_needs_no_image_and_lists_the_vms_of_all_nodes() {
    let cloud = Cloud::start().await;
    for (number, node) in (0..).zip(["n", "m"]) {
        cloud.provider_of(node, &[]).create(&request(node), &key("collect", number)).await.unwrap();
    }
    cloud.proxy.forget_calls();
    let collector = cloud.collector();
    let owned = collector.list_owned().await.unwrap();
    assert_eq!(owned.len(), 2);
    assert!(
        collector
            .create(&request("x"), &key("collect", 9))
            .await
            .unwrap_err()
            .to_string()
            .contains("only lists")
    );
    for vm in owned {
        collector.delete(&vm.id).await.unwrap();
    }
    let asked: Vec<String> = cloud.proxy.actions().into_iter().collect();
    assert_eq!(asked, ["DescribeInstances", "TerminateInstances"], "nothing else is needed for it");
}

/// Returns the offerings of a request's placement, in their order.
async fn places(provider: &dyn Provider, name: &str) -> Vec<(String, String)> {
    let wish = placed(provider, &request(name)).await.unwrap();
    let placement: Value = serde_json::from_str(wish.placement.unwrap().as_str()).unwrap();
    let one =
        |one: &Value| (one["type"].as_str().unwrap().to_owned(), one["zone"].as_str().unwrap().to_owned());
    placement["offerings"].as_array().unwrap().iter().map(one).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_cheapest_spot_offering_by_ec2_or_by_configured_price_comes_first() {
    let cloud = Cloud::start().await;
    for (machine, zone, price) in [
        ("m6a.large", "eu-central-1a", "0.0400"),
        ("m6a.large", "eu-central-1b", "0.0300"),
        ("c6a.large", "eu-central-1a", "0.0200"),
        ("c6a.large", "eu-central-1c", "0.0250"),
    ] {
        cloud.proxy.set_spot_price(machine, zone, price);
    }
    let types = ("instance-types", "m6a.large,c6a.large");
    let provider = cloud.provider(&[types, ("market", "spot")]);
    let first: Vec<_> = places(&*provider, "a").await.into_iter().take(4).collect();
    let expected = [
        ("c6a.large", "eu-central-1a"),
        ("c6a.large", "eu-central-1c"),
        ("m6a.large", "eu-central-1b"),
        ("m6a.large", "eu-central-1a"),
    ];
    assert_eq!(first, expected.map(|(machine, zone)| (machine.to_owned(), zone.to_owned())));
    let provider = cloud.provider(&[types, ("market", "spot"), ("prices", "m6a.large/spot=0.001")]);
    assert_eq!(places(&*provider, "b").await[0].0, "m6a.large", "the administrator knows better");
    // Without the right to read prices the order is by size, and preflight warns.
    cloud.proxy.deny("DescribeSpotPriceHistory");
    let warnings =
        cloud.provider(&[types, ("market", "spot")]).preflight().await.unwrap().warnings.join("; ");
    assert!(warnings.contains("allow ec2:DescribeSpotPriceHistory"), "{warnings}");
}

#[tokio::test(flavor = "multi_thread")]
async fn configured_prices_become_fleet_priorities() {
    let cloud = Cloud::start().await;
    let types = ("instance-types", "m6a.large,c6a.large");
    let provider = cloud.provider(&[types, ("prices", "m6a.large=0.01,c6a.large=0.02")]);
    let wish = placed(&*provider, &request("a")).await.unwrap();
    let made = provider.create(&wish, &key("prices", 0)).await.unwrap();
    assert_eq!(made.chosen.instance_type.as_deref(), Some("m6a.large"), "although the other one is smaller");
    assert_eq!(made.chosen.price, Some(10_000));
    assert!(
        made.chosen.zone.is_some() && made.chosen.market.is_some() && made.chosen.image.is_some(),
        "{made:?}"
    );
    let calls = cloud.proxy.calls();
    let fleet = calls.iter().find(|call| call.action == "CreateFleet").unwrap();
    let said = |name: &str| fleet.params.get(name).map(String::as_str);
    assert_eq!(said("OnDemandOptions.AllocationStrategy"), Some("prioritized"));
    let overrides = "LaunchTemplateConfigs.1.Overrides";
    let priority =
        |number: u32| said(&format!("{overrides}.{number}.Priority")).unwrap().parse::<f64>().unwrap();
    assert_eq!(said(&format!("{overrides}.1.InstanceType")), Some("m6a.large"));
    assert!(priority(1) < priority(2), "the lowest number comes first");
    assert_eq!(cloud.proxy.count(Some("DescribeSpotPriceHistory")), 0, "unused facts cause no call");
}
