//! Removes everything that was made for a sandbox: flush → relay → VM → volumes → network. Each step is retried until
//! it succeeds. A failed step does not hold up the others; only the volumes wait for the VM.

use std::fmt::Display;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use peerpod_proto::guest::{Flush, Request};
use peerpod_provider_api::InstanceId;

use crate::ledger::{NetnsRef, Network};
use crate::sandbox::ports::Ports;
use crate::spec::SandboxId;

/// Parts of a sandbox that are still to be removed.
#[derive(Clone, Debug)]
pub(crate) struct Left {
    pub id: SandboxId,
    /// Time limit for the guest to unmount and sync first. Requested once: the VM is deleted in any case.
    pub flush: Option<Duration>,
    pub relay: bool,
    pub vm: Option<InstanceId>,
    pub volumes: Option<Release>,
    pub network: Option<Undo>,
}

/// Arguments of `Storage::release`.
#[derive(Clone, Debug)]
pub(crate) struct Release {
    pub(crate) uid: String,
    pub(crate) vm: Option<InstanceId>,
}

/// Arguments of `PodNetwork::disconnect`.
#[derive(Clone, Debug)]
pub(crate) struct Undo {
    pub(crate) netns: NetnsRef,
    pub(crate) network: Option<Network>,
    pub(crate) address: Option<IpAddr>,
}

#[derive(Clone, Debug)]
pub(crate) struct Pass {
    pub(crate) left: Left,
    /// Stages reached, in order, with their wall-clock time in ms.
    pub(crate) reached: Vec<(&'static str, u64)>,
    pub(crate) errors: Vec<String>,
}

impl Left {
    pub(crate) fn is_nothing(&self) -> bool {
        let outside = self.vm.is_none() && self.volumes.is_none() && self.network.is_none();
        self.flush.is_none() && !self.relay && outside
    }
}

impl Pass {
    /// Notes the result of a step. Returns whether the step is done.
    fn note(&mut self, step: &str, stage: &'static str, at: u64, result: Result<(), impl Display>) -> bool {
        match &result {
            Ok(()) => self.reached.push((stage, at)),
            Err(error) => self.errors.push(format!("{step}: {error}")),
        }
        result.is_ok()
    }
}

/// Tries each remaining step once.
pub(crate) async fn pass(ports: Arc<Ports>, left: Left) -> Pass {
    let now = || ports.clock.now_ms();
    let id = left.id.clone();
    let mut pass = Pass { left, reached: Vec::new(), errors: Vec::new() };
    if let Some(timeout) = pass.left.flush.take() {
        let flushed = flush(&ports, &id, timeout).await;
        pass.note("flush", "flushed", now(), flushed);
    }
    if pass.left.relay {
        let removed = ports.relay.remove(&id).await;
        pass.left.relay = !pass.note("relay", "relay_removed", now(), removed);
    }
    if let Some(vm) = pass.left.vm.clone() {
        let deleted = ports.cloud.delete(&vm).await;
        if pass.note(&format!("delete of VM {vm}"), "vm_deleted", now(), deleted) {
            pass.left.vm = None;
        }
    }
    if pass.left.vm.is_none()
        && let Some(Release { uid, vm }) = pass.left.volumes.clone()
    {
        let released = ports.storage.release(&id, vm.as_ref(), &uid).await;
        if pass.note("volumes", "volumes_released", now(), released) {
            pass.left.volumes = None;
        }
    }
    if let Some(Undo { netns, network, address }) = pass.left.network.clone() {
        let undone = ports.network.disconnect(&netns, &id, network.as_ref(), address).await;
        if pass.note("network", "network_undone", now(), undone) {
            pass.left.network = None;
        }
    }
    pass
}

/// Makes the guest unmount and sync. The node bounds the wait itself, too: a relay that does not answer must not keep a
/// VM alive.
async fn flush(ports: &Ports, id: &SandboxId, timeout: Duration) -> Result<(), String> {
    let mut request = Request::new();
    request.set_flush(Flush::new());
    match tokio::time::timeout(timeout, ports.relay.call(id, request, timeout)).await {
        Ok(Ok(reply)) if reply.error.is_empty() => Ok(()),
        Ok(Ok(reply)) => Err(format!("the guest failed: {}", reply.error)),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(format!("no answer within {timeout:?}")),
    }
}
