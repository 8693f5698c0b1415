//! Tests of the fake of IBM Cloud's VPC API.

use std::time::Duration;

use peerpod_test_clouds::ibmcloud::{State, VPC, ZONES};
use peerpod_test_clouds::{Answer, Cloud, Fault, IbmCloud};
use serde_json::{Value, json};

const SECOND: Duration = Duration::from_secs(1);
const VERSION: &str = "version=2026-10-06&generation=2";

/// Starts a cloud and stops its time. It decides after a second, and a VM starts in ten more.
async fn start() -> Cloud<IbmCloud> {
    let cloud = Cloud::start(IbmCloud::default()).await.unwrap();
    cloud.stop_time();
    cloud.set_times(SECOND, 10 * SECOND);
    cloud
}

/// A body that the API accepts.
fn body(name: &str) -> Value {
    json!({"name": name, "zone": {"name": ZONES[0]}, "profile": {"name": "bx3d-2x10"}, "vpc": {"id": VPC},
        "image": {"id": IbmCloud::image("peerpod")}, "user_data": "{}",
        "primary_network_attachment": {"name": "nic0", "virtual_network_interface": {
            "subnet": {"id": IbmCloud::subnet(ZONES[0], "pods")}, "auto_delete": true}},
        "boot_volume_attachment": {"name": "boot", "delete_volume_on_instance_delete": true,
            "volume": {"profile": {"name": "general-purpose"}, "user_tags": ["peerpod.key:k"]}}})
}

fn call(cloud: &Cloud<IbmCloud>, method: &str, path: &str, body: Option<&Value>) -> Answer {
    let mark = if path.contains('?') { '&' } else { '?' };
    cloud.call(method, &format!("/v1/{path}{mark}{VERSION}"), &[], body).unwrap()
}

fn create(cloud: &Cloud<IbmCloud>, body: &Value) -> Answer {
    call(cloud, "POST", "instances", Some(body))
}

fn code(answer: &Answer) -> (u16, String) {
    (answer.status, answer.value()["errors"][0]["code"].as_str().unwrap_or("(none)").to_owned())
}

#[tokio::test]
async fn an_instance_goes_through_its_states_and_takes_its_volume_with_it() {
    let cloud = start().await;
    let made = create(&cloud, &body("pod"));
    assert_eq!((made.status, &made.value()["status"]), (201, &json!("pending")));
    let id = made.value()["id"].as_str().unwrap().to_owned();
    let see = || call(&cloud, "GET", &format!("instances/{id}"), None).value();
    assert_eq!(see()["primary_network_attachment"]["primary_ip"]["address"], "0.0.0.0");
    assert!(see()["boot_volume_attachment"].get("volume").is_none());
    cloud.advance(SECOND);
    assert_eq!(
        (&see()["status"], see()["boot_volume_attachment"]["volume"]["id"].is_string()),
        (&json!("starting"), true)
    );
    cloud.advance(10 * SECOND);
    assert_eq!((&see()["status"], see().get("user_data")), (&json!("running"), None));
    assert_eq!(call(&cloud, "DELETE", &format!("instances/{id}"), None).status, 204);
    assert_eq!(code(&call(&cloud, "GET", &format!("instances/{id}"), None)), (404, "not_found".to_owned()));
    assert_eq!(cloud.with(|ibm, _| ibm.volumes.all().count()), 0);
}

#[tokio::test]
async fn a_name_is_unique_in_the_region_until_the_instance_is_gone() {
    let cloud = start().await;
    cloud.with(|ibm, _| ibm.delete_time = SECOND);
    let id = create(&cloud, &body("pod")).value()["id"].as_str().unwrap().to_owned();
    let mut elsewhere = body("pod");
    elsewhere["zone"]["name"] = json!(ZONES[1]);
    elsewhere["primary_network_attachment"]["virtual_network_interface"]["subnet"]["id"] =
        json!(IbmCloud::subnet(ZONES[1], "pods"));
    let unique = (400, "validation_unique_failed".to_owned());
    assert_eq!(code(&create(&cloud, &elsewhere)), unique);
    assert_eq!(call(&cloud, "GET", "instances?name=pod", None).value()["total_count"], 1);
    call(&cloud, "DELETE", &format!("instances/{id}"), None);
    assert_eq!(code(&create(&cloud, &elsewhere)), unique, "it is going");
    cloud.advance(SECOND);
    assert_eq!(create(&cloud, &elsewhere).status, 201);
}

#[tokio::test]
async fn a_late_refusal_is_in_the_status_reasons() {
    let cloud = start().await;
    cloud.set_stock("bx3d-2x10", ZONES[0], "on-demand", 0);
    let id = create(&cloud, &body("pod")).value()["id"].as_str().unwrap().to_owned();
    cloud.fail("create_instance", Fault::refuse_late("cannot_start_storage", "no"), 1);
    cloud.advance(2 * SECOND);
    let seen = call(&cloud, "GET", &format!("instances/{id}"), None).value();
    assert_eq!(
        (&seen["status"], &seen["status_reasons"][0]["code"]),
        (&json!("failed"), &json!("cannot_start_capacity"))
    );
}

