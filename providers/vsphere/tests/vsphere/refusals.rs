//! Checks that every refusal of a vCenter, at once and late, names cause and remedy, and leaves nothing.

use peerpod_provider_api::{CreateRequest, Provider};
use peerpod_test_clouds::Fault;
use serde_json::json;

use super::common::{CREATE, Site, TestCloud, key, placed, request, says};

/// Faults of a clone: type, class, part of the remedy.
const FAULTS: [(&str, &str, &str); 9] = [
    ("InsufficientCpuResourcesFault", "capacity", "more of them"),
    ("InsufficientFailoverResourcesFault", "capacity", "more of them"),
    ("NoCompatibleHost", "capacity", "run the template"),
    ("NoDiskSpace", "capacity", "free space"),
    ("NotEnoughLicenses", "quota", "license"),
    ("NoPermission", "auth", "role.txt"),
    ("TaskInProgress", "transient", "it is tried again"),
    ("InvalidArgument", "invalid", "provider.vsphere"),
    ("ManagedObjectNotFound", "invalid", "provider.vsphere"),
];

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_clone_has_its_class_and_leaves_nothing() {
    let site = Site::start();
    for (number, (fault, class, remedy)) in (0..).zip(FAULTS) {
        // Each with a provider of its own, because it remembers places without capacity.
        let provider = site.provider(&[]);
        let wish = placed(&*provider, &request("web-0")).await.unwrap();
        site.vcsim.fail(CREATE, Fault::refuse(500, fault, "Because."), 1);
        let error = provider.create(&wish, &key("early", number)).await.unwrap_err();
        says(&error, class, &[fault, "Because", remedy]);
        // An accepted clone, whose task fails before or after the VM is made.
        for made in [false, true] {
            let provider = site.provider(&[]);
            let wish = placed(&*provider, &request("web-0")).await.unwrap();
            site.vcsim.order(&json!({"op": "late", "method": CREATE, "fault": fault, "made": made}));
            let error = provider.create(&wish, &key("late", 2 * number + u32::from(made))).await.unwrap_err();
            says(&error, class, &[fault, remedy]);
            if class == "transient" {
                continue;
            }
            assert!(site.vcsim.vms().is_empty(), "{fault}, made: {made}");
        }
        site.heal();
        for vm in site.provider(&[]).list_owned().await.unwrap() {
            site.provider(&[]).delete(&vm.id).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_place_without_capacity_is_skipped_until_none_is_left() {
    let site = Site::start();
    let provider = site.provider(&[("hosts", "DC0_C0_H0,DC0_C0_H1"), ("datastores", "LocalDS_0")]);
    let mut tried = Vec::new();
    for number in 0..2 {
        let wish = placed(&*provider, &request("web-0")).await.unwrap();
        tried.push(wish.placement.clone().unwrap());
        site.vcsim.fail(CREATE, Fault::refuse_late("NoDiskSpace", ""), 1);
        let error = provider.create(&wish, &key("place", number)).await.unwrap_err();
        says(&error, "capacity", &["NoDiskSpace"]);
    }
    assert_ne!(tried[0], tried[1]);
    let error = placed(&*provider, &request("web-0")).await.unwrap_err();
    says(&error, "capacity", &["DC0_C0_H0/LocalDS_0", "NoDiskSpace"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_power_on_that_is_refused_is_no_vm() {
    let site = Site::start();
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let first = provider.create(&wish, &key("power", 0)).await.unwrap();
    site.vcsim.order(&json!({"op": "power-off", "name": first.id.as_str()}));
    site.vcsim.fail("PowerOnVM_Task", Fault::refuse_late("InsufficientMemoryResourcesFault", ""), 1);
    let error = provider.create(&wish, &key("power", 0)).await.unwrap_err();
    says(&error, "capacity", &["InsufficientMemoryResourcesFault"]);
    assert!(site.vcsim.vms().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_settings_are_named_all_at_once() {
    let site = Site::start();
    let settings = [("template", "none"), ("hosts", "DC0_C0_H9"), ("second-network", "Storage")];
    let error = site.provider(&settings).preflight().await.unwrap_err();
    says(
        &error,
        "invalid",
        &["DC0/vm/none", "provider.vsphere.template", "DC0_C0_H9", "Storage", "second-network"],
    );
    let error = site.provider(&[("datastores", "fast")]).preflight().await.unwrap_err();
    says(&error, "invalid", &["fast", "provider.vsphere.datastores"]);
    let found = site.provider(&[]).preflight().await.unwrap();
    assert!(found.facts.iter().any(|fact| fact.contains("podvm-template, linked clones")), "{found:?}");
    assert!(found.warnings.iter().any(|text| text.contains("use https")), "{found:?}");
    assert!(site.vcsim.count("CreateFolder") == 0, "a preflight makes nothing");
    let provider = site.provider(&[]);
    let wish = CreateRequest { image: Some("none".to_owned()), ..request("web-0") };
    let wish = placed(&*provider, &wish).await.unwrap();
    let error = provider.create(&wish, &key("image", 0)).await.unwrap_err();
    says(&error, "invalid", &["DC0/vm/none"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delete_whose_destroy_fails_is_no_success() {
    let site = Site::start();
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("destroy", 0)).await.unwrap();
    for step in ["ReconfigVM_Task", "PowerOffVM_Task", "Destroy_Task"] {
        site.vcsim.fail(step, Fault::refuse_late("TaskInProgress", ""), 1);
        let error = provider.delete(&made.id).await.unwrap_err();
        says(&error, "transient", &["TaskInProgress", step]);
    }
    provider.delete(&made.id).await.unwrap();
    assert!(site.vcsim.vms().is_empty());
}
