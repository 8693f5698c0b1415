//! Walks one pod from CreateVM to a running exec and through StopVM; each stage checks its results. `make demo` prints
//! the stages, and the tests run them.

mod steps;

use std::future::Future;
use std::pin::Pin;
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::{Settings, World};
pub use steps::{Walk, transfer};

/// Receiver of the stages as they happen.
pub trait Progress: Send {
    /// Called when a stage begins.
    fn begin(&mut self, number: usize, of: usize, name: &str);
    /// Called when a stage has passed, with a summary of its results.
    fn done(&mut self, took: Duration, seen: &str);
}

/// Receiver that ignores the stages.
pub struct Silent;

impl Progress for Silent {
    fn begin(&mut self, _: usize, _: usize, _: &str) {}
    fn done(&mut self, _: Duration, _: &str) {}
}

/// Stage that has passed.
#[derive(Debug, Clone)]
pub struct Passed {
    /// Name of the stage.
    pub name: &'static str,
    /// Duration of the stage.
    pub took: Duration,
    /// Summary of its results.
    pub seen: String,
}

/// Result of a complete walk.
#[derive(Debug, Clone)]
pub struct Report {
    /// The stages as seen from outside, in order.
    pub passed: Vec<Passed>,
    /// The node's own stages with the time since CreateVM, from its ledger.
    pub inside: Vec<(String, Duration)>,
}

type Step = for<'a> fn(&'a mut Walk) -> Pin<Box<dyn Future<Output = anyhow::Result<String>> + 'a>>;

/// The stages in order.
const STAGES: &[(&str, Step)] = &[
    ("relay and node start", |walk| Box::pin(walk.start_daemons())),
    ("a pod's network, and another pod", |walk| Box::pin(walk.make_pods())),
    ("CreateVM", |walk| Box::pin(walk.create_vm())),
    ("StartVM: VM, guest, tunnel, agent", |walk| Box::pin(walk.start_vm())),
    ("agent: two connections, one silent", |walk| Box::pin(walk.connect_agent())),
    ("CreateSandbox, the pod's own container", |walk| Box::pin(walk.create_sandbox())),
    ("CopyFile, CreateContainer, StartContainer", |walk| Box::pin(walk.run_container())),
    ("ExecProcess of a real command", |walk| Box::pin(walk.exec())),
    ("64 MiB through WriteStdin and ReadStdout", |walk| Box::pin(walk.transfer())),
    ("the other pod pings the pod", |walk| Box::pin(walk.ping_in())),
    ("the other pod fetches a page", |walk| Box::pin(walk.fetch_in())),
    ("traffic out leaves by the node's pod netns", |walk| Box::pin(walk.fetch_out())),
    ("SignalProcess, WaitProcess, RemoveContainer", |walk| Box::pin(walk.remove_containers())),
    ("StopVM, three times", |walk| Box::pin(walk.stop_vm())),
    ("nothing is left but a tombstone", |walk| Box::pin(walk.nothing_is_left())),
];

/// Walks all stages in a new world. The first stage that fails ends the walk, with the ends of the daemons' logs in the
/// error. Everything it made is removed in every case, also when the future is dropped.
pub async fn walk(settings: Settings, progress: &mut dyn Progress) -> anyhow::Result<Report> {
    walk_in(&World::new()?, settings, progress).await
}

/// Walks all stages in the given world, which the caller can observe meanwhile.
pub async fn walk_in(
    world: &World,
    settings: Settings,
    progress: &mut dyn Progress,
) -> anyhow::Result<Report> {
    let mut walk = Walk::new(world.clone(), settings);
    let mut passed = Vec::new();
    for (index, (name, step)) in STAGES.iter().copied().enumerate() {
        progress.begin(index + 1, STAGES.len(), name);
        let began = Instant::now();
        let outcome = step(&mut walk).await;
        let seen = outcome.with_context(|| format!("{name}\n{}", walk.log_tails()))?;
        let took = began.elapsed();
        progress.done(took, &seen);
        passed.push(Passed { name, took, seen });
    }
    Ok(Report { passed, inside: walk.inside().to_vec() })
}