#[tokio::test]
async fn bodies_that_ibm_refuses_are_refused() {
    let cloud = start().await;
    let with = |pointer: &str, value: Value| {
        let mut body = body("pod");
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        body.pointer_mut(parent).unwrap()[field] = value;
        code(&create(&cloud, &body))
    };
    for (pointer, value, status, word) in [
        ("/name", json!("Pod"), 400, "bad_field"),
        ("/name", json!("p".repeat(64)), 400, "bad_field"),
        ("/zone/name", json!("us-south-9"), 400, "bad_field"),
        ("/profile/name", json!("none"), 404, "instance_profile_not_found"),
        ("/image/id", json!("r006-none"), 404, "image_not_found"),
        ("/image/id", json!(IbmCloud::image("peerpod-z")), 400, "bad_field"),
        ("/vpc/id", json!("r006-none"), 404, "vpc_not_found"),
        ("/user_data", json!("x".repeat(65_537)), 400, "bad_field"),
        ("/metadata_service", json!({"enabled": true}), 400, "bad_field"),
        ("/availability", json!({"class": "spot"}), 400, "bad_field"),
        ("/confidential_compute_mode", json!("tdx"), 400, "bad_field"),
        ("/placement_target", json!({"id": "0717-none"}), 404, "dedicated_host_not_found"),
        ("/boot_volume_attachment/volume/user_tags", json!(["a/b"]), 400, "bad_field"),
        ("/boot_volume_attachment/volume/capacity", json!(251), 400, "bad_field"),
        ("/primary_network_attachment/name", json!("Nic"), 400, "bad_field"),
        (
            "/primary_network_attachment/virtual_network_interface/subnet/id",
            json!("none"),
            404,
            "subnet_not_found",
        ),
        ("/volume_attachments", json!([{"volume": {"id": "r006-none"}}]), 404, "not_found"),
    ] {
        assert_eq!(with(pointer, value), (status, word.to_owned()), "{pointer}");
    }
    assert_eq!(cloud.with(|ibm, _| ibm.instances.all().count()), 0);
    let bare = cloud.call("GET", "/v1/instances?version=2026-10-06", &[], None).unwrap();
    assert_eq!(code(&bare), (400, "invalid_generation".to_owned()));
}

#[tokio::test]
async fn a_volume_belongs_to_one_instance_and_to_its_zone() {
    let cloud = start().await;
    cloud.with(|ibm, _| ibm.attach_time = SECOND);
    let [here, there] =
        [ZONES[0], ZONES[1]].map(|zone| cloud.with(|ibm, world| ibm.add_volume(zone, zone, world.now)));
    let ids = ["a", "b"].map(|name| create(&cloud, &body(name)).value()["id"].as_str().unwrap().to_owned());
    cloud.with(|ibm, _| ibm.instances.all_mut().for_each(|(_, one)| one.state = State::Running));
    let attach = |instance: &str, volume: &str| {
        let body = json!({"volume": {"id": volume}, "delete_volume_on_instance_delete": false});
        call(&cloud, "POST", &format!("instances/{instance}/volume_attachments"), Some(&body))
    };
    assert_eq!(code(&attach(&ids[0], &there)), (400, "bad_field".to_owned()));
    let made = attach(&ids[0], &here);
    assert_eq!(
        (made.status, &made.value()["status"], made.value().get("device")),
        (201, &json!("attaching"), None)
    );
    assert_eq!(code(&attach(&ids[1], &here)), (409, "volume_in_use".to_owned()));
    cloud.advance(SECOND);
    let all = call(&cloud, "GET", &format!("instances/{}/volume_attachments", ids[0]), None).value();
    assert!(all["volume_attachments"][0]["device"]["id"].is_string(), "{all}");
    let attachment = made.value()["id"].as_str().unwrap().to_owned();
    let detach = format!("instances/{}/volume_attachments/{attachment}", ids[0]);
    assert_eq!(call(&cloud, "DELETE", &detach, None).status, 202);
    assert_eq!(call(&cloud, "DELETE", &detach, None).status, 404);
    assert_eq!(attach(&ids[1], &here).status, 201);
}

#[tokio::test]
async fn a_list_has_pages_and_filters() {
    let cloud = start().await;
    for name in ["a", "b", "c"] {
        create(&cloud, &body(name));
    }
    let first = call(&cloud, "GET", "instances?limit=2", None).value();
    assert_eq!(first["instances"].as_array().unwrap().len(), 2);
    assert!(first["next"]["href"].as_str().unwrap().ends_with("/v1/instances?limit=2&start=2"), "{first}");
    let rest = call(&cloud, "GET", "instances?limit=2&start=2", None).value();
    assert_eq!((rest["instances"].as_array().unwrap().len(), rest.get("next")), (1, None));
    assert_eq!(call(&cloud, "GET", "instances?vpc.id=other", None).value()["total_count"], 0);
    cloud.advance(SECOND);
    assert_eq!(call(&cloud, "GET", "volumes?tag=peerpod.key:k", None).value()["total_count"], 3);
    assert_eq!(call(&cloud, "GET", "volumes?tag=peerpod.key", None).value()["total_count"], 0, "a whole tag");
}
