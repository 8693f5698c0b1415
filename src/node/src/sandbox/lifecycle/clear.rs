//! Removes everything that was made for a sandbox: flush → relay → VM → volumes → network. Each step is retried until
//! it succeeds. A failed step does not hold up the others; only the volumes wait for the VM.

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
    pub(crate) id: SandboxId,
    /// Time limit for the guest to unmount and sync first. Requested once: the VM is deleted in any case.
    pub(crate) flush: Option<Duration>,
    pub(crate) relay: bool,
    pub(crate) vm: Option<InstanceId>,
    /// Volumes to release.
    pub(crate) volumes: Option<Release>,
    pub(crate) network: Option<Undo>,
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

/// Result of one pass.
#[derive(Clone, Debug)]
pub(crate) struct Pass {
    pub(crate) left: Left,
    /// Stages reached, in order, with their wall-clock time in ms.
    pub(crate) reached: Vec<(&'static str, u64)>,
    /// Errors, as text.
    pub(crate) errors: Vec<String>,
}

impl Left {
    pub(crate) fn is_nothing(&self) -> bool {
        let outside = self.vm.is_none() && self.volumes.is_none() && self.network.is_none();
        self.flush.is_none() && !self.relay && outside
    }
}

/// Tries each remaining step once.
pub(crate) async fn pass(ports: Arc<Ports>, mut left: Left) -> Pass {
    let (mut reached, mut errors) = (Vec::new(), Vec::new());
    if let Some(timeout) = left.flush.take() {
        let request = flush_request();
        // The node bounds the wait itself, too: a relay that does not answer must not keep a VM alive.
        let flushed = tokio::time::timeout(timeout, ports.relay.call(&left.id, request, timeout)).await;
        match flushed {
            Ok(Ok(reply)) if reply.error.is_empty() => reached.push(("flushed", ports.clock.now_ms())),
            Ok(Ok(reply)) => errors.push(format!("flush: the guest failed: {}", reply.error)),
            Ok(Err(error)) => errors.push(format!("flush: {error}")),
            Err(_) => errors.push(format!("flush: no answer within {timeout:?}")),
        }
    }
    if left.relay {
        match ports.relay.remove(&left.id).await {
            Ok(()) => {
                left.relay = false;
                reached.push(("relay_removed", ports.clock.now_ms()));
            }
            Err(error) => errors.push(format!("relay: {error}")),
        }
    }
    if let Some(vm) = &left.vm {
        match ports.cloud.delete(vm).await {
            Ok(()) => {
                left.vm = None;
                reached.push(("vm_deleted", ports.clock.now_ms()));
            }
            Err(error) => errors.push(format!("delete of VM {vm}: {error}")),
        }
    }
    if left.vm.is_none()
        && let Some(Release { uid, vm }) = &left.volumes
    {
        match ports.storage.release(&left.id, vm.as_ref(), uid).await {
            Ok(()) => {
                left.volumes = None;
                reached.push(("volumes_released", ports.clock.now_ms()));
            }
            Err(error) => errors.push(format!("volumes: {error}")),
        }
    }
    if let Some(Undo { netns, network, address }) = &left.network {
        match ports.network.disconnect(netns, &left.id, network.as_ref(), *address).await {
            Ok(()) => {
                left.network = None;
                reached.push(("network_undone", ports.clock.now_ms()));
            }
            Err(error) => errors.push(format!("network: {error}")),
        }
    }
    Pass { left, reached, errors }
}

fn flush_request() -> Request {
    let mut request = Request::new();
    request.set_flush(Flush::new());
    request
}
