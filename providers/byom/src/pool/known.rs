//! Keeps the last look at a machine, and the steps that this process has begun there. Pure: the caller passes the time.
//!
//! The memory decides three things: which machines are likely to be free, what a list contains while a machine does not
//! answer, and whether a create that fails may go on to another machine. It may be lost at any time: the machine itself
//! has the truth.

use std::collections::BTreeSet;
use std::time::Duration;

use peerpod_provider_api::{IdempotencyKey, OwnedState};
use tokio::time::Instant;

use super::claim::{Boot, Claim};
use super::fault::Fault;

/// Time in which a machine is kept for the request that it was chosen for.
const HOLD: Duration = Duration::from_secs(60);
/// The same once its create has begun, which may be repeated for minutes.
const LONG_HOLD: Duration = Duration::from_secs(600);
/// Least time between two dials for a list, and between two of a machine that reboots. Never more than the quarantine.
const PAUSE: Duration = Duration::from_secs(15);
const REBOOT_PAUSE: Duration = Duration::from_millis(500);
/// Most abandoned keys of one machine.
const MAX_ABANDONED: usize = 64;

/// Last answer of a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Seen {
    /// None yet.
    #[default]
    Never,
    /// It can be claimed.
    Free(Boot),
    /// It has no claim, and cannot be claimed for this reason.
    Resting(&'static str),
    /// It has the claim of another owner.
    Taken,
    /// It has a claim of this owner, or may have one because the answer to it was lost.
    Ours(Claim, OwnedState),
}

/// Failed dials since the last answer.
#[derive(Debug, Clone)]
pub(crate) struct Down {
    /// Time of the first one.
    since: Instant,
    /// Time of the last one.
    last: Instant,
    /// Fault of the last one.
    pub(crate) fault: Fault,
}

/// Progress of a create on a machine that this process chose for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Step {
    /// Nothing was sent.
    Chosen,
    /// The claim was sent.
    Claiming,
    /// User-data were sent: the guest may run the pod.
    Delivering,
}

#[derive(Debug, Clone)]
struct Hold {
    /// Request or key that the machine is kept for.
    holder: String,
    step: Step,
    until: Instant,
}

/// Last look at a machine, and the steps begun there, of one process.
#[derive(Debug, Default)]
pub(crate) struct Known {
    seen: Seen,
    seen_at: Option<Instant>,
    down: Option<Down>,
    hold: Option<Hold>,
    /// Keys whose create gave up here: a claim of theirs is to be freed.
    abandoned: BTreeSet<IdempotencyKey>,
}

impl Known {
    /// Notes an answer. Returns the claim of a VM that has ended, although no caller asked for that.
    pub(crate) fn saw(&mut self, seen: Seen, now: Instant) -> Option<Claim> {
        (self.seen_at, self.down) = (Some(now), None);
        let before = std::mem::replace(&mut self.seen, seen);
        let Seen::Ours(claim, OwnedState::Running) = before else { return None };
        let lives = matches!(&self.seen, Seen::Ours(now, _) if now.boot_id == claim.boot_id);
        (!lives).then_some(claim)
    }

    /// Notes a failed dial, or a fault of the machine. Returns whether it is the first one.
    pub(crate) fn failed(&mut self, fault: Fault, now: Instant) -> bool {
        let since = self.down.as_ref().map_or(now, |down| down.since);
        self.down.replace(Down { since, last: now, fault }).is_none()
    }

    /// Returns the last answer.
    pub(crate) fn seen(&self) -> &Seen {
        &self.seen
    }

    /// Returns the last answer, if it is not older than `age`.
    pub(crate) fn recent(&self, age: Duration, now: Instant) -> Option<&Seen> {
        let is_recent = self.seen_at.is_some_and(|at| now.duration_since(at) < age);
        (is_recent && self.down.is_none()).then_some(&self.seen)
    }

    /// Returns the failed dials since the last answer.
    pub(crate) fn down(&self) -> Option<&Down> {
        self.down.as_ref()
    }

    /// Returns the fault of a dial that began after `asked`, for the callers that waited for it.
    pub(crate) fn fault_since(&self, asked: Instant) -> Option<Fault> {
        self.down.as_ref().filter(|down| down.last >= asked).map(|down| down.fault.clone())
    }

