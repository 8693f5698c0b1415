//! Implements the role beside kubelet. A peer pod's volume gets a target with a marker file, and a record for
//! peerpod-node; the driver is not asked. May touch: targets, loop devices, records, API server, peerpod-node's socket.

mod device;
mod guest;
pub(crate) mod ownership;
mod pending;
mod place;
pub(crate) mod publications;
mod publish;
mod secrets;
mod steps;
pub(crate) mod target;

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use peerpod_common::blocking::blocking;
use peerpod_common::keyed_locks::KeyedLocks;
use peerpod_proto::csi::{
    Empty, NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetVolumeStatsRequest,
    NodeGetVolumeStatsResponse, NodeStageVolumeRequest, NodeUnpublishVolumeRequest, NodeUnstageVolumeRequest,
    VolumeUsage,
};
use peerpod_volume::VolumeId;
use peerpod_volume::descriptor::Attach;
use peerpod_volume::records::Records;
use tokio::time::Instant;

use crate::cluster::NodeCluster;
use crate::config::CsiConfig;
use crate::grpc::{self, Code, Status};
use crate::metrics::CsiMetrics;
use crate::optin::{self, OptIn};
use crate::proxy::{Answered, Intercept, Intercepted};
use crate::upstream::Upstream;
use guest::Guest;
use ownership::Ownership;
use pending::Pending;
use publications::{Publication, Publications};

/// Key in the answer to ControllerPublishVolume: the controller role has assigned the volume to a VM.
pub(crate) const INTERCEPTED: &str = "peerpod.io/intercepted";

#[derive(Clone)]
pub(crate) struct NodeRole(Arc<Inner>);

struct Inner {
    upstream: Arc<Upstream>,
    records: Records,
    files: Publications,
    owners: Ownership,
    cluster: Option<NodeCluster>,
    guest: Guest,
    classes: Vec<String>,
    attach: Attach,
    region: Option<String>,
    turns: KeyedLocks<VolumeId>,
    pending: Pending,
    metrics: CsiMetrics,
}

/// Assignment of a volume to the driver or to a peer pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum VolumeOwner {
    /// Ordinary volume without the parameter.
    Driver,
    /// Ordinary volume; the parameter says so, and must not reach the driver.
    DriverByOptOut,
    /// Peer pod's volume, by its StorageClass, its PersistentVolume or the controller role.
    Vm,
    /// Peer pod's volume, by the pod's RuntimeClass alone.
    VmByClass,
}

impl NodeRole {
    /// Makes the role, and continues the work that an earlier process left.
    pub(crate) async fn start(
        config: &CsiConfig,
        upstream: &Arc<Upstream>,
        metrics: &CsiMetrics,
    ) -> anyhow::Result<NodeRole> {
        let files = Publications { root: config.volumes_dir.clone() };
        let (mut cluster, mut owners) = (None, Ownership::Node(files.clone()));
        if config.cluster.is_some() {
            let connected = NodeCluster::connect(config).await?;
            let leases = Box::new(connected.leases(&config.namespace));
            owners = Ownership::Cluster(leases, config.node_name.clone());
            cluster = Some(connected);
        }
        let node = NodeRole(Arc::new(Inner {
            upstream: upstream.clone(),
            records: Records::new(&config.volumes_dir),
            files,
            owners,
            cluster,
            guest: Guest { socket: config.volumes_socket.clone() },
            classes: config.runtime_classes.clone(),
            attach: config.attach,
            region: config.region.clone(),
            turns: KeyedLocks::default(),
            pending: Pending::default(),
            metrics: metrics.clone(),
        }));
        tokio::spawn(node.clone().follow());
        Ok(node)
    }

