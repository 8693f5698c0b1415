//! Checks that `role.json` and `role-subscription.json` together allow exactly the calls that a whole life of VMs needs.

use std::collections::BTreeSet;

use peerpod_provider_api::{CreateRequest, DiskRequest, Provider};
use peerpod_test_clouds::{Azure, Fault};
use serde_json::Value;

use super::common::{Site, key, placed, request};

fn actions(role: &str) -> BTreeSet<String> {
    let role: Value = serde_json::from_str(role).unwrap();
    role["Actions"].as_array().unwrap().iter().map(|action| action.as_str().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_roles_allow_exactly_our_calls() {
    let site = Site::start().await;
    let group = Azure::security_group();
    let provider = site.provider(&[("security-group-id", &group), ("use-public-ip", "true")]);
    provider.preflight().await.unwrap();
    let disk = DiskRequest { volume: site.disk("data", "1"), ..DiskRequest::default() };
    let wish = CreateRequest { second_nic: true, zones: vec!["1".to_owned()], ..request("web-0") };
    let wish = placed(&*provider, &wish).await.unwrap();
    let made = provider.create(&wish, &key("role", 0)).await.unwrap();
    provider.addresses(&made.id).await.unwrap();
    let volumes = provider.extensions().volumes.unwrap();
    volumes.attach(&made.id, &disk).await.unwrap();
    provider.extensions().console.unwrap().tail(&made.id, 100).await.unwrap();
    provider.list_owned().await.unwrap();
    volumes.detach(&made.id, &disk.volume).await.unwrap();
    // A VM may leave its interfaces, and an interface its public address: the next searches delete them.
    site.cloud.with(|azure, _| azure.keeps_nics = true);
    provider.delete(&made.id).await.unwrap();
    site.cloud.with(|azure, _| azure.keeps_nics = false);
    provider.preflight().await.unwrap();
    provider.preflight().await.unwrap();
    // Azure may tell the reason of a failed VM in its operation only.
    let late = Fault::refuse_late("", "");
    site.cloud.fail("VirtualMachines_CreateOrUpdate", late, 1);
    provider.create(&wish, &key("role", 1)).await.unwrap_err();
    let asked = site.cloud.rights();
    let (role, subscription) =
        (actions(include_str!("../../role.json")), actions(include_str!("../../role-subscription.json")));
    assert!(role.is_disjoint(&subscription));
    let allowed: BTreeSet<String> = role.union(&subscription).cloned().collect();
    assert_eq!(asked, allowed, "left: our calls; right: the calls that the roles allow");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_controller_needs_reads_and_deletes_only() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    site.cloud.with(|azure, _| azure.keeps_nics = true);
    let mut ids = Vec::new();
    for number in 0..2 {
        let wish = placed(&*provider, &request(&format!("web-{number}"))).await.unwrap();
        ids.push(provider.create(&wish, &key("collect", number)).await.unwrap().id);
    }
    provider.delete(&ids[0]).await.unwrap();
    site.cloud.forget_calls();
    let collector = site.collector();
    assert_eq!(collector.list_owned().await.unwrap().len(), 2);
    for id in &ids {
        collector.delete(id).await.unwrap();
    }
    let rights = site.cloud.rights();
    assert!(rights.iter().all(|right| right.ends_with("/read") || right.ends_with("/delete")), "{rights:?}");
    assert!(rights.is_subset(&actions(include_str!("../../role.json"))), "{rights:?}");
}