    /// Whether a machine may be dialled to place a pod. One that does not answer is left out for `quarantine`, and one
    /// that reboots for a moment.
    pub(crate) fn is_worth_a_place(&self, quarantine: Duration, now: Instant) -> bool {
        let pause = if self.reboots() { PAUSE.min(quarantine) } else { quarantine };
        self.down.as_ref().is_none_or(|down| now.duration_since(down.last) >= pause)
    }

    /// Whether a machine may be dialled for a list.
    pub(crate) fn is_worth_a_look(&self, quarantine: Duration, now: Instant) -> bool {
        let pause = if self.reboots() { REBOOT_PAUSE } else { PAUSE };
        let pause = pause.min(quarantine);
        self.down.as_ref().is_none_or(|down| now.duration_since(down.last) >= pause)
    }

    fn reboots(&self) -> bool {
        matches!(self.seen, Seen::Ours(_, OwnedState::Deleting) | Seen::Resting(_))
    }

    /// Keeps the machine for a request. Returns false if it is kept for another one.
    pub(crate) fn hold(&mut self, holder: &str, now: Instant) -> bool {
        if !self.is_free_for(holder, now) {
            return false;
        }
        match &mut self.hold {
            Some(hold) if hold.holder == holder => hold.until = hold.until.max(now + HOLD),
            _ => self.hold = Some(Hold { holder: holder.to_owned(), step: Step::Chosen, until: now + HOLD }),
        }
        true
    }

    /// Whether the machine is not kept for another request.
    pub(crate) fn is_free_for(&self, holder: &str, now: Instant) -> bool {
        self.hold.as_ref().is_none_or(|hold| hold.until <= now || hold.holder == holder)
    }

    /// Notes that a create takes a step.
    pub(crate) fn step(&mut self, holder: &str, step: Step, now: Instant) {
        if let Some(hold) = self.hold.as_mut().filter(|hold| hold.holder == holder) {
            (hold.step, hold.until) = (hold.step.max(step), now + LONG_HOLD);
        }
    }

    /// Returns the step of a create, if this process chose the machine for it. Otherwise an earlier process may have sent
    /// anything.
    pub(crate) fn step_of(&self, holder: &str) -> Option<Step> {
        self.hold.as_ref().filter(|hold| hold.holder == holder).map(|hold| hold.step)
    }

    /// Ends the hold of a request.
    pub(crate) fn release(&mut self, holder: &str) {
        self.hold.take_if(|hold| hold.holder == holder);
    }

    /// Notes that a claim was sent, before its answer.
    pub(crate) fn may_be_ours(&mut self, claim: &Claim) {
        // A call that comes again wants its VM after all.
        if let Some(key) = &claim.marks.key {
            self.abandoned.remove(key);
        }
        self.seen = Seen::Ours(claim.clone(), OwnedState::Pending);
    }

    /// Notes that a reboot was requested.
    pub(crate) fn will_reboot(&mut self) {
        if let Seen::Ours(_, state) = &mut self.seen {
            *state = OwnedState::Deleting;
        }
    }

    /// Whether the VM of this boot is being deleted.
    pub(crate) fn is_leaving(&self, boot_id: &str) -> bool {
        matches!(&self.seen, Seen::Ours(claim, OwnedState::Deleting) if claim.boot_id == boot_id)
    }

    /// Notes that a create gives up: a claim of its key is to be freed.
    pub(crate) fn abandon(&mut self, key: &IdempotencyKey) {
        if self.abandoned.len() >= MAX_ABANDONED {
            self.abandoned.pop_first();
        }
        self.abandoned.insert(key.clone());
        self.will_reboot();
    }

    /// Whether a create with this key gave up.
    pub(crate) fn is_abandoned(&self, key: Option<&IdempotencyKey>) -> bool {
        key.is_some_and(|key| self.abandoned.contains(key))
    }
}

impl Down {
    /// Returns how long the machine has not answered.
    pub(crate) fn lasts(&self, now: Instant) -> Duration {
        now.duration_since(self.since)
    }
}

#[cfg(test)]
mod tests {
    use peerpod_provider_api::{CreateRequest, Owner};

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn boot(id: &str) -> Boot {
        let text = format!("{{\"version\":1,\"boot_id\":\"{id}\",\"vcpus\":1,\"memory_mib\":1}}");
        Boot::parse(text.as_bytes()).unwrap()
    }