    /// Runs file operations on a blocking thread, so that other calls do not wait for the disk.
    async fn on_disk<T: Send + 'static>(
        &self,
        what: &str,
        work: impl FnOnce(&Inner) -> io::Result<T> + Send + 'static,
    ) -> Result<T, Status> {
        let inner = self.0.clone();
        let done = blocking(move || work(&inner)).await;
        done.map_err(|why| Code::Internal.status(format!("{what}: {why}")))
    }

    async fn volume(&self, handle: &str) -> Result<VolumeId, Status> {
        Ok(VolumeId::of(self.0.upstream.driver().await?, handle))
    }

    async fn stage(self, call: Intercepted, mut request: NodeStageVolumeRequest) -> Answered {
        match volume_owner(&request.volume_context, &request.publish_context)? {
            VolumeOwner::Driver => {
                self.keep_in_case(&request).await?;
                return call.pass(None).await;
            }
            VolumeOwner::DriverByOptOut => {
                request.volume_context.remove(optin::KEY);
                return call.pass(Some(grpc::encode(&request)?)).await;
            }
            VolumeOwner::Vm | VolumeOwner::VmByClass => {}
        }
        if request.volume_id.is_empty()
            || request.staging_target_path.is_empty()
            || request.volume_capability.is_none()
        {
            return Err(missing("volume_id, staging_target_path and volume_capability"));
        }
        let given = self.staged_with(&mut request).await?;
        let volume = self.volume(&request.volume_id).await?;
        let path = PathBuf::from(request.staging_target_path);
        let noted = self.on_disk("note that a volume is staged", move |inner| {
            inner.files.put_staged(&volume, &path)?;
            inner.files.put_staged_secret(&volume, &path, given.as_ref())
        });
        noted.await?;
        empty()
    }

    async fn unstage(self, call: Intercepted, request: NodeUnstageVolumeRequest) -> Answered {
        if request.volume_id.is_empty() || request.staging_target_path.is_empty() {
            return call.pass(None).await;
        }
        let volume = self.volume(&request.volume_id).await?;
        let path = PathBuf::from(request.staging_target_path);
        let forgotten = self.on_disk("forget that a volume is staged", move |inner| {
            let ours = inner.files.is_staged(&volume, &path);
            // A secret may have been kept for an ordinary volume, too.
            inner.files.remove_staged(&volume, &path)?;
            Ok(ours)
        });
        if forgotten.await? { empty() } else { call.pass(None).await }
    }

    async fn unpublish(self, call: Intercepted, request: NodeUnpublishVolumeRequest) -> Answered {
        if request.volume_id.is_empty() || request.target_path.is_empty() {
            return call.pass(None).await;
        }
        let volume = self.volume(&request.volume_id).await?;
        let turn = self.0.turns.lock(&volume).await;
        let Some(publication) = self.at(volume.clone(), request.target_path.into()).await? else {
            // An earlier process that was killed may have left its folder.
            self.on_disk("remove old files", move |inner| inner.files.remove_unused(&volume)).await?;
            drop(turn);
            return call.pass(None).await;
        };
        // Runs to its end even if the caller leaves.
        let work = tokio::spawn(async move {
            let _turn = turn;
            self.take_down(publication).await
        });
        work.await.map_err(|why| Code::Internal.status(format!("unpublish: {why}")))??;
        empty()
    }

    async fn stats(self, call: Intercepted, request: NodeGetVolumeStatsRequest) -> Answered {
        let (handle, path) = (request.volume_id, request.volume_path);
        let Some(publication) = self.published(&handle, &path).await? else { return call.pass(None).await };
        let stats = self.0.guest.stats(&publication, left(call.until)).await?;
        let usage = |total: u64, available: u64, used: u64, unit| {
            let number = |value| i64::try_from(value).unwrap_or(i64::MAX);
            let (total, available, used) = (number(total), number(available), number(used));
            VolumeUsage { total, available, used, unit, ..VolumeUsage::default() }
        };
        let mut answer = NodeGetVolumeStatsResponse::new();
        answer.usage.push(usage(stats.total_bytes, stats.available_bytes, stats.used_bytes, 1));
        if !stats.block && stats.total_inodes > 0 {
            answer.usage.push(usage(stats.total_inodes, stats.free_inodes, stats.used_inodes, 2));
        }
        grpc::success(&answer)
    }

    async fn expand(self, call: Intercepted, request: NodeExpandVolumeRequest) -> Answered {
        let bytes = request.capacity_range.as_ref().map_or(0, |range| range.required_bytes.max(0));
        let (handle, path) = (request.volume_id, request.volume_path);
        if self.is_staged(&handle, &path).await? {
            // The volume is not published yet, so there is no VM. It grows when the VM mounts it.
            return expanded(bytes);
        }
        let Some(publication) = self.published(&handle, &path).await? else { return call.pass(None).await };
        if !self.has_vm(&publication).await? {
            return expanded(bytes);
        }
        let wanted = u64::try_from(bytes).unwrap_or_default();
        let answer = self.0.guest.expand(&publication, wanted, left(call.until)).await?;
        expanded(i64::try_from(answer.capacity_bytes).unwrap_or(i64::MAX))
    }

    /// Returns the publication of a volume and a path; `None`: it is an ordinary volume, and the driver answers.
    async fn published(&self, handle: &str, path: &str) -> Result<Option<Publication>, Status> {
        if handle.is_empty() || path.is_empty() {
            return Ok(None);
        }
        self.at(self.volume(handle).await?, path.into()).await
    }

    async fn at(&self, volume: VolumeId, target: PathBuf) -> Result<Option<Publication>, Status> {
        self.on_disk("read the publications", move |inner| inner.files.get(&volume, &target)).await
    }

    async fn is_staged(&self, handle: &str, path: &str) -> Result<bool, Status> {
        if handle.is_empty() || path.is_empty() {
            return Ok(false);
        }
        let (volume, path) = (self.volume(handle).await?, PathBuf::from(path));
        let what = "look whether a volume is staged";
        self.on_disk(what, move |inner| Ok(inner.files.is_staged(&volume, &path))).await
    }
}

