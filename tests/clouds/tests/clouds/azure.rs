//! Tests of the fake of Azure.

use std::time::Duration;

use peerpod_test_clouds::azure::{GROUP, SUBSCRIPTION, State};
use peerpod_test_clouds::{Answer, Azure, Cloud, Fault};
use serde_json::{Value, json};

const CREATE: &str = "VirtualMachines_CreateOrUpdate";
const NEW: &[(&str, &str)] = &[("if-none-match", "*")];
const SECOND: Duration = Duration::from_secs(1);

/// Starts a cloud and stops its time. It decides after a second, and a VM boots in ten more.
pub(super) async fn start() -> Cloud<Azure> {
    let cloud = Cloud::start(Azure::default()).await.unwrap();
    cloud.stop_time();
    cloud.set_times(SECOND, 10 * SECOND);
    cloud
}

pub(super) fn path(kind: &str, rest: &str) -> String {
    let (rest, query) =
        rest.split_once('?').map_or((rest, String::new()), |(rest, query)| (rest, format!("&{query}")));
    format!(
        "/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/{kind}{rest}?api-version=2024-07-01{query}"
    )
}

pub(super) fn vm(rest: &str) -> String {
    path("Microsoft.Compute/virtualMachines", rest)
}

/// A body that Azure accepts.
pub(super) fn body(name: &str) -> Value {
    json!({
        "location": "westeurope", "zones": ["1"], "tags": {"peerpod.key": name},
        "properties": {
            "hardwareProfile": {"vmSize": "Standard_D2s_v5"},
            "userData": "e30=",
            "storageProfile": {
                "imageReference": {"id": Azure::image("peerpod")},
                "osDisk": {"name": format!("{name}-os"), "createOption": "FromImage", "deleteOption": "Delete",
                    "managedDisk": {"storageAccountType": "Premium_LRS"}},
            },
            "networkProfile": {"networkApiVersion": "2022-11-01", "networkInterfaceConfigurations": [{
                "name": format!("{name}-nic"),
                "properties": {"primary": true, "deleteOption": "Delete", "ipConfigurations": [{"name": "first",
                    "properties": {"subnet": {"id": Azure::subnet("default")}}}]}}]},
            "diagnosticsProfile": {"bootDiagnostics": {"enabled": true}},
        },
    })
}

fn create(cloud: &Cloud<Azure>, name: &str, body: &Value) -> Answer {
    cloud.call("PUT", &vm(&format!("/{name}")), NEW, Some(body)).unwrap()
}

fn code(answer: &Answer) -> (u16, String) {
    (answer.status, answer.value()["error"]["code"].as_str().unwrap_or("(none)").to_owned())
}

/// Statuses of a VM's instance view.
fn statuses(cloud: &Cloud<Azure>, name: &str) -> String {
    let seen = cloud.ask("GET", &vm(&format!("/{name}?$expand=instanceView")), None).value();
    let statuses = seen["properties"]["instanceView"]["statuses"].as_array().cloned().unwrap_or_default();
    let codes: Vec<&str> = statuses.iter().filter_map(|one| one["code"].as_str()).collect();
    codes.join(" ")
}

