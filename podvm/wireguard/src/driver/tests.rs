//! Tests failing threads between a real TUN device and a real socket. Needs root.

use peerpod_podnet::netns::Netns;

use super::*;
use crate::key::PrivateKey;
use crate::udp::bind;
use peerpod_common::tun::open_tun;

const PATIENCE: Duration = Duration::from_secs(10);

fn until(what: &str, is: impl Fn() -> bool) {
    let since = Instant::now();
    while !is() {
        assert!(since.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn device(netns: &Netns) -> io::Result<Tun> {
    netns.run(|| open_tun("pp-wg0")).unwrap()
}

fn plane(netns: &Netns, halves: [(&'static str, Half); 2]) -> DataPlane {
    plane_that_tells(netns, halves, || {})
}

fn plane_that_tells(
    netns: &Netns,
    halves: [(&'static str, Half); 2],
    ended: impl Fn() + Send + Sync + 'static,
) -> DataPlane {
    let socket = netns.run(|| bind(0)).unwrap().unwrap();
    let engine = Arc::new(Engine::new(PrivateKey::generate().unwrap()));
    DataPlane::with(engine, device(netns).unwrap(), socket, "test", ended, halves).unwrap()
}

fn panics(_: &Shared, _: &Ends) -> io::Result<()> {
    panic!("a bug in Peerpod")
}

fn fails(_: &Shared, _: &Ends) -> io::Result<()> {
    Err(io::Error::other("a closed socket"))
}

#[test]
fn a_half_that_panics_or_fails_ends_the_other_half() {
    let netns = Netns::scratch().unwrap();
    for (bad, panicked) in [(panics as Half, true), (fails, false)] {
        for halves in [[("out", outgoing as Half), ("in", bad)], [("out", bad), ("in", incoming)]] {
            let plane = plane(&netns, halves);
            until("the plane reports its end", || !plane.is_running());
            // Even before the plane is dropped, the device is free for a new plane.
            until("both halves end", || plane.threads.iter().all(JoinHandle::is_finished));
            assert_eq!(plane.has_panicked(), panicked);
            let free = device(&netns);
            assert!(free.is_ok(), "{free:?}");
        }
    }
}

#[test]
fn a_half_that_returns_ends_the_plane() {
    let netns = Netns::scratch().unwrap();
    let plane = plane(&netns, [("out", |_, _| Ok(())), ("in", incoming)]);
    until("the plane reports its end", || !plane.is_running());
}

#[test]
fn one_that_works_runs_until_it_is_dropped_and_then_its_device_is_free() {
    let netns = Netns::scratch().unwrap();
    let plane = plane(&netns, [("out", outgoing), ("in", incoming)]);
    assert!(plane.is_running() && !plane.has_panicked());
    assert_eq!(device(&netns).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
    drop(plane);
    device(&netns).unwrap();
}

#[test]
fn a_device_that_is_deleted_ends_the_plane_at_once() {
    let netns = Netns::scratch().unwrap();
    let plane = plane(&netns, [("out", outgoing), ("in", incoming)]);
    let delete = || std::process::Command::new("ip").args(["link", "del", "pp-wg0"]).status();
    assert!(netns.run(delete).unwrap().unwrap().success());
    until("both halves end", || plane.threads.iter().all(JoinHandle::is_finished));
    assert!(!plane.is_running() && !plane.has_panicked());
}

#[test]
fn an_unexpected_end_is_reported_once_and_a_requested_one_is_not() {
    let netns = Netns::scratch().unwrap();
    for (halves, times) in [
        ([("out", outgoing as Half), ("in", panics as Half)], 1),
        ([("out", fails), ("in", fails)], 1),
        ([("out", outgoing), ("in", incoming)], 0),
    ] {
        let told = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let count = told.clone();
        let plane = plane_that_tells(&netns, halves, move || {
            count.fetch_add(1, Ordering::SeqCst);
        });
        if times > 0 {
            until("the callback runs", || told.load(Ordering::SeqCst) > 0);
            assert!(!plane.is_running(), "the callback ran, and the plane still runs");
        }
        drop(plane);
        assert_eq!(told.load(Ordering::SeqCst), times);
    }
}
