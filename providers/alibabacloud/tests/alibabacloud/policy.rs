//! Checks that `ram-policy.json` allows exactly the calls that a whole life of VMs needs, and on VMs of the installation
//! only.

use std::collections::BTreeSet;

use peerpod_provider_api::{CreateRequest, DiskRequest, Provider};
use peerpod_test_clouds::alibaba::ZONES;
use serde_json::{Value, json};

use super::common::{Site, key, placed, request};

fn statements() -> Vec<Value> {
    let policy: Value = serde_json::from_str(include_str!("../../ram-policy.json")).unwrap();
    policy["Statement"].as_array().unwrap().clone()
}

fn allowed() -> BTreeSet<String> {
    let statements = statements();
    let actions = statements.iter().flat_map(|one| one["Action"].as_array().unwrap());
    actions.map(|action| action.as_str().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_policy_allows_exactly_our_calls() {
    let site = Site::start().await;
    // More VMs than a list by tags shows: the list by tags of resources is needed, too.
    let provider = site.provider(&[("use-public-ip", "true"), ("disable-cvm", "false")]);
    provider.preflight().await.unwrap();
    let disk = DiskRequest { volume: site.disk(ZONES[0]), ..DiskRequest::default() };
    let wish = CreateRequest { disks: vec![disk.clone()], second_nic: true, ..request("web-0") };
    let wish = placed(&*provider, &wish).await.unwrap();
    let made = provider.create(&wish, &key("policy", 0)).await.unwrap();
    provider.addresses(&made.id).await.unwrap();
    let volumes = provider.extensions().volumes.unwrap();
    volumes.attach(&made.id, &disk).await.unwrap();
    volumes.detach(&made.id, &disk.volume).await.unwrap();
    provider.extensions().console.unwrap().tail(&made.id, 100).await.unwrap();
    let batch = placed(&*provider, &request("batch")).await.unwrap();
    let many = provider.extensions().batch.unwrap();
    many.create_many(&batch, 100.try_into().unwrap(), &key("policy", 1)).await.unwrap();
    for number in 2..11 {
        many.create_many(&batch, 100.try_into().unwrap(), &key("policy", number)).await.unwrap();
    }
    assert_eq!(provider.list_owned().await.unwrap().len(), 1_001, "the list is whole");
    provider.delete(&made.id).await.unwrap();
    assert_eq!(site.cloud.rights(), allowed(), "left: our calls; right: the calls that the policy allows");
}

/// Checks that no call on a VM of another cluster or installation is allowed. A disk has no tag of ours: its CSI driver
/// makes it.
#[test]
fn the_policy_allows_changes_of_our_own_vms_only() {
    let of_ours = json!({"StringEquals": {"acs:ResourceTag/peerpod.cluster": "CLUSTER-ID",
        "acs:ResourceTag/peerpod.installation": "INSTALLATION-ID"}});
    for action in ["DeleteInstances", "AttachDisk", "DetachDisk"] {
        let action = json!(format!("ecs:{action}"));
        let statements = statements();
        let mut allows = statements.iter().filter(|one| one["Action"].as_array().unwrap().contains(&action));
        let is_bounded = |one: &Value| one["Condition"] == of_ours || one["Resource"] == "acs:ecs:*:*:disk/*";
        assert!(allows.clone().count() > 0 && allows.all(is_bounded), "{action}");
    }
}

/// Checks that a missing right is named, with the policy as the remedy.
#[tokio::test(flavor = "multi_thread")]
async fn a_missing_right_is_named() {
    let site = Site::start().await;
    site.cloud.deny("vpc:DescribeVSwitches");
    site.cloud.deny("ecs:DescribeInstances");
    let error = site.provider(&[]).preflight().await.unwrap_err();
    let text = error.to_string();
    assert_eq!(error.class(), "auth", "{text}");
    for part in ["vpc:DescribeVSwitches", "allow DescribeInstances", "ram-policy.json"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let site = Site::start().await;
    site.cloud.deny("ecs:RunInstances");
    let error = site.provider(&[]).preflight().await.unwrap_err();
    assert!(error.class() == "auth" && error.to_string().contains("allow RunInstances"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_controller_needs_two_rights() {
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
    assert_eq!(asked, ["ecs:DeleteInstances", "ecs:DescribeInstances"]);
}
