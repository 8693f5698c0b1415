//! Starts processes from one long-lived thread.

use std::fs::File;
use std::io;
use std::process::{Child, Command};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use anyhow::Context;
use nix::sched::{CloneFlags, setns, unshare};
use peerpod_podnet::netns::Netns;

type Job = Box<dyn FnOnce() + Send>;

/// Starts processes in a network namespace, or in this process's namespace. They die with this thread: the kernel takes
/// the *thread* that started a process for its parent.
pub struct Spawner {
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Spawner {
    /// Starts the thread.
    pub fn start(netns: Option<Netns>) -> anyhow::Result<Spawner> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let work = move || queue.into_iter().for_each(|job| job());
        let thread = thread::Builder::new().name("spawner".into()).spawn(move || match netns {
            None => work(),
            Some(netns) => {
                if let Err(error) = netns.run(work) {
                    tracing::error!(%error, "cannot enter the node's namespace");
                }
            }
        })?;
        Ok(Spawner { jobs: Some(jobs), thread: Some(thread) })
    }

    /// Starts a process; with `own_pids` as the first process of a PID namespace.
    pub fn spawn(&self, mut command: Command, own_pids: bool) -> anyhow::Result<Child> {
        let (answer, answered) = mpsc::channel();
        let job: Job = Box::new(move || {
            // Without a receiver the child is dropped, and dies with this thread.
            answer.send(if own_pids { with_own_pids(&mut command) } else { command.spawn() }).ok();
        });
        self.jobs
            .as_ref()
            .context("the thread that starts processes ended")?
            .send(job)
            .ok()
            .context("the thread that starts processes ended")?;
        Ok(answered.recv().context("the thread that starts processes ended")??)
    }
}

/// Starts the thread's next child in a new PID namespace; later children are in the caller's namespace again.
#[expect(
    clippy::disallowed_methods,
    reason = "back to the PID namespace of this very process, for children alone"
)]
fn with_own_pids(command: &mut Command) -> io::Result<Child> {
    let ours = File::open("/proc/self/ns/pid")?;
    unshare(CloneFlags::CLONE_NEWPID)?;
    let child = command.spawn();
    setns(ours, CloneFlags::CLONE_NEWPID)?;
    child
}

impl Drop for Spawner {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // The thread only ends the queue; a panic in a job was reported to its caller.
            thread.join().ok();
        }
    }
}
