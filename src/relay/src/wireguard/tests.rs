//! Tests of peers without a data plane, and of failing data planes on real devices. The latter need root.

use std::os::fd::{AsFd, OwnedFd};
use std::process::Command;
use std::time::{Duration, Instant};

use peerpod_podnet::netns::Netns;
use peerpod_test_reference as reference;
use peerpod_wireguard::open_tun;
use prometheus_client::registry::Registry;

use super::*;

fn id(text: &str) -> SandboxId {
    SandboxId::new(text).unwrap()
}

fn peer(last: u8) -> TunnelPeer {
    TunnelPeer {
        key: vec![last; 32],
        inner: [10, 0, 1, last].into(),
        vnis: vec![256 + u32::from(last)],
        vxlan_port: 4789,
    }
}

#[test]
fn a_peer_waits_for_the_data_plane_and_belongs_to_one_sandbox() {
    let plane = WireGuard::default();
    plane.put(&id("a"), Some(&peer(2))).unwrap();
    plane.put(&id("a"), Some(&peer(2))).unwrap();
    let error = plane.put(&id("b"), Some(&peer(2))).unwrap_err();
    assert!(error.contains("sandbox a"), "{error}");
    plane.put(&id("b"), Some(&peer(3))).unwrap();
    assert!(plane.figures().is_none());
    plane.delete(&id("a"));
    plane.put(&id("b"), Some(&peer(2))).unwrap();
    plane.put(&id("b"), None).unwrap();
    assert!(plane.state.lock().peers.is_empty());
}

#[test]
fn an_invalid_peer_is_refused() {
    let plane = WireGuard::default();
    for wrong in [
        TunnelPeer { key: vec![1; 31], ..peer(2) },
        TunnelPeer { key: vec![0; 32], ..peer(2) },
        TunnelPeer { vnis: vec![], ..peer(2) },
        TunnelPeer { inner: NODE_INNER, ..peer(2) },
        TunnelPeer { inner: [192, 0, 2, 1].into(), ..peer(2) },
    ] {
        plane.put(&id("a"), Some(&wrong)).unwrap_err();
    }
}

const DEVICE: &str = "pp-wg0";
const PATIENCE: Duration = Duration::from_secs(10);

fn key() -> PrivateKey {
    PrivateKey::generate().unwrap()
}

/// Returns the message of a node: the device of a private namespace, and a socket unless the relay has one.
fn handed(key: &PrivateKey, tun: impl Into<OwnedFd>, socket: Option<UdpSocket>) -> Passed {
    let text = BASE64_STANDARD.encode(key.expose().as_slice());
    let mut descriptors = vec![("tun".to_owned(), tun.into())];
    descriptors.extend(socket.map(|socket| ("udp".to_owned(), socket.into())));
    Passed { detail: json!({ "private_key": text, "inside": "here" }), descriptors }
}

fn device(netns: &Netns) -> std::io::Result<Tun> {
    netns.run(|| open_tun(DEVICE)).unwrap()
}

