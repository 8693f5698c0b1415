//! Checks that each field of a request reaches the VM, and that disks and addresses are the VM's own.

use peerpod_provider_api::{
    Confidential, CreateRequest, DiskIdentity, DiskRequest, Error, IdempotencyKey, InstanceId, Market,
    OwnedState, Provider,
};
use peerpod_provider_ibmcloud::IbmCloudProvider;
use peerpod_test_clouds::IbmCloud;
use peerpod_test_clouds::ibmcloud::{KEY, State, ZONES};
use serde_json::{Value, json};

use super::common::{PATIENCE, Site, key, owner, placed, request, stranger, subnets};

/// Body of a VM as the cloud got it.
fn body(site: &Site, id: &InstanceId) -> Value {
    site.cloud.with(|ibm, _| ibm.instances.get(id.as_str()).unwrap().body.clone())
}

async fn create(provider: &IbmCloudProvider, request: &CreateRequest, key: &IdempotencyKey) -> InstanceId {
    let wish = placed(provider, request).await.unwrap();
    provider.create(&wish, key).await.unwrap().id
}

#[tokio::test(flavor = "multi_thread")]
async fn each_wish_of_a_pod_reaches_its_vm() {
    let site = Site::start().await;
    let types = "bxf-2x8,bx3d-2x10,bx3dc-2x10,gx3-16x80x1l4";
    let provider = site.provider(&[("instance-types", types), ("key-id", KEY)]);
    let plain =
        CreateRequest { market: Some(Market::OnDemand), zones: vec![ZONES[2].to_owned()], ..request("a") };
    let plain = create(&provider, &plain, &key("w", 0)).await;
    let plain = body(&site, &plain);
    assert_eq!((&plain["profile"]["name"], &plain["zone"]["name"]), (&json!("bxf-2x8"), &json!(ZONES[2])));
    assert_eq!(plain["keys"], json!([{"id": KEY}]));
    let tags = plain["boot_volume_attachment"]["volume"]["user_tags"].to_string();
    for tag in ["peerpod.pod:a", "peerpod.node:n", "peerpod.cluster:c", "peerpod.key:", "peerpod.digest:"] {
        assert!(tags.contains(tag), "{tag} in {tags}");
    }
    assert!(plain.get("availability").is_none() && plain.get("confidential_compute_mode").is_none());
    let tdx = CreateRequest { confidential: Some(Confidential::Tdx), ..request("b") };
    let tdx = body(&site, &create(&provider, &tdx, &key("w", 1)).await);
    assert_eq!(
        (&tdx["profile"]["name"], &tdx["confidential_compute_mode"]),
        (&json!("bx3dc-2x10"), &json!("tdx"))
    );
    let mut gpu = request("c");
    gpu.size.gpu_model = Some("l4".to_owned());
    let gpu = body(&site, &create(&provider, &gpu, &key("w", 2)).await);
    assert_eq!((&gpu["profile"]["name"], &gpu["zone"]["name"]), (&json!("gx3-16x80x1l4"), &json!(ZONES[1])));
    let spot = body(&site, &create(&provider, &request("d"), &key("w", 3)).await);
    assert_eq!(
        (&spot["availability"]["class"], &spot["availability_policy"]["preemption"]),
        (&json!("spot"), &json!("delete"))
    );
    let second = CreateRequest { second_nic: true, ..request("e") };
    let second = create(&provider, &second, &key("w", 4)).await;
    let nic = &body(&site, &second)["network_attachments"][0]["virtual_network_interface"];
    assert_eq!(nic["subnet"]["id"], json!(IbmCloud::subnet(ZONES[0], "second")));
    let addresses = provider.addresses(&second).await.unwrap();
    let first = site.cloud.with(|ibm, _| ibm.instances.get(second.as_str()).unwrap().addresses[0].clone());
    assert_eq!(
        addresses.iter().map(ToString::to_string).collect::<Vec<_>>(),
        [first],
        "none of the second NIC"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_is_that_of_the_pod_or_of_its_architecture() {
    let site = Site::start().await;
    let images = [IbmCloud::image("peerpod"), IbmCloud::image("peerpod-z")].join(",");
    let types = "bx3d-2x10,bz2-2x8";
    let provider = site.provider(&[
        ("image-ids", &images),
        ("instance-type", "bx3d-2x10"),
        ("instance-types", types),
        ("market", "on-demand"),
        ("second-subnet-ids", ""),
    ]);
    let z = CreateRequest { arch: Some(peerpod_provider_api::Arch::S390x), ..request("z") };
    let z = body(&site, &create(&provider, &z, &key("i", 0)).await);
    assert_eq!(
        (&z["profile"]["name"], &z["image"]["id"]),
        (&json!("bz2-2x8"), &json!(IbmCloud::image("peerpod-z")))
    );
    let named = CreateRequest { image: Some(IbmCloud::image("peerpod")), ..request("a") };
    let made = body(&site, &create(&provider, &named, &key("i", 1)).await);
    assert_eq!(made["image"]["id"], json!(IbmCloud::image("peerpod")));
    for (number, (image, words)) in (2..).zip([
        ("none".to_owned(), "there is no such image"),
        (IbmCloud::image("pending"), "it is pending"),
        (IbmCloud::image("ipxe"), "user-data format is ipxe"),
        (IbmCloud::image("peerpod-z"), "it is for s390x"),
        ("A/b".to_owned(), "not the id of an image"),
    ]) {
        let wish = CreateRequest { image: Some(image), ..request("b") };
        let wish = placed(&*provider, &wish).await.unwrap();
        let error = provider.create(&wish, &key("i", number)).await.unwrap_err();
        assert!(error.class() == "invalid" && error.to_string().contains(words), "{words}: {error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_dedicated_host_leads_to_its_group_and_then_to_the_next_zone() {
    let site = Site::start().await;
    let host = IbmCloud::dedicated(ZONES[0], false);
    let groups = [IbmCloud::dedicated(ZONES[0], true), IbmCloud::dedicated(ZONES[1], true)];
    let provider = site.provider(&[
        ("market", "on-demand"),
        ("dedicated-host-ids", &host),
        ("dedicated-host-group-ids", &groups.join(",")),
    ]);
    site.cloud.set_stock("*", &host, "*", 1);
    site.cloud.set_stock("*", &groups[0], "*", 0);
    let mut tried = Vec::new();
    for number in 0..4 {
        let wish = placed(&*provider, &request("web-0")).await.unwrap();
        match provider.create(&wish, &key("host", number)).await {
            Ok(made) => {
                tried.push(body(&site, &made.id)["placement_target"]["id"].as_str().unwrap().to_owned())
            }
            Err(error) => {
                assert!(
                    error.class() == "capacity" && error.to_string().contains("cannot_start_capacity"),
                    "{error}"
                );
                tried.push("refused".to_owned());
            }
        }
    }
    assert_eq!(tried, [host.as_str(), "refused", "refused", &groups[1]], "host, its group, the next zone");
    assert_eq!(site.parts(), (2, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_are_attached_with_the_vm_and_to_it() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let disk = |name: &str| DiskRequest { volume: site.volume(name, ZONES[1]), ..DiskRequest::default() };
    let (first, hot) = (disk("first"), disk("hot"));
    let wish = CreateRequest { disks: vec![first.clone()], ..request("a") };
    let wish = placed(&*provider, &wish).await.unwrap();
    let made = provider.create(&wish, &key("disks", 0)).await.unwrap();
    assert_eq!(body(&site, &made.id)["zone"]["name"], ZONES[1], "where its disk is");
    let volumes = provider.extensions().volumes.unwrap();
    let told = made.disks[0].1.clone();
    assert!(matches!(&told, DiskIdentity::Serial(serial) if serial.len() == 20), "{told:?}");
    assert_eq!(volumes.attach(&made.id, &first).await, Ok(told.clone()), "attached from the beginning");
    let identity = volumes.attach(&made.id, &hot).await.unwrap();
    assert_ne!(identity, told);
    let taken = CreateRequest { disks: vec![hot.clone()], ..request("b") };
    let error = placed(&*provider, &taken).await.unwrap_err();
    assert!(error.class() == "transient" && error.to_string().contains("in use by"), "{error}");
    volumes.detach(&made.id, &hot.volume).await.unwrap();
    volumes.detach(&made.id, &hot.volume).await.unwrap();
    let on = |id: &str| site.cloud.with(|ibm, _| ibm.volumes.get(id).unwrap().instance.clone());
    assert_eq!((on(&hot.volume), on(&first.volume).is_some()), (None, true));
    provider.delete(&made.id).await.unwrap();
    assert_eq!(site.parts(), (0, 2), "the pod's disks stay");
    let error = volumes.attach(&made.id, &hot).await.unwrap_err();
    assert_eq!(error.class(), "not_found", "{error}");
    for (volume, words) in [("r006-none", "there is no volume"), ("vol-1/x", "is not the id of a volume")] {
        let unknown = DiskRequest { volume: volume.to_owned(), ..DiskRequest::default() };
        let wish = CreateRequest { disks: vec![unknown], ..request("c") };
        let error = placed(&*provider, &wish).await.unwrap_err();
        assert!(error.class() == "invalid" && error.to_string().contains(words), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_strangers_vm_gets_no_disk_and_loses_none() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let stranger = site.provider_of(stranger(), &[]);
    let disk = DiskRequest { volume: site.volume("data", ZONES[0]), ..DiskRequest::default() };
    let theirs =
        create(&stranger, &CreateRequest { disks: vec![disk.clone()], ..request("a") }, &key("t", 0)).await;
    let volumes = provider.extensions().volumes.unwrap();
    let more = DiskRequest { volume: site.volume("more", ZONES[0]), ..DiskRequest::default() };
    assert!(matches!(volumes.attach(&theirs, &more).await, Err(Error::NotFound { .. })));
    volumes.detach(&theirs, &disk.volume).await.unwrap();
    provider.delete(&theirs).await.unwrap();
    assert!(provider.list_owned().await.unwrap().is_empty());
    let on = site.cloud.with(|ibm, _| ibm.volumes.get(&disk.volume).unwrap().instance.clone());
    assert_eq!((on.as_deref(), site.machines().len()), (Some(theirs.as_str()), 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_administrators_tags_reach_the_vm_by_a_call_of_their_own() {
    let site = Site::start().await;
    let provider = site.provider(&[("tags", "team=blue,cost=7")]);
    let id = create(&provider, &request("a"), &key("tags", 0)).await;
    let volume = body(&site, &id)["boot_volume_attachment"]["volume"]["user_tags"].to_string();
    assert!(volume.contains("team:blue"), "{volume}");
    let crn = site.cloud.with(|ibm, _| ibm.instances.get(id.as_str()).unwrap().crn());
    let tagged = async {
        loop {
            match site.cloud.with(|ibm, _| ibm.tags.get(&crn).cloned()) {
                Some(tags) => break tags,
                None => tokio::task::yield_now().await,
            }
        }
    };
    assert_eq!(tokio::time::timeout(PATIENCE, tagged).await.unwrap(), ["cost:7", "team:blue"]);
    // A failure is no error of the create.
    site.cloud.deny("attach_tag");
    create(&provider, &request("b"), &key("tags", 1)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_capital_letters_finds_its_vms_and_the_controller_its_name() {
    let site = Site::start().await;
    let mut odd = owner("Node-1.Example");
    odd.cluster_id = "My_Cluster".to_owned();
    let provider = site.provider_of(odd, &[]);
    let id = create(&provider, &request("web-0"), &key("odd", 0)).await;
    let listed = provider.list_owned().await.unwrap();
    assert_eq!((&listed[0].id, listed[0].node.as_deref()), (&id, Some("Node-1.Example")));
    assert_eq!((listed[0].name.as_deref(), &listed[0].key), (Some("web-0"), &Some(key("odd", 0))));
    site.cloud.with(|ibm, _| {
        ibm.instances.all_mut().for_each(|(_, one)| one.state = State::Stopped);
    });
    assert_eq!(provider.list_owned().await.unwrap()[0].state, OwnedState::Ended);
    provider.delete(&id).await.unwrap();
    assert!(site.machines().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn settings_that_do_not_fit_are_refused_together() {
    let site = Site::start().await;
    let second = subnets("second");
    let settings = [
        ("zones", "us-south-1"),
        ("image-ids", "r006-none"),
        ("security-group-ids", "r006-none"),
        ("second-subnet-ids", second.as_str()),
        ("dedicated-host-group-ids", "0717-none"),
        ("market", "on-demand"),
    ];
    let error = site.provider(&settings).preflight().await.unwrap_err();
    for part in [
        "which is none of zones",
        "second-subnet-ids",
        "there is no such image",
        "security-group-ids",
        "dedicated-host-group-ids",
    ] {
        assert!(error.to_string().contains(part), "{part} in {error}");
    }
    let old = [("instance-type", "bx2-2x8"), ("market", "on-demand")];
    let error = site.provider(&old).preflight().await.unwrap_err();
    assert!(error.class() == "invalid" && error.to_string().contains("no UEFI"), "{error}");
    let found = site.provider(&[("confidential", "tdx"), ("secure-boot", "true")]).preflight().await.unwrap();
    let warnings = found.warnings.join("\n");
    assert!(warnings.contains("can be confidential by tdx") && warnings.contains("unsigned"), "{warnings}");
}
