//! Defines the phases of a sandbox and the transitions between them: one pure, total function. The task applies an
//! event, makes the new phase durable, and only then performs the phase's operations (`steps.rs`), which follow from the
//! phase alone.
//!
//! ```text
//! Created ─ Booting ─ Joining ─ Running ─ Leaving ─ Gone
//!               └──── Unwanted ─────────────┘
//! ```

use std::fmt;

use peerpod_provider_api::InstanceId;
use serde::{Deserialize, Serialize};

/// Most attempts before a sandbox fails for lack of capacity, each with a key and maybe a list of offerings.
pub(crate) const MAX_ATTEMPTS: u32 = 8;

/// Phase of one sandbox, with its data. The ledger stores it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "name")]
pub enum Phase {
    /// Known in memory only; nothing was requested.
    Created,
    /// The cloud is called under the key of `attempt` (from 0), or was before a crash; its answer is not known.
    Booting { attempt: u32 },
    /// The VM exists; its guest has not joined yet.
    Joining { vm: InstanceId },
    /// The guest has its pod's network and a listening agent; StartVM succeeds.
    Running { vm: InstanceId },
    /// A stop or a failure came during the create call: the VM is deleted as soon as it is known.
    Unwanted { attempt: u32 },
    /// Everything that was made is removed, with retries. Without a VM, the cloud is known to have made none.
    Leaving { vm: Option<InstanceId> },
    /// Tombstone: the id stays known, so that a late CreateVM makes nothing.
    Gone,
}

/// Event in the life of a sandbox.
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
    /// The sandbox is not wanted any more: by a call or a deadline, or after a failure of the VM or its guest.
    Stop,
    /// The sandbox's relay state, VM and network are confirmed gone.
    Cleared,
}

/// Event that has no meaning in its phase. The phase does not change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{event:?} is not valid for a sandbox that is {phase}")]
pub(crate) struct Refused {
    pub phase: Phase,
    pub event: PhaseEvent,
}

/// Returns the next phase. Total: every phase has a written answer to every event.
pub(crate) fn next(phase: &Phase, event: PhaseEvent) -> Result<Phase, Refused> {
    use Phase::{Booting, Created, Gone, Joining, Leaving, Running, Unwanted};
    use PhaseEvent::{Begin, Cleared, Joined, Made, NoCapacity, Refused as NotMade, Stop};

    Ok(match (phase, &event) {
        (Created, Begin) => Booting { attempt: 0 },
        // Nothing was requested, so only a tombstone remains.
        (Created, Stop) => Gone,

        (Booting { .. }, Made(vm)) => Joining { vm: vm.clone() },
        (Booting { attempt }, NoCapacity) if attempt + 1 < MAX_ATTEMPTS => Booting { attempt: attempt + 1 },
        (Booting { .. }, NoCapacity | NotMade) => Leaving { vm: None },
        // The cloud may have made the VM already, or may still make it.
        (Booting { attempt }, Stop) => Unwanted { attempt: *attempt },

        (Joining { vm }, Joined) => Running { vm: vm.clone() },
        (Joining { vm } | Running { vm }, Stop) => Leaving { vm: Some(vm.clone()) },
        // A repeated answer names the same VM. Another VM under the same key never belongs to this sandbox.
        (Joining { vm }, Made(again)) if again == vm => Joining { vm: vm.clone() },
        (Running { vm }, Made(again)) if again == vm => Running { vm: vm.clone() },
        (Running { vm }, Joined) => Running { vm: vm.clone() },

        (Unwanted { .. }, Made(vm)) => Leaving { vm: Some(vm.clone()) },
        (Unwanted { .. }, NoCapacity | NotMade) => Leaving { vm: None },
        (Unwanted { attempt }, Stop) => Unwanted { attempt: *attempt },

        (Leaving { .. }, Cleared) => Gone,
        (Leaving { vm }, Stop) => Leaving { vm: vm.clone() },

        (Gone, Stop | Cleared) => Gone,

        (Created, Made(_) | NoCapacity | NotMade | Joined | Cleared)
        | (Booting { .. } | Unwanted { .. }, Begin | Joined | Cleared)
        | (Joining { .. } | Running { .. }, Begin | Made(_) | NoCapacity | NotMade | Cleared)
        | (Leaving { .. } | Gone, Begin | Made(_) | NoCapacity | NotMade | Joined) => {
            return Err(Refused { phase: phase.clone(), event });
        }
    })
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

    /// One row per phase, one column per event, in the order of `events()`. `.`: no change; `!`: refused.
    #[rustfmt::skip]
    const EXPECTED: &[(&str, [&str; 7])] = &[
        //              Begin        Made(a)      NoCapacity   Refused      Joined       Stop         Cleared
        ("created",   ["booting#0", "!",         "!",         "!",         "!",         "gone",      "!"]),
        ("booting#0", ["!",         "joining a", "booting#1", "leaving -", "!",         "unwanted#0","!"]),
        ("joining a", ["!",         ".",         "!",         "!",         "running a", "leaving a", "!"]),
        ("running a", ["!",         ".",         "!",         "!",         ".",         "leaving a", "!"]),
        ("unwanted#0",["!",         "leaving a", "leaving -", "leaving -", "!",         ".",         "!"]),
        ("leaving a", ["!",         "!",         "!",         "!",         "!",         ".",         "gone"]),
        ("leaving -", ["!",         "!",         "!",         "!",         "!",         ".",         "gone"]),
        ("gone",      ["!",         "!",         "!",         "!",         "!",         ".",         "."]),
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
                    Ok(same) if same == *phase => ".".to_owned(),
                    Ok(next) => written(&next),
                };
                assert_eq!(&got, expected, "{name} + {event:?}");
            }
        }
    }

    #[test]
    fn attempts_are_bounded() {
        let mut phase = Phase::Booting { attempt: 0 };
        for attempt in 1..MAX_ATTEMPTS {
            phase = next(&phase, PhaseEvent::NoCapacity).unwrap();
            assert_eq!(phase, Phase::Booting { attempt });
        }
        assert_eq!(next(&phase, PhaseEvent::NoCapacity).unwrap(), Phase::Leaving { vm: None });
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
            steps in prop::collection::vec(0usize..7, 1..60),
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
                    PhaseEvent::Begin | PhaseEvent::Joined | PhaseEvent::Stop => {}
                }
                stopped |= event == PhaseEvent::Stop;
                let Ok(next) = next(&phase, event) else { continue };
                // A new attempt is requested at once.
                if next != phase && matches!(next, Phase::Booting { .. }) {
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
