//! Defines the phases of a sandbox and the transitions between them: one pure, total function.
//!
//! This module does not wait, write or call. The task (`task.rs`) applies an event, makes the new phase durable, and
//! only then performs the phase's duty ([`desired`]). The duty follows from the phase alone, so a task that recovers after
//! a crash does the same as one that never stopped.
//!
//! ```text
//! Created ─ Booting ─ Joining ─ Running ─ Leaving ─ Gone
//!               └──── Unwanted ─────────────┘
//! ```

use std::fmt;

use peerpod_provider_api::InstanceId;
use serde::{Deserialize, Serialize};

/// Maximum number of attempts before a sandbox fails for lack of capacity. Each attempt has a key of its own. One
/// attempt may name many offerings, where the cloud takes a list.
pub(crate) const MAX_ATTEMPTS: u32 = 8;

/// Phase of one sandbox, with its data. The ledger stores it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "name")]
pub enum Phase {
    /// Known in memory only; nothing was requested.
    Created,
    /// The cloud is being called under the key of `attempt`, or may have been before a crash; its answer is not known.
    Booting {
        /// Counts from 0; part of the idempotency key.
        attempt: u32,
    },
    /// The VM exists; its guest has not joined yet.
    Joining {
        /// The VM.
        vm: InstanceId,
    },
    /// The guest has its pod's network and a listening agent; StartVM succeeds.
    Running {
        /// The VM.
        vm: InstanceId,
    },
    /// A stop or a failure came during the create call: the VM is deleted as soon as it is known.
    Unwanted {
        /// The attempt without a known result.
        attempt: u32,
    },
    /// Everything that was made for the sandbox is being removed, with retries until it is gone.
    Leaving {
        /// The VM to delete; `None` if the cloud is known to have made none.
        vm: Option<InstanceId>,
    },
    /// Tombstone: the id stays known, so that a late CreateVM makes nothing.
    Gone,
}

/// PhaseEvent in the life of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PhaseEvent {
    /// CreateVM was accepted: the intent may be written and the cloud called.
    Begin,
    /// The cloud made this VM, or found the one that an earlier call with the same key made.
    Made(InstanceId),
    /// The cloud made nothing because this offering is exhausted; another one may have capacity.
    NoCapacity,
    /// The cloud made nothing and will not.
    Refused,
    /// The guest reported that the pod can run.
    Joined,
    /// The node gives up on the sandbox: a deadline passed, or the VM or its guest failed.
    Failed,
    /// StopVM, an inbox entry, or the reaper.
    Stop,
    /// The sandbox's relay state, VM and network are confirmed gone.
    Cleared,
}

/// Duty of a sandbox's owner while the sandbox is in its phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing new.
    Nothing,
    /// Request the VM with the key of the phase's attempt; meanwhile prepare network and relay.
    Ask,
    /// Get the VM's address, connect its network, assign the pod to its guest.
    Join,
    /// Answer StartVM, and maintain the guest.
    Serve,
    /// Find the VM that the cloud may have made, in order to delete it.
    Learn,
    /// Remove everything.
    Clear,
    /// Keep the tombstone until it expires.
    KeepTombstone,
}

/// PhaseEvent that has no meaning in its phase. The phase does not change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{event:?} is not valid for a sandbox that is {phase}")]
pub(crate) struct Refused {
    /// Phase at the time of the event.
    pub phase: Phase,
    /// The refused event.
    pub event: PhaseEvent,
}

/// Returns the next phase and its duty. Total: every phase has a written answer to every event.
pub(crate) fn next(phase: &Phase, event: PhaseEvent) -> Result<(Phase, Step), Refused> {
    use Phase::{Booting, Created, Gone, Joining, Leaving, Running, Unwanted};
    use PhaseEvent::{Begin, Cleared, Failed, Joined, Made, NoCapacity, Refused as NotMade, Stop};

    let next = match (phase, &event) {
        (Created, Begin) => Booting { attempt: 0 },
        // Nothing was requested, so only a tombstone remains.
        (Created, Stop | Failed) => Gone,

        (Booting { .. }, Made(vm)) => Joining { vm: vm.clone() },
        (Booting { attempt }, NoCapacity) if attempt + 1 < MAX_ATTEMPTS => Booting { attempt: attempt + 1 },
        (Booting { .. }, NoCapacity | NotMade) => Leaving { vm: None },
        // The cloud may have made the VM already, or may still make it.
        (Booting { attempt }, Stop | Failed) => Unwanted { attempt: *attempt },

        (Joining { vm }, Joined) => Running { vm: vm.clone() },
        (Joining { vm } | Running { vm }, Stop | Failed) => Leaving { vm: Some(vm.clone()) },
        // A repeated answer names the same VM. Another VM under the same key never belongs to this sandbox.
        (Joining { vm }, Made(again)) if again == vm => Joining { vm: vm.clone() },
        (Running { vm }, Made(again)) if again == vm => Running { vm: vm.clone() },
        (Running { vm }, Joined) => Running { vm: vm.clone() },

        (Unwanted { .. }, Made(vm)) => Leaving { vm: Some(vm.clone()) },
        (Unwanted { .. }, NoCapacity | NotMade) => Leaving { vm: None },
        (Unwanted { attempt }, Stop | Failed) => Unwanted { attempt: *attempt },

        (Leaving { .. }, Cleared) => Gone,
        (Leaving { vm }, Stop | Failed) => Leaving { vm: vm.clone() },

        (Gone, Stop | Failed | Cleared) => Gone,

        (Created, Made(_) | NoCapacity | NotMade | Joined | Cleared)
        | (Booting { .. } | Unwanted { .. }, Begin | Joined | Cleared)
        | (Joining { .. } | Running { .. }, Begin | Made(_) | NoCapacity | NotMade | Cleared)
        | (Leaving { .. } | Gone, Begin | Made(_) | NoCapacity | NotMade | Joined) => {
            return Err(Refused { phase: phase.clone(), event });
        }
    };
    let action = if next == *phase { Step::Nothing } else { desired(&next) };
    Ok((next, action))
}

