//! Checks that disks outlive the VMs that have them: a destroy of vSphere deletes the files of all attached disks.

use std::time::Duration;

use peerpod_provider_api::{DiskIdentity, DiskRequest, InstanceId, Provider};
use peerpod_provider_vsphere::VsphereProvider;
use peerpod_test_clouds::Fault;
use peerpod_test_clouds::vcsim::{Break, DATASTORES};
use peerpod_tests::report;
use serde_json::json;
use tokio::time::timeout;

use super::common::{Site, TestCloud, key, placed, request, says};

/// VM with disks of others: a first-class disk and a file that the provider attached, and a file that another program
/// attached.
struct Laden {
    id: InstanceId,
    /// Files of the disks.
    files: Vec<String>,
}

fn disk(volume: &str) -> DiskRequest {
    DiskRequest { volume: volume.to_owned(), ..DiskRequest::default() }
}

async fn laden(site: &Site, provider: &VsphereProvider, number: u32) -> Laden {
    let wish = placed(provider, &request(&format!("pod-{number}"))).await.unwrap();
    let made = provider.create(&wish, &key("disks", number)).await.unwrap();
    let (id, first_class) = site.vcsim.first_class_disk(&format!("pvc-{number}"), DATASTORES[1]);
    let own = format!("[{}] own-{number}.vmdk", DATASTORES[0]);
    let foreign = format!("[{}] foreign-{number}.vmdk", DATASTORES[1]);
    site.vcsim.plain_disk(&own);
    site.vcsim.plain_disk(&foreign);
    let volumes = provider.extensions().volumes.unwrap();
    volumes.attach(&made.id, &disk(&id)).await.unwrap();
    volumes.attach(&made.id, &disk(&own)).await.unwrap();
    site.vcsim.order(&json!({"op": "attach", "name": made.id.as_str(), "path": foreign}));
    let files = vec![first_class, own, foreign];
    let has = site.vcsim.vm(made.id.as_str()).unwrap()["Disks"].clone();
    for file in &files {
        assert!(has.as_array().unwrap().contains(&json!(file)), "{file} in {has}");
    }
    Laden { id: made.id, files }
}

/// Returns the disks that are gone.
fn lost(site: &Site, laden: &Laden) -> usize {
    laden.files.iter().filter(|file| !site.vcsim.exists(file)).count()
}

/// Deletes VMs with disks, with the process killed before and after each change of a delete, and deleted again by another
/// process.
#[tokio::test(flavor = "multi_thread")]
async fn every_disk_outlives_a_delete_that_is_killed_at_any_step() {
    let site = Site::start();
    let provider = site.provider(&[]);
    let first = laden(&site, &provider, 0).await;
    let root = site.vcsim.vm(first.id.as_str()).unwrap()["Disks"][0].as_str().unwrap().to_owned();
    site.vcsim.break_at(Break::Before(usize::MAX));
    provider.delete(&first.id).await.unwrap();
    let (steps, mut deleted) = (site.vcsim.changes(), lost(&site, &first));
    site.vcsim.heal();
    assert!(steps >= 6, "mark, power-off, three disks and destroy: {steps}");
    assert!(!site.vcsim.exists(&root), "the VM's own disk goes with it");
    let breaks = (0..steps).flat_map(|step| [Break::Before(step), Break::After(step)]);
    for (number, at) in (1..).zip(breaks) {
        let laden = laden(&site, &provider, number).await;
        site.vcsim.break_at(at);
        let killed = site.provider(&[]);
        drop(timeout(Duration::from_millis(300), killed.delete(&laden.id)).await);
        drop(killed);
        deleted += lost(&site, &laden);
        site.vcsim.heal();
        let again = site.provider(&[]);
        let repeated = async {
            while let Err(error) = again.delete(&laden.id).await {
                assert_eq!(error.class(), "transient", "{at:?}: {error}");
            }
        };
        timeout(peerpod_tests::cloud::PATIENCE, repeated).await.unwrap();
        deleted += lost(&site, &laden);
        assert!(site.vcsim.vm(laden.id.as_str()).is_none(), "{at:?}");
    }
    report("vsphere_deleted_foreign_disks", deleted as f64);
    assert_eq!((deleted, site.ids().await.len()), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_cannot_be_detached_keeps_its_vm() {
    let site = Site::start();
    let provider = site.provider(&[]);
    let laden = laden(&site, &provider, 0).await;
    site.vcsim.fail("DetachDisk_Task", Fault::refuse_late("NoPermission", ""), 1);
    let error = provider.delete(&laden.id).await.unwrap_err();
    says(&error, "auth", &["NoPermission", "role.txt"]);
    assert_eq!((site.vcsim.count("Destroy_Task"), lost(&site, &laden)), (0, 0));
    provider.delete(&laden.id).await.unwrap();
    assert_eq!(lost(&site, &laden), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_create_deletes_no_disk_of_the_template() {
    let site = Site::start();
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("late")).await.unwrap();
    site.vcsim.order(&json!({"op": "late", "method": "CloneVM_Task", "fault": "NoDiskSpace", "made": true}));
    let error = provider.create(&wish, &key("late", 0)).await.unwrap_err();
    says(&error, "capacity", &["NoDiskSpace", "free space"]);
    assert!(site.vcsim.vms().is_empty());
    assert!(site.vcsim.exists(&format!("[{}] DC0_C0_RP0_VM0/disk1.vmdk", DATASTORES[0])));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_keeps_its_identity_and_is_on_one_vm() {
    let site = Site::start();
    let provider = site.provider(&[]);
    let volumes = provider.extensions().volumes.unwrap();
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("identity", 0)).await.unwrap();
    let other = provider.create(&wish, &key("identity", 1)).await.unwrap();
    let (id, _) = site.vcsim.first_class_disk("pvc-1", DATASTORES[1]);
    let identity = volumes.attach(&made.id, &disk(&id)).await.unwrap();
    let DiskIdentity::Wwn(wwn) = &identity else { panic!("{identity:?}") };
    assert!(wwn.starts_with("naa.6000c29") && wwn.len() == 36, "{wwn}");
    assert_eq!(volumes.attach(&made.id, &disk(&id)).await.unwrap(), identity, "repeated");
    let error = volumes.attach(&other.id, &disk(&id)).await.unwrap_err();
    says(&error, "transient", &["ResourceInUse", "end the pod or VM"]);
    volumes.detach(&made.id, &id).await.unwrap();
    volumes.detach(&made.id, &id).await.unwrap();
    assert_eq!(volumes.attach(&other.id, &disk(&id)).await.unwrap(), identity, "on another VM");
    let error = volumes.attach(&made.id, &disk("11111111-2222-3333-4444-555555555555")).await.unwrap_err();
    says(&error, "not_found", &["no datastore of DC0"]);
    let error = volumes.attach(&made.id, &disk("pvc-1")).await.unwrap_err();
    says(&error, "invalid", &["`pvc-1` is no disk", "first-class disk"]);
}