    fn claim(number: u32, boot_id: &str) -> Claim {
        let key = IdempotencyKey::derive("c", "s", number);
        Claim::new(&CreateRequest::default(), &key, &Owner::default(), &boot(boot_id))
    }

    #[test]
    fn a_vm_that_ends_unasked_is_reported_once() {
        let (mut known, now) = (Known::default(), Instant::now());
        let running = |id| Seen::Ours(claim(0, id), OwnedState::Running);
        assert_eq!(known.saw(running("a"), now), None);
        assert_eq!(known.saw(running("a"), now), None);
        assert_eq!(
            known.saw(running("b"), now),
            Some(claim(0, "a")),
            "the machine was rebooted and claimed again"
        );
        assert_eq!(known.saw(Seen::Free(boot("c")), now), Some(claim(0, "b")));
        assert_eq!(known.saw(Seen::Taken, now), None);
        known.saw(running("d"), now);
        assert!(!known.is_leaving("d"));
        known.will_reboot();
        assert!(known.is_leaving("d") && !known.is_leaving("c"));
        assert_eq!(known.saw(Seen::Free(boot("e")), now), None, "a delete is no surprise");
        known.may_be_ours(&claim(1, "e"));
        assert_eq!(known.saw(Seen::Taken, now), None, "a claim that was lost is no VM");
    }

    #[test]
    fn a_machine_that_does_not_answer_rests_and_one_that_reboots_is_tried_soon() {
        let (mut known, now) = (Known::default(), Instant::now());
        let quarantine = SECOND * 180;
        assert!(known.is_worth_a_place(quarantine, now));
        assert!(
            known.failed(Fault::Away("x".into()), now)
                && !known.failed(Fault::Away("y".into()), now + SECOND)
        );
        assert_eq!(known.fault_since(now), Some(Fault::Away("y".into())));
        assert_eq!(known.fault_since(now + SECOND * 2), None);
        assert!(!known.is_worth_a_place(quarantine, now + SECOND * 180));
        assert!(known.is_worth_a_place(quarantine, now + SECOND * 181));
        assert!(
            !known.is_worth_a_look(quarantine, now + SECOND * 15)
                && known.is_worth_a_look(quarantine, now + SECOND * 16)
        );
        assert_eq!(known.down().unwrap().lasts(now + SECOND * 9), SECOND * 9);
        known.saw(Seen::Resting("it boots"), now);
        assert!(known.down().is_none() && known.recent(SECOND, now).is_some());
        assert!(known.failed(Fault::Away("z".into()), now));
        assert_eq!(known.recent(SECOND, now), None);
        assert!(
            known.is_worth_a_look(quarantine, now + SECOND)
                && known.is_worth_a_place(quarantine, now + SECOND * 15)
        );
    }

    #[test]
    fn a_machine_is_kept_for_one_request_and_its_steps_are_known() {
        let (mut known, now) = (Known::default(), Instant::now());
        assert!(known.hold("a", now) && known.hold("a", now) && !known.hold("b", now));
        assert_eq!((known.step_of("a"), known.step_of("b")), (Some(Step::Chosen), None));
        known.step("a", Step::Delivering, now);
        known.step("a", Step::Claiming, now);
        assert_eq!(known.step_of("a"), Some(Step::Delivering), "a repeated create has done it before");
        assert!(!known.hold("b", now + HOLD) && known.hold("b", now + LONG_HOLD));
        assert_eq!(known.step_of("a"), None);
        known.release("a");
        assert_eq!(known.step_of("b"), Some(Step::Chosen));
        known.release("b");
        assert!(known.hold("a", now));
    }

    #[test]
    fn a_create_that_gave_up_is_remembered_within_limits() {
        let mut known = Known::default();
        known.may_be_ours(&claim(0, "a"));
        let key = |number| IdempotencyKey::derive("c", "s", number);
        known.abandon(&key(0));
        assert!(matches!(known.seen(), Seen::Ours(_, OwnedState::Deleting)));
        assert!(
            known.is_abandoned(Some(&key(0)))
                && !known.is_abandoned(Some(&key(1)))
                && !known.is_abandoned(None)
        );
        known.may_be_ours(&claim(0, "b"));
        assert!(!known.is_abandoned(Some(&key(0))), "its call came again");
        for number in 0..200 {
            known.abandon(&key(number));
        }
        assert_eq!(known.abandoned.len(), MAX_ABANDONED);
    }
}
