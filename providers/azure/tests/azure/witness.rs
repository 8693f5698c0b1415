//! Compares every body of this provider with Microsoft's models, and reads the VMs that it made by Microsoft's client.
//! Needs Go modules and PyPI once (feature `witness`).

use peerpod_provider_api::{Confidential, CreateRequest, DiskRequest, Market, Provider};
use peerpod_test_clouds::azure::GROUP;
use peerpod_test_clouds::witness::{azure_client, azure_models};
use peerpod_test_clouds::{Azure, Fault};
use serde_json::json;

use super::common::{Site, key, name, placed, request};

#[tokio::test(flavor = "multi_thread")]
async fn microsofts_models_know_every_body_and_answer() {
    let site = Site::start().await;
    let (group, generalized) = (Azure::security_group(), Azure::image("generalized"));
    let types = "Standard_D2s_v5,Standard_DC2as_v5";
    let all = site.provider(&[
        ("security-group-id", &group),
        ("use-public-ip", "true"),
        ("instance-types", types),
        ("image-id", &generalized),
        ("root-volume-size", "40"),
        ("secure-boot", "true"),
        ("tags", "team=blue"),
    ]);
    all.preflight().await.unwrap();
    let disk = |name: &str| DiskRequest { volume: site.disk(name, "1"), ..DiskRequest::default() };
    let wishes = [
        CreateRequest {
            disks: vec![disk("a"), disk("b")],
            second_nic: true,
            public_ip: true,
            ..request("full")
        },
        CreateRequest {
            confidential: Some(Confidential::SevSnp),
            market: Some(Market::Spot),
            ..request("secret")
        },
        CreateRequest { market: Some(Market::OnDemand), ..request("plain") },
        CreateRequest {
            image: Some("/CommunityGalleries/pods-0000/Images/peerpod/Versions/1.0.0".to_owned()),
            ..request("community")
        },
    ];
    for (number, wish) in (0..).zip(&wishes) {
        let wish = placed(&*all, wish).await.unwrap();
        let made = all.create(&wish, &key("bodies", number)).await.unwrap();
        all.addresses(&made.id).await.unwrap();
    }
    let plain = site.provider(&[]);
    let late = Fault::refuse_late("ZonalAllocationFailed", "none left");
    site.cloud.fail("VirtualMachines_CreateOrUpdate", late, 1);
    let wish = placed(&*plain, &request("late")).await.unwrap();
    plain.create(&wish, &key("bodies", 9)).await.unwrap_err();
    let owned = all.list_owned().await.unwrap();
    let hot = DiskRequest { volume: site.disk("hot", "1"), ..DiskRequest::default() };
    let first = owned.iter().find(|vm| vm.name.as_deref() == Some("full")).unwrap();
    let volumes = all.extensions().volumes.unwrap();
    volumes.attach(&first.id, &hot).await.unwrap();
    volumes.detach(&first.id, &hot.volume).await.unwrap();
    all.extensions().console.unwrap().tail(&first.id, 10).await.unwrap();
    for vm in &owned {
        all.delete(&vm.id).await.unwrap();
    }
    assert_eq!(azure_models(&site.cloud.calls()).unwrap(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn microsofts_client_reads_what_the_provider_made() {
    let site = Site::start().await;
    let provider = site.provider(&[("tags", "team=blue")]);
    let disk = DiskRequest { volume: site.disk("data", "3"), ..DiskRequest::default() };
    let wish = CreateRequest { disks: vec![disk.clone()], market: Some(Market::Spot), ..request("web-0") };
    let wish = placed(&*provider, &wish).await.unwrap();
    let made = provider.create(&wish, &key("client", 0)).await.unwrap();
    let arguments =
        json!({"resource_group_name": GROUP, "vm_name": name(made.id.as_str()), "expand": "instanceView"});
    let seen = azure_client(&site.cloud, "virtual_machines.get", &arguments).unwrap();
    assert_eq!(seen["zones"], json!(["3"]), "{seen}");
    assert_eq!(seen["tags"]["team"], "blue", "{seen}");
    assert_eq!(seen["tags"]["peerpod.digest"], json!(wish.digest()), "{seen}");
    let text = seen.to_string();
    for part in ["Standard_D2s_v5", "Spot", "Detach", "PowerState/running"] {
        assert!(text.contains(part), "{part} in {text}");
    }
}
