//! Asks peerpod-node about a volume that is mounted in a VM. May touch: its socket.

use std::path::PathBuf;
use std::time::Duration;

use peerpod_proto::volumes::{ExpandRequest, ExpandResponse, StatsRequest, StatsResponse};
use peerpod_proto::volumes_ttrpc::VolumesClient;
use peerpod_volume::VolumeId;
use ttrpc::asynchronous::Client;
use ttrpc::context::{self, Context};

use crate::grpc::{Code, Status};

/// Client of peerpod-node's socket.
#[derive(Clone, Debug)]
pub(super) struct Guest {
    socket: PathBuf,
}

impl Guest {
    /// Makes a client for this socket.
    pub(super) fn new(socket: PathBuf) -> Guest {
        Guest { socket }
    }

    /// Returns the use of a volume.
    ///
    /// # Errors
    /// The node's status.
    pub(super) async fn stats(
        &self,
        pod: &str,
        volume: &VolumeId,
        within: Duration,
    ) -> Result<StatsResponse, Status> {
        let request =
            StatsRequest { pod_uid: pod.to_owned(), volume_id: volume.to_string(), ..Default::default() };
        self.client().await?.stats(deadline(within), &request).await.map_err(|why| self.failed(&why))
    }

    /// Grows a volume's filesystem.
    ///
    /// # Errors
    /// The node's status.
    pub(super) async fn expand(
        &self,
        pod: &str,
        volume: &VolumeId,
        bytes: u64,
        within: Duration,
    ) -> Result<ExpandResponse, Status> {
        let request = ExpandRequest {
            pod_uid: pod.to_owned(),
            volume_id: volume.to_string(),
            capacity_bytes: bytes,
            ..Default::default()
        };
        self.client().await?.expand(deadline(within), &request).await.map_err(|why| self.failed(&why))
    }

    /// Opens a new connection for each call: calls are rare, and the node may have restarted in between.
    async fn client(&self) -> Result<VolumesClient, Status> {
        let address = format!("unix://{}", self.socket.display());
        let client = Client::connect(&address).await.map_err(|why| self.failed(&why))?;
        Ok(VolumesClient::new(client))
    }

    fn failed(&self, why: &ttrpc::Error) -> Status {
        let socket = self.socket.display();
        match why {
            ttrpc::Error::RpcStatus(status) => {
                let code = match status.code() {
                    ttrpc::Code::NOT_FOUND => Code::NotFound,
                    ttrpc::Code::INVALID_ARGUMENT => Code::InvalidArgument,
                    ttrpc::Code::FAILED_PRECONDITION => Code::FailedPrecondition,
                    ttrpc::Code::OUT_OF_RANGE => Code::OutOfRange,
                    ttrpc::Code::DEADLINE_EXCEEDED => Code::DeadlineExceeded,
                    ttrpc::Code::UNAVAILABLE => Code::Unavailable,
                    ttrpc::Code::UNIMPLEMENTED => Code::Unimplemented,
                    _ => Code::Internal,
                };
                code.status(status.message())
            }
            why => Code::Unavailable.status(format!(
                "peerpod-node at {socket}, which asks the pod's VM: {why}; see whether it runs"
            )),
        }
    }
}

fn deadline(within: Duration) -> Context {
    context::with_duration(within)
}
