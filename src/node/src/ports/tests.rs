//! Tests of the watchers around a running pod, with real namespaces.

use peerpod_podnet::mark::Owner;
use tokio::time::timeout;

use super::*;
use crate::tunnel::TunnelConfig;
use crate::tunnel::external::External;
use crate::tunnel::tests::net_world::World;

const DEADLINE: Duration = Duration::from_secs(20);

#[test]
fn a_pod_without_its_own_network_namespace_is_refused_with_a_remedy() {
    let mut world = World::new();
    let pod = world.pod("pod", 7);
    assert_eq!(pod_netns(pod.path()).unwrap(), pod.id());
    // The path that shims send for a pod with hostNetwork, and the node's own namespace.
    for path in ["", "/proc/self/ns/net"] {
        let refused = pod_netns(Path::new(path)).unwrap_err();
        assert!(refused.permanent && refused.text.contains("remove hostNetwork"), "{path:?}: {refused}");
    }
}

#[tokio::test]
async fn a_new_node_address_is_detected_and_enters_the_next_plan() {
    let mut world = World::new();
    let external = External { cluster_cidrs: vec!["10.96.0.0/12".into()], ..External::default() };
    let owner = Owner::of(&["heard", &world.name("node")]);
    let config = TunnelConfig { owner, external: Some(external), ..TunnelConfig::default() };
    let tunnel = world.within("node", || Tunnel::open(config)).unwrap();
    let addresses = GuestAddresses::new(vec![], "[::]:15151".parse().unwrap());
    let runtime = tokio::runtime::Handle::current();
    let surroundings = world.within("node", || {
        let _entered = runtime.enter();
        Surroundings::new(addresses, watch::Sender::new(None).subscribe(), tunnel.clone())
    });
    let pod = world.pod("pod", 7);
    let vm: IpAddr = "10.77.0.2".parse().unwrap();
    let seen = inspect(&pod).unwrap();
    let reserved = tunnel.reserve(&pod, "sandbox", &seen, false, None).unwrap();
    let told = || {
        let plan = tunnel.connect(&pod, "sandbox", &reserved, &seen, vm).unwrap().0;
        plan.external.node_addresses.clone()
    };
    let before = told();
    assert_eq!(before[0], "10.77.0.1");
    let NetnsId { dev, inode } = pod.id();
    let netns = NetnsRef { path: pod.path().to_owned(), dev, inode, boot_id: "this".into() };
    let way = Some((reserved.clone(), vm));
    let mut netns_watcher =
        netns_watcher::watch_netns("this".into(), netns, tunnel.clone(), way, &surroundings);
    // An address within the cluster's prefixes, for example of a proxy, is no change.
    world.ip("node", "addr add 10.96.0.10/32 dev cni0");
    world.ip("node", "addr add 10.66.0.1/24 dev cni0");
    let mut after = before.clone();
    while after == before {
        timeout(DEADLINE, netns_watcher.changed()).await.expect("no change is detected").unwrap();
        after = told();
    }
    assert!(after.contains(&"10.66.0.1".to_owned()) && after.len() == before.len() + 1, "{after:?}");
    world.ip("node", "addr del 10.66.0.1/24 dev cni0");
    while after != before {
        timeout(DEADLINE, netns_watcher.changed()).await.expect("no change is detected").unwrap();
        after = told();
    }
    tunnel.undo("sandbox", Some(&pod), Some(&reserved), Some(vm)).unwrap();
}

#[test]
fn the_guest_decodes_the_user_data_and_it_is_small() {
    let ticket = Ticket::new(0, Duration::from_secs(60)).unwrap();
    let addresses: Vec<SocketAddr> =
        ["10.99.0.1:15151", "[fd99::1]:15151"].iter().map(|a| a.parse().unwrap()).collect();
    let text = user_data(&ticket, 3, &addresses, None, &[[1; 32], [2; 32]], Duration::from_secs(900));
    assert!(text.len() < 2048, "{} bytes", text.len());
    let read = UserData::parse(text.as_bytes()).unwrap();
    assert_eq!(read.ticket.id, ticket.id);
    assert!(ticket.matches(read.ticket.secret.expose()));
    assert_eq!((read.ticket.claims, read.lease_seconds), (3, 900));
    assert_eq!(read.node.addresses, addresses);
    assert_eq!(read.node.ca_sha256, [[1; 32], [2; 32]]);
    assert_eq!(text, user_data(&ticket, 3, &addresses, None, &[[1; 32], [2; 32]], Duration::from_secs(900)));
}