/// Opens what the data plane has released. Another test's child has a copy of each descriptor until its `exec`.
async fn released<T>(open: impl Fn() -> std::io::Result<T>) -> T {
    let since = Instant::now();
    loop {
        match open() {
            Ok(opened) => return opened,
            Err(error) => assert!(since.elapsed() < PATIENCE, "it is not released: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn socket() -> UdpSocket {
    UdpSocket::bind("127.0.0.1:0").unwrap()
}

fn figures(plane: &WireGuard) -> (bool, u64) {
    plane.figures().map(|figures| (figures.running, figures.failures)).unwrap()
}

#[tokio::test]
async fn a_failed_handoff_keeps_the_running_data_plane() {
    let (netns, plane, key) = (Netns::scratch().unwrap(), WireGuard::default(), key());
    let tun = device(&netns).unwrap();
    let ours = socket();
    let port = ours.local_addr().unwrap().port();
    plane.take(None, handed(&key, OwnedFd::from(tun), Some(ours))).await.unwrap();
    let before = plane.held(None).await.unwrap();
    assert_eq!(before["port"], port);
    let error = plane.take(None, handed(&key, socket(), None)).await.unwrap_err();
    assert!(error.contains("start the data plane"), "{error}");
    assert_eq!(plane.held(None).await, Some(before));
    assert_eq!(figures(&plane), (true, 0));
    assert!(device(&netns).is_err(), "the device is still held by the one that runs");
}

#[tokio::test]
async fn another_device_takes_over_with_the_same_sessions_and_the_same_port() {
    let (plane, key) = (WireGuard::default(), key());
    let (one, two) = (Netns::scratch().unwrap(), Netns::scratch().unwrap());
    plane.put(&id("a"), Some(&peer(2))).unwrap();
    plane.take(None, handed(&key, device(&one).unwrap(), Some(socket()))).await.unwrap();
    let engine = plane.state.lock().engine.clone().unwrap();
    assert_eq!(engine.peers(), 1);
    let before = plane.held(None).await.unwrap();
    let now = plane.take(None, handed(&key, device(&two).unwrap(), None)).await.unwrap();
    assert_eq!(now["port"], before["port"]);
    assert!(Arc::ptr_eq(&engine, plane.state.lock().engine.as_ref().unwrap()));
    released(|| device(&one)).await;
    device(&two).unwrap_err();
    assert_eq!(figures(&plane), (true, 0));
}

#[tokio::test]
async fn a_node_may_pass_the_running_device_again() {
    let (netns, plane) = (Netns::scratch().unwrap(), WireGuard::default());
    let tun = device(&netns).unwrap();
    let copy = || tun.as_fd().try_clone_to_owned().unwrap();
    plane.take(None, handed(&key(), copy(), Some(socket()))).await.unwrap();
    let other = key();
    let now = plane.take(None, handed(&other, copy(), None)).await.unwrap();
    assert_eq!(now["key"], other.public().to_string());
    assert_eq!(figures(&plane), (true, 0));
}

#[tokio::test]
async fn a_data_plane_without_its_device_is_reported_and_releases_everything() {
    let (netns, plane, key) = (Netns::scratch().unwrap(), WireGuard::default(), key());
    plane.put(&id("a"), Some(&peer(2))).unwrap();
    let ours = socket();
    let address = ours.local_addr().unwrap();
    plane.take(None, handed(&key, device(&netns).unwrap(), Some(ours))).await.unwrap();
    let delete = || Command::new("ip").args(["link", "del", DEVICE]).status();
    assert!(netns.run(delete).unwrap().unwrap().success());
    let since = Instant::now();
    while plane.held(None).await.is_some() {
        assert!(since.elapsed() < PATIENCE, "the relay did not notice the deletion");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(figures(&plane), (false, 1));
    // A node started meanwhile holds neither, and opens both again.
    let tun = released(|| device(&netns)).await;
    let socket = released(|| UdpSocket::bind(address)).await;
    plane.put(&id("b"), Some(&peer(3))).unwrap();
    plane.take(None, handed(&key, tun, Some(socket))).await.unwrap();
    assert!(plane.held(None).await.is_some());
    assert_eq!(figures(&plane), (true, 1));
    assert_eq!(plane.state.lock().engine.as_ref().unwrap().peers(), 2);
    plane.delete(&id("a"));
    assert_eq!(plane.state.lock().engine.as_ref().unwrap().peers(), 1);
}

#[test]
fn documented_metrics_are_up_to_date() {
    // Only a relay that has had a data plane has these metrics.
    let plane = WireGuard { state: Mutex::new(State { failures: 1, ..State::default() }) };
    let mut registry = Registry::default();
    registry
        .sub_registry_with_prefix("peerpod_relay")
        .register_collector(Box::new(WireGuardCollector(Arc::new(plane))));
    let text = reference::metrics(&registry).unwrap();
    reference::section("metrics.md", "peerpod-relay wireguard", &text).unwrap();
}
