//! Checks that `role.yaml` allows exactly the calls that a whole life of VMs needs.

use std::collections::BTreeSet;

use peerpod_provider_api::{CreateRequest, DiskRequest, Provider};
use peerpod_test_clouds::gcp::ZONES;

use super::common::{Site, key, placed, request};

/// Right that Google checks beside those of the call: labels of a new disk ("disks.insert", required permissions).
const CHECKED_BESIDE: [&str; 1] = ["compute.disks.setLabels"];

fn allowed() -> BTreeSet<String> {
    let role = include_str!("../../role.yaml");
    let (_, rights) = role.split_once("includedPermissions:\n").unwrap();
    rights.lines().map(|line| line.strip_prefix("- ").unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_role_allows_exactly_our_calls() {
    let site = Site::start().await;
    let settings = [
        ("network-tags", "pods"),
        ("use-public-ip", "true"),
        ("service-account", "pods@pods-1234.iam.gserviceaccount.com"),
        ("instance-types", "n2d-standard-2"),
    ];
    for (number, image) in ["peerpod", "family/pods"].into_iter().enumerate() {
        let provider = site.provider(&[&settings[..], &[("image", image)]].concat());
        provider.preflight().await.unwrap();
        let disk = DiskRequest {
            volume: site.disk(ZONES[0], &format!("pvc-{number}")),
            read_only: number == 0,
            ..DiskRequest::default()
        };
        let wish = CreateRequest { disks: vec![disk.clone()], second_nic: true, ..request("web-0") };
        let wish = placed(&*provider, &wish).await.unwrap();
        let made = provider.create(&wish, &key("role", u32::try_from(number).unwrap())).await.unwrap();
        provider.addresses(&made.id).await.unwrap();
        let volumes = provider.extensions().volumes.unwrap();
        volumes.detach(&made.id, &disk.volume).await.unwrap();
        volumes.attach(&made.id, &disk).await.unwrap();
        provider.extensions().console.unwrap().tail(&made.id, 100).await.unwrap();
        provider.list_owned().await.unwrap();
        provider.delete(&made.id).await.unwrap();
    }
    let provider = site.provider(&settings);
    let wish = placed(&*provider, &request("batch")).await.unwrap();
    let batch = provider.extensions().batch.unwrap();
    site.cloud.set_times(std::time::Duration::from_millis(20), std::time::Duration::ZERO);
    batch.create_many(&wish, 3.try_into().unwrap(), &key("role", 9)).await.unwrap();
    // A network without a subnetwork in the settings is looked at, whatever it turns out to be.
    drop(site.provider(&[("network", "pods"), ("subnetwork", "")]).preflight().await);
    // The others are for settings that name an object of another service.
    let asked = site.cloud.rights().into_iter().filter(|right| right.starts_with("compute."));
    let asked: BTreeSet<String> = asked.chain(CHECKED_BESIDE.map(str::to_owned)).collect();
    assert_eq!(asked, allowed(), "left: our calls; right: the calls that the role allows");
}

/// Checks that a missing right is named, with the role as the remedy.
#[tokio::test(flavor = "multi_thread")]
async fn a_missing_right_is_named() {
    let site = Site::start().await;
    site.cloud.deny("compute.machineTypes.list");
    site.cloud.deny("compute.instances.list");
    let error = site.provider(&[]).preflight().await.unwrap_err();
    let text = error.to_string();
    assert_eq!(error.class(), "auth", "{text}");
    for part in ["compute.machineTypes.list", "compute.instances.list", "role.yaml"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_controller_needs_three_rights() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("controller", 0)).await.unwrap();
    site.cloud.forget_calls();
    let collector = site.collector();
    assert_eq!(collector.list_owned().await.unwrap().len(), 1);
    collector.addresses(&made.id).await.unwrap();
    collector.delete(&made.id).await.unwrap();
    let asked: Vec<String> = site.cloud.rights().into_iter().collect();
    assert_eq!(asked, ["compute.instances.delete", "compute.instances.get", "compute.instances.list"]);
}
