//! Reads the guest's status while its pod runs: the path MTU to the node, deviations of the pod's network from the plan,
//! the guest's notes, and the cloud's notice that it takes the VM back. The status only feeds logs, metrics, Events and
//! `describe`; no decision depends on it. The number of log lines is bounded, so that a guest with ever-changing reports does not fill the log.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::{Duration, UNIX_EPOCH};

use peerpod_proto::guest::{NetworkPlan, Pull, Status};
use protobuf::Message;
use tracing::{info, warn};

use crate::sandbox::lifecycle::{Phase, Task, clip};
use crate::sandbox::vm::events::interruption;

/// Maximum number of log lines for one sandbox, in one life of its task.
const MOST_LOGGED: u32 = 64;
const MOST_NOTES: usize = 8;
const MIB: f64 = 1_048_576.0;
/// Pulls that one report adds to the metric: a hostile guest must not spoil it.
const MOST_PULLS: u64 = 100;

/// Maximum number of Events with the progress of pulls, in one life of the sandbox's task.
const MOST_PULL_EVENTS: u32 = 64;

/// Remedy of a narrow path.
const WIDEN: &str = "let the network between VM and node pass packets of the VM's MTU, or lower the MTU of the pods' \
                     network";

/// Last report of a guest, and the number of log lines so far.
#[derive(Default)]
pub(crate) struct Reports {
    /// Hash of the status that was read last and of the MTU planned at that time.
    seen: u64,
    path: Option<Path>,
    notes: Vec<String>,
    logged: u32,
    /// Pulls of images that were counted, done and failed. A new guest program begins again at 0.
    pulls: [u64; 2],
    /// Progress of the pulls in flight that is in an Event already.
    pulling: Vec<Pull>,
    pull_events: u32,
    /// Whether the guest reported that the cloud takes the VM back. Only its first report counts.
    reclaimed: bool,
}