/// Returns the duty of a phase; recovery resumes a phase with it.
pub(crate) fn desired(phase: &Phase) -> Step {
    match phase {
        Phase::Created => Step::Nothing,
        Phase::Booting { .. } => Step::Ask,
        Phase::Joining { .. } => Step::Join,
        Phase::Running { .. } => Step::Serve,
        Phase::Unwanted { .. } => Step::Learn,
        Phase::Leaving { .. } => Step::Clear,
        Phase::Gone => Step::KeepTombstone,
    }
}

impl Phase {
    /// All names, in the order of a sandbox's life; for metrics that must show zeros too.
    pub const NAMES: [&'static str; 7] =
        ["created", "booting", "joining", "running", "unwanted", "leaving", "gone"];

    /// Returns the phase's name, one word, for logs and metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Phase::Created => "created",
            Phase::Booting { .. } => "booting",
            Phase::Joining { .. } => "joining",
            Phase::Running { .. } => "running",
            Phase::Unwanted { .. } => "unwanted",
            Phase::Leaving { .. } => "leaving",
            Phase::Gone => "gone",
        }
    }

    /// Returns the VM that is known to belong to the sandbox.
    pub fn vm(&self) -> Option<&InstanceId> {
        match self {
            Phase::Joining { vm } | Phase::Running { vm } => Some(vm),
            Phase::Leaving { vm } => vm.as_ref(),
            Phase::Created | Phase::Booting { .. } | Phase::Unwanted { .. } | Phase::Gone => None,
        }
    }

    /// Whether the sandbox is wanted: neither stopped nor failed.
    pub fn is_live(&self) -> bool {
        match self {
            Phase::Created | Phase::Booting { .. } | Phase::Joining { .. } | Phase::Running { .. } => true,
            Phase::Unwanted { .. } | Phase::Leaving { .. } | Phase::Gone => false,
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn vm(name: &str) -> InstanceId {
        InstanceId::new(name).unwrap()
    }

    fn phases() -> Vec<Phase> {
        vec![
            Phase::Created,
            Phase::Booting { attempt: 0 },
            Phase::Joining { vm: vm("a") },
            Phase::Running { vm: vm("a") },
            Phase::Unwanted { attempt: 0 },
            Phase::Leaving { vm: Some(vm("a")) },
            Phase::Leaving { vm: None },
            Phase::Gone,
        ]
    }

    fn events() -> Vec<PhaseEvent> {
        vec![
            PhaseEvent::Begin,
            PhaseEvent::Made(vm("a")),
            PhaseEvent::NoCapacity,
            PhaseEvent::Refused,
            PhaseEvent::Joined,
            PhaseEvent::Failed,
            PhaseEvent::Stop,
            PhaseEvent::Cleared,
        ]
    }

    fn written(phase: &Phase) -> String {
        match phase {
            Phase::Booting { attempt } | Phase::Unwanted { attempt } => format!("{phase}#{attempt}"),
            Phase::Leaving { vm } => format!("leaving {}", vm.as_ref().map_or("-", |vm| vm.as_str())),
            other => match other.vm() {
                Some(vm) => format!("{other} {vm}"),
                None => other.to_string(),
            },
        }
    }

    /// One row per phase, one column per event, in the order of `events()`. `.`: no change, no duty; `!`: refused.
    #[rustfmt::skip]
    const EXPECTED: &[(&str, [&str; 8])] = &[
        //              Begin        Made(a)      NoCapacity   Refused      Joined       Failed       Stop         Cleared
        ("created",   ["booting#0", "!",         "!",         "!",         "!",         "gone",      "gone",      "!"]),
        ("booting#0", ["!",         "joining a", "booting#1", "leaving -", "!",         "unwanted#0","unwanted#0","!"]),
        ("joining a", ["!",         ".",         "!",         "!",         "running a", "leaving a", "leaving a", "!"]),
        ("running a", ["!",         ".",         "!",         "!",         ".",         "leaving a", "leaving a", "!"]),
        ("unwanted#0",["!",         "leaving a", "leaving -", "leaving -", "!",         ".",         ".",         "!"]),
        ("leaving a", ["!",         "!",         "!",         "!",         "!",         ".",         ".",         "gone"]),
        ("leaving -", ["!",         "!",         "!",         "!",         "!",         ".",         ".",         "gone"]),
        ("gone",      ["!",         "!",         "!",         "!",         "!",         ".",         ".",         "."]),
    ];

    #[test]
    fn every_phase_handles_every_event_as_the_table_states() {
        for (phase, (name, row)) in phases().iter().zip(EXPECTED) {
            assert_eq!(&written(phase), name);
            for (event, expected) in events().into_iter().zip(row) {
                let got = match next(phase, event.clone()) {
                    Err(refused) => {
                        assert_eq!((&refused.phase, &refused.event), (phase, &event));
                        "!".to_owned()
                    }
                    Ok((same, Step::Nothing)) => {
                        assert_eq!(&same, phase);
                        ".".to_owned()
                    }
                    Ok((next, action)) => {
                        assert_eq!(action, desired(&next));
                        written(&next)
                    }
                };
                assert_eq!(&got, expected, "{name} + {event:?}");
            }
        }
    }

    #[test]
    fn attempts_are_bounded() {
        let mut phase = Phase::Booting { attempt: 0 };
        for attempt in 1..MAX_ATTEMPTS {
            phase = next(&phase, PhaseEvent::NoCapacity).unwrap().0;
            assert_eq!(phase, Phase::Booting { attempt });
        }
        assert_eq!(next(&phase, PhaseEvent::NoCapacity).unwrap().0, Phase::Leaving { vm: None });
    }

    #[test]
    fn another_vm_under_one_key_is_refused() {
        for phase in [Phase::Joining { vm: vm("a") }, Phase::Running { vm: vm("a") }] {
            assert!(next(&phase, PhaseEvent::Made(vm("b"))).is_err());
        }
    }

    /// VMs that a cloud may hold for one sandbox.
    #[derive(Clone, Debug, PartialEq)]
    enum Cloud {
        Nothing,
        /// A create was sent and its answer is open: there may be a VM.
        Asked,
        Vm(InstanceId),
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(5000))]

        #[test]
        fn no_sequence_of_events_leaves_a_vm_without_an_owner(
            steps in prop::collection::vec(0usize..8, 1..60),
        ) {
            let mut phase = Phase::Created;
            let mut cloud = Cloud::Nothing;
            let mut stopped = false;
            let mut made = 0;
            for step in steps {
                let mut event = events()[step].clone();
                // Events that the world cannot produce at this moment are left out; all others come in any order.
                match &mut event {
                    PhaseEvent::Made(id) if cloud == Cloud::Asked => {
                        made += 1;
                        *id = vm(&format!("vm{made}"));
                        cloud = Cloud::Vm(id.clone());
                    }
                    PhaseEvent::Made(_) => continue,
                    PhaseEvent::NoCapacity | PhaseEvent::Refused => {
                        if cloud != Cloud::Asked { continue }
                        cloud = Cloud::Nothing;
                    }
                    PhaseEvent::Cleared => {
                        if !matches!(phase, Phase::Leaving { .. }) {
                            prop_assert!(phase == Phase::Gone || next(&phase, event).is_err());
                            continue;
                        }
                        // Only the VM that the phase names is deleted.
                        match phase.vm() {
                            Some(named) => prop_assert_eq!(&cloud, &Cloud::Vm(named.clone())),
                            None => prop_assert_eq!(&cloud, &Cloud::Nothing),
                        }
                        cloud = Cloud::Nothing;
                    }
                    PhaseEvent::Begin | PhaseEvent::Joined | PhaseEvent::Failed | PhaseEvent::Stop => {}
                }
                stopped |= event == PhaseEvent::Stop;
                let Ok((next, action)) = next(&phase, event) else { continue };
                if action == Step::Ask {
                    prop_assert!(!stopped, "requested a VM after a stop");
                    prop_assert_eq!(&cloud, &Cloud::Nothing);
                    cloud = Cloud::Asked;
                }
                phase = next;
                match &cloud {
                    Cloud::Nothing => {
                        let needs_vm = matches!(phase, Phase::Joining { .. } | Phase::Running { .. });
                        prop_assert!(!needs_vm, "{:?}", phase);
                    }
                    Cloud::Asked => {
                        let owns_key = matches!(phase, Phase::Booting { .. } | Phase::Unwanted { .. });
                        prop_assert!(owns_key, "{:?}", phase);
                    }
                    Cloud::Vm(id) => prop_assert_eq!(phase.vm(), Some(id)),
                }
                prop_assert!(!stopped || !phase.is_live());
            }
        }
    }
}