#[tokio::test]
async fn a_vm_is_made_runs_and_goes_with_all_that_is_its_own() {
    let cloud = start().await;
    let made = create(&cloud, "Pod", &body("pod"));
    assert_eq!(
        (made.status, made.value()["properties"]["provisioningState"].as_str()),
        (201, Some("Creating"))
    );
    let operation = made.get("azure-asyncoperation").strip_prefix(&cloud.endpoint()).unwrap().to_owned();
    let status = || cloud.ask("GET", &operation, None).value()["status"].as_str().unwrap().to_owned();
    assert_eq!(statuses(&cloud, "pod"), "ProvisioningState/creating");
    cloud.advance(SECOND);
    assert_eq!(statuses(&cloud, "pod"), "ProvisioningState/creating PowerState/starting");
    assert_eq!(status(), "InProgress");
    cloud.advance(10 * SECOND);
    assert_eq!(statuses(&cloud, "pod"), "ProvisioningState/succeeded PowerState/running");
    assert_eq!(status(), "Succeeded");
    let listed = cloud.ask("GET", &vm(""), None).value();
    assert_eq!(listed["value"][0]["tags"], json!({"peerpod.key": "pod"}));
    assert!(listed["value"][0]["properties"].get("userData").is_none());
    let nics = cloud.ask("GET", &path("Microsoft.Network/networkInterfaces", ""), None).value();
    let nic = &nics["value"][0];
    assert!(nic.get("tags").is_none(), "an interface made with its VM has no tags");
    let owner = nic["properties"]["virtualMachine"]["id"].as_str().unwrap();
    assert!(owner.to_lowercase().ends_with("/virtualmachines/pod"), "{owner}");
    let with_data = cloud.ask("GET", &vm("/pod?$expand=userData"), None).value();
    assert_eq!(with_data["properties"]["userData"], "e30=");
    cloud.with(|azure, _| azure.delete_time = 5 * SECOND);
    assert_eq!(cloud.call("DELETE", &vm("/pod?forceDeletion=true"), &[], None).unwrap().status, 202);
    assert_eq!(statuses(&cloud, "pod"), "ProvisioningState/deleting");
    assert_eq!(code(&create(&cloud, "pod", &body("pod"))), (409, "OperationNotAllowed".to_owned()));
    cloud.advance(5 * SECOND);
    let left =
        cloud.with(|azure, _| (azure.vms.all().count(), azure.nics.all().count(), azure.disks.all().count()));
    assert_eq!(left, (0, 0, 0));
    assert_eq!(cloud.call("DELETE", &vm("/pod"), &[], None).unwrap().status, 204);
}

#[tokio::test]
async fn a_name_is_for_one_vm() {
    let cloud = start().await;
    assert_eq!(create(&cloud, "pod", &body("pod")).status, 201);
    assert_eq!(code(&create(&cloud, "POD", &body("pod"))), (412, "PreconditionFailed".to_owned()));
    let unconditional = |body: &Value| cloud.call("PUT", &vm("/pod"), &[], Some(body)).unwrap();
    let mut other = body("pod");
    other["tags"] = json!({"peerpod.key": "other"});
    assert_eq!(unconditional(&other).status, 200, "that is an update");
    other["zones"] = json!(["2"]);
    assert_eq!(code(&unconditional(&other)), (409, "PropertyChangeNotAllowed".to_owned()));
    let fresh = cloud.call("PUT", &vm("/new"), &[], Some(&body("new"))).unwrap();
    assert_eq!(code(&fresh), (400, "ConditionRequired".to_owned()));
}

#[tokio::test]
async fn a_late_refusal_leaves_a_failed_vm() {
    let cloud = start().await;
    cloud.set_stock("Standard_D2s_v5", "1", "on-demand", 0);
    assert_eq!(create(&cloud, "pod", &body("pod")).status, 201);
    cloud.advance(SECOND);
    assert_eq!(statuses(&cloud, "pod"), "ProvisioningState/failed/ZonalAllocationFailed");
    assert_eq!(cloud.with(|azure, _| azure.nics.all().count()), 1);
    cloud.fail(CREATE, Fault::refuse_late("AllocationFailed", "none left"), 1);
    let mut elsewhere = body("two");
    elsewhere["zones"] = json!(["2"]);
    let made = create(&cloud, "two", &elsewhere);
    cloud.advance(SECOND);
    let operation = made.get("azure-asyncoperation").strip_prefix(&cloud.endpoint()).unwrap().to_owned();
    let operation = cloud.ask("GET", &operation, None).value();
    assert_eq!(
        (&operation["status"], &operation["error"]["code"]),
        (&json!("Failed"), &json!("AllocationFailed"))
    );
    let mut spot = body("spot");
    spot["properties"]["priority"] = json!("Spot");
    cloud.set_stock("*", "*", "spot", 0);
    assert_eq!(code(&create(&cloud, "spot", &spot)), (409, "SkuNotAvailable".to_owned()));
    cloud.with(|azure, _| azure.quota = Some(1));
    let full = create(&cloud, "full", &body("full"));
    assert_eq!(code(&full), (409, "OperationNotAllowed".to_owned()));
}

