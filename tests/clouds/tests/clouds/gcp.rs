//! Tests of the fake of Google's Compute Engine.

use std::time::Duration;

use peerpod_test_clouds::gcp::{PROJECT, REGION, State, ZONES};
use peerpod_test_clouds::{Answer, Cloud, Fault, Gcp};
use serde_json::{Value, json};

const SECOND: Duration = Duration::from_secs(1);
const FIRST: &str = "11111111-1111-4111-8111-111111111111";
const OTHER: &str = "22222222-2222-4222-8222-222222222222";

/// Starts a cloud and stops its time. It decides after a second, and an instance boots in ten more.
pub(super) async fn start() -> Cloud<Gcp> {
    let cloud = Cloud::start(Gcp::default()).await.unwrap();
    cloud.stop_time();
    cloud.set_times(SECOND, 10 * SECOND);
    cloud
}

pub(super) fn path(rest: &str) -> String {
    format!("/compute/v1/projects/{PROJECT}/{rest}")
}

/// Path below the first zone.
pub(super) fn zonal(rest: &str) -> String {
    path(&format!("zones/{}/{rest}", ZONES[0]))
}

/// A body that Google accepts.
pub(super) fn body(name: &str) -> Value {
    let zone = ZONES[0];
    json!({
        "name": name, "machineType": format!("zones/{zone}/machineTypes/n2-standard-2"),
        "labels": {"peerpod-cluster": "c", "peerpod-key": name}, "description": "{\"peerpod\":1}",
        "metadata": {"items": [{"key": "user-data", "value": "{}"}]},
        "disks": [{"boot": true, "autoDelete": true,
            "initializeParams": {"sourceImage": Gcp::image("peerpod"), "diskSizeGb": "10",
                "diskType": format!("zones/{zone}/diskTypes/pd-balanced")}}],
        "networkInterfaces": [{"network": Gcp::network("pods"), "subnetwork": Gcp::subnetwork("pods")}],
    })
}

/// The same as properties of several.
pub(super) fn properties() -> Value {
    let mut body = body("none");
    body.as_object_mut().unwrap().remove("name");
    body["machineType"] = json!("n2-standard-2");
    body["disks"][0]["initializeParams"]["diskType"] = json!("pd-balanced");
    body
}

fn insert(cloud: &Cloud<Gcp>, id: &str, body: &Value) -> Answer {
    let target = zonal(&format!("instances{}{id}", if id.is_empty() { "" } else { "?requestId=" }));
    cloud.call("POST", &target, &[], Some(body)).unwrap()
}

fn reason(answer: &Answer) -> (u16, String) {
    let reason = answer.value()["error"]["errors"][0]["reason"].as_str().unwrap_or("(none)").to_owned();
    (answer.status, reason)
}

fn get(cloud: &Cloud<Gcp>, rest: &str) -> Value {
    cloud.ask("GET", &zonal(rest), None).value()
}

/// Asks for the operation that an answer holds.
fn operation(cloud: &Cloud<Gcp>, answer: &Answer) -> Value {
    get(cloud, &format!("operations/{}", answer.value()["name"].as_str().unwrap()))
}

#[tokio::test]
async fn an_instance_is_made_runs_and_goes_with_its_disk() {
    let cloud = start().await;
    let made = insert(&cloud, FIRST, &body("pod"));
    assert_eq!((made.status, &made.value()["clientOperationId"]), (200, &json!(FIRST)));
    assert_eq!(get(&cloud, "instances/pod")["status"], "PROVISIONING");
    cloud.advance(SECOND);
    assert_eq!(get(&cloud, "instances/pod")["status"], "STAGING");
    assert_eq!(operation(&cloud, &made)["status"], "RUNNING");
    cloud.advance(10 * SECOND);
    let seen = get(&cloud, "instances/pod");
    assert_eq!((&seen["status"], &seen["description"]), (&json!("RUNNING"), &json!("{\"peerpod\":1}")));
    assert!(seen["networkInterfaces"][0]["networkIP"].as_str().unwrap().starts_with("10."));
    let done = operation(&cloud, &made);
    assert!(done["status"] == "DONE" && done.get("error").is_none(), "{done}");
    let listed = get(&cloud, &format!("operations?filter=clientOperationId%3D%22{FIRST}%22"));
    assert_eq!(listed["items"].as_array().unwrap().len(), 1);
    cloud.with(|gcp, _| gcp.delete_time = 5 * SECOND);
    assert_eq!(cloud.call("DELETE", &zonal("instances/pod"), &[], None).unwrap().status, 200);
    assert_eq!(get(&cloud, "instances/pod")["status"], "STOPPING");
    assert_eq!(reason(&insert(&cloud, OTHER, &body("pod"))), (409, "alreadyExists".to_owned()));
    cloud.advance(5 * SECOND);
    let gone = cloud.call("DELETE", &zonal("instances/pod"), &[], None).unwrap();
    assert_eq!(reason(&gone), (404, "notFound".to_owned()));
    assert_eq!(cloud.with(|gcp, _| gcp.disks.all().count()), 0);
}

