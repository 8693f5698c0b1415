//! Tests the reservation of addresses, which keeps libvirt's DHCP server from pinging them first. With a real libvirtd,
//! QEMU and dnsmasq; `virsh` shows the network's state. Needs root.

use super::common;
use std::collections::BTreeSet;
use std::fs;
use std::net::Ipv4Addr;
use std::sync::Arc;

use common::{Place, create, key, request};
use futures_util::future::join_all;
use peerpod_provider_api::{CreateRequest, Provider};
use peerpod_provider_libvirt::LibvirtProvider;
use peerpod_world::libvirtd::NETWORK;

/// Number of addresses of the small network, beside its own.
const SMALL: u32 = 12;

/// Starts a network with these options and this DHCP range.
fn make_network(place: &Place, name: &str, range: &str, options: &str) {
    let xml = format!(
        "<network xmlns:dnsmasq='http://libvirt.org/schemas/network/dnsmasq/1.0'><name>{name}</name>\
         <bridge name='lv{name}' stp='off' delay='0'/><ip address='10.98.0.1' prefix='24'>{range}</ip>\
         <dnsmasq:options>{options}</dnsmasq:options></network>"
    );
    let file = place.world.folder().join(format!("{name}.xml"));
    fs::write(&file, xml).unwrap();
    place.libvirtd.virsh(&["net-define", &file.display().to_string()]).unwrap();
    place.libvirtd.virsh(&["net-start", name]).unwrap();
}

fn small_range() -> String {
    // The first address is that of the network itself.
    format!("<dhcp><range start='10.98.0.1' end='10.98.0.{}'/></dhcp>", SMALL + 1)
}

