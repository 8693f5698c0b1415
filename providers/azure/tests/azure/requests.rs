//! Checks that each field of a request reaches the VM, and that disks, console and addresses are the VM's own.

use peerpod_provider_api::{
    Confidential, CreateRequest, DiskIdentity, DiskRequest, Error, IdempotencyKey, InstanceId, Market,
    Provider,
};
use peerpod_provider_azure::AzureProvider;
use peerpod_test_clouds::Azure;
use serde_json::{Value, json};

use super::common::{Site, key, name, placed, request, stranger};

/// Body of a VM as the cloud got it.
fn body(site: &Site, id: &str) -> Value {
    site.cloud.with(|azure, _| azure.vms.get(name(id)).unwrap().body.clone())
}

async fn create(provider: &AzureProvider, request: &CreateRequest, key: &IdempotencyKey) -> String {
    let wish = placed(provider, request).await.unwrap();
    let made = provider.create(&wish, key).await.unwrap();
    made.id.as_str().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_wish_of_a_pod_reaches_its_vm() {
    let site = Site::start().await;
    let types = "Standard_D2s_v5,Standard_DC2as_v5,Standard_DC2es_v6,Standard_NC4as_T4_v3";
    let provider = site.provider(&[("instance-types", types), ("tags", "team=blue")]);
    let plain =
        create(&provider, &CreateRequest { market: Some(Market::OnDemand), ..request("a") }, &key("w", 0))
            .await;
    let plain = body(&site, &plain);
    assert_eq!(plain["properties"]["hardwareProfile"]["vmSize"], "Standard_D2s_v5");
    assert_eq!((&plain["tags"]["team"], &plain["tags"]["peerpod.pod"]), (&json!("blue"), &json!("a")));
    assert_eq!(plain["tags"]["peerpod.node"], "n");
    assert!(plain["properties"].get("priority").is_none());
    for (wish, kind) in
        [(Confidential::SevSnp, "Standard_DC2as_v5"), (Confidential::Tdx, "Standard_DC2es_v6")]
    {
        let wish = CreateRequest { confidential: Some(wish), ..request("b") };
        let made = create(&provider, &wish, &key(kind, 1)).await;
        let made = body(&site, &made);
        assert_eq!(made["properties"]["hardwareProfile"]["vmSize"], kind);
        assert_eq!(made["properties"]["securityProfile"]["securityType"], "ConfidentialVM");
    }
    let mut gpu = CreateRequest { zones: vec!["1".to_owned()], ..request("c") };
    gpu.size.gpu_model = Some("t4".to_owned());
    let gpu = create(&provider, &gpu, &key("w", 2)).await;
    let gpu = body(&site, &gpu);
    assert_eq!((&gpu["zones"], &gpu["properties"]["priority"]), (&json!(["1"]), &json!("Spot")));
    assert_eq!(gpu["properties"]["hardwareProfile"]["vmSize"], "Standard_NC4as_T4_v3");
    let image = "/CommunityGalleries/pods-0000/Images/peerpod/Versions/1.0.0";
    let named = CreateRequest { image: Some(image.to_owned()), ..request("d") };
    let named = create(&provider, &named, &key("w", 3)).await;
    let reference = &body(&site, &named)["properties"]["storageProfile"]["imageReference"];
    assert_eq!(*reference, json!({"communityGalleryImageId": image}));
    let none =
        CreateRequest { image: Some("/CommunityGalleries/pods-0000/Images/none".to_owned()), ..request("e") };
    let none = placed(&*provider, &none).await.unwrap();
    let error = provider.create(&none, &key("w", 4)).await.unwrap_err();
    assert!(error.class() == "invalid" && error.to_string().contains("set image-id"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_can_be_in_no_zone_and_from_a_generalized_image() {
    let site = Site::start().await;
    let generalized = Azure::image("generalized");
    let provider = site.provider(&[("zones", ""), ("image-id", &generalized)]);
    let id = create(&provider, &request("a"), &key("regional", 0)).await;
    let made = body(&site, &id);
    assert!(made.get("zones").is_none());
    let profile = &made["properties"]["osProfile"]["linuxConfiguration"];
    assert_eq!(
        (&profile["provisionVMAgent"], &profile["disablePasswordAuthentication"]),
        (&json!(false), &json!(true))
    );
    let disk = DiskRequest { volume: site.disk("zonal", "1"), ..DiskRequest::default() };
    let wish = CreateRequest { disks: vec![disk], ..request("b") };
    let error = placed(&*provider, &wish).await.unwrap_err();
    assert!(error.class() == "invalid" && error.to_string().contains("nothing on offer fits"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_are_attached_with_the_vm_and_to_it() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let disk = |name: &str| DiskRequest { volume: site.disk(name, "2"), ..DiskRequest::default() };
    let (first, second, hot, other) = (disk("first"), disk("second"), disk("hot"), disk("other"));
    let wish = CreateRequest { disks: vec![first.clone(), second.clone()], ..request("a") };
    let wish = placed(&*provider, &wish).await.unwrap();
    let made = provider.create(&wish, &key("disks", 0)).await.unwrap();
    assert_eq!(
        made.disks,
        [(first.volume.clone(), DiskIdentity::Lun(0)), (second.volume.clone(), DiskIdentity::Lun(1))]
    );
    assert_eq!(body(&site, made.id.as_str())["zones"], json!(["2"]), "where its disks are");
    let volumes = provider.extensions().volumes.unwrap();
    assert_eq!(
        volumes.attach(&made.id, &first).await,
        Ok(DiskIdentity::Lun(0)),
        "attached from the beginning"
    );
    let (a, b) = tokio::join!(volumes.attach(&made.id, &hot), volumes.attach(&made.id, &other));
    assert_eq!((a, b), (Ok(DiskIdentity::Lun(2)), Ok(DiskIdentity::Lun(3))), "one change after the other");
    let taken = CreateRequest { disks: vec![hot.clone()], ..request("b") };
    let error = placed(&*provider, &taken).await.unwrap_err();
    assert!(error.class() == "invalid" && error.to_string().contains("in use by pp-"), "{error}");
    volumes.detach(&made.id, &hot.volume).await.unwrap();
    volumes.detach(&made.id, &hot.volume).await.unwrap();
    let on = |name: &str| site.cloud.with(|azure, _| azure.disks.get(name).unwrap().vm.clone());
    assert_eq!((on("hot"), on("other").is_some()), (None, true));
    provider.delete(&made.id).await.unwrap();
    assert_eq!(site.parts(), (0, 0, 4), "the pod's disks stay");
    let error = volumes.attach(&made.id, &hot).await.unwrap_err();
    assert_eq!(error.class(), "not_found", "{error}");
    let unknown = DiskRequest { volume: hot.volume.replace("hot", "none"), ..DiskRequest::default() };
    let error =
        placed(&*provider, &CreateRequest { disks: vec![unknown], ..request("c") }).await.unwrap_err();
    assert!(error.class() == "invalid" && error.to_string().contains("there is no disk"), "{error}");
    let odd = DiskRequest { volume: "vol-1".to_owned(), ..DiskRequest::default() };
    let error = placed(&*provider, &CreateRequest { disks: vec![odd], ..request("d") }).await.unwrap_err();
    assert!(error.to_string().contains("is not the id of a managed disk"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_strangers_vm_gets_no_disk_and_loses_none() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let stranger = site.provider_of(stranger(), &[]);
    let disk = DiskRequest { volume: site.disk("data", "1"), ..DiskRequest::default() };
    let wish = CreateRequest { disks: vec![disk.clone()], ..request("a") };
    let wish = placed(&*stranger, &wish).await.unwrap();
    let made = stranger.create(&wish, &key("theirs", 0)).await.unwrap();
    let volumes = provider.extensions().volumes.unwrap();
    let more = DiskRequest { volume: site.disk("more", "1"), ..DiskRequest::default() };
    assert!(matches!(volumes.attach(&made.id, &more).await, Err(Error::NotFound { .. })));
    volumes.detach(&made.id, &disk.volume).await.unwrap();
    provider.delete(&made.id).await.unwrap();
    assert!(provider.list_owned().await.unwrap().is_empty());
    let on = site.cloud.with(|azure, _| azure.disks.get("data").unwrap().vm.clone());
    assert_eq!((on.as_deref(), site.machines().len()), (Some(name(made.id.as_str())), 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_node_gets_the_public_address_where_it_needs_it() {
    let site = Site::start().await;
    let provider = site.provider(&[("use-public-ip", "true"), ("market", "on-demand")]);
    let wish = placed(&*provider, &CreateRequest { second_nic: true, ..request("a") }).await.unwrap();
    let made = provider.create(&wish, &key("public", 0)).await.unwrap();
    let addresses = provider.addresses(&made.id).await.unwrap();
    let private = site.cloud.with(|azure, _| {
        let nics: Vec<_> =
            azure.nics.all().map(|(name, nic)| (name.to_owned(), nic.address.clone())).collect();
        nics.into_iter().find(|(name, _)| name.ends_with("nic0")).unwrap().1
    });
    assert_eq!(
        (addresses.len(), addresses[1].to_string()),
        (2, private),
        "public, then private; none of the second NIC"
    );
    assert_eq!(provider.list_owned().await.unwrap()[0].addresses, addresses);
    assert_eq!(site.parts(), (1, 2, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_console_is_read_from_azures_storage_without_a_token() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let id = create(&provider, &request("a"), &key("console", 0)).await;
    site.cloud.with(|azure, _| azure.vms.get_mut(name(&id)).unwrap().console = "one\ntwo\n".to_owned());
    let console = provider.extensions().console.unwrap();
    let id = InstanceId::new(id).unwrap();
    assert_eq!(console.tail(&id, 4).await.unwrap(), b"two\n");
    assert_eq!(console.tail(&id, 1 << 20).await.unwrap(), b"one\ntwo\n");
    let evil = peerpod_test_clouds::Answer::json(
        200,
        &json!({"serialConsoleLogBlobUri": "https://evil.test/x?sig=hush"}),
    );
    let action = "VirtualMachines_RetrieveBootDiagnosticsData";
    site.cloud.fail(action, peerpod_test_clouds::Fault::Answer(evil), 1);
    let error = console.tail(&id, 4).await.unwrap_err();
    assert!(error.to_string().contains("evil.test") && !error.to_string().contains("hush"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attach_that_azure_refuses_late_is_an_error() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let disk = DiskRequest { volume: site.disk("data", "1"), ..DiskRequest::default() };
    let wish = CreateRequest { zones: vec!["1".to_owned()], ..request("a") };
    let id = InstanceId::new(create(&provider, &wish, &key("late", 0)).await).unwrap();
    let link = format!(
        "{}/subscriptions/{}/providers/Microsoft.Compute/locations/westeurope/operations/1?api-version=2024-07-01",
        site.cloud.endpoint(),
        peerpod_test_clouds::azure::SUBSCRIPTION
    );
    let accepted = peerpod_test_clouds::Answer::empty(202).header("azure-asyncoperation", link);
    let error = json!({"code": "AttachDiskWhileBeingDetached", "message": "busy"});
    let failed = peerpod_test_clouds::Answer::json(200, &json!({"status": "Failed", "error": error}));
    site.cloud.fail("VirtualMachines_AttachDetachDataDisks", peerpod_test_clouds::Fault::Answer(accepted), 1);
    site.cloud.fail("Operations_Get", peerpod_test_clouds::Fault::Answer(failed), 1);
    let volumes = provider.extensions().volumes.unwrap();
    let error = volumes.attach(&id, &disk).await.unwrap_err();
    assert!(
        error.class() == "transient" && error.to_string().contains("AttachDiskWhileBeingDetached"),
        "{error}"
    );
    assert_eq!(volumes.attach(&id, &disk).await, Ok(DiskIdentity::Lun(0)));
}
