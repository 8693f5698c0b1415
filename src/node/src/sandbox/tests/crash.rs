//! Tests that in the end exactly the VMs of live sandboxes exist: after `kill -9` at any boundary, with a cloud, a
//! relay and a kernel that fail at random.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::node::*;
use super::world::*;
use crate::ledger::Batch;
use crate::sandbox::Stop;
use crate::sandbox::phase::Phase;

/// Next step of one sandbox's shim. The shim repeats a call without an answer, as the relay does for it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Next {
    Create,
    Start,
    /// Runs for a while.
    Idle(u64),
    Stop,
    /// The shim and its pod vanish without a StopVM.
    Vanish,
    /// The sandbox is stopped, and a late clean-up process calls CreateVM.
    LateCreate,
    Done,
    /// The sandbox runs to the end of the test.
    Stays,
}

struct Shim {
    name: String,
    next: Next,
    /// Step that follows the run.
    plan: Next,
    created: bool,
    stopped: bool,
}

impl Shim {
    async fn step(&mut self, node: &Node) {
        let sandbox = id(&self.name);
        self.next = match self.next {
            Next::Create => match node.create(&self.name).await {
                Ok(_) => {
                    self.created = true;
                    if self.plan == Next::Vanish { Next::Vanish } else { Next::Start }
                }
                Err(_) => Next::Stop,
            },
            Next::Start => match node.table.start(&sandbox).await {
                Ok(()) => Next::Idle(3),
                Err(_) => Next::Stop,
            },
            Next::Idle(0) => self.plan,
            Next::Idle(n) => {
                tokio::time::sleep(Duration::from_millis(200)).await;
                Next::Idle(n - 1)
            }
            Next::Stop => match node.table.stop(&sandbox, Stop::Called).await {
                Ok(()) => {
                    self.stopped = true;
                    Next::LateCreate
                }
                // The Rust shim tries three times and gives up; its network namespace goes then.
                Err(_) => Next::Vanish,
            },
            Next::Vanish => {
                node.fx.world.state().dead_netns.insert(format!("/run/netns/{}", self.name).into());
                self.stopped = true;
                Next::Done
            }
            Next::LateCreate => {
                drop(node.create(&self.name).await);
                Next::Done
            }
            Next::Done => Next::Done,
            Next::Stays => Next::Stays,
        };
    }
}

