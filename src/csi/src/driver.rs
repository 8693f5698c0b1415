//! Sends this program's own requests to the driver. May touch: its socket.

use std::sync::Arc;
use std::time::Duration;

use peerpod_proto::csi::{GetPluginInfoRequest, GetPluginInfoResponse};
use tokio::sync::OnceCell;

use crate::grpc::{Code, Status};
use crate::upstream::Upstream;

/// Deadline of requests that a driver answers by itself.
const ANSWER: Duration = Duration::from_secs(10);

/// The proxied driver, with its name once that is known.
#[derive(Clone, Debug)]
pub struct Driver {
    /// Connection to the driver.
    pub upstream: Arc<Upstream>,
    name: Arc<OnceCell<String>>,
}

impl Driver {
    /// Sends no request.
    pub fn new(upstream: Arc<Upstream>) -> Driver {
        Driver { upstream, name: Arc::default() }
    }

    /// Returns the driver's name, which is requested once.
    ///
    /// # Errors
    /// The driver cannot be asked now.
    pub async fn name(&self) -> Result<&str, Status> {
        let ask = async || -> Result<String, Status> {
            const INFO: &str = "/csi.v1.Identity/GetPluginInfo";
            let answer: GetPluginInfoResponse =
                self.upstream.call(INFO, &GetPluginInfoRequest::new(), ANSWER).await?;
            if answer.name.is_empty() {
                return Err(Code::Internal.status("the CSI driver has no name"));
            }
            Ok(answer.name)
        };
        self.name.get_or_try_init(ask).await.map(String::as_str)
    }
}
