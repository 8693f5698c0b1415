//! Checks that `role.json` allows exactly the calls that a whole life of VMs needs.

use std::collections::BTreeSet;

use peerpod_provider_api::{CreateRequest, DiskRequest, Provider};
use peerpod_test_clouds::IbmCloud;
use peerpod_test_clouds::ibmcloud::{KEY, ZONES};
use serde_json::Value;

use super::common::{Site, key, placed, request};

fn role() -> BTreeSet<String> {
    let role: Value = serde_json::from_str(include_str!("../../role.json")).unwrap();
    role["actions"].as_array().unwrap().iter().map(|action| action.as_str().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_role_allows_exactly_our_calls() {
    let site = Site::start().await;
    let host = IbmCloud::dedicated(ZONES[0], false);
    let group = IbmCloud::dedicated(ZONES[0], true);
    let provider = site.provider(&[
        ("market", "on-demand"),
        ("dedicated-host-ids", &host),
        ("dedicated-host-group-ids", &group),
        ("key-id", KEY),
        ("tags", "team=blue"),
    ]);
    provider.preflight().await.unwrap();
    let disk = |name: &str| DiskRequest { volume: site.volume(name, ZONES[0]), ..DiskRequest::default() };
    let wish = CreateRequest { second_nic: true, disks: vec![disk("data")], ..request("web-0") };
    let wish = placed(&*provider, &wish).await.unwrap();
    let made = provider.create(&wish, &key("role", 0)).await.unwrap();
    provider.addresses(&made.id).await.unwrap();
    let volumes = provider.extensions().volumes.unwrap();
    let hot = disk("hot");
    volumes.attach(&made.id, &hot).await.unwrap();
    volumes.detach(&made.id, &hot.volume).await.unwrap();
    provider.list_owned().await.unwrap();
    // A VM may leave its boot volume: the second search that finds it deletes it.
    site.cloud.with(|ibm, _| ibm.keeps_volumes = true);
    provider.delete(&made.id).await.unwrap();
    provider.preflight().await.unwrap();
    provider.preflight().await.unwrap();
    assert_eq!(site.parts(), (0, 2), "the pod's volumes stay");
    assert_eq!(site.cloud.rights(), role(), "left: our calls; right: the calls that the role allows");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_controller_needs_reads_and_deletes_only() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let id = provider.create(&wish, &key("collect", 0)).await.unwrap().id;
    site.cloud.forget_calls();
    let collector = site.collector();
    let listed = collector.list_owned().await.unwrap();
    assert_eq!((listed.len(), listed[0].node.as_deref()), (1, Some("n")));
    collector.delete(&id).await.unwrap();
    let rights = site.cloud.rights();
    let is_small = |right: &String| [".read", ".list", ".delete"].iter().any(|word| right.ends_with(word));
    assert!(rights.iter().all(is_small) && rights.is_subset(&role()), "{rights:?}");
}