fn add(place: &Place, host: &str) {
    place.libvirtd.virsh(&["net-update", NETWORK, "add", "ip-dhcp-host", host, "--live"]).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_reserves_its_address_and_keeps_foreign_entries() {
    let place = Place::new();
    let provider = place.provider();
    add(&place, "<host mac='52:54:00:00:00:01' name='printer' ip='10.97.0.77'/>");
    let others = place.reservations(NETWORK);
    assert_eq!(others.len(), 1);
    let made = create(&*provider, 1).await;
    // A repeated create finds the VM.
    create(&*provider, 1).await;
    let name = place.libvirtd.domains().unwrap().remove(0);
    let mut all = place.reservations(NETWORK);
    let (mac, address) = all.remove(&name).expect("the VM's entry has its name");
    assert_eq!(all, others);
    let first = Ipv4Addr::new(10, 97, 0, 10);
    assert!((first..=Ipv4Addr::new(10, 97, 0, 250)).contains(&address), "{address}");
    assert!(place.libvirtd.virsh(&["dumpxml", &name]).unwrap().contains(&mac), "{mac}");
    let file = fs::read_to_string(place.hosts_file(NETWORK)).unwrap();
    assert!(file.contains(&format!("{mac},{address}")), "dnsmasq's file: {file}");
    let kept = place.libvirtd.virsh(&["net-dumpxml", NETWORK, "--inactive"]).unwrap();
    assert!(!kept.contains("<host"), "the network's configuration is changed: {kept}");
    provider.delete(&made.id).await.unwrap();
    assert_eq!(place.reservations(NETWORK), others);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_never_reserve_one_address_and_a_full_range_blocks_no_vm() {
    let place = Place::new();
    make_network(&place, "small", &small_range(), "");
    let node = |node: &str| {
        let config = place.config(&[("network", "small")]);
        Arc::new(LibvirtProvider::new(config, common::owner(node)))
    };
    let (one, two) = (node("one"), node("two"));
    let creates = (0..SMALL).map(|number| {
        let provider = if number % 2 == 0 { one.clone() } else { two.clone() };
        async move { provider.create(&request("vm"), &key(number)).await.unwrap() }
    });
    let all = join_all(creates).await;
    let reserved = place.reservations("small");
    let addresses: BTreeSet<Ipv4Addr> = reserved.values().map(|(_, address)| *address).collect();
    let expected: BTreeSet<Ipv4Addr> = (2..=SMALL + 1).map(|last| [10, 98, 0, last as u8].into()).collect();
    let news = if reserved.len() < all.len() { one.preflight().await.unwrap().warnings } else { Vec::new() };
    assert_eq!((reserved.len(), addresses), (all.len(), expected), "{news:?}");
    // One more VM has no reservation, and starts.
    let more = one.create(&request("vm"), &key(SMALL)).await.unwrap();
    assert_eq!(place.reservations("small"), reserved);
    let found = one.preflight().await.unwrap();
    let warnings = found.warnings.join("\n");
    for part in
        ["network small", "3 s longer", "all 13 addresses of its range are reserved or leased", "net-edit"]
    {
        assert!(warnings.contains(part), "{part}: {warnings}");
    }
    one.delete(&more.id).await.unwrap();
    for made in &all {
        // Each provider deletes its own VMs, and ignores those of the other.
        one.delete(&made.id).await.unwrap();
        two.delete(&made.id).await.unwrap();
    }
    assert!(place.reservations("small").is_empty());
    let found = one.preflight().await.unwrap();
    assert!(!found.warnings.join("\n").contains("network small"), "{found:?}");
    place.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn preflight_removes_only_its_own_nodes_stale_entries() {
    let place = Place::new();
    let provider = place.provider();
    let made = create(&*provider, 1).await;
    let name = place.libvirtd.domains().unwrap().remove(0);
    // The domain is removed by hand.
    place.libvirtd.virsh(&["destroy", &name]).unwrap();
    place.libvirtd.virsh(&["undefine", &name]).unwrap();
    provider.delete(&made.id).await.unwrap();
    add(&place, "<host mac='52:54:00:00:00:02' name='peerpod-00000000-0123' ip='10.97.0.78'/>");
    assert_eq!(place.reservations(NETWORK).len(), 2);
    let found = place.provider().preflight().await.unwrap();
    let says = |part: &str| found.facts.iter().any(|fact| fact.contains(part));
    assert!(says("removed 1 DHCP host entries of VMs that are gone"), "{found:?}");
    let left: Vec<String> = place.reservations(NETWORK).into_keys().collect();
    assert_eq!(left, ["peerpod-00000000-0123"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_nic_reserves_its_address_in_its_own_network() {
    let place = Place::new();
    make_network(&place, "second", &small_range(), "");
    let with_second = [("second-network", "second")];
    let provider = place.provider_with(&with_second);
    let request = CreateRequest { second_nic: true, ..request("vm") };
    let made = provider.create(&request, &key(1)).await.unwrap();
    let name = place.libvirtd.domains().unwrap().remove(0);
    let description = place.libvirtd.virsh(&["dumpxml", &name]).unwrap();
    let [one, two] = [NETWORK, "second"].map(|network| place.reservations(network).remove(&name).unwrap().0);
    assert!(one != two && description.contains(&one) && description.contains(&two), "{one} {two}");
    provider.delete(&made.id).await.unwrap();
    assert!(place.reservations("second").is_empty());
    // The domain of another VM is removed by hand.
    let made = provider.create(&request, &key(2)).await.unwrap();
    let name = place.libvirtd.domains().unwrap().remove(0);
    place.libvirtd.virsh(&["destroy", &name]).unwrap();
    place.libvirtd.virsh(&["undefine", &name]).unwrap();
    provider.delete(&made.id).await.unwrap();
    let found = place.provider_with(&with_second).preflight().await.unwrap();
    let removed = "removed 2 DHCP host entries of VMs that are gone";
    assert!(found.facts.iter().any(|fact| fact == removed), "{found:?}");
    assert!(place.reservations("second").is_empty());
    // Both NICs in one network: entries have the VM's name, so one gets none.
    let provider = place.provider_with(&[("second-network", NETWORK)]);
    let made = provider.create(&request, &key(3)).await.unwrap();
    assert_eq!(place.reservations(NETWORK).len(), 1);
    provider.delete(&made.id).await.unwrap();
    place.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_that_is_started_anew_harms_no_vm() {
    let place = Place::new();
    let provider = place.provider();
    let before = create(&*provider, 1).await;
    place.libvirtd.virsh(&["net-destroy", NETWORK]).unwrap();
    place.libvirtd.virsh(&["net-start", NETWORK]).unwrap();
    assert!(place.reservations(NETWORK).is_empty());
    let after = create(&*provider, 2).await;
    assert_eq!(place.reservations(NETWORK).len(), 1);
    provider.delete(&before.id).await.unwrap();
    assert_eq!(place.reservations(NETWORK).len(), 1);
    // The VM's network is not even started any more.
    place.libvirtd.virsh(&["net-destroy", NETWORK]).unwrap();
    provider.delete(&after.id).await.unwrap();
    place.libvirtd.virsh(&["net-start", NETWORK]).unwrap();
    place.assert_clean();
}

#[tokio::test(flavor = "multi_thread")]
async fn networks_without_dhcp_pings_stay_unchanged() {
    let place = Place::new();
    make_network(&place, "static", "", "");
    let quick = "<dnsmasq:option value='no-ping'/>";
    for name in ["static", "quick"] {
        if name == "quick" {
            place.libvirtd.virsh(&["net-destroy", "static"]).unwrap();
            make_network(&place, "quick", &small_range(), quick);
        }
        let provider = place.provider_with(&[("network", name)]);
        let found = provider.preflight().await.unwrap();
        assert!(!found.warnings.join("\n").contains("DHCP"), "{found:?}");
        let made = create(&*provider, 1).await;
        assert!(place.reservations(name).is_empty(), "{name}");
        provider.delete(&made.id).await.unwrap();
    }
    place.assert_clean();
}