#[tokio::test]
async fn a_request_id_is_for_one_operation_and_a_name_for_one_instance() {
    let cloud = start().await;
    let first = insert(&cloud, FIRST, &body("pod")).value();
    let second = insert(&cloud, FIRST, &body("pod")).value();
    assert_eq!(first["name"], second["name"]);
    assert_eq!(reason(&insert(&cloud, OTHER, &body("pod"))), (409, "alreadyExists".to_owned()));
    assert_eq!(reason(&insert(&cloud, "", &body("pod"))), (409, "alreadyExists".to_owned()));
    for wrong in ["1234", "00000000-0000-0000-0000-000000000000"] {
        assert_eq!(reason(&insert(&cloud, wrong, &body("two"))), (400, "invalid".to_owned()));
    }
    // A delete with the id of a create answers with the create, and deletes nothing.
    let target = zonal(&format!("instances/pod?requestId={FIRST}"));
    let kept = cloud.call("DELETE", &target, &[], None).unwrap().value();
    assert_eq!(
        (&kept["operationType"], &get(&cloud, "instances/pod")["name"]),
        (&json!("insert"), &json!("pod"))
    );
    cloud.with(|gcp, _| gcp.forget_requests());
    assert_eq!(reason(&insert(&cloud, FIRST, &body("pod"))), (409, "alreadyExists".to_owned()));
}

#[tokio::test]
async fn a_late_refusal_is_in_the_operation_and_leaves_nothing() {
    let cloud = start().await;
    cloud.set_stock("n2-standard-2", ZONES[0], "on-demand", 0);
    let made = insert(&cloud, FIRST, &body("pod"));
    assert_eq!(made.status, 200);
    assert_eq!(get(&cloud, "instances/pod")["status"], "PROVISIONING");
    cloud.advance(SECOND);
    let done = operation(&cloud, &made);
    assert_eq!(
        (&done["status"], &done["error"]["errors"][0]["code"]),
        (&json!("DONE"), &json!("ZONE_RESOURCE_POOL_EXHAUSTED"))
    );
    assert_eq!(cloud.with(|gcp, _| gcp.instances.all().count() + gcp.disks.all().count()), 0);
    cloud.heal();
    cloud.fail("compute.instances.insert", Fault::refuse_late("STOCKOUT", "none left"), 1);
    let made = insert(&cloud, OTHER, &body("pod"));
    assert_eq!(operation(&cloud, &made)["error"]["errors"][0]["code"], "STOCKOUT");
    cloud.with(|gcp, _| gcp.quota = Some(1));
    let made = insert(&cloud, "", &body("full"));
    assert_eq!(operation(&cloud, &made)["error"]["errors"][0]["code"], "QUOTA_EXCEEDED");
    cloud.with(|gcp, _| (gcp.quota, gcp.most_operations) = (None, Some(0)));
    let refused = insert(&cloud, "", &body("two"));
    assert_eq!(reason(&refused), (403, "quotaExceeded".to_owned()));
    let details = refused.value()["error"]["details"][0]["reason"].clone();
    assert_eq!(details, "CONCURRENT_OPERATIONS_QUOTA_EXCEEDED");
}

