//! Checks that things of others outlive the VMs of pods: a destroy of vSphere deletes the files of all disks that a VM and
//! its snapshots have.

use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use peerpod_base::config::{Reader, Sources};
use peerpod_provider_api::{DiskIdentity, DiskRequest, Error, InstanceId, OwnedState, Provider};
use peerpod_provider_vsphere::{VsphereConfig, VsphereProvider};
use peerpod_test_clouds::Fault;
use peerpod_test_clouds::vcsim::{Break, DATASTORES};
use peerpod_tests::cloud::PATIENCE;
use peerpod_tests::report;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use super::common::{Site, TestCloud, key, owner, placed, request, says};

/// Variable with the work of the process that is killed.
const WORK: &str = "PEERPOD_TEST_WORK";
/// Prefix of the variables with the provider's settings.
const SETTING: &str = "PEERPOD_PROVIDER_VSPHERE_";

/// VM, and disks of others: a first-class disk and a file that are its pod's, and two files that a user attached by hand,
/// one of them in the VM's folder.
struct Laden {
    id: InstanceId,
    /// Volumes of the pod, which are not attached yet.
    volumes: [String; 2],
    /// Files of all disks.
    files: Vec<String>,
}

fn disk(volume: &str) -> DiskRequest {
    DiskRequest { volume: volume.to_owned(), ..DiskRequest::default() }
}

async fn laden(site: &Site, provider: &VsphereProvider, number: u32) -> Laden {
    let wish = placed(provider, &request(&format!("pod-{number}"))).await.unwrap();
    let made = provider.create(&wish, &key("disks", number)).await.unwrap();
    let (id, first_class) = site.vcsim.first_class_disk(&format!("pvc-{number}"), DATASTORES[1]);
    let seen = site.vcsim.vm(made.id.as_str()).unwrap();
    let own = format!("[{}] own-{number}.vmdk", DATASTORES[0]);
    let foreign = format!("[{}] foreign-{number}.vmdk", DATASTORES[1]);
    let beside = format!("[{}] {}/by-hand.vmdk", seen["Datastore"].as_str().unwrap(), made.id);
    for file in [&own, &foreign, &beside] {
        site.vcsim.plain_disk(file);
    }
    for file in [&foreign, &beside] {
        site.vcsim.order(&json!({"op": "attach", "name": made.id.as_str(), "path": file}));
    }
    Laden { id: made.id, volumes: [id, own.clone()], files: vec![first_class, own, foreign, beside] }
}

async fn attach(provider: &VsphereProvider, laden: &Laden) -> Result<(), Error> {
    let volumes = provider.extensions().volumes.unwrap();
    for volume in &laden.volumes {
        volumes.attach(&laden.id, &disk(volume)).await?;
    }
    Ok(())
}

/// Attaches the pod's disks, and deletes the VM.
async fn work(provider: &VsphereProvider, laden: &Laden) -> Result<(), Error> {
    attach(provider, laden).await?;
    provider.delete(&laden.id).await
}

/// Returns the number of disks that are gone, and reports that of all tests of this process.
fn lost(site: &Site, laden: &Laden) -> usize {
    static LOST: AtomicUsize = AtomicUsize::new(0);
    let lost = laden.files.iter().filter(|file| !site.vcsim.exists(file)).count();
    report("vsphere_deleted_foreign_disks", (LOST.fetch_add(lost, Ordering::Relaxed) + lost) as f64);
    lost
}

/// Deletes the VM by a process that knows nothing of an earlier one.
async fn cleared(site: &Site, laden: &Laden) {
    assert_eq!(lost(site, laden), 0);
    let again = site.provider(&[]);
    let repeated = async {
        while let Err(error) = again.delete(&laden.id).await {
            assert_eq!(error.class(), "transient", "{error}");
        }
    };
    timeout(PATIENCE, repeated).await.unwrap();
    assert_eq!(lost(site, laden), 0);
    assert!(site.vcsim.vm(laden.id.as_str()).is_none());
}

/// Returns the number of changes of the whole work.
async fn steps(site: &Site) -> usize {
    let provider = site.provider(&[]);
    let laden = laden(site, &provider, 0).await;
    let root = site.vcsim.vm(laden.id.as_str()).unwrap()["Disks"][0].as_str().unwrap().to_owned();
    site.vcsim.break_at(Break::Before(usize::MAX));
    work(&provider, &laden).await.unwrap();
    let steps = site.vcsim.changes();
    site.vcsim.heal();
    cleared(site, &laden).await;
    assert!(!site.vcsim.exists(&root), "the VM's own disk goes with it");
    assert_eq!(steps, 9, "two attaches, mark, power-off, four detaches and destroy");
    steps
}

