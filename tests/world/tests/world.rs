//! Tests of the test world: its parts work, and are gone afterwards, even if the process that made it was killed.

#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use peerpod_world::ping::ping;
use peerpod_world::{World, eventually_blocking, page};

const PATIENCE: Duration = Duration::from_secs(5);

#[test]
fn pods_reach_each_other_in_both_families() {
    let world = World::new().unwrap();
    let (one, other) = (world.pod().unwrap(), world.pod().unwrap());
    for address in other.addresses() {
        ping(one.namespace(), address, 56, PATIENCE).unwrap();
        ping(world.node(), address, 1400, PATIENCE).unwrap();
    }
    let server = page::PageServer::start(other.namespace()).unwrap();
    for (from, to) in one.addresses().into_iter().zip(other.addresses()) {
        let page = page::fetch(one.namespace(), SocketAddr::new(to, server.port())).unwrap();
        assert_eq!(page, page::page_for(from));
    }
    assert_eq!(server.peers(), one.addresses());
    let routes = one.namespace().ip("route show\n").unwrap();
    assert!(routes.contains("default via 10.244.1.1") && routes.contains("10.96.0.0/12"), "{routes}");
    let (received, sent) = one.namespace().counters("eth0").unwrap();
    assert!(received > 0 && sent > 0);
    assert!(ping(one.namespace(), "10.244.1.254".parse().unwrap(), 56, Duration::from_millis(200)).is_err());
}

#[test]
fn a_dropped_world_leaves_nothing() {
    let world = World::new().unwrap();
    let pod = world.pod().unwrap();
    let (prefix, folder) = (world.prefix().to_owned(), world.folder().to_owned());
    let log = folder.join("sleep.log");
    let mut child = world.spawn(Path::new("sleep"), &[OsStr::new("1000")], &log).unwrap();
    assert_eq!(left(&prefix).len(), 2);
    drop((pod, world));
    assert!(!child.wait().unwrap().success());
    assert_eq!(left(&prefix), Vec::<String>::new());
    assert!(!folder.exists());
}

/// Helper, not a test: the next test runs it in a separate process, and kills that process.
#[test]
#[ignore = "helper of a_killed_maker_leaves_nothing"]
fn makes_a_world_and_waits_to_be_killed() {
    let world = World::new().unwrap();
    let _pod = world.pod().unwrap();
    let log = world.folder().join("sleep.log");
    let mut child = world.spawn(Path::new("sleep"), &[OsStr::new("60")], &log).unwrap();
    println!("\nready {} {} {}", world.prefix(), world.folder().display(), child.id());
    child.wait().unwrap();
}

#[test]
fn a_killed_maker_leaves_nothing() {
    let mut maker = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", "makes_a_world_and_waits_to_be_killed"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(maker.stdout.take().unwrap()).lines();
    let line = lines.map_while(Result::ok).find(|line| line.starts_with("ready ")).unwrap();
    let words: Vec<&str> = line.split(' ').collect();
    assert_eq!(left(words[1]).len(), 2);
    maker.kill().unwrap();
    maker.wait().unwrap();
    eventually_blocking("the janitor is done", PATIENCE, || {
        let gone = left(words[1]).is_empty() && !Path::new(words[2]).exists();
        (gone && !Path::new("/proc").join(words[3]).exists()).then_some(())
    })
    .unwrap();
}

fn left(prefix: &str) -> Vec<String> {
    let names = std::fs::read_dir("/run/netns").unwrap().flatten();
    names
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with(prefix))
        .collect()
}