#[tokio::test]
async fn a_bulk_insert_makes_what_there_is_and_nothing_below_its_least() {
    let cloud = start().await;
    let bulk = |place: &str, names: &[&str], least: &str| {
        let names: serde_json::Map<String, Value> =
            names.iter().map(|name| ((*name).to_owned(), json!({}))).collect();
        let body = json!({"count": names.len().to_string(), "minCount": least, "perInstanceProperties": names,
            "instanceProperties": properties()});
        cloud.call("POST", &path(&format!("{place}/instances/bulkInsert")), &[], Some(&body)).unwrap()
    };
    let zone = format!("zones/{}", ZONES[0]);
    cloud.set_stock("*", ZONES[0], "on-demand", 2);
    let made = bulk(&zone, &["a", "b", "c"], "1");
    assert_eq!(made.status, 200);
    cloud.advance(11 * SECOND);
    let done = operation(&cloud, &made);
    assert!(done.get("error").is_none(), "{done}");
    let status = &done["instancesBulkInsertOperationMetadata"]["perLocationStatus"][&zone];
    assert_eq!((&status["createdVmCount"], &status["failedToCreateVmCount"]), (&json!(2), &json!(1)));
    let names: Vec<String> =
        cloud.with(|gcp, _| gcp.instances.all().map(|(_, one)| one.name.clone()).collect());
    assert_eq!(names, ["a", "b"]);
    let refused = bulk(&zone, &["d", "e"], "1");
    cloud.advance(SECOND);
    let code = operation(&cloud, &refused)["error"]["errors"][0]["code"].clone();
    assert_eq!(code, "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS");
    assert_eq!(cloud.with(|gcp, _| gcp.instances.all().count()), 2);
    cloud.heal();
    let taken = bulk(&zone, &["a", "f"], "1");
    let done = operation(&cloud, &taken);
    assert_eq!((taken.status, &done["httpErrorStatusCode"]), (200, &json!(409)));
    assert_eq!(done["error"]["errors"][0]["code"], "RESOURCE_ALREADY_EXISTS");
    assert_eq!(cloud.with(|gcp, _| gcp.instances.all().count()), 2);
    let regional = bulk(&format!("regions/{REGION}"), &["g"], "1");
    assert_eq!((regional.status, regional.value()["region"].is_string()), (200, true));
}

#[tokio::test]
async fn bodies_that_google_refuses_are_refused() {
    let cloud = start().await;
    let with = |pointer: &str, value: Value| {
        let mut body = body("pod");
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        body.pointer_mut(parent).unwrap()[field] = value;
        reason(&insert(&cloud, "", &body))
    };
    let boot = "/disks/0/initializeParams";
    for (pointer, value, status, expected) in [
        ("/name", json!("Pod"), 400, "invalid"),
        ("/machineType", json!("n2-standard-2"), 400, "invalid"),
        ("/machineType", json!(format!("zones/{}/machineTypes/t2a-standard-2", ZONES[0])), 400, "invalid"),
        ("/labels", json!({"peerpod.cluster": "c"}), 400, "invalid"),
        ("/labels", json!({"peerpod": "C"}), 400, "invalid"),
        ("/description", json!("x".repeat(2_049)), 400, "invalid"),
        (
            "/metadata",
            json!({"items": [{"key": "user-data", "value": "x".repeat(262_145)}]}),
            413,
            "fieldSizeTooLarge",
        ),
        ("/networkInterfaces", json!([]), 400, "invalid"),
        ("/networkInterfaces", json!([{"subnetwork": Gcp::subnetwork("third")}]), 404, "notFound"),
        ("/scheduling", json!({"provisioningModel": "SPOT"}), 400, "invalid"),
        ("/confidentialInstanceConfig", json!({"confidentialInstanceType": "TDX"}), 400, "invalid"),
        (&format!("{boot}/sourceImage"), json!(Gcp::image("none")), 404, "notFound"),
        (&format!("{boot}/diskType"), json!("pd-balanced"), 400, "invalid"),
        (&format!("{boot}/sourceImage"), json!(Gcp::image("peerpod-arm")), 400, "invalid"),
    ] {
        assert_eq!(with(pointer, value), (status, expected.to_owned()), "{pointer}");
    }
    let spot = json!({"provisioningModel": "SPOT", "instanceTerminationAction": "DELETE", "automaticRestart": false,
        "onHostMaintenance": "TERMINATE"});
    assert_eq!(with("/scheduling", spot).0, 200);
}

#[tokio::test]
async fn a_disk_is_attached_once_in_its_zone() {
    let cloud = start().await;
    let (near, far, both) = cloud.with(|gcp, world| {
        let add = |gcp: &mut Gcp, name: &str, zone: &str| gcp.add_disk(name, zone, world.now);
        (add(gcp, "near", ZONES[0]), add(gcp, "far", ZONES[1]), add(gcp, "both", ""))
    });
    insert(&cloud, "", &body("pod"));
    let attach = |disk: &str, device: &str| {
        let body = json!({"source": disk, "deviceName": device, "mode": "READ_WRITE", "autoDelete": false});
        reason(&cloud.call("POST", &zonal("instances/pod/attachDisk"), &[], Some(&body)).unwrap())
    };
    let detach = |device: &str| {
        let target = zonal(&format!("instances/pod/detachDisk?deviceName={device}"));
        reason(&cloud.call("POST", &target, &[], None).unwrap())
    };
    assert_eq!(attach(&near, "data"), (400, "resourceNotReady".to_owned()));
    cloud.advance(SECOND);
    let done = (200, "(none)".to_owned());
    assert_eq!(attach(&near, "data"), done);
    assert_eq!(attach(&near, "again"), (400, "resourceInUseByAnotherResource".to_owned()));
    assert_eq!(attach(&both, "data"), (400, "invalid".to_owned()));
    assert_eq!(attach(&far, "far"), (400, "invalid".to_owned()));
    assert_eq!(attach(&both, "both"), done);
    assert_eq!(get(&cloud, "disks/near")["users"].as_array().unwrap().len(), 1);
    let disks = get(&cloud, "instances/pod")["disks"].clone();
    let devices: Vec<&str> =
        disks.as_array().unwrap().iter().map(|disk| disk["deviceName"].as_str().unwrap()).collect();
    assert_eq!((devices.len(), devices[0]), (3, "persistent-disk-0"), "{devices:?}");
    assert_eq!(detach("data"), done);
    assert_eq!(detach("data"), (400, "invalid".to_owned()));
    cloud.call("DELETE", &zonal("instances/pod"), &[], None).unwrap();
    cloud.advance(SECOND);
    assert_eq!(cloud.with(|gcp, _| gcp.disks.all().filter(|(_, disk)| disk.users.is_empty()).count()), 3);
}

