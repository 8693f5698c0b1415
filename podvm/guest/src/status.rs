//! Collects the guest's status: stages with times, readiness, the state of the kata-agent, the losses of a restart.
//!
//! Times count from the start of the VM's kernel, or, if the "VM" is a set of namespaces, from the start of its pid 1.
//! Both kinds can then be compared with the node's clock.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use parking_lot::{Mutex, MutexGuard};
use peerpod_proto::guest;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use crate::{files, proc, usage};

/// Limit of stages; a guest has about ten, and a restart adds a few.
const MAX_STAGES: usize = 64;
const MAX_LOST: usize = 16;
/// File with pid 1's stages of the boot.
const PAST: &str = "boot.json";
const MAX_PAST: u64 = 16 << 10;
/// The inode number of the first pid namespace (`PROC_PID_INIT_INO`).
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";

/// Returns the time since the machine's kernel started, including suspended time.
pub(crate) fn since_boot() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map(Duration::from).unwrap_or_default()
}

/// Returns the kernel's id of the boot.
pub(crate) fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// Returns whether pid 1 of this namespace is that of the machine.
pub(crate) fn in_first_pid_namespace() -> bool {
    std::fs::read_link("/proc/self/ns/pid").is_ok_and(|link| link.as_os_str() == FIRST_PID_NAMESPACE)
}

/// Returns the start of this VM's time, on the clock of [`since_boot`].
pub(crate) fn birth_of_vm() -> Duration {
    if in_first_pid_namespace() { Duration::ZERO } else { proc::started(1).unwrap_or_else(since_boot) }
}

/// Stage that was over before this program began, as pid 1 noted it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Past {
    name: String,
    /// On the clock of [`since_boot`].
    began_us: u64,
    took_us: u64,
}

impl Past {
    /// Makes a stage that ends now.
    pub(crate) fn new(name: &str, began: Duration) -> Past {
        let took = since_boot().saturating_sub(began);
        Past { name: name.to_owned(), began_us: micros(began), took_us: micros(took) }
    }
}

/// Stores finished stages for the program that talks to the node.
pub(crate) fn note_past(state_dir: &Path, stages: &[Past]) -> std::io::Result<()> {
    files::write_json(&state_dir.join(PAST), &stages)
}

pub(crate) struct Status {
    zero: Duration,
    inner: Mutex<guest::Status>,
    notes: Mutex<BTreeMap<&'static str, String>>,
    /// Process id of the kata-agent; 0: none runs.
    pub(crate) agent: AtomicU32,
    /// Directory of the container images, once it is known.
    pub(crate) images: OnceLock<PathBuf>,
    /// The node is being dialled, or may dial.
    pub(crate) called: Flag,
    /// The NICs' addresses are requested, or there: other work may use the processor.
    pub(crate) asked: Flag,
    /// Notified when a NIC gets an address: other targets may be reachable now. For one listener.
    pub(crate) addressed: Arc<Notify>,
    /// Notified when the node must receive a note at once. For one listener.
    pub(crate) said: Notify,
}

/// Stage in progress.
pub(crate) struct RunningStage {
    name: &'static str,
    began: Duration,
}

/// Event that deferred work waits for.
pub(crate) struct Flag(watch::Sender<bool>);

impl Flag {
    pub(crate) fn set(&self) {
        self.0.send_replace(true);
    }

    /// Waits for the event, but not for ever: a missing one delays nothing for good.
    pub(crate) async fn wait(&self, limit: Duration) {
        drop(timeout(limit, self.0.subscribe().wait_for(|happened| *happened)).await);
    }
}

impl Status {
    /// Acts as [`Status::note`] for an event on the guest's side: the node gets the status at once.
    pub(crate) fn say(&self, subject: &'static str, text: Option<String>) {
        self.note(subject, text);
        self.said.notify_one();
    }

    /// Makes the status, with the stages before this program, if it is the first run.
    pub(crate) fn new(state_dir: &Path, restarted: bool) -> Status {
        let zero = birth_of_vm();
        let mut inner = guest::Status::new();
        inner.version = env!("CARGO_PKG_VERSION").to_owned();
        inner.boot_id = boot_id();
        let [called, asked] = [(); 2].map(|()| Flag(watch::Sender::new(restarted)));
        let status = Status {
            zero,
            inner: Mutex::new(inner),
            notes: Mutex::default(),
            agent: AtomicU32::default(),
            images: OnceLock::new(),
            called,
            asked,
            addressed: Arc::default(),
            said: Notify::new(),
        };
        let own_start = || proc::started(std::process::id()).unwrap_or_else(since_boot);
        status.done(match restarted {
            false => RunningStage { name: "boot", began: zero },
            true => RunningStage { name: "restart", began: own_start() },
        });
        let noted = files::read(&state_dir.join(PAST), MAX_PAST).ok().flatten().unwrap_or_default();
        let noted: Vec<Past> = serde_json::from_slice(&noted).unwrap_or_default();
        for past in noted.into_iter().filter(|_| !restarted).take(MAX_STAGES / 2) {
            let (name, at_us, took_us) =
                (past.name, past.began_us.saturating_sub(micros(zero)), past.took_us);
            let time = guest::StageTime { name, at_us, took_us, ..guest::StageTime::default() };
            status.lock().stages.push(time);
        }
        status
    }

