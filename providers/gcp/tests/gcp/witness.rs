//! Compares the provider's calls and VMs with Google's own models: the API's discovery document has each path,
//! parameter and field of every call, and Google's Python client reads the VMs.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::time::Duration;

use peerpod_provider_api::{Confidential, CreateRequest, DiskRequest, Market, Provider};
use peerpod_test_clouds::gcp::{PROJECT, ZONES};
use peerpod_test_clouds::{Fault, witness};
use serde_json::{Value, json};

use super::common::{Site, key, placed, request};

/// Makes each call that the provider can make, with each option of a request and each setting.
async fn every_call(site: &Site) {
    site.cloud.set_times(Duration::from_millis(20), Duration::from_millis(10));
    let settings = [
        ("tags", "team=blue"),
        ("network-tags", "pods"),
        ("service-account", "pods@pods-1234.iam.gserviceaccount.com"),
        ("resource-manager-tags", "env=prod,tagKeys/12=tagValues/34"),
        ("root-volume-type", "pd-ssd"),
        ("confidential", "sev_snp"),
        ("secure-boot", "true"),
    ];
    let full = site.provider(&settings);
    let plain = site.provider(&[("network", "pods"), ("image", "family/pods"), ("root-volume-size", "0")]);
    drop(site.provider(&[("network", "pods"), ("subnetwork", "")]).preflight().await);
    for (number, provider) in (0..).zip([full, plain]) {
        provider.preflight().await.unwrap();
        let disk = |name: &str| DiskRequest {
            volume: site.disk(ZONES[0], &format!("{name}-{number}")),
            read_only: number == 1,
            ..DiskRequest::default()
        };
        let (cold, hot) = (disk("cold"), disk("hot"));
        let wish = CreateRequest {
            disks: vec![cold],
            second_nic: true,
            public_ip: true,
            market: Some([Market::Spot, Market::OnDemand][number as usize % 2]),
            confidential: (number == 0).then_some(Confidential::Sev),
            image: (number == 1).then(|| "peerpod".to_owned()),
            ..request("Web_0.example")
        };
        let wish = placed(&*provider, &wish).await.unwrap();
        let made = provider.create(&wish, &key("every", number)).await.unwrap();
        provider.addresses(&made.id).await.unwrap();
        let volumes = provider.extensions().volumes.unwrap();
        volumes.attach(&made.id, &hot).await.unwrap();
        volumes.detach(&made.id, &hot.volume).await.unwrap();
        provider.extensions().console.unwrap().tail(&made.id, 100).await.unwrap();
        provider.list_owned().await.unwrap();
        let wish = placed(&*provider, &request("batch")).await.unwrap();
        let batch = provider.extensions().batch.unwrap();
        let many =
            batch.create_many(&wish, NonZeroU32::new(3).unwrap(), &key("batch", number)).await.unwrap();
        for one in &many.made {
            provider.delete(&one.id).await.unwrap();
        }
        provider.delete(&made.id).await.unwrap();
    }
    // A refusal that comes later is read from its operation.
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("late")).await.unwrap();
    site.cloud.fail("compute.instances.insert", Fault::refuse_late("STOCKOUT", "none"), 1);
    assert_eq!(provider.create(&wish, &key("late", 0)).await.unwrap_err().class(), "capacity");
}

#[tokio::test(flavor = "multi_thread")]
async fn googles_description_of_its_api_knows_every_call() {
    let site = Site::start().await;
    every_call(&site).await;
    let calls = site.cloud.calls();
    let actions: BTreeSet<&str> = calls.iter().map(|call| call.action.as_str()).collect();
    for action in [
        "disks.get",
        "images.get",
        "images.getFromFamily",
        "instances.aggregatedList",
        "instances.attachDisk",
        "instances.bulkInsert",
        "instances.delete",
        "instances.detachDisk",
        "instances.get",
        "instances.getSerialPortOutput",
        "instances.insert",
        "instances.list",
        "machineTypes.list",
        "networks.get",
        "regions.get",
        "subnetworks.get",
        "zoneOperations.get",
    ] {
        assert!(actions.contains(format!("compute.{action}").as_str()), "{action} in {actions:?}");
    }
    assert_eq!(witness::google_document(&calls).unwrap(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn googles_client_reads_the_vms_that_the_provider_made() {
    let site = Site::start().await;
    let provider = site.provider(&[("market", "spot"), ("secure-boot", "true")]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("client", 0)).await.unwrap();
    let (zone, name) = made.id.as_str().split_once('/').unwrap();
    let ask = json!({"project": PROJECT, "zone": zone, "instance": name});
    let vm = witness::google_client(&site.cloud, "InstancesClient.get", &ask).unwrap();
    let text = |pointer: &str| vm.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
    assert_eq!(text("/name"), name);
    assert_eq!(text("/metadata/items/0/value"), wish.user_data);
    assert_eq!(text("/scheduling/provisioning_model"), "SPOT");
    assert_eq!(text("/labels/peerpod-pod"), "web-0");
    assert_eq!(vm.pointer("/shielded_instance_config/enable_secure_boot"), Some(&json!(true)));
    let marks: Value = serde_json::from_str(&text("/description")).unwrap();
    assert_eq!((&marks["cluster"], &marks["node"]), (&json!("c"), &json!("n")));
    let ask = json!({"project": PROJECT, "zone": zone});
    let all = witness::google_client(&site.cloud, "InstancesClient.list", &ask).unwrap();
    assert!(all.to_string().contains(name), "{all}");
}
