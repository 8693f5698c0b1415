//! Kills the guest while it changes the pod's network from one plan to another.

use super::network_common;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use network_common::Vm;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use peerpod_tests::{Dice, PATIENCE, beyond_wall};
use peerpod_world::picture::Picture;
use peerpod_world::{Daemons, Settings, Sight, World, eventually};

/// Enough routes to make a plan take a while; a pod may have 4,096.
const ROUTES: u32 = 1500;
/// Limit of rounds. The test needs one kill in the middle of a plan, and usually the first round has it.
const ROUNDS: u64 = 20;
/// Minimum number of rounds, with kills at any time.
const AT_LEAST: u64 = 4;
/// The tunnel's MTU.
const ROOM: u64 = 1450;

/// Returns the routes that distinguish the plans, in the form that `ip` takes and the picture prints.
fn routes(of: u64) -> impl Iterator<Item = String> {
    let second = 50 + of % 2;
    (0..ROUTES).map(move |n| format!("10.{second}.{}.{}/32", n / 250, n % 250))
}

/// Returns the number of routes of this plan that exist.
fn count(picture: &Picture, of: u64) -> usize {
    let lines = picture.lines(ROOM);
    let there: BTreeSet<&str> = lines
        .iter()
        .filter_map(|line| line.split(" dst ").nth(1)?.split(' ').next())
        .map(|destination| destination.trim_end_matches("/32"))
        .collect();
    routes(of).filter(|route| there.contains(route.trim_end_matches("/32"))).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_killed_during_a_plan_completes_it_after_its_restart() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let pod = world.pod().unwrap();
    let outside = pod.namespace().netns().clone();
    let batch = |verb: &str, of: u64| -> String {
        routes(of).map(|route| format!("route {verb} {route} via 10.244.1.1 dev eth0\n")).collect()
    };
    pod.namespace().ip(&batch("add", 0)).unwrap();
    let vm = Vm::start(&daemons, "halfway", &pod.namespace().path()).await.unwrap();
    let same = async || {
        let outside = Picture::of(&outside, &[]).unwrap();
        let mut left = Vec::new();
        let follows = eventually("the VM's network is the pod's", PATIENCE, async || {
            left = beyond_wall(outside.differences(&Picture::of(&vm.inside, &[]).ok()?, ROOM));
            left.is_empty().then_some(())
        });
        if let Err(error) = follows.await {
            left.truncate(20);
            panic!("{error}: {}\n{}", left.join("\n"), daemons.log_tails());
        }
    };
    same().await;
    let mut dice = Dice(0x5eed);
    let (mut halfway, mut rounds) = (0, 0);
    while rounds < AT_LEAST || (halfway == 0 && rounds < ROUNDS) {
        rounds += 1;
        // A guest that was killed just after it had finished may not be back yet.
        let guest = eventually("the guest runs", PATIENCE, async || {
            let sight = Sight::of(&world, &[], &daemons).unwrap();
            sight.pids("peerpod-guest").into_iter().find(|pid| {
                let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                line.split(|byte| *byte == 0).any(|word| word == b"serve")
            })
        });
        let guest = Pid::from_raw(guest.await.unwrap() as i32);
        // The other plan, all at once, and without the previous one.
        pod.namespace().ip(&(batch("add", rounds) + &batch("del", rounds - 1))).unwrap();
        // The guest has begun when the first route exists.
        let first = routes(rounds).next().unwrap();
        let began = Instant::now();
        let begun = || vm.inside.run(|| has_route(&first)).unwrap();
        while !begun() {
            assert!(began.elapsed() < PATIENCE, "the guest does not follow\n{}", daemons.log_tails());
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        tokio::time::sleep(Duration::from_micros(dice.roll(3000))).await;
        match kill(guest, Signal::SIGKILL) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(error) => panic!("{error}"),
        }
        let now = Picture::of(&vm.inside, &[]).unwrap();
        let (new, old) = (count(&now, rounds), count(&now, rounds - 1));
        halfway += usize::from(new < ROUTES as usize || old > 0);
        println!("round {rounds}: killed with {new} new routes and {old} old ones");
        same().await;
        // No route of the previous plan, and every route of the new one.
        let now = Picture::of(&vm.inside, &[]).unwrap();
        assert_eq!((count(&now, rounds), count(&now, rounds - 1)), (ROUTES as usize, 0));
    }
    assert!(halfway > 0, "no kill came in the middle");
    vm.stop(&daemons).await.unwrap();
}

/// Returns whether the main table has the route, on a thread in the namespace.
fn has_route(route: &str) -> bool {
    let address: std::net::Ipv4Addr = route.trim_end_matches("/32").parse().unwrap();
    let wanted = format!("{:08X}", u32::from_ne_bytes(address.octets()));
    let table = std::fs::read_to_string("/proc/thread-self/net/route").unwrap();
    table.lines().any(|line| line.split_whitespace().nth(1) == Some(&wanted))
}
