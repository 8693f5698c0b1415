//! What the provider says of VMs without being asked: that the cloud will take one back, that one has ended. Said aloud
//! (log line, metric) with the pod's name; whoever makes Kubernetes Events of it begins here. A VM that is said to have
//! ended is looked for at once, not after the usual grace ([`super::Deaths`]); what the provider's list says counts.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use futures_util::{StreamExt, stream::BoxStream};
use peerpod_provider_api::{EventKind, InstanceId, ProviderEvent};
use tracing::{info, warn};

use super::{Sandboxes, table::Entry};
use crate::{metrics::Metrics, spec::SandboxId};

/// VMs that are said to have ended, for who looks after deaths. Cheap to clone.
#[derive(Clone, Default)]
pub struct Notices(Arc<Mutex<HashSet<InstanceId>>>);

/// More nobody can have lost; a list is looked at in every case.
const MOST: usize = 10_000;

impl Notices {
    /// Listens for ever.
    pub async fn run(self, table: Sandboxes, mut events: BoxStream<'static, ProviderEvent>) {
        while let Some(event) = events.next().await {
            self.notice(&table, event);
        }
        warn!("the provider's events have ended; VMs that it takes back are noticed when they are gone");
    }

    fn notice(&self, table: &Sandboxes, ProviderEvent { id: vm, kind }: ProviderEvent) {
        let metrics: &Metrics = &table.0.metrics;
        let (kind, left) = match kind {
            EventKind::Interruption { at } => ("interruption", Ok(at.duration_since(SystemTime::now()))),
            EventKind::Ended { reason } => ("ended", Err(reason)),
        };
        let Some((id, pod)) = table.of_vm(&vm) else {
            info!(%vm, kind, "the provider speaks of a VM that no sandbox has");
            return;
        };
        metrics.noticed(kind);
        match left {
            Ok(left) => {
                let left = left.unwrap_or_default();
                warn!(sandbox = %id, pod = &*pod, %vm, ?left, "the cloud takes this pod's VM back; move the pod, or let its controller make another");
            }
            Err(reason) => {
                warn!(sandbox = %id, pod = &*pod, %vm, reason, "this pod's VM has ended");
                let mut ended = self.lock();
                if ended.len() < MOST {
                    ended.insert(vm);
                }
            }
        }
    }

    /// Whether this VM is said to have ended; asked once.
    pub(super) fn take_ended(&self, vm: &InstanceId) -> bool {
        self.lock().remove(vm)
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<InstanceId>> {
        // A set is whole after every step.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Sandboxes {
    /// Whose VM this is. Looks at all: the provider says such things rarely.
    fn of_vm(&self, vm: &InstanceId) -> Option<(SandboxId, Arc<str>)> {
        let state = self.state();
        state.entries.iter().find_map(|(id, entry)| match entry {
            Entry::Task(running) => {
                let view = running.view.borrow();
                (view.vm() == Some(vm)).then(|| (id.clone(), view.pod.clone()))
            }
            Entry::Tombstone { .. } => None,
        })
    }
}
