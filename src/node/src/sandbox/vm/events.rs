//! Posts Events for VMs that the cloud will reclaim (logged and counted), refused creates and failed handovers. The
//! provider reports that the cloud will reclaim a VM, or the VM's guest does.

use std::sync::Arc;
use std::time::SystemTime;

use peerpod_provider_api::InstanceId;
use tracing::{info, info_span, warn};

use crate::metrics::Metrics;
use crate::sandbox::Sandboxes;
use crate::sandbox::error::Error;
use crate::sandbox::lifecycle::clip;
use crate::sandbox::ports::PodEvent;
use crate::spec::{PodRef, SandboxId};

/// Logs and counts that the cloud will reclaim a pod's VM at the time `at`; returns the Event for the pod.
pub(crate) fn interruption(metrics: &Metrics, vm: &InstanceId, at: SystemTime) -> PodEvent {
    let left = at.duration_since(SystemTime::now()).unwrap_or_default();
    warn!(%vm, ?left, "the cloud reclaims this pod's VM; move the pod, or let its controller make another");
    metrics.sandboxes.notices.count("interruption");
    let text = format!("the cloud reclaims this pod's VM {vm} in {left:?}; its controller may make another");
    PodEvent::warning("VMInterruption", text)
}

impl Sandboxes {
    /// Reports that the cloud will reclaim the VM at the time `at`.
    pub(crate) fn interrupted(&self, vm: &InstanceId, at: SystemTime) {
        let Some((id, pod)) = self.of_vm(vm) else {
            info!(%vm, "the cloud reclaims a VM that belongs to no sandbox");
            return;
        };
        let span = info_span!("sandbox", sandbox = %id, pod = &*pod);
        let event = span.in_scope(|| interruption(&self.0.metrics, vm, at));
        self.tell(&id, event);
    }

    /// Posts an Event on the pod: its sandbox was refused with this error, and nothing was started.
    pub(crate) fn refused(&self, pod: &PodRef, error: &Error) {
        self.0.ports.kubernetes.tell(pod, PodEvent::warning("CreateRefused", error.to_string()));
    }

    /// Posts an Event on the pod of a new relay that could not take over from the running one.
    pub(crate) fn take_over_failed(&self, pod: PodRef, why: &str) {
        let PodRef { namespace, name, uid } = pod;
        let (namespace, name) = (clip(&namespace), clip(&name));
        let (pod, why) = (PodRef { namespace, name, uid: uid.map(|uid| clip(&uid)) }, clip(why));
        warn!(relay = %pod, why, "a new relay could not take over; the running one goes on");
        self.0.ports.kubernetes.tell(&pod, PodEvent::warning("TakeOverFailed", why));
    }

    fn tell(&self, id: &SandboxId, event: PodEvent) {
        let pod = self.state().task(id).and_then(|running| running.pod.clone());
        if let Some((namespace, name)) = pod {
            self.0.ports.kubernetes.tell(&PodRef { namespace, name, uid: None }, event);
        }
    }

    /// Returns the sandbox that has this VM, and its pod. Scans all entries: provider events are rare.
    pub(crate) fn of_vm(&self, vm: &InstanceId) -> Option<(SandboxId, Arc<str>)> {
        self.state().running().find_map(|(id, running)| {
            let view = running.view.borrow();
            (view.vm() == Some(vm)).then(|| (id.clone(), view.pod.clone()))
        })
    }
}
