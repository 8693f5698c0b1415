//! Serves `peerpod-csi node`: usage and expansion of volumes that are mounted in VMs. It forwards each call to the
//! guest of the pod's VM, after the provider has shown the VM its larger disk, and stores nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use peerpod_proto::guest::{ExpandVolume, Reply, Request, VolumeFault, VolumeFill, VolumeStats};
use peerpod_proto::volumes::{ExpandRequest, ExpandResponse, StatsRequest, StatsResponse};
use peerpod_proto::volumes_ttrpc::{Volumes, create_volumes};
use tracing::{debug, warn};
use ttrpc::Code;
use ttrpc::asynchronous::transport::Listener;
use ttrpc::asynchronous::{Server, TtrpcContext};

use super::{patience, status};
use crate::one_line;
use crate::sandbox::Sandboxes;

/// Limits for callers without a deadline. Kubelet waits two minutes for its CSI calls.
const STATS: Duration = Duration::from_secs(20);
const EXPAND: Duration = Duration::from_secs(110);
/// Part of that limit for announcing the larger disk to the VM: most VMs detect it by themselves.
const SHOW: Duration = Duration::from_secs(20);

/// The service, on its own socket: its caller must not reach the hypervisor API.
struct Asked(Sandboxes);

pub(crate) async fn serve(listener: Listener, sandboxes: Sandboxes) -> Result<Server, ttrpc::Error> {
    let mut server =
        Server::new().add_listener(listener).register_service(create_volumes(Arc::new(Asked(sandboxes))));
    server.start().await?;
    Ok(server)
}

impl Asked {
    async fn ask(&self, uid: &str, volume: &str, ask: Request, limit: Duration) -> ttrpc::Result<VolumeFill> {
        if uid.len() > 253 || volume.len() > 64 {
            return Err(status(Code::INVALID_ARGUMENT, "the pod's UID or the volume's id is too long"));
        }
        let Some(id) = self.0.of_pod_uid(uid) else {
            return Err(status(Code::NOT_FOUND, format!("no VM of pod {uid} has volumes on this node")));
        };
        let answer = self.0.ask_guest(&id, ask, limit).await;
        let reply =
            answer.map_err(|why| status(Code::UNAVAILABLE, format!("ask the VM of pod {uid}: {why}")))?;
        filled(reply)
            .inspect_err(|error| debug!(sandbox = %id, volume, %error, "cannot report the fill of a volume"))
    }

    /// Announces the larger disk to the VM. A failure is only logged: the answer of the VM's guest decides.
    async fn show(&self, request: &ExpandRequest, limit: Duration) {
        let (uid, volume, bytes) = (&request.pod_uid, &request.volume_id, request.capacity_bytes);
        let Some(id) = self.0.of_pod_uid(uid) else { return };
        if let Err(error) = self.0.disk_grown(&id, volume, bytes, limit.min(SHOW)).await {
            let volume = one_line(volume, 64);
            warn!(sandbox = %id, volume, %error, "cannot announce the grown disk to the VM");
        }
    }
}

fn filled(reply: Reply) -> ttrpc::Result<VolumeFill> {
    if let (Some(fill), true) = (reply.volume.as_ref(), reply.error.is_empty()) {
        return Ok(fill.clone());
    }
    let code = match reply.volume_fault.enum_value_or_default() {
        VolumeFault::VOLUME_FAULT_UNKNOWN => Code::NOT_FOUND,
        VolumeFault::VOLUME_FAULT_NEVER => Code::FAILED_PRECONDITION,
        VolumeFault::VOLUME_FAULT_NOT_NOW | VolumeFault::VOLUME_FAULT_NONE => Code::UNAVAILABLE,
    };
    if reply.error.is_empty() {
        return Err(status(code, "the guest did not report the fill of the volume"));
    }
    Err(status(code, one_line(&reply.error, 1000)))
}

#[async_trait]
impl Volumes for Asked {
    async fn stats(&self, context: &TtrpcContext, request: StatsRequest) -> ttrpc::Result<StatsResponse> {
        let mut ask = Request::new();
        ask.set_volume_stats(VolumeStats { id: request.volume_id.clone(), ..VolumeStats::default() });
        let limit = patience(context).unwrap_or(STATS);
        let fill = self.ask(&request.pod_uid, &request.volume_id, ask, limit).await?;
        Ok(StatsResponse {
            total_bytes: fill.total_bytes,
            available_bytes: fill.available_bytes,
            used_bytes: fill.used_bytes,
            total_inodes: fill.total_inodes,
            free_inodes: fill.free_inodes,
            used_inodes: fill.used_inodes,
            block: fill.block,
            ..StatsResponse::default()
        })
    }

    async fn expand(&self, context: &TtrpcContext, request: ExpandRequest) -> ttrpc::Result<ExpandResponse> {
        let mut ask = Request::new();
        let (id, bytes) = (request.volume_id.clone(), request.capacity_bytes);
        ask.set_expand_volume(ExpandVolume { id, bytes, ..ExpandVolume::default() });
        let limit = patience(context).unwrap_or(EXPAND);
        let begun = Instant::now();
        self.show(&request, limit / 3).await;
        let limit = limit.saturating_sub(begun.elapsed());
        let fill = self.ask(&request.pod_uid, &request.volume_id, ask, limit).await?;
        // A share has no disk: its own size counts.
        let capacity_bytes = if fill.disk_bytes > 0 { fill.disk_bytes } else { fill.total_bytes };
        Ok(ExpandResponse { capacity_bytes, ..ExpandResponse::default() })
    }
}