#[tokio::test]
async fn a_list_has_a_filter_pages_and_zones_that_do_not_answer() {
    let cloud = start().await;
    for name in ["a", "b", "c"] {
        insert(&cloud, "", &body(name));
    }
    let names = |answer: &Value, pointer: &str| {
        let items = answer.pointer(pointer).and_then(Value::as_array).cloned().unwrap_or_default();
        items.iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let filter =
        "filter=(labels.peerpod-cluster%20%3D%20%22c%22)%20AND%20(labels.peerpod-key%20%3D%20%22b%22)";
    assert_eq!(names(&get(&cloud, &format!("instances?{filter}")), "/items"), ["b"]);
    let first = get(&cloud, "instances?maxResults=2");
    let next = first["nextPageToken"].as_str().unwrap();
    let second = get(&cloud, &format!("instances?maxResults=2&pageToken={next}"));
    assert_eq!((names(&first, "/items").len(), names(&second, "/items")), (2, vec!["c".to_owned()]));
    assert!(get(&cloud, "instances?filter=name=zz").get("items").is_none(), "an empty list has no items");
    let all = cloud.ask("GET", &path("aggregated/instances"), None).value();
    assert_eq!(names(&all, &format!("/items/zones~1{}/instances", ZONES[0])).len(), 3);
    assert_eq!(all["items"][format!("zones/{}", ZONES[1])]["warning"]["code"], "NO_RESULTS_ON_PAGE");
    cloud.with(|gcp, _| gcp.unreachable.insert(ZONES[0].to_owned()));
    let some = cloud.ask("GET", &path("aggregated/instances"), None).value();
    assert_eq!(some["unreachables"], json!([format!("zones/{}", ZONES[0])]));
    cloud.fail("compute.instances.list second page", Fault::refuse(503, "backendError", "later"), 1);
    let page = |rest: &str| {
        cloud.call("GET", &zonal(&format!("instances?maxResults=1{rest}")), &[], None).unwrap().status
    };
    assert_eq!((page(""), page("&pageToken=page-1"), page("&pageToken=page-1")), (200, 503, 200));
}

#[tokio::test]
async fn calls_are_counted_in_fixed_minutes() {
    let cloud = start().await;
    cloud.set_rates(1.0);
    cloud.advance(59 * SECOND);
    let list = || cloud.call("GET", &zonal("instances"), &[], None).unwrap();
    let answers: Vec<Answer> = (0..1_501).map(|_| list()).collect();
    let refused: Vec<(u16, String)> =
        answers.iter().map(reason).filter(|(status, _)| *status != 200).collect();
    assert_eq!(refused, [(403, "rateLimitExceeded".to_owned())]);
    assert_eq!(insert(&cloud, "", &body("pod")).status, 200, "another group");
    cloud.advance(SECOND);
    assert_eq!(list().status, 200);
}

#[tokio::test]
async fn the_serial_port_gives_the_last_bytes() {
    let cloud = start().await;
    insert(&cloud, "", &body("pod"));
    cloud.with(|gcp, _| {
        gcp.instances.all_mut().for_each(|(_, one)| "0123456789".clone_into(&mut one.console))
    });
    let port = get(&cloud, "instances/pod/serialPort?port=1&start=-4");
    assert_eq!(
        (&port["contents"], &port["start"], &port["next"]),
        (&json!("6789"), &json!("6"), &json!("10"))
    );
    cloud.with(|gcp, _| gcp.instances.all_mut().for_each(|(_, one)| one.state = State::Terminated));
    assert_eq!(get(&cloud, "instances/pod")["status"], "TERMINATED");
}