#[tokio::test]
async fn bodies_that_azure_refuses_are_refused() {
    let cloud = start().await;
    let with = |pointer: &str, value: Value| {
        let mut body = body("pod");
        *body.pointer_mut(pointer).unwrap() = value;
        code(&create(&cloud, "pod", &body))
    };
    let generalized = json!({"id": Azure::image("generalized")});
    let arm = json!({"id": Azure::image("peerpod-arm")});
    let network = "/properties/networkProfile";
    for (pointer, value, status, expected) in [
        ("/location", json!("northeurope"), 400, "LocationRequired"),
        ("/zones", json!(["9"]), 400, "InvalidAvailabilityZone"),
        ("/tags", json!({"a/b": "c"}), 400, "InvalidTagNameCharacters"),
        ("/properties/userData", json!("x".repeat(65_540)), 400, "InvalidParameter"),
        ("/properties/hardwareProfile/vmSize", json!("Standard_Z9"), 400, "InvalidParameter"),
        ("/properties/hardwareProfile/vmSize", json!("Standard_F2s_v2"), 409, "SkuNotAvailable"),
        ("/properties/hardwareProfile/vmSize", json!("Standard_DC2as_v5"), 400, "BadRequest"),
        ("/properties/storageProfile/imageReference", generalized, 400, "InvalidParameter"),
        ("/properties/storageProfile/imageReference", arm, 400, "BadRequest"),
        ("/properties/storageProfile/imageReference", json!({}), 404, "PlatformImageNotFound"),
        (&format!("{network}/networkApiVersion"), json!("2024-01-01"), 400, "InvalidParameter"),
        (
            &format!(
                "{network}/networkInterfaceConfigurations/0/properties/ipConfigurations/0/properties/subnet/id"
            ),
            json!(Azure::subnet("third")),
            400,
            "InvalidResourceReference",
        ),
    ] {
        assert_eq!(with(pointer, value), (status, expected.to_owned()), "{pointer}");
    }
    assert_eq!(cloud.with(|azure, _| azure.nics.all().count() + azure.disks.all().count()), 0);
    assert_eq!(with("/zones", json!(["2"])), (201, "(none)".to_owned()));
}

#[tokio::test]
async fn a_disk_is_attached_once_in_its_zone() {
    let cloud = start().await;
    cloud.set_times(Duration::ZERO, Duration::ZERO);
    let (near, far) = cloud
        .with(|azure, world| (azure.add_disk("near", "1", world.now), azure.add_disk("far", "2", world.now)));
    create(&cloud, "pod", &body("pod"));
    let change = |list: &str, disk: &str, lun: u64| {
        let body = json!({list: [{"diskId": disk, "lun": lun}]});
        code(&cloud.call("POST", &vm("/pod/attachDetachDataDisks"), &[], Some(&body)).unwrap())
    };
    let none = "(none)".to_owned();
    assert_eq!(change("dataDisksToAttach", &far, 0), (400, "BadRequest".to_owned()));
    assert_eq!(change("dataDisksToAttach", &near, 3), (202, none.clone()));
    assert_eq!(change("dataDisksToAttach", &near, 4), (409, "ConflictingUserInput".to_owned()));
    let seen = cloud.ask("GET", &vm("/pod"), None).value();
    assert_eq!(seen["properties"]["storageProfile"]["dataDisks"][0]["lun"], 3);
    let disk = cloud.ask("GET", &path("Microsoft.Compute/disks", "/NEAR"), None).value();
    assert!(
        disk["managedBy"].as_str().unwrap().ends_with("/pod")
            && disk["properties"]["diskState"] == "Attached"
    );
    assert_eq!(change("dataDisksToDetach", &near, 0), (202, none));
    let mut with_disk = body("two");
    with_disk["properties"]["storageProfile"]["dataDisks"] =
        json!([{"lun": 0, "createOption": "Attach", "deleteOption": "Detach", "managedDisk": {"id": near}}]);
    assert_eq!(create(&cloud, "two", &with_disk).status, 201);
    cloud.call("DELETE", &vm("/two"), &[], None).unwrap();
    assert_eq!(cloud.ask("GET", &vm("/two"), None).status, 404);
    assert_eq!(cloud.with(|azure, _| azure.disks.get("near").unwrap().vm.clone()), None);
}

