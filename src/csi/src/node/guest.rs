//! Asks peerpod-node about a volume that is mounted in a VM. May touch: its socket.

use std::path::PathBuf;
use std::time::Duration;

use peerpod_proto::volumes::{ExpandRequest, ExpandResponse, StatsRequest, StatsResponse};
use peerpod_proto::volumes_ttrpc::VolumesClient;
use ttrpc::asynchronous::Client;
use ttrpc::context::with_duration;

use super::publications::Publication;
use crate::grpc::{Code, Status};

/// Client of peerpod-node's socket. Errors have the node's status.
#[derive(Clone, Debug)]
pub(super) struct Guest {
    pub(super) socket: PathBuf,
}

impl Guest {
    pub(super) async fn stats(&self, of: &Publication, within: Duration) -> Result<StatsResponse, Status> {
        let (pod_uid, volume_id) = (of.pod.uid.clone(), of.volume.to_string());
        let request = StatsRequest { pod_uid, volume_id, ..Default::default() };
        self.client().await?.stats(with_duration(within), &request).await.map_err(|why| self.failed(&why))
    }

    pub(super) async fn expand(
        &self,
        of: &Publication,
        capacity_bytes: u64,
        within: Duration,
    ) -> Result<ExpandResponse, Status> {
        let (pod_uid, volume_id) = (of.pod.uid.clone(), of.volume.to_string());
        let request = ExpandRequest { pod_uid, volume_id, capacity_bytes, ..Default::default() };
        self.client().await?.expand(with_duration(within), &request).await.map_err(|why| self.failed(&why))
    }

    /// Opens a new connection for each call: calls are rare, and the node may have restarted in between.
    async fn client(&self) -> Result<VolumesClient, Status> {
        let address = format!("unix://{}", self.socket.display());
        let client = Client::connect(&address).await.map_err(|why| self.failed(&why))?;
        Ok(VolumesClient::new(client))
    }

    fn failed(&self, why: &ttrpc::Error) -> Status {
        let ttrpc::Error::RpcStatus(status) = why else {
            return Code::Unavailable.status(format!(
                "peerpod-node at {}, which asks the pod's VM: {why}; see whether it runs",
                self.socket.display()
            ));
        };
        // The numbers of ttrpc's codes are those of gRPC.
        Code::numbered(status.code() as usize).status(status.message())
    }
}
