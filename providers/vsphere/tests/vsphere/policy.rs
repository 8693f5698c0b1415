//! Checks that `role.txt` allows exactly the calls that a whole life of VMs needs. The simulator has no roles, so the
//! table below has the privileges of each method, as vSphere's API reference requires them.

use std::collections::BTreeSet;

use peerpod_provider_api::{CreateRequest, DiskRequest, Provider};
use peerpod_test_clouds::vcsim::DATASTORES;
use serde_json::json;

use super::common::{Site, key, placed, request};

/// Methods that need no privilege besides those to see an object.
const READS: [&str; 12] = [
    "ContinueRetrievePropertiesEx",
    "CreateContainerView",
    "CreateFilter",
    "CreatePropertyCollector",
    "FindByInventoryPath",
    "FindChild",
    "Login",
    "RetrievePropertiesEx",
    "RetrieveServiceContent",
    "RetrieveVStorageObject",
    "WaitForUpdatesEx",
    "System",
];

/// Returns the privileges of a method, with the changes that this provider makes by it.
fn privileges(method: &str) -> &'static [&'static str] {
    match method {
        "CloneVM_Task" => &[
            "VirtualMachine.Provisioning.DeployTemplate",
            "VirtualMachine.Provisioning.Clone",
            "VirtualMachine.Inventory.CreateFromExisting",
            "VirtualMachine.Config.AddNewDisk",
            "VirtualMachine.Config.CPUCount",
            "VirtualMachine.Config.Memory",
            "VirtualMachine.Config.AdvancedConfig",
            "VirtualMachine.Config.Annotation",
            "VirtualMachine.Config.AddRemoveDevice",
            "VirtualMachine.Config.EditDevice",
            "VirtualMachine.Interact.PowerOn",
            "Resource.AssignVMToPool",
            "Datastore.AllocateSpace",
            "Network.Assign",
        ],
        "PowerOnVM_Task" => &["VirtualMachine.Interact.PowerOn"],
        "PowerOffVM_Task" => &["VirtualMachine.Interact.PowerOff"],
        "ReconfigVM_Task" => &[
            "VirtualMachine.Config.AdvancedConfig",
            "VirtualMachine.Config.AddExistingDisk",
            "VirtualMachine.Config.RemoveDisk",
        ],
        "AttachDisk_Task" => &["VirtualMachine.Config.AddExistingDisk", "Datastore.FileManagement"],
        "DetachDisk_Task" => &["VirtualMachine.Config.RemoveDisk"],
        "Destroy_Task" => &["VirtualMachine.Inventory.Delete"],
        "CreateFolder" => &["Folder.Create"],
        _ if method.starts_with("GET /folder/") => &["Datastore.Browse"],
        _ if READS.contains(&method) => &["System.Read", "System.View"],
        _ => panic!("the table lacks {method}"),
    }
}

fn allowed() -> BTreeSet<&'static str> {
    let lines = include_str!("../../role.txt").lines();
    lines.filter(|line| !line.is_empty() && !line.starts_with('#')).collect()
}

fn needed(site: &Site) -> BTreeSet<&'static str> {
    site.vcsim.calls().iter().flat_map(|method| privileges(method)).copied().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_role_allows_exactly_our_calls() {
    let site = Site::start();
    let provider = site.provider(&[]);
    provider.preflight().await.unwrap();
    let wish = CreateRequest { second_nic: true, ..request("web-0") };
    let wish = placed(&*provider, &wish).await.unwrap();
    let made = provider.create(&wish, &key("role", 0)).await.unwrap();
    provider.addresses(&made.id).await.unwrap();
    site.vcsim.order(&json!({"op": "power-off", "name": made.id.as_str()}));
    provider.create(&wish, &key("role", 0)).await.unwrap();
    let volumes = provider.extensions().volumes.unwrap();
    let (id, _) = site.vcsim.first_class_disk("pvc-1", DATASTORES[0]);
    let path = format!("[{}] a.vmdk", DATASTORES[0]);
    site.vcsim.plain_disk(&path);
    for volume in [id, path] {
        volumes
            .attach(&made.id, &DiskRequest { volume: volume.clone(), ..DiskRequest::default() })
            .await
            .unwrap();
        volumes.detach(&made.id, &volume).await.unwrap();
    }
    provider.extensions().console.unwrap().tail(&made.id, 100).await.unwrap();
    provider.list_owned().await.unwrap();
    provider.delete(&made.id).await.unwrap();
    assert_eq!(needed(&site), allowed(), "left: our calls; right: the calls that the role allows");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_controller_changes_vms_by_four_methods() {
    let site = Site::start();
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("controller", 0)).await.unwrap();
    let (id, _) = site.vcsim.first_class_disk("pvc-1", DATASTORES[0]);
    let volumes = provider.extensions().volumes.unwrap();
    volumes.attach(&made.id, &DiskRequest { volume: id, ..DiskRequest::default() }).await.unwrap();
    site.vcsim.forget_calls();
    let collector = site.collector();
    assert_eq!(collector.list_owned().await.unwrap().len(), 1);
    collector.addresses(&made.id).await.unwrap();
    collector.delete(&made.id).await.unwrap();
    let methods: BTreeSet<String> = site.vcsim.calls().into_iter().collect();
    let changes: Vec<&str> =
        methods.iter().map(String::as_str).filter(|method| !READS.contains(method)).collect();
    assert_eq!(changes, ["Destroy_Task", "DetachDisk_Task", "PowerOffVM_Task", "ReconfigVM_Task"]);
}
