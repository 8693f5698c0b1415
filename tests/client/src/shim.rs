//! Client of `hypervisor.sock`, as in the shim.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use peerpod_proto::hypervisor_ttrpc::HypervisorClient;
use peerpod_proto::podvminfo_ttrpc::PodVmInfoClient;
use peerpod_proto::{hypervisor, podvminfo};
use tokio::net::UnixStream;
use ttrpc::asynchronous::Client;
use ttrpc::asynchronous::transport::Socket;
use ttrpc::context;

use crate::{Annotations, Error};

/// Deadline of StartVM in the Rust shim, which takes 10 000 ms as seconds.
pub const START_TIMEOUT: Duration = Duration::from_secs(10_000);

/// Deadline of StopVM in the Rust shim.
pub const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// One connection to `hypervisor.sock`. The Rust shim keeps one for the life of its VM: it is never redialled, and
/// closes when this is dropped. The Go shim makes a connection per call: make a new client for every call.
#[derive(Clone)]
pub struct ShimClient {
    hypervisor: HypervisorClient,
    info: PodVmInfoClient,
    traceparent: Option<String>,
}

impl ShimClient {
    /// Connects once; a shim refuses to start if the socket is not there.
    pub async fn connect(socket: &Path) -> Result<ShimClient, Error> {
        let client = client(connect(socket).await?);
        Ok(ShimClient {
            hypervisor: HypervisorClient::new(client.clone()),
            info: PodVmInfoClient::new(client),
            traceparent: None,
        })
    }

    /// Makes CreateVM carry this W3C `traceparent` in its metadata, as a traced shim.
    pub fn traced(self, traceparent: &str) -> ShimClient {
        ShimClient { traceparent: Some(traceparent.to_owned()), ..self }
    }

    /// Sends CreateVM without a deadline; returns the path of the future agent socket.
    pub async fn create_vm(
        &self,
        id: &str,
        annotations: Annotations,
        netns: &Path,
    ) -> Result<PathBuf, Error> {
        let mut request = hypervisor::CreateVMRequest::new();
        request.id = id.into();
        request.annotations = annotations.into_map();
        request.networkNamespacePath = netns.to_string_lossy().into_owned();
        let parent = self.traceparent.iter().map(|text| ("traceparent".to_owned(), vec![text.clone()]));
        let context = context::with_metadata(parent.collect());
        let answer = self.hypervisor.create_vm(context, &request).await.map_err(failed("CreateVM", id))?;
        match answer.agentSocketPath.as_str() {
            "" => Err(Error::NoAgentSocket(id.into())),
            path => Ok(path.into()),
        }
    }

    /// Sends StartVM with the Rust shim's deadline.
    pub async fn start_vm(&self, id: &str) -> Result<(), Error> {
        self.start_vm_within(id, START_TIMEOUT).await
    }

    /// Sends StartVM with the given deadline (the Go shim's is 600 s).
    pub async fn start_vm_within(&self, id: &str, deadline: Duration) -> Result<(), Error> {
        let mut request = hypervisor::StartVMRequest::new();
        request.id = id.into();
        let context = context::with_duration(deadline);
        self.hypervisor.start_vm(context, &request).await.map_err(failed("StartVM", id)).map(drop)
    }

    /// Sends StopVM with the Rust shim's deadline of one second.
    pub async fn stop_vm(&self, id: &str) -> Result<(), Error> {
        let mut request = hypervisor::StopVMRequest::new();
        request.id = id.into();
        let context = context::with_duration(STOP_TIMEOUT);
        self.hypervisor.stop_vm(context, &request).await.map_err(failed("StopVM", id)).map(drop)
    }

    /// Returns the version of the hypervisor service; no shim asks for it.
    pub async fn version(&self) -> Result<String, Error> {
        let context = context::with_duration(Duration::from_secs(10));
        let answer = self.hypervisor.version(context, &hypervisor::VersionRequest::new()).await;
        Ok(answer.map_err(failed("Version", "hypervisor"))?.version)
    }

    /// Returns the VM of a pod. With `wait` the answer arrives once there is one, at the latest at the deadline.
    pub async fn vm_id(
        &self,
        namespace: &str,
        name: &str,
        wait: bool,
        deadline: Duration,
    ) -> Result<String, Error> {
        let mut request = podvminfo::GetInfoRequest::new();
        request.PodName = name.into();
        request.PodNamespace = namespace.into();
        request.Wait = wait;
        let subject = format!("{namespace}/{name}");
        let answer = self.info.get_info(context::with_duration(deadline), &request).await;
        Ok(answer.map_err(failed("GetInfo", &subject))?.VMID)
    }
}

/// Converts a ttrpc error into [`Error`].
pub(crate) fn failed(method: &'static str, subject: &str) -> impl FnOnce(ttrpc::Error) -> Error {
    let subject = subject.to_owned();
    move |source| Error::Call { method, subject, source }
}

/// Makes one attempt to connect.
pub(crate) async fn connect(socket: &Path) -> Result<UnixStream, Error> {
    try_connect(socket).await.map_err(|source| Error::Connect { path: socket.into(), source })
}

/// Makes one attempt like [`connect`], and returns the plain error.
pub(crate) async fn try_connect(socket: &Path) -> io::Result<UnixStream> {
    UnixStream::connect(socket).await
}

/// Makes a ttrpc client over an existing connection.
pub(crate) fn client(stream: UnixStream) -> Client {
    Client::new(Socket::from(stream))
}