#[tokio::test(flavor = "multi_thread")]
async fn every_disk_outlives_connections_that_break_at_any_step() {
    let site = Site::start();
    let provider = site.provider(&[]);
    let steps = steps(&site).await;
    let breaks = (0..steps).flat_map(|step| [Break::Before(step), Break::After(step)]);
    for (number, at) in (1..).zip(breaks) {
        let laden = laden(&site, &provider, number).await;
        site.vcsim.break_at(at);
        let broken = site.provider(&[]);
        let worked = timeout(Duration::from_millis(300), work(&broken, &laden)).await;
        assert!(!matches!(worked, Ok(Ok(()))), "{at:?}");
        drop(broken);
        assert_eq!(lost(&site, &laden), 0, "{at:?}");
        site.vcsim.heal();
        cleared(&site, &laden).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_disk_outlives_a_process_that_is_killed_at_any_step() {
    let site = Site::start();
    let provider = site.provider(&[]);
    for (number, step) in (1..).zip(0..steps(&site).await) {
        let laden = laden(&site, &provider, number).await;
        // A task goes on while the process is killed.
        site.vcsim.set_task_time(Duration::from_millis(50));
        site.vcsim.break_at(Break::Before(usize::MAX));
        let variable = |(key, value): (String, String)| {
            (format!("{SETTING}{key}").to_ascii_uppercase().replace('-', "_"), value)
        };
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "disks::the_process_that_is_killed", "--ignored", "--nocapture"])
            .envs(site.settings().into_iter().map(variable))
            .env(WORK, json!({"id": laden.id.as_str(), "volumes": laden.volumes}).to_string())
            .spawn()
            .unwrap();
        let reached = async {
            while site.vcsim.changes() <= step {
                assert!(process.try_wait().unwrap().is_none(), "the process ended before step {step}");
                sleep(Duration::from_millis(2)).await;
            }
        };
        timeout(PATIENCE, reached).await.unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
        cleared(&site, &laden).await;
        site.heal();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "another test runs this in a process of its own, and kills it"]
async fn the_process_that_is_killed() {
    let Ok(told) = std::env::var(WORK) else { return };
    let told: Value = serde_json::from_str(&told).unwrap();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let laden = Laden {
        id: InstanceId::new(text(&told["id"])).unwrap(),
        volumes: [text(&told["volumes"][0]), text(&told["volumes"][1])],
        files: Vec::new(),
    };
    let env = std::env::vars().filter(|(name, _)| name.starts_with(SETTING)).collect();
    let mut reader =
        Reader::load(Sources { env, ..Sources::default() }.for_tests(), &["provider"], &[]).unwrap();
    let provider = VsphereProvider::new(VsphereConfig::read(&mut reader, true), owner("n"));
    work(&provider, &laden).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_cannot_be_detached_keeps_its_vm() {
    let site = Site::start();
    let provider = site.provider(&[]);
    let laden = laden(&site, &provider, 0).await;
    attach(&provider, &laden).await.unwrap();
    site.vcsim.fail("DetachDisk_Task", Fault::refuse_late("NoPermission", ""), 1);
    let error = provider.delete(&laden.id).await.unwrap_err();
    says(&error, "auth", &["NoPermission", "role.txt"]);
    assert_eq!((site.vcsim.count("Destroy_Task"), lost(&site, &laden)), (0, 0));
    cleared(&site, &laden).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_in_a_snapshot_keeps_its_vm() {
    let site = Site::start();
    let provider = site.provider(&[]);
    let laden = laden(&site, &provider, 0).await;
    site.vcsim.order(&json!({"op": "snapshot", "name": laden.id.as_str()}));
    let error = provider.delete(&laden.id).await.unwrap_err();
    says(&error, "transient", &["a snapshot of the VM has a disk", "delete the VM's snapshots"]);
    assert_eq!((site.vcsim.count("Destroy_Task"), lost(&site, &laden)), (0, 0));
    site.vcsim.order(&json!({"op": "remove-snapshots", "name": laden.id.as_str()}));
    cleared(&site, &laden).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_by_hand_is_no_vm_of_ours() {
    let site = Site::start();
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("copy", 0)).await.unwrap();
    let copy = format!("{}_restored", made.id);
    site.vcsim.order(&json!({"op": "copy", "name": made.id.as_str(), "value": copy}));
    assert_eq!(site.vcsim.vm(&copy).unwrap()["Extra"]["peerpod.cluster"], "c", "it has the same marks");
    for process in [&provider, &site.collector()] {
        let listed = process.list_owned().await.unwrap();
        assert_eq!((listed.len(), &listed[0].id, listed[0].state), (1, &made.id, OwnedState::Running));
        process.delete(&InstanceId::new(copy.clone()).unwrap()).await.unwrap();
    }
    assert_eq!(site.ids().await.len(), 2);
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
