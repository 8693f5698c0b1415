//! Checks each field of a request, and each setting, in the VM as the cloud shows it.

use std::time::Duration;

use peerpod_provider_api::{Confidential, CreateRequest, DiskIdentity, DiskRequest, Market, Provider};
use peerpod_test_clouds::gcp::{PROJECT, State, ZONES};
use serde_json::{Value, json};

use super::common::{Site, key, placed, request};

async fn made(site: &Site, settings: &[(&str, &str)], wish: CreateRequest, number: u32) -> Value {
    let provider = site.provider(settings);
    let wish = placed(&*provider, &wish).await.unwrap();
    let made = provider.create(&wish, &key("fields", number)).await.unwrap();
    let addresses = provider.addresses(&made.id).await.unwrap();
    assert!(!addresses.is_empty());
    site.vm(made.id.as_str()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_field_of_a_request_is_in_the_vm() {
    let site = Site::start().await;
    let plain = made(&site, &[], request("web-0"), 0).await;
    assert_eq!(plain["scheduling"]["provisioningModel"], "SPOT", "spot first");
    assert_eq!(plain["labels"]["peerpod-pod"], "web-0");
    assert!(plain["networkInterfaces"][0]["accessConfigs"].as_array().is_none_or(Vec::is_empty));
    let wish = CreateRequest {
        market: Some(Market::OnDemand),
        zones: vec![ZONES[1].to_owned()],
        confidential: Some(Confidential::SevSnp),
        second_nic: true,
        public_ip: true,
        image: Some("family/pods".to_owned()),
        ..request("web-1")
    };
    let full = made(&site, &[], wish, 1).await;
    assert!(full["zone"].as_str().unwrap().ends_with(ZONES[1]));
    assert_eq!(full["confidentialInstanceConfig"]["confidentialInstanceType"], "SEV_SNP");
    assert_eq!(full["scheduling"]["provisioningModel"], "STANDARD");
    let nics = full["networkInterfaces"].as_array().unwrap();
    assert_eq!(nics.len(), 2);
    assert!(nics[0]["accessConfigs"][0]["natIP"].is_string(), "{}", nics[0]);
    assert!(nics[1]["subnetwork"].as_str().unwrap().ends_with("subnetworks/second"));
}

#[tokio::test(flavor = "multi_thread")]
async fn each_setting_is_in_the_vm() {
    let site = Site::start().await;
    let settings = [
        ("tags", "team=blue"),
        ("network-tags", "pods"),
        ("use-public-ip", "true"),
        ("root-volume-size", "40"),
        ("root-volume-type", "pd-ssd"),
        ("confidential", "sev"),
        ("market", "on-demand"),
    ];
    let vm = made(&site, &settings, request("web-0"), 0).await;
    assert_eq!((&vm["labels"]["team"], &vm["tags"]["items"]), (&json!("blue"), &json!(["pods"])));
    assert_eq!(vm["confidentialInstanceConfig"]["confidentialInstanceType"], "SEV");
    let provider = site.provider(&settings);
    let owned = provider.list_owned().await.unwrap().remove(0);
    let public = vm["networkInterfaces"][0]["accessConfigs"][0]["natIP"].as_str().unwrap();
    assert_eq!(owned.addresses[0].to_string(), public, "the node uses the public address");
    assert_eq!((owned.name.as_deref(), owned.node.as_deref()), (Some("web-0"), Some("n")));
    assert!(owned.created.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_decide_the_zone_and_are_found_by_their_device_names() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let disk = |volume: String| DiskRequest { volume, ..DiskRequest::default() };
    let (one, two) = (site.disk(ZONES[1], "pvc-1"), site.disk(ZONES[1], "pvc-2"));
    let wish = CreateRequest { disks: vec![disk(one.clone())], ..request("web-0") };
    let wish = placed(&*provider, &wish).await.unwrap();
    let made = provider.create(&wish, &key("disks", 0)).await.unwrap();
    assert!(made.id.as_str().starts_with(ZONES[1]));
    let (volume, DiskIdentity::ById(link)) = &made.disks[0] else { panic!("{:?}", made.disks) };
    assert!(*volume == one && link.starts_with("google-pp-"), "{link}");
    let volumes = provider.extensions().volumes.unwrap();
    assert_eq!(volumes.attach(&made.id, &disk(one.clone())).await.unwrap(), made.disks[0].1);
    let hot = volumes.attach(&made.id, &disk(two.clone())).await.unwrap();
    let vm = site.vm(made.id.as_str()).unwrap();
    let names: Vec<String> = vm["disks"].as_array().unwrap()[1..]
        .iter()
        .map(|disk| format!("google-{}", disk["deviceName"].as_str().unwrap()))
        .collect();
    assert!(names.len() == 2 && hot == DiskIdentity::ById(names[1].clone()), "{names:?} {hot:?}");
    // Another pod cannot have the disk. The error names the VM that has it, and no VM is paid for.
    let other = CreateRequest { disks: vec![disk(one.clone())], ..request("web-1") };
    let error = provider.place(&other).await.unwrap_err();
    let name = made.id.as_str().split_once('/').unwrap().1;
    assert!(error.class() == "transient" && error.to_string().contains(name), "{error}");
    volumes.detach(&made.id, &two).await.unwrap();
    provider.delete(&made.id).await.unwrap();
    let path = format!("/compute/v1/{one}");
    assert_eq!(site.cloud.ask("GET", &path, None).status, 200, "the disk outlives the VM");
    let none = CreateRequest {
        disks: vec![disk(format!("projects/{PROJECT}/zones/{}/disks/none", ZONES[0]))],
        ..request("web-2")
    };
    assert_eq!(provider.place(&none).await.unwrap_err().class(), "invalid");
    let far = site.disk(ZONES[2], "pvc-3");
    let far = CreateRequest { disks: vec![disk(far)], zones: vec![ZONES[0].to_owned()], ..request("web-3") };
    assert_eq!(provider.place(&far).await.unwrap_err().class(), "invalid");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_regional_disk_is_in_two_zones() {
    let site = Site::start().await;
    let provider = site.provider(&[("market", "on-demand")]);
    let disk = DiskRequest { volume: site.disk("", "pvc-r"), ..DiskRequest::default() };
    assert!(disk.volume.contains("/regions/"), "{}", disk.volume);
    let wish = CreateRequest { disks: vec![disk.clone()], ..request("web-0") };
    let first = placed(&*provider, &wish).await.unwrap();
    // The first zone has none left, and the disk has another one.
    site.cloud.set_stock("*", ZONES[0], "*", 0);
    let error = provider.create(&first, &key("regional", 0)).await.unwrap_err();
    assert_eq!(error.class(), "capacity", "{error}");
    let second = placed(&*provider, &wish).await.unwrap();
    let made = provider.create(&second, &key("regional", 1)).await.unwrap();
    assert!(made.id.as_str().starts_with(ZONES[1]), "{}", made.id);
    let volumes = provider.extensions().volumes.unwrap();
    assert_eq!(volumes.attach(&made.id, &disk).await.unwrap(), made.disks[0].1);
    volumes.detach(&made.id, &disk.volume).await.unwrap();
    assert_eq!(volumes.attach(&made.id, &disk).await.unwrap(), made.disks[0].1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_burst_of_creates_shares_its_looks_and_a_batch_needs_few_calls() {
    let site = Site::start().await;
    site.cloud.set_times(Duration::from_millis(100), Duration::from_millis(50));
    site.cloud.set_rates(1.0);
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("burst")).await.unwrap();
    site.cloud.forget_calls();
    let creates = (0..50).map(|number| {
        let (provider, wish, key) = (provider.clone(), wish.clone(), key("burst", number));
        tokio::spawn(async move {
            let made = provider.create(&wish, &key).await.unwrap();
            provider.addresses(&made.id).await.unwrap();
        })
    });
    for create in creates.collect::<Vec<_>>() {
        create.await.unwrap();
    }
    let calls = site.cloud.calls().len();
    assert_eq!(site.cloud.count(Some("compute.instances.insert")), 50);
    assert!(calls <= 100, "{calls} calls for 50 VMs");
    site.cloud.forget_calls();
    let batch = provider.extensions().batch.unwrap();
    let made = batch.create_many(&wish, 500.try_into().unwrap(), &key("many", 0)).await.unwrap();
    assert!(made.made.len() == 500 && made.rest.is_none(), "{} {:?}", made.made.len(), made.rest);
    let each = made.made.iter().map(|one| async { provider.addresses(&one.id).await.unwrap() });
    futures_util::future::join_all(each).await;
    let calls = site.cloud.calls().len();
    assert!(calls <= 50, "{calls} calls for 500 VMs");
    assert!(!site.cloud.calls().iter().any(|call| call.throttled));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_stops_by_itself_has_ended_and_its_console_stays() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("ended", 0)).await.unwrap();
    provider.addresses(&made.id).await.unwrap();
    site.cloud.with(|gcp, _| {
        let vm = gcp.instances.get_mut(made.id.as_str()).unwrap();
        vm.console.push_str("Kernel panic - not syncing");
        vm.state = State::Terminated;
    });
    let owned = provider.list_owned().await.unwrap();
    assert_eq!(owned[0].state, peerpod_provider_api::OwnedState::Ended);
    assert_eq!(provider.addresses(&made.id).await.unwrap_err().class(), "not_found");
    let console = provider.extensions().console.unwrap();
    let tail = console.tail(&made.id, 11).await.unwrap();
    assert_eq!(String::from_utf8_lossy(&tail), "not syncing");
    provider.delete(&made.id).await.unwrap();
}
