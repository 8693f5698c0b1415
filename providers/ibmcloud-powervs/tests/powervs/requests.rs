//! Checks that each field of a request reaches the VM, and that addresses are the VM's own.

use peerpod_provider_api::{CreateRequest, DiskRequest, Error, OwnedState, Provider, Size};
use peerpod_test_clouds::powervs::{DHCP, Instance, PUBLIC, SECOND, State};
use serde_json::{Value, json};

use super::common::{Site, key, owner, request, stranger};

/// Body of a VM as the cloud got it.
fn body(site: &Site, id: &str) -> Value {
    site.cloud.with(|power, _| power.instances.get(id).unwrap().body.clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn each_wish_of_a_pod_reaches_its_vm() {
    let site = Site::start().await;
    let provider = site.provider(&[("tags", "team=blue"), ("key-name", "me"), ("processors", "0.25")]);
    let size = |vcpus, memory_mib| Size { vcpus, memory_mib, ..Size::default() };
    for (number, (wish, system, processors, memory)) in (0..).zip([
        (CreateRequest { size: size(0, 0), ..request("a") }, "s922", 0.25, 2),
        (CreateRequest { size: size(2, 3000), ..request("b") }, "s922", 2.0, 3),
        (CreateRequest { instance_type: Some("e980-1.5x8".to_owned()), ..request("c") }, "e980", 1.5, 8),
    ]) {
        let made = provider.create(&wish, &key("w", number)).await.unwrap();
        let body = body(&site, made.id.as_str());
        assert_eq!((&body["sysType"], &body["procType"]), (&json!(system), &json!("shared")));
        assert_eq!((&body["processors"], &body["memory"]), (&json!(processors), &json!(memory)));
        let shown = format!("{system}-{processors}x{memory}");
        assert_eq!((made.chosen.instance_type, made.chosen.zone.as_deref()), (Some(shown), Some("dal12")));
    }
    let wish = CreateRequest { second_nic: true, ..request("d") };
    let made = provider.create(&wish, &key("w", 9)).await.unwrap();
    let body = body(&site, made.id.as_str());
    assert_eq!((&body["networks"][1]["networkID"], &body["keyPairName"]), (&json!(SECOND), &json!("me")));
    let tags = body["userTags"].to_string();
    for tag in ["team:blue", "peerpod.pod:d", "peerpod.node:n", "peerpod.key:", "peerpod.digest:"] {
        assert!(tags.contains(tag), "{tag} in {tags}");
    }
    assert_eq!(provider.addresses(&made.id).await.unwrap().len(), 1, "none of the second NIC");
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_and_parts_of_dedicated_cores_are_refused_in_words() {
    let site = Site::start().await;
    let provider = site.provider(&[("processor-type", "dedicated"), ("processors", "1")]);
    let disk = DiskRequest { volume: "wwn-1".to_owned(), ..DiskRequest::default() };
    let error = provider
        .create(&CreateRequest { disks: vec![disk], ..request("a") }, &key("v", 0))
        .await
        .unwrap_err();
    assert!(matches!(&error, Error::Unsupported { field, .. } if field == "disks"), "{error}");
    let quarter = CreateRequest { instance_type: Some("s922-0.25x2".to_owned()), ..request("b") };
    let error = provider.create(&quarter, &key("v", 1)).await.unwrap_err();
    assert!(error.class() == "invalid" && error.to_string().contains("whole"), "{error}");
    let image = CreateRequest { image: Some("a/b".to_owned()), ..request("c") };
    let error = provider.create(&image, &key("v", 2)).await.unwrap_err();
    assert!(error.class() == "invalid" && error.to_string().contains("image-id"), "{error}");
    assert!(site.machines().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_is_fixed_or_a_lease_or_public() {
    let site = Site::start().await;
    let text =
        |addresses: Vec<std::net::IpAddr>| addresses.iter().map(ToString::to_string).collect::<Vec<_>>();
    let dhcp = site.provider(&[("network-id", DHCP)]);
    let made = dhcp.create(&request("a"), &key("n", 0)).await.unwrap();
    let found = text(dhcp.addresses(&made.id).await.unwrap());
    assert!(found.len() == 1 && found[0].starts_with("192.170."), "{found:?}");
    let public = site.provider(&[("network-id", PUBLIC), ("use-public-ip", "true")]);
    let made = public.create(&request("b"), &key("n", 1)).await.unwrap();
    let found = text(public.addresses(&made.id).await.unwrap());
    assert!(found.len() == 2 && found[0].starts_with("203.0.113."), "{found:?}");
    let found = site.provider(&[("use-public-ip", "true")]).preflight().await.unwrap();
    assert!(
        found.warnings.iter().any(|warning| warning.contains("no public addresses")),
        "{:?}",
        found.warnings
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tags_of_a_vm_are_read_once() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    for number in 0..3 {
        provider.create(&request("web-0"), &key("once", number)).await.unwrap();
    }
    let successor = site.provider(&[]);
    for _ in 0..3 {
        assert_eq!(successor.list_owned().await.unwrap().len(), 3);
    }
    site.cloud.forget_calls();
    let collector = site.collector();
    let listed = collector.list_owned().await.unwrap();
    collector.list_owned().await.unwrap();
    assert!(listed.iter().all(|vm| vm.node.as_deref() == Some("n") && vm.name.as_deref() == Some("web-0")));
    assert_eq!(
        (site.cloud.count(Some("pvminstances.get")), site.cloud.count(Some("pvminstances.getall"))),
        (3, 2)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn tags_that_appear_late_are_read_again() {
    let site = Site::start().await;
    let made = site.provider(&[]).create(&request("web-0"), &key("late", 0)).await.unwrap();
    let tags = |tags: Value| {
        let change = |one: &mut Instance| std::mem::replace(&mut one.body["userTags"], tags);
        site.cloud.with(|power, _| power.instances.get_mut(made.id.as_str()).map(change)).unwrap()
    };
    let late = tags(json!([]));
    let successor = site.provider(&[]);
    assert!(successor.list_owned().await.unwrap().is_empty(), "nothing shows the owner");
    successor.delete(&made.id).await.unwrap();
    let error = successor.create(&request("web-0"), &key("late", 0)).await.unwrap_err();
    assert!(error.class() == "transient" && error.to_string().contains("no tags yet"), "{error}");
    tags(late);
    assert_eq!(successor.list_owned().await.unwrap()[0].id, made.id);
    assert_eq!(successor.create(&request("web-0"), &key("late", 0)).await.unwrap().id, made.id);
    assert_eq!(site.machines(), [made.id.as_str()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_strangers_vm_survives_and_one_of_an_odd_node_is_found() {
    let site = Site::start().await;
    let stranger = site.provider_of(stranger(), &[]);
    let theirs = stranger.create(&request("a"), &key("t", 0)).await.unwrap();
    let mut odd = owner("Node-1.Example");
    odd.cluster_id = "My_Cluster".to_owned();
    let provider = site.provider_of(odd, &[]);
    provider.delete(&theirs.id).await.unwrap();
    assert!(provider.list_owned().await.unwrap().is_empty());
    let ours = provider.create(&request("b"), &key("t", 1)).await.unwrap();
    let listed = provider.list_owned().await.unwrap();
    assert_eq!((listed.len(), listed[0].node.as_deref()), (1, Some("Node-1.Example")));
    site.cloud.with(|power, _| power.instances.get_mut(ours.id.as_str()).unwrap().state = State::Shutoff);
    assert_eq!(provider.list_owned().await.unwrap()[0].state, OwnedState::Ended);
    let error = provider.addresses(&ours.id).await.unwrap_err();
    assert!(error.class() == "not_found" && error.to_string().contains("it has ended"), "{error}");
    provider.delete(&ours.id).await.unwrap();
    assert_eq!(site.machines(), [theirs.id.as_str()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn preflight_reports_all_that_is_missing_at_once() {
    let site = Site::start().await;
    let found = site.provider(&[]).preflight().await.unwrap();
    assert!(
        found.warnings.len() == 1 && found.warnings[0].contains("no image for ppc64le"),
        "{:?}",
        found.warnings
    );
    let error =
        site.provider(&[("image-id", "none"), ("network-id", "nowhere")]).preflight().await.unwrap_err();
    for part in ["image-id", "network-id"] {
        assert!(error.class() == "invalid" && error.to_string().contains(part), "{part} in {error}");
    }
    for (system, words) in [("e980", "0 free cores"), ("s1022", "has no system s1022")] {
        let found = site.provider(&[("system-type", system)]).preflight().await.unwrap();
        assert!(found.warnings.iter().any(|warning| warning.contains(words)), "{:?}", found.warnings);
    }
    let error = site.provider(&[("api-key", "wrong")]).preflight().await.unwrap_err();
    assert!(error.class() == "auth" && error.to_string().contains("BXNIM0415E"), "{error}");
    let error = site.provider(&[("api-key", "")]).preflight().await.unwrap_err();
    assert!(
        error.class() == "auth" && error.to_string().contains("set provider.ibmcloud-powervs.api-key"),
        "{error}"
    );
}