    /// Begins a stage, which becomes the stage that the guest is in.
    pub(crate) fn begin(&self, name: &'static str) -> RunningStage {
        self.lock().stage = name.to_owned();
        RunningStage { name, began: since_boot() }
    }

    pub(crate) fn done(&self, stage: RunningStage) {
        let at_us = micros(stage.began.saturating_sub(self.zero));
        let took_us = micros(since_boot().saturating_sub(stage.began));
        tracing::info!(stage = stage.name, at_us, took_us, "stage done");
        let mut inner = self.lock();
        if inner.stages.len() < MAX_STAGES {
            let name = stage.name.to_owned();
            inner.stages.push(guest::StageTime { name, at_us, took_us, ..guest::StageTime::default() });
        }
    }

    /// Reports that the pod may be used.
    pub(crate) fn ready(&self) {
        let mut inner = self.lock();
        (inner.ready, inner.stage) = (true, "ready".to_owned());
        inner.error.clear();
    }

    /// Sets the present obstacle; empty = none.
    pub(crate) fn error(&self, text: &str) {
        self.lock().error = text.to_owned();
    }

    /// Adds a loss by a restart, as text.
    pub(crate) fn lost(&self, what: String) {
        tracing::warn!(what, "lost");
        let mut inner = self.lock();
        if inner.lost.len() < MAX_LOST {
            inner.lost.push(what);
        }
    }

    /// Reports that the cloud takes the VM back at this time since 1970. The node gets the status at once.
    pub(crate) fn reclaimed(&self, at: Duration) {
        // 0 means that there is no notice.
        self.lock().reclaimed_at_unix_ms = u64::try_from(at.as_millis()).unwrap_or(u64::MAX).max(1);
        self.said.notify_one();
    }

    /// Counts a pull of an image, which is over. The node gets the status at once.
    pub(crate) fn pulled(&self, image: &str, is_done: bool) {
        let mut inner = self.lock();
        inner.pulls.retain(|pull| pull.image != image);
        let count = if is_done { &mut inner.images_pulled } else { &mut inner.image_pulls_failed };
        *count += 1;
        drop(inner);
        self.said.notify_one();
    }

    /// Reports the progress of an image's pull to the node at once.
    pub(crate) fn pulling(&self, pull: guest::Pull) {
        let mut inner = self.lock();
        inner.pulls.retain(|known| known.image != pull.image);
        inner.pulls.push(pull);
        drop(inner);
        self.said.notify_one();
    }

    /// Sets the note of a subject; `None` removes it.
    pub(crate) fn note(&self, subject: &'static str, text: Option<String>) {
        let mut notes = self.notes.lock();
        match text {
            Some(text) => {
                if notes.get(subject) != Some(&text) {
                    tracing::warn!(subject, text, "note");
                }
                notes.insert(subject, text);
            }
            None => drop(notes.remove(subject)),
        }
        self.lock().notes = notes.values().cloned().collect();
    }

    pub(crate) fn report(&self) -> guest::Status {
        self.lock().clone()
    }

    /// Returns the status with the present use of the VM.
    pub(crate) fn with_usage(&self) -> guest::Status {
        let images = self.images.get().map_or(Path::new("/"), PathBuf::as_path);
        let usage = usage::read(self.agent.load(Relaxed), images);
        guest::Status { usage: Some(usage).into(), ..self.report() }
    }

    /// Locks the message, to change other parts of it.
    pub(crate) fn lock(&self) -> MutexGuard<'_, guest::Status> {
        self.inner.lock()
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_have_times_and_their_number_is_bounded() {
        let dir = files::testing::TempDir::new();
        note_past(dir.path(), &[Past::new("init", since_boot())]).unwrap();
        let status = Status::new(dir.path(), false);
        let stage = status.begin("dial");
        assert_eq!(status.report().stage, "dial");
        std::thread::sleep(Duration::from_millis(2));
        status.done(stage);
        let report = status.report();
        assert_eq!(report.stages[0].name, "boot");
        assert_eq!(report.stages[1].name, "init");
        assert_eq!(report.stages[2].name, "dial");
        assert!(report.stages[2].took_us >= 2000 && report.stages[2].at_us > 0);
        assert!(!report.boot_id.is_empty() && !report.version.is_empty());
        for _ in 0..200 {
            status.done(status.begin("link"));
            status.lost("everything".into());
        }
        assert_eq!((status.report().stages.len(), status.report().lost.len()), (MAX_STAGES, MAX_LOST));
    }

    #[test]
    fn being_ready_clears_the_error() {
        let status = Status::new(Path::new("/nonexistent"), true);
        status.error("no agent");
        assert_eq!(status.report().error, "no agent");
        status.ready();
        let report = status.report();
        assert!(report.ready && report.error.is_empty());
        assert_eq!(report.stages[0].name, "restart");
    }
}
