//! Asks the vendors' models and clients whether the fakes are like their clouds.

use std::time::Duration;

use peerpod_test_clouds::alibaba::{GROUP as SECURITY_GROUP, IMAGES, REGION as BEIJING, VSWITCHES};
use peerpod_test_clouds::azure::{GROUP, SUBSCRIPTION};
use peerpod_test_clouds::gcp::{PROJECT, REGION, ZONES};
use peerpod_test_clouds::witness::{
    alibaba_client, azure_client, azure_models, google_client, google_document,
};
use peerpod_test_clouds::{Alibaba, Azure, Cloud, Gcp};
use serde_json::{Value, json};

use super::{azure, gcp};

const COMPUTE: &str = "Microsoft.Compute";
const NETWORK: &str = "Microsoft.Network";

/// Calls everything that the fake of Azure answers with a resource.
fn call_all_of_azure(cloud: &Cloud<Azure>) {
    let call = |method: &str, target: &str, body: Option<&Value>| {
        let answer = cloud.call(method, target, &[("if-none-match", "*")], body).unwrap();
        assert!(answer.status < 300, "{method} {target}: {}", answer.value());
    };
    let disk = cloud.with(|azure, world| azure.add_disk("data", "1", world.now));
    let mut body = azure::body("pod");
    let address = "/properties/networkProfile/networkInterfaceConfigurations/0/properties/ipConfigurations/0/properties";
    body.pointer_mut(address).unwrap()["publicIPAddressConfiguration"] =
        json!({"name": "pod-ip", "sku": {"name": "Standard"}, "properties": {"deleteOption": "Delete"}});
    call("PUT", &azure::vm("/pod"), Some(&body));
    let mut confidential = azure::body("secret");
    confidential["properties"]["hardwareProfile"]["vmSize"] = json!("Standard_DC2as_v5");
    confidential["properties"]["priority"] = json!("Spot");
    confidential["properties"]["evictionPolicy"] = json!("Delete");
    confidential["properties"]["billingProfile"] = json!({"maxPrice": -1});
    let firmware = json!({"vTpmEnabled": true, "secureBootEnabled": false});
    confidential["properties"]["securityProfile"] =
        json!({"securityType": "ConfidentialVM", "uefiSettings": firmware});
    confidential["properties"]["storageProfile"]["osDisk"]["managedDisk"]["securityProfile"] =
        json!({"securityEncryptionType": "VMGuestStateOnly"});
    call("PUT", &azure::vm("/secret"), Some(&confidential));
    let attach = json!({"dataDisksToAttach": [{"diskId": disk, "lun": 2, "deleteOption": "Detach"}]});
    call("POST", &azure::vm("/pod/attachDetachDataDisks"), Some(&attach));
    call("POST", &azure::vm("/pod/retrieveBootDiagnosticsData"), None);
    let nic = cloud.with(|azure, world| azure.add_nic("left", &json!({"peerpod.key": "k"}), world.now));
    assert!(nic.ends_with("/left"));
    for rest in ["/pod?$expand=instanceView", "/pod?$expand=userData", "/pod/instanceView", ""] {
        call("GET", &azure::vm(rest), None);
    }
    for (kind, rest) in [
        (NETWORK, "/networkInterfaces"),
        (NETWORK, "/networkInterfaces/left"),
        (NETWORK, "/publicIPAddresses"),
        (NETWORK, "/publicIPAddresses/pod-ip"),
        (NETWORK, "/virtualNetworks/pods/subnets/default"),
        (NETWORK, "/networkSecurityGroups/pods"),
        (COMPUTE, "/disks"),
        (COMPUTE, "/disks/data"),
        (COMPUTE, "/galleries/pods/images/peerpod"),
        (COMPUTE, "/galleries/pods/images/peerpod/versions/1.0.0"),
    ] {
        call("GET", &azure::path(kind, rest), None);
    }
    let region = format!("/subscriptions/{SUBSCRIPTION}/providers/{COMPUTE}");
    let gallery = format!("{region}/locations/westeurope/communityGalleries/pods-0000/images/peerpod");
    for target in [
        format!("/subscriptions/{SUBSCRIPTION}/providers/{COMPUTE}/virtualMachines?statusOnly=true"),
        format!("{region}/skus?$filter=location%20eq%20'westeurope'"),
        format!("{region}/locations/westeurope/usages"),
        gallery.clone(),
        format!("{gallery}/versions/1.0.0"),
    ] {
        let mark = if target.contains('?') { '&' } else { '?' };
        call("GET", &format!("{target}{mark}api-version=2024-07-01"), None);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn microsofts_models_know_all_of_the_fakes_answers() {
    let cloud = azure::start().await;
    cloud.set_times(Duration::ZERO, Duration::ZERO);
    call_all_of_azure(&cloud);
    assert_eq!(azure_models(&cloud.calls()).unwrap(), Vec::<String>::new());
    cloud.forget_calls();
    let mut wrong = azure::body("wrong");
    wrong["properties"]["storageProfile"]["osDisk"]["deleteOptions"] = json!("Delete");
    wrong["properties"]["networkProfile"]["networkInterfaceConfigurations"][0]["properties"]["primary"] =
        json!("true");
    cloud.call("PUT", &azure::vm("/wrong"), &[("if-none-match", "*")], Some(&wrong)).unwrap();
    let found = azure_models(&cloud.calls()).unwrap().join("\n");
    assert!(found.contains("bool"), "a wrong type: {found}");
    let mut misspelt = azure::body("misspelt");
    misspelt["properties"]["storageProfile"]["osDisk"]["deleteOptions"] = json!("Delete");
    cloud.call("PUT", &azure::vm("/misspelt"), &[("if-none-match", "*")], Some(&misspelt)).unwrap();
    let found = azure_models(&cloud.calls()).unwrap().join("\n");
    assert!(found.contains("osDisk/deleteOptions: the model does not know it"), "{found}");
    let mut word = azure::body("word");
    word["properties"]["storageProfile"]["osDisk"]["caching"] = json!("Readonly");
    cloud.call("PUT", &azure::vm("/word"), &[("if-none-match", "*")], Some(&word)).unwrap();
    let found = azure_models(&cloud.calls()).unwrap().join("\n");
    assert!(found.contains("\"Readonly\" is none of"), "{found}");
}

#[tokio::test(flavor = "multi_thread")]
async fn microsofts_client_makes_lists_and_deletes_vms() {
    let cloud = Cloud::start(Azure::default()).await.unwrap();
    cloud.set_times(Duration::from_millis(20), Duration::from_millis(20));
    let one = json!({"resource_group_name": GROUP, "vm_name": "pod"});
    let mut create = one.clone();
    create["parameters"] = azure::body("pod");
    create["if_none_match"] = json!(true);
    let made = azure_client(&cloud, "virtual_machines.begin_create_or_update", &create).unwrap();
    assert_eq!(made["properties"]["provisioningState"], "Succeeded");
    let again = azure_client(&cloud, "virtual_machines.begin_create_or_update", &create).unwrap_err();
    assert!(format!("{again:#}").contains("PreconditionFailed"), "{again:#}");
    let mut view = one.clone();
    view["expand"] = json!("instanceView");
    let seen = azure_client(&cloud, "virtual_machines.get", &view).unwrap();
    assert_eq!(seen["properties"]["instanceView"]["statuses"][1]["code"], "PowerState/running");
    let group = json!({"resource_group_name": GROUP});
    let disk = cloud.with(|azure, world| azure.add_disk("data", "1", world.now));
    let mut attach = one.clone();
    attach["parameters"] = json!({"dataDisksToAttach": [{"diskId": disk, "lun": 2}]});
    let attached = azure_client(&cloud, "virtual_machines.begin_attach_detach_data_disks", &attach).unwrap();
    assert_eq!(attached["dataDisks"][0]["lun"], 2);
    let listed = azure_client(&cloud, "virtual_machines.list", &group).unwrap();
    assert_eq!((listed.as_array().unwrap().len(), &listed[0]["name"]), (1, &json!("pod")));
    let nics = azure_client(&cloud, "network.network_interfaces.list", &group).unwrap();
    let address = &nics[0]["properties"]["ipConfigurations"][0]["properties"]["privateIPAddress"];
    assert!(address.as_str().is_some_and(|address| address.starts_with("10.")), "{nics}");
    let skus =
        azure_client(&cloud, "resource_skus.list", &json!({"filter": "location eq 'westeurope'"})).unwrap();
    assert!(skus.as_array().unwrap().iter().any(|sku| sku["name"] == "Standard_D2s_v5"));
    azure_client(&cloud, "virtual_machines.begin_delete", &one).unwrap();
    assert_eq!(azure_client(&cloud, "virtual_machines.list", &group).unwrap(), json!([]));
    cloud.set_stock("*", "*", "on-demand", 0);
    let refused = azure_client(&cloud, "virtual_machines.begin_create_or_update", &create).unwrap_err();
    assert!(format!("{refused:#}").contains("ZonalAllocationFailed"), "{refused:#}");
}

/// Calls everything that the fake of Google's answers.
fn call_all_of_google(cloud: &Cloud<Gcp>) {
    let call = |method: &str, target: &str, body: Option<&Value>| {
        let answer = cloud.call(method, target, &[], body).unwrap();
        assert!(answer.status < 300, "{method} {target}: {}", answer.value());
        answer.value()
    };
    let disk = cloud.with(|gcp, world| gcp.add_disk("data", ZONES[0], world.now));
    cloud.with(|gcp, world| gcp.add_disk("both", "", world.now));
    let id = "11111111-1111-4111-8111-111111111111";
    let mut body = gcp::body("pod");
    body["networkInterfaces"][0]["accessConfigs"] =
        json!([{"type": "ONE_TO_ONE_NAT", "networkTier": "PREMIUM"}]);
    body["scheduling"] = json!({"provisioningModel": "SPOT", "instanceTerminationAction": "DELETE",
        "automaticRestart": false, "onHostMaintenance": "TERMINATE"});
    let made = call("POST", &gcp::zonal(&format!("instances?requestId={id}")), Some(&body));
    let names = json!({"count": "2", "minCount": "1", "perInstanceProperties": {"a": {}, "b": {}},
        "instanceProperties": gcp::properties()});
    cloud.set_stock("*", "*", "on-demand", 1);
    call("POST", &gcp::zonal("instances/bulkInsert"), Some(&names));
    cloud.set_stock("*", "*", "on-demand", 0);
    let regional = json!({"count": "1", "namePattern": "r-#", "instanceProperties": gcp::properties(),
        "locationPolicy": {"locations": {format!("zones/{}", ZONES[0]): {"preference": "ALLOW"}}, "targetShape": "ANY"}});
    let refused =
        call("POST", &gcp::path(&format!("regions/{REGION}/instances/bulkInsert")), Some(&regional));
    cloud.advance(Duration::from_secs(20));
    let attach = json!({"source": disk, "deviceName": "data", "mode": "READ_ONLY", "autoDelete": false});
    call("POST", &gcp::zonal("instances/pod/attachDisk"), Some(&attach));
    cloud.with(|gcp, _| gcp.unreachable.insert(ZONES[2].to_owned()));
    let name = |operation: &Value| operation["name"].as_str().unwrap().to_owned();
    for rest in [
        "instances".to_owned(),
        "instances/pod".to_owned(),
        "instances/pod/serialPort?port=1&start=-4".to_owned(),
        format!("operations/{}", name(&made)),
        format!("operations?filter=clientOperationId%3D%22{id}%22"),
        "disks".to_owned(),
        "disks/data".to_owned(),
        "machineTypes?maxResults=500".to_owned(),
        "machineTypes/n2-standard-2".to_owned(),
    ] {
        call("GET", &gcp::zonal(&rest), None);
    }
    for rest in [
        String::new(),
        "zones".to_owned(),
        format!("zones/{}", ZONES[0]),
        format!("regions/{REGION}"),
        format!("regions/{REGION}/disks/both"),
        format!("regions/{REGION}/subnetworks/pods"),
        format!("regions/{REGION}/operations/{}", name(&refused)),
        "aggregated/instances?maxResults=500".to_owned(),
        "global/images/peerpod".to_owned(),
        "global/images/family/pods".to_owned(),
        "global/networks/pods".to_owned(),
    ] {
        call("GET", gcp::path(&rest).trim_end_matches('/'), None);
    }
    call("POST", &gcp::zonal("instances/pod/detachDisk?deviceName=data"), None);
    call("DELETE", &gcp::zonal("instances/pod"), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn googles_document_describes_all_of_the_fakes_answers() {
    let cloud = gcp::start().await;
    call_all_of_google(&cloud);
    assert_eq!(google_document(&cloud.calls()).unwrap(), Vec::<String>::new());
    cloud.forget_calls();
    let mut wrong = gcp::body("Wrong");
    wrong["scheduling"] = json!({"provisioningModel": "spot"});
    wrong["networkInterfaces"][0]["nic"] = json!("GVNIC");
    wrong["disks"][0]["initializeParams"]["diskSizeGb"] = json!(10);
    cloud.call("POST", &gcp::zonal("instances?request_id=1"), &[], Some(&wrong)).unwrap();
    let found = google_document(&cloud.calls()).unwrap().join("\n");
    for mistake in ["body/name", "provisioningModel", "networkInterfaces/0/nic:", "diskSizeGb", "request_id"]
    {
        assert!(found.contains(mistake), "{mistake}: {found}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn googles_client_makes_lists_and_deletes_instances() {
    let cloud = Cloud::start(Gcp::default()).await.unwrap();
    let zone = ZONES[0];
    let place = json!({"project": PROJECT, "zone": zone});
    let with = |more: &[(&str, Value)]| {
        let mut request = place.clone();
        more.iter().for_each(|(name, value)| request[*name] = value.clone());
        request
    };
    let id = json!("11111111-1111-4111-8111-111111111111");
    let create = with(&[("instanceResource", gcp::body("pod")), ("requestId", id.clone())]);
    let made = google_client(&cloud, "InstancesClient.insert", &create).unwrap();
    let again = google_client(&cloud, "InstancesClient.insert", &create).unwrap();
    assert_eq!(made["name"], again["name"]);
    let other =
        google_client(&cloud, "InstancesClient.insert", &with(&[("instanceResource", gcp::body("pod"))]));
    assert!(format!("{:#}", other.unwrap_err()).contains("already exists"));
    let bulk = json!({"count": "2", "perInstanceProperties": {"a": {}, "b": {}}, "instanceProperties": gcp::properties()});
    google_client(
        &cloud,
        "InstancesClient.bulk_insert",
        &with(&[("bulkInsertInstanceResourceResource", bulk)]),
    )
    .unwrap();
    let filter = ("filter", json!("labels.peerpod-cluster = \"c\""));
    let listed =
        google_client(&cloud, "InstancesClient.list", &with(&[filter, ("maxResults", json!(2))])).unwrap();
    let names: Vec<&str> =
        listed.as_array().unwrap().iter().map(|one| one["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["a", "b", "pod"]);
    let seen = google_client(&cloud, "InstancesClient.get", &with(&[("instance", json!("pod"))])).unwrap();
    assert_eq!(seen["status"], "RUNNING");
    google_client(&cloud, "InstancesClient.delete", &with(&[("instance", json!("pod"))])).unwrap();
    let gone = google_client(&cloud, "InstancesClient.get", &with(&[("instance", json!("pod"))]));
    assert!(format!("{:#}", gone.unwrap_err()).contains("was not found"));
    let machines = google_client(&cloud, "MachineTypesClient.list", &place).unwrap();
    assert!(machines.as_array().unwrap().iter().any(|one| one["name"] == "n2-standard-2"));
}

/// Alibaba Cloud's client sends everything in the query.
#[tokio::test(flavor = "multi_thread")]
async fn alibabas_client_makes_lists_and_deletes_instances() {
    let cloud = Cloud::start(Alibaba::default()).await.unwrap();
    let ask = |operation: &str, request: Value| alibaba_client(&cloud, operation, &request).unwrap();
    let nic =
        json!({"InstanceType": "Primary", "VSwitchId": VSWITCHES[0], "SecurityGroupIds": [SECURITY_GROUP]});
    let made = ask(
        "run_instances",
        json!({"RegionId": BEIJING, "ClientToken": "one", "Amount": 2, "MinAmount": 1, "ImageId": IMAGES[0],
            "InstanceType": "ecs.g7.large", "NetworkInterface": [nic], "UserData": "e30=",
            "SystemDisk": {"Category": "cloud_essd", "Size": "20"}, "Tag": [{"Key": "peerpod.cluster", "Value": "c"}]}),
    );
    let ids = made["InstanceIdSets"]["InstanceIdSet"].as_array().unwrap().clone();
    assert_eq!(ids.len(), 2, "{made}");
    let by_tag =
        json!({"RegionId": BEIJING, "Tag": [{"Key": "peerpod.cluster", "Value": "c"}], "MaxResults": 100});
    assert_eq!(ask("describe_instances", by_tag)["Instances"]["Instance"].as_array().unwrap().len(), 2);
    ask("delete_instances", json!({"RegionId": BEIJING, "InstanceId": ids, "Force": true}));
    let left = ask("describe_instances", json!({"RegionId": BEIJING}));
    assert_eq!(left["Instances"]["Instance"], json!([]));
}
