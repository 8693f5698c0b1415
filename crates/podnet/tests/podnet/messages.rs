//! Tests that the number of netlink messages does not depend on the number of objects. Runs alone in its process,
//! because it counts the process's messages.

use super::world;
use std::time::{Duration, Instant};

use peerpod_podnet::inspect::inspect;
use peerpod_podnet::netlink::messages_sent;
use world::World;

fn count<T>(f: impl FnOnce() -> T) -> (u64, T) {
    let before = messages_sent();
    let result = f();
    (messages_sent() - before, result)
}

#[test]
fn an_inspection_sends_six_requests_for_a_pod_of_any_size() {
    let mut world = World::new();
    world.widen();
    let small = world.pod("small", 7);
    let large = world.bare("large", &["eth0", "net1", "net2"]);
    let mut lines = "addr add 10.244.1.7/24 dev eth0\naddr add 10.55.0.2/24 dev net1\n".to_owned();
    lines.extend(
        (0..500).map(|n| format!("route add 10.{}.{}.0/24 via 10.244.1.1\n", 100 + (n >> 8), n & 255)),
    );
    lines.extend((0..50).map(|n| format!("rule add from 10.9.0.{n} lookup 100 priority {}\n", 100 + n)));
    lines.extend(
        (1..50).map(|n| {
            format!("neigh add 10.55.0.{} lladdr 02:00:00:00:00:01 dev net1 nud permanent\n", 2 + n)
        }),
    );
    world.batch("large", &lines, false);
    inspect(&small).unwrap(); // the first call of a process also reads a new namespace
    let (few, _) = count(|| inspect(&small).unwrap());
    let (many, seen) = count(|| inspect(&large).unwrap());
    assert_eq!((few, many), (6, 6));
    assert!(
        seen.primary().routes.len() > 500
            && seen.rules.len() == 50
            && seen.interfaces[1].neighbours.len() == 49
    );

    let mut took: Vec<Duration> = (0..200)
        .map(|_| {
            let began = Instant::now();
            inspect(&small).unwrap();
            began.elapsed()
        })
        .collect();
    took.sort();
    println!("inspect: p50 {:?}, p99 {:?}", took[100], took[198]);

    // In the VM: six queries, then one message per object, and several per device.
    let plan = world.plan(&seen);
    let (first, _) = count(|| world.apply_in("podns", &plan, None).unwrap());
    let (again, applied) = count(|| world.apply_in("podns", &plan, Some(&plan)).unwrap());
    assert!(!applied.changed);
    println!("the guest: {first} messages at first, {again} when all is as planned");
    let things = 500 + 50 + 49 + 10;
    assert!(first < things + 60 && again < 30, "{first} {again}");
}