async fn life(seed: u64, late: bool) {
    let (world, dir) = (World::new(seed), Dir::new());
    world.late_creates.store(late, Ordering::Relaxed);
    // In every other world the provider chooses the placement, a new one each time.
    world.places.store(seed % 2 == 1, Ordering::Relaxed);
    // Every third node makes one call for several VMs; their guests have source addresses of their own.
    let settings = || if seed % 3 == 2 { batching(3) } else { settings() };
    world.own_addresses.store(seed % 3 == 2, Ordering::Relaxed);
    let mut dice = Dice::new(seed ^ 0xdead_beef);
    world.faults.store(dice.below(25), Ordering::Relaxed);
    let mut shims: Vec<Shim> = (0..3)
        .map(|n| Shim {
            name: format!("s{n}"),
            next: Next::Create,
            plan: [Next::Stop, Next::Stop, Next::Vanish, Next::Stays][dice.below(4) as usize],
            created: false,
            stopped: false,
        })
        .collect();

    for _ in 0..4 + dice.below(8) {
        let fuse = Fuse::after(Some(dice.below(70)));
        let Some(node) = Node::start_with(&world, &dir, fuse.clone(), settings()).await else { continue };
        // A shim may also stop in mid-boot.
        let impatient = dice.below(3) as usize;
        let hurry = dice.percent(30);
        let patience = Duration::from_millis(dice.below(1500));
        let mut calls: Vec<_> = shims.iter_mut().enumerate().collect();
        let all = calls.iter_mut().map(|(index, shim)| {
            let node = &node;
            async move {
                if hurry && *index == impatient && shim.next == Next::Start {
                    drop(tokio::time::timeout(patience, shim.step(node)).await);
                    shim.next = Next::Stop;
                }
                loop {
                    shim.step(node).await;
                    if matches!(shim.next, Next::Done | Next::Stays) {
                        std::future::pending::<()>().await;
                    }
                }
            }
        });
        let all = futures_util::future::join_all(all);
        tokio::select! {
            () = fuse.blown.notified() => {}
            _ = all => {}
            () = tokio::time::sleep(Duration::from_secs(400)) => {}
        }
        node.kill().await;
        // The relay answers a StopVM while the node is away.
        for shim in &mut shims {
            if shim.next == Next::Stop && dice.percent(50) {
                let text = format!(r#"{{"version":1,"op":"stop","id":"{}","at_ms":1}}"#, shim.name);
                std::fs::write(dir.0.join("inbox").join(format!("{}.json", shim.name)), text).unwrap();
                shim.stopped = true;
                shim.next = Next::LateCreate;
            }
        }
    }

    // Without further faults, every shim gets its answers and the state settles.
    world.faults.store(0, Ordering::Relaxed);
    let node = Node::start_with(&world, &dir, Fuse::after(None), settings()).await.unwrap();
    for shim in &mut shims {
        while !matches!(shim.next, Next::Done | Next::Stays) {
            shim.step(&node).await;
        }
    }
    let settled = |node: &Node| {
        node.table.views().iter().all(|view| matches!(view.phase, Phase::Running { .. }))
            && shims.iter().all(|shim| {
                !shim.stopped || node.phase(&shim.name) == "gone" || node.phase(&shim.name) == "-"
            })
    };
    node.until(&format!("seed {seed} settles"), settled).await;
    tokio::time::sleep(Duration::from_secs(120)).await;

    let live: BTreeSet<String> =
        node.table.views().iter().filter_map(|view| view.vm().map(|vm| vm.to_string())).collect();
    let names: BTreeSet<String> = node.table.views().iter().map(|view| view.id.to_string()).collect();
    {
        let state = world.state();
        let vms: BTreeSet<String> = state.vms.keys().map(ToString::to_string).collect();
        assert_eq!(vms, live, "seed {seed}: VMs are those of live sandboxes");
        assert_eq!(state.reused, 0, "seed {seed}: a repeated create is the same byte for byte");
        assert_eq!(names.len(), live.len(), "seed {seed}: one each");
        assert_eq!(state.devices.keys().cloned().collect::<BTreeSet<_>>(), names, "seed {seed}: tunnels");
        assert_eq!(state.relay.keys().cloned().collect::<BTreeSet<_>>(), names, "seed {seed}: relay");
        for shim in &shims {
            assert!(!shim.stopped || !names.contains(&shim.name), "seed {seed}: {} was stopped", shim.name);
            if shim.next == Next::Stays {
                assert!(names.contains(&shim.name), "seed {seed}: {} was lost", shim.name);
            }
        }
    }
    let kept = node.fx.ledger().load().unwrap();
    let live = |batch: &Batch| batch.members.iter().any(|member| names.contains(member.sandbox.as_str()));
    assert!(kept.batches.iter().all(live), "seed {seed}: a batch's file goes with its last member");
    assert_eq!(node.metrics.panics.get(), 0, "seed {seed}");
    node.kill().await;
}

/// Returns the number of lives: `usual`, or 20 times as many in `make test-long`.
fn seeds(usual: u64) -> u64 {
    if std::env::var_os("PEERPOD_TEST_LONG").is_some() { usual * 80 } else { usual }
}

fn lives(seeds: std::ops::Range<u64>, late: bool) {
    for seed in seeds {
        // Each life has a runtime of its own: its clock starts anew, and no task outlives it.
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(life(seed, late));
    }
}

#[test]
fn kills_at_random_boundaries_leak_and_lose_no_vm() {
    lives(0..seeds(100), false);
}

/// A create may also arrive at the cloud after its caller died. No record can name such a VM; the comparison of the
/// cloud's list with the ledger finds it.
#[test]
fn creates_that_arrive_after_a_crash_are_found() {
    lives(0..seeds(50), true);
}

/// Kills the node at each boundary of one quiet life: create, run, stop.
#[test]
fn the_node_recovers_from_a_kill_at_each_boundary() {
    killed_at_each_boundary(false);
}

/// A create that is repeated after a crash goes to its first placement, even if the provider would choose another by
/// now.
#[test]
fn the_node_recovers_from_a_kill_at_each_boundary_with_placements() {
    killed_at_each_boundary(true);
}

fn killed_at_each_boundary(places: bool) {
    let mut boundaries = 0;
    loop {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let survived = runtime.block_on(async {
            let (world, dir) = (World::new(7), Dir::new());
            world.places.store(places, Ordering::Relaxed);
            let fuse = Fuse::after(Some(boundaries));
            let whole = async |node: &Node| {
                node.create("a").await.unwrap();
                node.table.start(&id("a")).await.unwrap();
                node.table.stop(&id("a"), Stop::Called).await.unwrap();
                node.until("gone", |node| node.phase("a") == "gone").await;
            };
            let mut survived = false;
            if let Some(node) = Node::start_with(&world, &dir, fuse.clone(), settings()).await {
                tokio::select! {
                    biased;
                    () = fuse.blown.notified() => {}
                    () = whole(&node) => survived = true,
                }
                node.kill().await;
            }
            let node = Node::start(&world, &dir).await;
            if !survived {
                // The relay repeats the calls without an answer; a stopped sandbox refuses them.
                node.create("a").await.unwrap();
                drop(node.table.start(&id("a")).await);
                node.table.stop(&id("a"), Stop::Called).await.unwrap();
                node.until("gone", |node| node.phase("a") == "gone").await;
            }
            {
                let state = world.state();
                assert!(state.vms.is_empty(), "boundary {boundaries}");
                assert!(state.devices.is_empty() && state.relay.is_empty(), "boundary {boundaries}");
                assert_eq!(state.reused, 0, "boundary {boundaries}");
                assert!(state.made <= 1, "boundary {boundaries}: {} VMs were made", state.made);
            }
            node.kill().await;
            survived
        });
        if survived {
            break;
        }
        boundaries += 1;
    }
    assert!(boundaries > 20, "{boundaries}");
}
