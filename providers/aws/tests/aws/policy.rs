//! Checks that `iam-policy.json` allows exactly the calls that a whole life of VMs needs, and on VMs of the
//! installation only.

use super::common;
use std::collections::BTreeSet;

use common::{Cloud, key, placed, request};
use futures_util::StreamExt;
use peerpod_provider_api::{CreateRequest, DiskRequest, Provider};
use serde_json::{Value, json};

/// Actions that EC2 checks beside the called one. CreateFleet needs the right to run VMs, and tags at creation need the
/// right to tag (EC2 User Guide, "EC2 Fleet permissions", "Grant permission to tag on creation").
const CHECKED_BESIDE: [&str; 2] = ["RunInstances", "CreateTags"];

#[tokio::test(flavor = "multi_thread")]
async fn the_policy_allows_exactly_our_calls() {
    let cloud = Cloud::start().await;
    let nic = json!({"SubnetId": cloud.subnets[0], "TagSpecifications": [{"ResourceType": "network-interface", "Tags": [
        {"Key": "peerpod.cluster", "Value": "c"}, {"Key": "peerpod.node", "Value": "n"},
        {"Key": "peerpod.installation", "Value": "i"}]}]});
    cloud.proxy.boto3("create_network_interface", &nic).await.unwrap();
    let second = [("second-subnet-ids", cloud.subnets[0].as_str())];
    for launch in ["fleet", "run"] {
        let spot = [("launch", launch), ("market", "spot"), ("spot-watch", "1s")];
        let settings: Vec<_> = second.into_iter().chain(spot).collect();
        let provider = cloud.provider(&settings);
        provider.preflight().await.unwrap();
        let disk = DiskRequest { volume: cloud.volume("eu-central-1a").await, ..DiskRequest::default() };
        let wish =
            CreateRequest { disks: vec![disk.clone()], second_nic: launch == "run", ..request("web-0") };
        let wish = placed(&*provider, &wish).await.unwrap();
        let made = provider.create(&wish, &key(launch, 0)).await.unwrap();
        provider.addresses(&made.id).await.unwrap();
        let volumes = provider.extensions().volumes.unwrap();
        volumes.attach(&made.id, &disk).await.unwrap();
        provider.extensions().console.unwrap().tail(&made.id, 100).await.unwrap();
        provider.list_owned().await.unwrap();
        let mut events = provider.events().unwrap();
        cloud.proxy.interrupt(made.id.as_str(), "marked-for-termination");
        let event = tokio::time::timeout(common::PATIENCE, events.next()).await.unwrap().unwrap();
        assert_eq!(event.id, made.id);
        volumes.detach(&made.id, &disk.volume).await.unwrap();
        provider.delete(&made.id).await.unwrap();
    }
    let asked = cloud.proxy.actions().into_iter().chain(CHECKED_BESIDE.map(str::to_owned));
    let right = |action: String| match action.as_str() {
        "GetServiceQuota" => format!("servicequotas:{action}"),
        _ => format!("ec2:{action}"),
    };
    let asked: BTreeSet<String> = asked.map(right).collect();
    let policy: Value = serde_json::from_str(include_str!("../../iam-policy.json")).unwrap();
    let mut allowed = BTreeSet::new();
    for statement in policy["Statement"].as_array().unwrap() {
        let actions = match &statement["Action"] {
            Value::String(one) => vec![one.as_str()],
            list => list.as_array().unwrap().iter().map(|one| one.as_str().unwrap()).collect(),
        };
        allowed.extend(actions.into_iter().map(str::to_owned));
    }
    assert_eq!(asked, allowed, "left: our calls; right: the calls that the policy allows");
}

/// Checks that no call on a VM or a NIC of another cluster or installation is allowed. A volume has no tag of ours: its
/// CSI driver makes it.
#[test]
fn the_policy_allows_changes_of_our_own_vms_only() {
    let policy: Value = serde_json::from_str(include_str!("../../iam-policy.json")).unwrap();
    let of_ours = json!({"StringEquals": {"aws:ResourceTag/peerpod.cluster": "CLUSTER-ID",
        "aws:ResourceTag/peerpod.installation": "INSTALLATION-ID"}});
    for action in ["TerminateInstances", "DeleteNetworkInterface", "AttachVolume", "DetachVolume"] {
        let action = json!(format!("ec2:{action}"));
        let mut allows = policy["Statement"].as_array().unwrap().iter().filter(|statement| {
            statement["Action"] == action
                || statement["Action"].as_array().is_some_and(|all| all.contains(&action))
        });
        let is_bounded = |statement: &Value| {
            statement["Condition"] == of_ours || statement["Resource"] == "arn:*:ec2:*:*:volume/*"
        };
        assert!(allows.clone().count() > 0 && allows.all(is_bounded), "{action}");
    }
}
