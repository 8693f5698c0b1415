//! Removes everything that was made for a sandbox: flush → relay → VM → volumes → network. Each step is retried until
//! it succeeds. A failed step does not hold up the others; only the volumes wait for the VM. The flush is tried once.

use std::fmt::Display;
use std::net::IpAddr;
use std::sync::Arc;

use peerpod_provider_api::InstanceId;

use crate::ledger::{NetnsRef, Network};
use crate::sandbox::lifecycle::flush::{self, FlushPlan, Incomplete};
use crate::sandbox::ports::Ports;
use crate::spec::SandboxId;

/// Parts of a sandbox that are still to be removed.
#[derive(Clone, Debug)]
pub(crate) struct Left {
    pub id: SandboxId,
    pub flush: Option<FlushPlan>,
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
    /// Whether the flush of the pod's volumes is over.
    pub(crate) flush_over: bool,
    /// Reason for which data of the pod's volumes may be lost.
    pub(crate) unwritten: Option<String>,
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

/// Tries each remaining step once, or only the flush of the pod's volumes.
pub(crate) async fn pass(ports: Arc<Ports>, left: Left) -> Pass {
    let now = || ports.clock.now_ms();
    let id = left.id.clone();
    let mut pass = Pass { left, flush_over: false, unwritten: None, reached: Vec::new(), errors: Vec::new() };
    match (pass.left.flush.take(), &pass.left.vm) {
        (Some(FlushPlan::Brief(limit)), _) => {
            let flushed = flush::brief(&ports, &id, limit).await;
            pass.note("flush", "flushed", now(), flushed);
        }
        (Some(FlushPlan::Volumes), Some(vm)) => {
            let flushed = flush::volumes(&ports, &id, vm).await.map_err(|incomplete| match incomplete {
                Incomplete::Failed(text) => text,
                Incomplete::GivenUp(text) => pass.unwritten.insert(text).clone(),
            });
            pass.note("flush", "flushed", now(), flushed);
            // Recorded before the next step: a flush without the relay's state would wait in vain.
            pass.flush_over = true;
            return pass;
        }
        (Some(FlushPlan::Volumes), None) | (None, _) => {}
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