#[async_trait]
impl Intercept for NodeRole {
    fn methods(&self) -> &'static [&'static str] {
        &[
            "/csi.v1.Node/NodeStageVolume",
            "/csi.v1.Node/NodeUnstageVolume",
            "/csi.v1.Node/NodePublishVolume",
            "/csi.v1.Node/NodeUnpublishVolume",
            "/csi.v1.Node/NodeGetVolumeStats",
            "/csi.v1.Node/NodeExpandVolume",
        ]
    }

    async fn handle(&self, call: Intercepted) -> Answered {
        let node = self.clone();
        match call.method {
            "NodeStageVolume" => call.parsed(|call, request| node.stage(call, request)).await,
            "NodeUnstageVolume" => call.parsed(|call, request| node.unstage(call, request)).await,
            "NodePublishVolume" => call.parsed(|call, request| node.publish(call, request)).await,
            "NodeUnpublishVolume" => call.parsed(|call, request| node.unpublish(call, request)).await,
            "NodeGetVolumeStats" => call.parsed(|call, request| node.stats(call, request)).await,
            "NodeExpandVolume" => call.parsed(|call, request| node.expand(call, request)).await,
            _ => call.pass(None).await,
        }
    }
}

/// Returns the assignment that the request itself carries.
fn volume_owner(
    context: &HashMap<String, String>,
    published: &HashMap<String, String>,
) -> Result<VolumeOwner, Status> {
    Ok(match optin::read(context)? {
        OptIn::Yes => VolumeOwner::Vm,
        OptIn::No => VolumeOwner::DriverByOptOut,
        OptIn::Unset if published.contains_key(INTERCEPTED) => VolumeOwner::Vm,
        OptIn::Unset => VolumeOwner::Driver,
    })
}

fn expanded(bytes: i64) -> Answered {
    grpc::success(&NodeExpandVolumeResponse { capacity_bytes: bytes, ..Default::default() })
}

fn empty() -> Answered {
    grpc::success(&Empty::new())
}

fn missing(what: &str) -> Status {
    Code::InvalidArgument.status(format!("the request needs {what}"))
}

/// Returns the rest of the caller's time, less a second for the answer, between 1 s and 120 s.
fn left(until: Instant) -> Duration {
    until
        .saturating_duration_since(Instant::now())
        .saturating_sub(Duration::from_secs(1))
        .clamp(Duration::from_secs(1), Duration::from_secs(120))
}
