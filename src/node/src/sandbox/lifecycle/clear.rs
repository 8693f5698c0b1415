//! Removes everything that was made for a sandbox: flush → relay → VM → volumes → network. Each step is retried until
//! it succeeds. A failed step does not hold up the others; only the volumes wait for the VM. The flush is tried once.

use std::fmt::Display;
use std::sync::Arc;

use crate::ledger::Record;
use crate::sandbox::lifecycle::address;
use crate::sandbox::lifecycle::flush::{self, FlushPlan, Incomplete};
use crate::sandbox::ports::Ports;

/// Parts of a sandbox that are still to be removed.
#[derive(Clone, Debug)]
pub(crate) struct Left {
    pub flush: Option<FlushPlan>,
    pub relay: bool,
    pub vm: bool,
    pub volumes: bool,
    pub network: bool,
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
        self.flush.is_none() && !(self.relay || self.vm || self.volumes || self.network)
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
pub(crate) async fn pass(ports: Arc<Ports>, record: Record, left: Left) -> Pass {
    let now = || ports.clock.now_ms();
    let (id, vm) = (&record.id, record.phase.vm());
    let mut pass = Pass { left, flush_over: false, unwritten: None, reached: Vec::new(), errors: Vec::new() };
    match (pass.left.flush.take(), vm) {
        (Some(FlushPlan::Brief(limit)), _) => {
            let flushed = flush::brief(&ports, id, limit).await;
            pass.note("flush", "flushed", now(), flushed);
        }
        (Some(FlushPlan::Volumes), Some(vm)) => {
            let flushed = flush::volumes(&ports, id, vm).await.map_err(|incomplete| match incomplete {
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
        let removed = ports.relay.remove(id).await;
        pass.left.relay = !pass.note("relay", "relay_removed", now(), removed);
    }
    if let Some(vm) = vm.filter(|_| pass.left.vm) {
        let deleted = ports.cloud.delete(vm).await;
        pass.left.vm = !pass.note(&format!("delete of VM {vm}"), "vm_deleted", now(), deleted);
    }
    if let Some(volumes) = record.volumes.as_ref().filter(|_| pass.left.volumes && !pass.left.vm) {
        let released = ports.storage.release(id, vm, &volumes.uid).await;
        pass.left.volumes = !pass.note("volumes", "volumes_released", now(), released);
    }
    if let Some(netns) = record.netns.as_ref().filter(|_| pass.left.network) {
        let undone = ports.network.disconnect(netns, id, record.network.as_ref(), address(&record)).await;
        pass.left.network = !pass.note("network", "network_undone", now(), undone);
    }
    pass
}