#[tokio::test]
async fn a_list_has_pages_and_can_be_stale() {
    let cloud = start().await;
    cloud.with(|azure, _| azure.page = 2);
    for name in ["a", "b", "c"] {
        create(&cloud, name, &body(name));
    }
    let first = cloud.call("GET", &vm(""), &[], None).unwrap().value();
    let next = first["nextLink"].as_str().unwrap().strip_prefix(&cloud.endpoint()).unwrap().to_owned();
    let second = cloud.call("GET", &next, &[], None).unwrap().value();
    assert_eq!((first["value"].as_array().unwrap().len(), second["value"].as_array().unwrap().len()), (2, 1));
    assert!(second.get("nextLink").is_none());
    assert!(
        first["value"][0]["id"].as_str().unwrap().contains("/resourceGroups/PODS/"),
        "lists change the case"
    );
    cloud.fail("VirtualMachines_List", Fault::StaleList(SECOND), 1);
    let stale = cloud.call("GET", &vm(""), &[], None).unwrap().value();
    assert_eq!(stale["value"], json!([]));
}

#[tokio::test]
async fn too_many_calls_are_refused_by_the_buckets() {
    let cloud = start().await;
    create(&cloud, "pod", &body("pod"));
    cloud.set_rates(1.0);
    let get = || cloud.call("GET", &vm("/pod"), &[], None).unwrap();
    let left = get().get("x-ms-ratelimit-remaining-resource").to_owned();
    assert!(left.contains("GetVMResource.pod;35"), "{left}");
    let answers: Vec<Answer> = (0..40).map(|_| get()).collect();
    assert_eq!(answers.iter().filter(|answer| answer.status == 429).count(), 5);
    assert!(answers.last().unwrap().get("retry-after").parse::<u64>().unwrap() <= 5);
    cloud.advance(5 * SECOND);
    assert_eq!(get().status, 200);
}

#[tokio::test]
async fn rights_are_recorded_and_can_be_missing() {
    let cloud = start().await;
    create(&cloud, "pod", &body("pod"));
    let rights = cloud.rights();
    assert!(rights.contains("Microsoft.Compute/virtualMachines/write"));
    assert!(rights.contains("Microsoft.Network/virtualNetworks/subnets/join/action"), "{rights:?}");
    cloud.deny("Microsoft.Network/virtualNetworks/subnets/join/action");
    assert_eq!(code(&create(&cloud, "two", &body("two"))), (403, "AuthorizationFailed".to_owned()));
}

#[tokio::test]
async fn the_console_is_read_by_its_signed_url_alone() {
    let cloud = start().await;
    create(&cloud, "pod", &body("pod"));
    let urls = cloud.call("POST", &vm("/pod/retrieveBootDiagnosticsData"), &[], None).unwrap().value();
    let url =
        urls["serialConsoleLogBlobUri"].as_str().unwrap().strip_prefix(&cloud.endpoint()).unwrap().to_owned();
    assert_eq!(cloud.ask("GET", &url, None).body, "pod boots\n");
    assert_eq!(cloud.call("GET", &url, &[], None).unwrap().status, 403, "it came with a token");
    let off = cloud.with(|azure, _| {
        azure.vms.get_mut("pod").unwrap().state = State::Stopped;
        azure.vms.get("pod").unwrap().state
    });
    assert_eq!(off, State::Stopped);
    assert!(statuses(&cloud, "pod").contains("PowerState/stopped"));
}

#[tokio::test]
async fn an_interface_that_a_vm_left_is_reserved_for_a_time() {
    let cloud = start().await;
    cloud.with(|azure, _| (azure.keeps_nics, azure.nic_reserve) = (true, 180 * SECOND));
    create(&cloud, "pod", &body("pod"));
    let nic = path("Microsoft.Network/networkInterfaces", "/pod-nic");
    let delete = || cloud.call("DELETE", &nic, &[], None).unwrap();
    assert_eq!(code(&delete()), (400, "NicInUse".to_owned()));
    cloud.call("DELETE", &vm("/pod"), &[], None).unwrap();
    assert_eq!(cloud.ask("GET", &vm("/pod"), None).status, 404);
    assert_eq!(code(&delete()), (400, "NicReservedForAnotherVm".to_owned()));
    assert_eq!(code(&create(&cloud, "pod", &body("pod"))), (400, "NicReservedForAnotherVm".to_owned()));
    cloud.advance(180 * SECOND);
    assert_eq!(delete().status, 202);
    assert_eq!(cloud.with(|azure, _| azure.nics.all().count()), 0);
}
