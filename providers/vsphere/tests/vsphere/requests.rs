//! Checks that each field of a request and each setting is in the VM.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures_util::{FutureExt, StreamExt};
use peerpod_provider_api::{CreateRequest, EventKind, OwnedState, Provider, Size};
use peerpod_test_clouds::Fault;
use peerpod_test_clouds::vcsim::{CLUSTER, DATASTORES, NETWORKS};
use peerpod_tests::cloud::PATIENCE;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::common::{CREATE, Site, key, placed, request, says};

async fn made(site: &Site, settings: &[(&str, &str)], wish: CreateRequest) -> Value {
    let provider = site.provider(settings);
    let wish = placed(&*provider, &wish).await.unwrap();
    let made = provider.create(&wish, &key("requests", 0)).await.unwrap();
    provider.addresses(&made.id).await.unwrap();
    let vm = site.vcsim.vm(made.id.as_str()).unwrap();
    provider.delete(&made.id).await.unwrap();
    vm
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_and_the_settings_are_in_the_vm() {
    let site = Site::start();
    let wish = CreateRequest {
        second_nic: true,
        size: Size { vcpus: 3, memory_mib: 1023, ..Size::default() },
        ..request("web-0")
    };
    let settings = [("tags", "team=blue"), ("hosts", "DC0_C0_H2"), ("datastores", DATASTORES[1])];
    let vm = made(&site, &settings, wish).await;
    assert_eq!((&vm["Vcpus"], &vm["Memory"]), (&json!(3), &json!(1024)));
    assert_eq!((&vm["Host"], &vm["Datastore"]), (&json!("DC0_C0_H2"), &json!(DATASTORES[1])));
    assert_eq!(vm["Nics"], json!([NETWORKS[1], NETWORKS[0]]));
    let extra = &vm["Extra"];
    for (name, value) in [
        ("disk.EnableUUID", "TRUE"),
        ("peerpod.tag.team", "blue"),
        ("peerpod.cluster", "c"),
        ("peerpod.node", "n"),
        ("peerpod.pod", "web-0"),
        ("guestinfo.userdata.encoding", "base64"),
    ] {
        assert_eq!(extra[name], value, "{name} in {extra}");
    }
    assert!(vm["Console"].as_str().unwrap().ends_with("/console.log"), "{vm}");
    let settings = [("network", NETWORKS[0]), ("console", "false"), ("vcpus", "1"), ("memory-mib", "256")];
    let wish = CreateRequest { size: Size::default(), ..request("web-1") };
    let vm = made(&site, &settings, wish).await;
    assert_eq!((&vm["Nics"], &vm["Console"]), (&json!([NETWORKS[0]]), &json!("")));
    assert_eq!((&vm["Vcpus"], &vm["Memory"]), (&json!(1), &json!(256)));
}

#[tokio::test(flavor = "multi_thread")]
async fn drs_a_pool_and_a_folder_of_folders_are_used() {
    let site = Site::start();
    let settings = [("hosts", ""), ("drs", "true"), ("datastores", ""), ("folder", "a/peerpods")];
    let provider = site.provider(&settings);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("drs", 0)).await.unwrap();
    assert_eq!(made.chosen.zone.as_deref(), Some(CLUSTER));
    let vm = site.vcsim.vm(made.id.as_str()).unwrap();
    assert_eq!(vm["Datastore"], DATASTORES[0], "the template's");
    assert_eq!(provider.list_owned().await.unwrap().len(), 1);
    // Another node finds the folder.
    let again = site.provider(&settings).create(&wish, &key("drs", 0)).await.unwrap();
    assert_eq!((again.id, site.vcsim.count("CreateFolder")), (made.id, 2));
    let standalone = site.provider(&[("cluster", ""), ("hosts", "none")]);
    says(&standalone.preflight().await.unwrap_err(), "invalid", &["DC0/host/none", "provider.vsphere"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_spread_over_all_hosts_and_datastores() {
    let site = Site::start();
    let provider = site.provider(&[]);
    let mut places = BTreeSet::new();
    for number in 0..60 {
        let wish = placed(&*provider, &request(&format!("pod-{number}"))).await.unwrap();
        places.insert(wish.placement.unwrap().as_str().to_owned());
    }
    assert_eq!(places.len(), 6, "{places:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_console_is_the_end_of_a_file_in_the_datastore() {
    let site = Site::start();
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("console", 0)).await.unwrap();
    let console = provider.extensions().console.unwrap();
    assert_eq!(console.tail(&made.id, 100).await.unwrap(), b"", "the VM has written nothing");
    let file = site.vcsim.vm(made.id.as_str()).unwrap()["Console"].clone();
    let text = format!("{}the end", "x".repeat(10_000));
    site.vcsim.order(&json!({"op": "write", "path": file, "value": text}));
    assert_eq!(console.tail(&made.id, 7).await.unwrap(), b"the end");
    assert_eq!(console.tail(&made.id, 1 << 20).await.unwrap().len(), 10_007);
    assert!(site.provider(&[("console", "false")]).extensions().console.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_comes_from_the_guest_and_from_no_tools() {
    let site = Site::start();
    site.vcsim.order(&json!({"op": "boot-time", "ms": -1}));
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("address", 0)).await.unwrap();
    assert!(made.addresses.is_empty());
    let id = made.id.clone();
    let waiting = tokio::spawn(async move { provider.addresses(&id).await });
    let order =
        json!({"op": "set", "name": made.id.as_str(), "key": "guestinfo.local-ipv4", "value": "10.1.2.3"});
    site.vcsim.order(&order);
    let addresses = timeout(PATIENCE, waiting).await.unwrap().unwrap().unwrap();
    assert_eq!(addresses, ["10.1.2.3".parse::<std::net::IpAddr>().unwrap()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_ends_is_an_event_and_a_delete_is_none() {
    let site = Site::start();
    // A list has several answers.
    site.vcsim.set_page(1);
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let mut all = Vec::new();
    for number in 0..3 {
        let made = provider.create(&wish, &key("events", number)).await.unwrap();
        provider.addresses(&made.id).await.unwrap();
        all.push(made.id);
    }
    let mut events = provider.events().unwrap();
    timeout(PATIENCE, async {
        // One answer for each VM, and the wait.
        while site.vcsim.count("WaitForUpdatesEx") < 4 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .unwrap();
    for (order, id, state) in [("power-off", &all[0], Some(OwnedState::Ended)), ("destroy", &all[1], None)] {
        if order == "destroy" {
            site.vcsim.order(&json!({"op": "power-off", "name": id.as_str()}));
        } else {
            // The wait after this event breaks, and another list follows.
            site.vcsim.fail("WaitForUpdatesEx", Fault::Reset, 1);
            site.vcsim.order(&json!({"op": order, "name": id.as_str()}));
        }
        let event = timeout(PATIENCE, events.next()).await.unwrap().unwrap();
        assert_eq!(&event.id, id);
        assert!(matches!(event.kind, EventKind::Ended { .. }), "{event:?}");
        if order == "destroy" {
            site.vcsim.order(&json!({"op": order, "name": id.as_str()}));
        }
        let listed = provider.list_owned().await.unwrap();
        assert_eq!(listed.iter().find(|one| one.id == *id).map(|one| one.state), state);
    }
    assert_eq!(events.next().now_or_never(), None, "the third VM runs");
    let error = provider.addresses(&all[0]).await.unwrap_err();
    says(&error, "not_found", &["it has ended"]);
}

/// A host has 16 units. A full clone costs four of them, a linked one costs one.
#[tokio::test(flavor = "multi_thread")]
async fn a_host_makes_a_limited_number_of_clones_at_once() {
    for (is_linked, most) in [(true, 16), (false, 4)] {
        let site = Site::start();
        if !is_linked {
            site.vcsim.order(&json!({"op": "remove-snapshots", "name": "podvm-template"}));
        }
        let provider = site.provider(&[]);
        let found = provider.preflight().await.unwrap();
        assert_eq!(found.warnings.iter().any(|text| text.contains("copies its whole disk")), !is_linked);
        site.vcsim.set_task_time(Duration::from_millis(200));
        let creates = (0..2 * most).map(|number| {
            let provider = provider.clone();
            async move {
                let wish = placed(&*provider, &request(&format!("pod-{number}"))).await.unwrap();
                provider.create(&wish, &key("limit", number)).await.map(drop)
            }
        });
        for done in futures_util::future::join_all(creates).await {
            done.unwrap();
        }
        let at_once = site.vcsim.order(&json!({"op": "most-clones"})).as_u64().unwrap();
        assert!((2..=u64::from(most)).contains(&at_once), "{at_once} of at most {most}");
        let body = site.vcsim.bodies().into_iter().find(|(method, _)| method == CREATE).unwrap().1;
        assert_eq!(body.contains("createNewChildDiskBacking"), is_linked, "{body}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_creates_at_once_share_their_looks() {
    let site = Site::start();
    let provider = site.provider(&[]);
    provider.preflight().await.unwrap();
    site.vcsim.forget_calls();
    let creates = (0..50).map(|number| {
        let provider = provider.clone();
        async move {
            let wish = placed(&*provider, &request(&format!("pod-{number}"))).await.unwrap();
            let made = provider.create(&wish, &key("burst", number)).await.unwrap();
            provider.addresses(&made.id).await.unwrap();
        }
    });
    futures_util::future::join_all(creates).await;
    let mut calls: BTreeMap<String, usize> = BTreeMap::new();
    for call in site.vcsim.calls() {
        *calls.entry(call).or_default() += 1;
    }
    assert_eq!(calls[CREATE], 50);
    // Alone, each would have five looks and more.
    assert!(calls.values().sum::<usize>() < 200, "{calls:?} for 50 VMs");
}