impl Reports {
    /// Returns the present faults of the last status, as text.
    pub(crate) fn faults(&self) -> impl Iterator<Item = &str> {
        let path = self.path.as_ref().filter(|path| path.kind == "narrow").map(|path| path.sentence.as_str());
        self.notes.iter().map(String::as_str).chain(path)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Path {
    kind: &'static str,
    sentence: String,
}

impl Task {
    pub(crate) fn read_reports(&mut self) {
        let Phase::Running { vm } = &self.record.phase else { return };
        let Some(plan) = &self.guest.plan else { return };
        let planned = plan.network.interfaces.first().map_or(0, |interface| interface.mtu);
        let status = {
            let guest = self.guest.state.borrow();
            let mut hasher = DefaultHasher::new();
            (&guest.status, planned).hash(&mut hasher);
            let now = hasher.finish();
            if guest.status.is_empty() || std::mem::replace(&mut self.guest.reports.seen, now) == now {
                return;
            }
            Status::parse_from_bytes(&guest.status).unwrap_or_default()
        };
        let path = judge(&plan.network, &status);
        if status.reclaimed_at_unix_ms > 0 && !std::mem::replace(&mut self.guest.reports.reclaimed, true) {
            let at = UNIX_EPOCH + Duration::from_millis(status.reclaimed_at_unix_ms);
            let event = interruption(&self.metrics, vm, at);
            self.tell(event.reason, event.text);
        }
        self.post_pulls(&status.pulls);
        self.count_pulls([status.images_pulled, status.image_pulls_failed]);
        if path.is_some() && path != self.guest.reports.path {
            self.log_path(path);
        }
        let notes: Vec<String> = status.notes.iter().take(MOST_NOTES).map(|note| clip(note)).collect();
        if notes != self.guest.reports.notes {
            for note in notes.iter().filter(|note| !self.guest.reports.notes.contains(note)) {
                if may_log(&mut self.guest.reports.logged) {
                    warn!(note, "note of the guest");
                    self.tell("GuestNote", format!("the guest of the pod's VM reports: {note}"));
                }
            }
            self.guest.reports.notes = notes;
        }
        self.publish();
    }

    /// Posts the progress of pulls that take long. The guest reports it ever more rarely.
    fn post_pulls(&mut self, pulls: &[Pull]) {
        for pull in pulls.iter().filter(|pull| !self.guest.reports.pulling.contains(pull)) {
            if self.guest.reports.pull_events < MOST_PULL_EVENTS {
                self.guest.reports.pull_events += 1;
                self.progress("PullingImage", pull_text(pull));
            }
        }
        self.guest.reports.pulling = pulls.to_vec();
    }

    /// Adds the pulls of images since the last report. A guest adds at most [`MOST_PULLS`] at once.
    fn count_pulls(&mut self, now: [u64; 2]) {
        let before = std::mem::replace(&mut self.guest.reports.pulls, now);
        for ((result, now), before) in ["done", "failed"].into_iter().zip(now).zip(before) {
            let new = now.checked_sub(before).unwrap_or(now).min(MOST_PULLS);
            self.metrics.guests.image_pulls.get_or_create(&[("result", result)]).inc_by(new);
        }
    }

    fn log_path(&mut self, path: Option<Path>) {
        let before = std::mem::replace(&mut self.guest.reports.path, path);
        let Some(Path { kind, sentence }) = &self.guest.reports.path else { return };
        if before.is_none_or(|before| before.kind != *kind) && self.guest.reports.logged < MOST_LOGGED {
            self.metrics.guests.paths.count(kind);
        }
        if may_log(&mut self.guest.reports.logged) {
            match *kind {
                "narrow" => {
                    warn!(path = sentence, "packets of the pod are smaller than planned");
                    self.tell("NarrowPath", sentence.clone());
                }
                "untried" => warn!(path = sentence, "the guest could not probe the path to the node"),
                _ => info!(path = sentence, "the guest probed the path to the node"),
            }
        }
    }
}

fn may_log(logged: &mut u32) -> bool {
    *logged = logged.saturating_add(1);
    if *logged == MOST_LOGGED {
        warn!(bound = MOST_LOGGED, "the guest reports too often; its further reports are not logged");
    }
    *logged < MOST_LOGGED
}

fn pull_text(pull: &Pull) -> String {
    let Pull { bytes, of, bytes_per_second, elapsed_ms, .. } = pull;
    let (image, seconds, mib) = (clip(&pull.image), elapsed_ms / 1000, *bytes_per_second as f64 / MIB);
    format!(
        "The VM pulls image {image}: {} of {} MiB after {seconds} s, {mib:.1} MiB/s",
        bytes >> 20,
        of >> 20
    )
}

/// Compares the status with the plan; `None` while the guest has not reported a path.
fn judge(plan: &NetworkPlan, status: &Status) -> Option<Path> {
    let path = status.path.as_ref().filter(|path| path.mtu > 0)?;
    let planned = plan.interfaces.first().map_or(0, |interface| interface.mtu);
    let overhead = plan.underlay.as_ref().map_or(0, |underlay| underlay.overhead);
    let by = if path.probed == 0 { "as the VM's kernel reports" } else { "as probed" };
    let mut sentence = format!(
        "packets of at most {} bytes pass between VM and {}, {by} (its device {}, its route {})",
        path.mtu,
        clip(&path.peer),
        path.device,
        path.kernel
    );
    let narrow = status.pod_mtu > 0 && status.pod_mtu < planned;
    if narrow {
        let mtu = status.pod_mtu;
        sentence += &format!(
            "; with {overhead} for the tunnel the pod has an MTU of {mtu} instead of {planned}: {WIDEN}"
        );
    }
    if !path.why.is_empty() {
        sentence += &format!("; {}", clip(&path.why));
    }
    let kind = match (narrow, path.why.is_empty()) {
        (true, _) => "narrow",
        (false, false) => "untried",
        (false, true) => "as_planned",
    };
    Some(Path { kind, sentence })
}

#[cfg(test)]
mod tests {
    use peerpod_proto::guest;

    use super::*;

    fn plan() -> NetworkPlan {
        let interface = guest::Interface { mtu: 1450, ..Default::default() };
        let underlay = guest::Underlay { overhead: 50, ..Default::default() };
        NetworkPlan { interfaces: vec![interface], underlay: Some(underlay).into(), ..Default::default() }
    }

    fn status(mtu: u32, probed: u32, why: &str, pod_mtu: u32) -> Status {
        let path = guest::Path {
            peer: "10.0.0.1".into(),
            mtu,
            probed,
            kernel: 1500,
            device: 1500,
            why: why.into(),
            ..Default::default()
        };
        Status { path: Some(path).into(), pod_mtu, ..Default::default() }
    }

    #[test]
    fn a_path_report_names_the_pods_mtu_and_the_reason() {
        let plan = plan();
        assert_eq!(judge(&plan, &Status::new()), None);
        assert_eq!(judge(&plan, &status(0, 0, "", 1450)), None, "not tried yet");
        for (status, kind, texts) in [
            (status(1500, 1500, "", 1450), "as_planned", &["1500", "10.0.0.1", "as probed"][..]),
            (status(1500, 0, "UDP is blocked", 1450), "untried", &["kernel reports", "UDP is blocked"]),
            (status(1400, 1400, "", 1350), "narrow", &["1400", "50", "1350 instead of 1450"]),
            (status(1400, 0, "UDP is\nblocked", 1350), "narrow", &["1350 instead of 1450", "UDP is blocked"]),
        ] {
            let path = judge(&plan, &status).unwrap();
            assert_eq!(path.kind, kind);
            for word in texts {
                assert!(path.sentence.contains(word), "{}", path.sentence);
            }
        }
    }
}
