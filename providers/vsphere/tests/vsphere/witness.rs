//! Compares every call of this provider with VMware's models, and reads the VMs that it made by VMware's client. Needs
//! PyPI once.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::StreamExt;
use peerpod_provider_api::{CreateRequest, DiskRequest, Provider};
use peerpod_test_clouds::vcsim::{DATASTORES, FOLDER, NETWORKS};
use peerpod_test_clouds::witness::{vmware_client, vmware_models};
use peerpod_tests::cloud::PATIENCE;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use super::common::{Site, key, placed, request};

#[tokio::test(flavor = "multi_thread")]
async fn vmwares_models_know_every_call() {
    let site = Site::start();
    site.vcsim.set_page(1);
    let provider = site.provider(&[("network", NETWORKS[1]), ("tags", "team=blue"), ("folder", "peerpods")]);
    let plain =
        site.provider(&[("hosts", ""), ("drs", "true"), ("datastores", ""), ("network", NETWORKS[0])]);
    provider.preflight().await.unwrap();
    let wish = CreateRequest { second_nic: true, ..request("full") };
    let wish = placed(&*provider, &wish).await.unwrap();
    let made = provider.create(&wish, &key("bodies", 0)).await.unwrap();
    let other = placed(&*plain, &request("plain")).await.unwrap();
    let other = plain.create(&other, &key("bodies", 1)).await.unwrap();
    for id in [&made.id, &other.id] {
        provider.addresses(id).await.unwrap();
    }
    let mut events = provider.events().unwrap();
    let volumes = provider.extensions().volumes.unwrap();
    let (id, _) = site.vcsim.first_class_disk("pvc-1", DATASTORES[1]);
    let file = format!("[{}] a.vmdk", DATASTORES[0]);
    site.vcsim.plain_disk(&file);
    for volume in [id, file] {
        let disk = DiskRequest { volume: volume.clone(), ..DiskRequest::default() };
        volumes.attach(&made.id, &disk).await.unwrap();
        volumes.detach(&made.id, &volume).await.unwrap();
    }
    let waits = async {
        // One answer for each VM, and the wait.
        while site.vcsim.count("WaitForUpdatesEx") < 3 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, waits).await.unwrap();
    site.vcsim.order(&json!({"op": "power-off", "name": made.id.as_str()}));
    timeout(PATIENCE, events.next()).await.unwrap().unwrap();
    provider.create(&wish, &key("bodies", 0)).await.unwrap();
    site.vcsim.order(&json!({"op": "snapshot", "name": made.id.as_str()}));
    for vm in provider.list_owned().await.unwrap() {
        provider.delete(&vm.id).await.unwrap();
    }
    let calls = site.vcsim.bodies();
    assert_eq!(vmware_models(&calls).unwrap(), Vec::<String>::new());
    let methods: BTreeSet<&str> = calls.iter().map(|(method, _)| method.as_str()).collect();
    assert_eq!(methods.len(), 19, "all methods of the provider: {methods:?}");
    // The witness itself can fail.
    let clone = calls.iter().find(|(method, _)| method == "CloneVM_Task").unwrap();
    let order = "<template>false</template>";
    let without = clone.1.replace(order, "");
    let order = without.replace("<location>", &format!("{order}<location>"));
    let planted = [clone.1.replace("numCPUs>", "numCpus>"), order, without];
    let found = vmware_models(&planted.map(|body| (clone.0.clone(), body))).unwrap();
    let named = [
        "CloneVM_Task: AttributeError: numCpus",
        "CloneVM_Task: CloneVM_Task/spec: template differs in the model",
        "CloneVM_Task: CloneVM_Task/spec: the order differs in the model",
    ];
    assert_eq!(found, named);
}

#[tokio::test(flavor = "multi_thread")]
async fn vmwares_client_reads_what_the_provider_made() {
    let site = Site::start();
    site.vcsim.order(&json!({"op": "pool", "name": "pods"}));
    let settings =
        [("resource-pool", "pods"), ("hosts", "DC0_C0_H1"), ("network", NETWORKS[0]), ("tags", "team=blue")];
    let provider = site.provider(&settings);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("client", 0)).await.unwrap();
    let (disk, file) = site.vcsim.first_class_disk("pvc-1", DATASTORES[1]);
    let volumes = provider.extensions().volumes.unwrap();
    volumes.attach(&made.id, &DiskRequest { volume: disk.clone(), ..DiskRequest::default() }).await.unwrap();
    let seen = vmware_client(&site.vcsim, &format!("DC0/vm/{FOLDER}/{}", made.id)).unwrap();
    for (name, value) in [
        ("power", json!("poweredOn")),
        ("host", json!("DC0_C0_H1")),
        ("pool", json!("pods")),
        ("folder", json!(FOLDER)),
        ("vcpus", json!(1)),
        ("memory", json!(512)),
        ("annotation", json!("Peerpod: pod VM web-0 of the node n")),
    ] {
        assert_eq!(seen[name], value, "{name} in {seen}");
    }
    assert_eq!(seen["variables"]["peerpod.tag.team"], "blue", "{seen}");
    assert_eq!(seen["variables"]["peerpod.key"], key("client", 0).as_str(), "{seen}");
    let of = |kind: &str| -> Vec<&Value> {
        seen["devices"].as_array().unwrap().iter().filter(|device| device["kind"] == kind).collect()
    };
    assert!(
        of("VirtualDisk").iter().any(|one| one["first-class"] == *disk && one["file"] == *file),
        "{seen}"
    );
    let networks: Vec<&Value> =
        of("VirtualE1000").iter().chain(&of("VirtualVmxnet3")).map(|nic| &nic["network"]).collect();
    assert_eq!(networks, [&json!(NETWORKS[0])], "{seen}");
    assert!(of("VirtualSerialPort")[0]["file"].as_str().unwrap().ends_with("/console.log"), "{seen}");
}
