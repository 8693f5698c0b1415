//! What the provider says of VMs without being asked: that the cloud will take one back. Said aloud (log line, metric)
//! with the pod's name; whoever makes Kubernetes Events of it begins here. VMs that have ended are `deaths`' matter.

use std::{sync::Arc, time::SystemTime};

use peerpod_provider_api::InstanceId;
use tracing::{info, warn};

use super::{Sandboxes, table::Entry};
use crate::spec::SandboxId;

impl Sandboxes {
    /// The cloud takes a VM back at this time.
    pub(super) fn interrupted(&self, vm: &InstanceId, at: SystemTime) {
        let Some((id, pod)) = self.of_vm(vm) else {
            info!(%vm, "the provider takes a VM back that no sandbox has");
            return;
        };
        let left = at.duration_since(SystemTime::now()).unwrap_or_default();
        warn!(sandbox = %id, pod = &*pod, %vm, ?left, "the cloud takes this pod's VM back; move the pod, or let its controller make another");
        self.0.metrics.noticed("interruption");
    }

    /// Whose VM this is. Looks at all: the provider says such things rarely.
    pub(super) fn of_vm(&self, vm: &InstanceId) -> Option<(SandboxId, Arc<str>)> {
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
