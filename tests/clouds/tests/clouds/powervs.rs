//! Tests of the fake of IBM Power Virtual Server.

use std::time::Duration;

use peerpod_test_clouds::iam::ACCOUNT;
use peerpod_test_clouds::powervs::{DHCP, IMAGE, NETWORK, WORKSPACE, ZONE};
use peerpod_test_clouds::{Answer, Cloud, Fault, PowerVs};
use serde_json::{Value, json};

const SECOND: Duration = Duration::from_secs(1);

/// Starts a cloud and stops its time. It builds a VM in ten seconds.
async fn start() -> Cloud<PowerVs> {
    let cloud = Cloud::start(PowerVs::default()).await.unwrap();
    cloud.stop_time();
    cloud.set_times(SECOND, 9 * SECOND);
    cloud
}

/// A body that the API accepts.
fn body(name: &str, network: &str) -> Value {
    json!({"serverName": name, "imageID": IMAGE, "memory": 2, "processors": 0.5, "procType": "shared",
        "sysType": "s922", "networks": [{"networkID": network}], "userData": "e30=", "userTags": ["peerpod.key:k"]})
}

fn call(cloud: &Cloud<PowerVs>, method: &str, path: &str, body: Option<&Value>) -> Answer {
    let crn = format!("crn:v1:bluemix:public:power-iaas:{ZONE}:a/{ACCOUNT}:{WORKSPACE}::");
    cloud
        .call(method, &format!("/pcloud/v1/cloud-instances/{WORKSPACE}/{path}"), &[("crn", &crn)], body)
        .unwrap()
}

fn create(cloud: &Cloud<PowerVs>, body: &Value) -> Answer {
    call(cloud, "POST", "pvm-instances", Some(body))
}

fn id(made: &Answer) -> String {
    made.value()[0]["pvmInstanceID"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_vm_is_built_and_two_may_have_one_name() {
    let cloud = start().await;
    let made = create(&cloud, &body("pod", NETWORK));
    assert_eq!((made.status, &made.value()[0]["status"]), (202, &json!("BUILD")));
    let path = format!("pvm-instances/{}", id(&made));
    assert!(call(&cloud, "GET", &path, None).value()["networks"][0].get("ipAddress").is_none());
    cloud.advance(10 * SECOND);
    let seen = call(&cloud, "GET", &path, None).value();
    assert_eq!((&seen["status"], &seen["userTags"]), (&json!("ACTIVE"), &json!(["peerpod.key:k"])));
    assert!(seen["networks"][0]["ipAddress"].is_string() && seen.get("userData").is_none());
    assert_ne!(id(&create(&cloud, &body("pod", NETWORK))), id(&made), "no name is unique");
    let listed = call(&cloud, "GET", "pvm-instances", None).value();
    assert_eq!(listed["pvmInstances"].as_array().unwrap().len(), 2);
    assert!(listed["pvmInstances"][0].get("userTags").is_none(), "lists have no tags");
    assert_eq!(call(&cloud, "DELETE", &path, None).status, 200);
    assert_eq!(call(&cloud, "GET", &path, None).status, 404);
}

#[tokio::test]
async fn a_late_refusal_is_a_fault_of_the_vm() {
    let cloud = start().await;
    cloud.fail("pvminstances.post", Fault::refuse_late("ERROR", "No valid host was found."), 1);
    let made = create(&cloud, &body("pod", NETWORK));
    cloud.advance(10 * SECOND);
    let seen = call(&cloud, "GET", &format!("pvm-instances/{}", id(&made)), None).value();
    assert_eq!(
        (&seen["status"], &seen["fault"]["details"]),
        (&json!("ERROR"), &json!("No valid host was found."))
    );
}

#[tokio::test]
async fn an_address_by_dhcp_is_in_the_servers_leases_alone() {
    let cloud = start().await;
    let made = create(&cloud, &body("pod", DHCP));
    cloud.advance(10 * SECOND);
    let seen = call(&cloud, "GET", &format!("pvm-instances/{}", id(&made)), None).value();
    assert!(seen["networks"][0].get("ipAddress").is_none());
    let servers = call(&cloud, "GET", "services/dhcp", None).value();
    let server = servers[0]["id"].as_str().unwrap();
    let leases = call(&cloud, "GET", &format!("services/dhcp/{server}"), None).value()["leases"].clone();
    let mac = seen["networks"][0]["macAddress"].as_str().unwrap().to_lowercase();
    assert_eq!(leases[0]["instanceMacAddress"], json!(mac));
}

#[tokio::test]
async fn what_powervs_refuses_is_refused() {
    let cloud = start().await;
    for (field, value, status) in [
        ("serverName", json!("a pod"), 400),
        ("imageID", json!("other"), 404),
        ("networks", json!([]), 400),
        ("processors", json!(0.3), 400),
        ("memory", json!(1), 400),
        ("sysType", json!("z16"), 400),
        ("userData", json!("{}"), 400),
        ("userTags", json!(["a=b"]), 400),
    ] {
        let mut wrong = body("pod", NETWORK);
        wrong[field] = value;
        assert_eq!(create(&cloud, &wrong).status, status, "{field}");
    }
    let path = format!("/pcloud/v1/cloud-instances/{WORKSPACE}/pvm-instances");
    assert_eq!(cloud.call("GET", &path, &[], None).unwrap().status, 403, "no header names the workspace");
    assert_eq!(call(&cloud, "GET", "pvm-instances/none", None).status, 404);
}
