//! Compares every body of this provider, and every answer of the fake to it, with the models of IBM's SDK. Its client
//! makes, reads and deletes VMs of the fake. Needs PyPI once (feature `witness`).

use peerpod_provider_api::{Confidential, CreateRequest, DiskRequest, Market, Provider};
use peerpod_test_clouds::ibmcloud::{KEY, ZONES};
use peerpod_test_clouds::witness::{ibm_client, ibm_models};
use peerpod_test_clouds::{Fault, IbmCloud};
use serde_json::json;

use super::common::{CREATE, Site, key, placed, request};

#[tokio::test(flavor = "multi_thread")]
async fn ibms_models_know_every_body_and_answer() {
    let site = Site::start().await;
    let types = "bxf-2x8,bx3dc-2x10";
    let all = site.provider(&[
        ("instance-types", types),
        ("root-volume-size", "40"),
        ("secure-boot", "true"),
        ("key-id", KEY),
        ("tags", "team=blue"),
    ]);
    all.preflight().await.unwrap();
    let disk = |name: &str| DiskRequest { volume: site.volume(name, ZONES[0]), ..DiskRequest::default() };
    let wishes = [
        CreateRequest { disks: vec![disk("a"), disk("b")], second_nic: true, ..request("full") },
        CreateRequest { confidential: Some(Confidential::Tdx), ..request("secret") },
        CreateRequest { market: Some(Market::OnDemand), ..request("plain") },
    ];
    for (number, wish) in (0..).zip(&wishes) {
        let wish = placed(&*all, wish).await.unwrap();
        let made = all.create(&wish, &key("bodies", number)).await.unwrap();
        all.addresses(&made.id).await.unwrap();
    }
    let host = IbmCloud::dedicated(ZONES[0], false);
    let group = IbmCloud::dedicated(ZONES[0], true);
    let dedicated = site.provider(&[
        ("market", "on-demand"),
        ("dedicated-host-ids", &host),
        ("dedicated-host-group-ids", &group),
    ]);
    site.cloud.fail(CREATE, Fault::refuse_late("cannot_start_capacity", "none left"), 1);
    let wish = placed(&*dedicated, &request("late")).await.unwrap();
    dedicated.create(&wish, &key("bodies", 9)).await.unwrap_err();
    let owned = all.list_owned().await.unwrap();
    let hot = disk("hot");
    let volumes = all.extensions().volumes.unwrap();
    let first = owned.iter().find(|vm| vm.name.as_deref() == Some("full")).unwrap();
    volumes.attach(&first.id, &hot).await.unwrap();
    volumes.detach(&first.id, &hot.volume).await.unwrap();
    for vm in &owned {
        all.delete(&vm.id).await.unwrap();
    }
    assert_eq!(ibm_models(&site.cloud.calls()).unwrap(), Vec::<String>::new());
    // The models find a mistake.
    let mut calls = site.cloud.calls();
    calls.retain(|call| call.action == CREATE);
    let mut wrong = calls[0].body();
    wrong["boot_volume_attachment"]["delete_volume"] = json!(true);
    wrong["availability_policy"]["host_failure"] = json!("stopp");
    calls[0].request.body = wrong.to_string().into();
    let found = ibm_models(&calls[..1]).unwrap().join("\n");
    assert!(found.contains("boot_volume_attachment/delete_volume: the model does not know it"), "{found}");
    assert!(found.contains("'stopp' is none of its words"), "{found}");
}

#[tokio::test(flavor = "multi_thread")]
async fn ibms_client_reads_what_the_provider_made_and_makes_the_same() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let made = provider.create(&wish, &key("client", 0)).await.unwrap();
    let id = json!({"id": made.id.as_str()});
    let seen = ibm_client(&site.cloud, "get_instance", &id).unwrap();
    assert_eq!(
        (&seen["status"], &seen["availability"]["class"]),
        (&json!("running"), &json!("spot")),
        "{seen}"
    );
    assert_eq!(seen["metadata_service"]["enabled"], false);
    let boot = json!({"id": seen["boot_volume_attachment"]["volume"]["id"]});
    let volume = ibm_client(&site.cloud, "get_volume", &boot).unwrap();
    assert!(
        volume["user_tags"].to_string().contains(&format!("peerpod.digest:{}", wish.digest())),
        "{volume}"
    );
    let sent = site.cloud.calls().into_iter().find(|call| call.action == CREATE).unwrap().body();
    let again = ibm_client(&site.cloud, CREATE, &json!({"instance_prototype": sent})).unwrap_err();
    assert!(format!("{again:#}").contains("is not unique"), "{again:#}");
    let mut other = sent;
    other["name"] = json!("theirs");
    let theirs = ibm_client(&site.cloud, CREATE, &json!({"instance_prototype": other})).unwrap();
    let listed = ibm_client(&site.cloud, "list_instances", &json!({"limit": 1})).unwrap();
    assert_eq!(
        (listed["instances"].as_array().map(Vec::len), listed["next"]["href"].is_string()),
        (Some(1), true)
    );
    ibm_client(&site.cloud, "delete_instance", &json!({"id": theirs["id"]})).unwrap();
    assert_eq!(site.machines(), [made.id.as_str()]);
}
