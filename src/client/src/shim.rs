//! The shim's side of `hypervisor.sock`.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use peerpod_proto::{
    hypervisor, hypervisor_ttrpc::HypervisorClient, podvminfo, podvminfo_ttrpc::PodVmInfoClient,
};
use tokio::net::UnixStream;
use ttrpc::{
    asynchronous::{Client, transport::Socket},
    context::{self, Context},
};

use crate::{Annotations, Error};

/// StartVM's deadline in the Rust shim: 10 000 ms taken as seconds.
pub const START_TIMEOUT: Duration = Duration::from_secs(10_000);

/// StopVM's deadline in the Rust shim.
pub const STOP_TIMEOUT: Duration = Duration::from_secs(1);

/// One connection to `hypervisor.sock`, as the Rust shim keeps one for the life of its VM: never re-dialled; closed when
/// this is dropped. The Go shim makes a new one for every call: make a new client for every call.
#[derive(Clone)]
pub struct ShimClient {
    hypervisor: HypervisorClient,
    info: PodVmInfoClient,
}

impl ShimClient {
    /// Dials once; a shim refuses to start when the socket is not there.
    pub async fn connect(socket: &Path) -> Result<ShimClient, Error> {
        let client = client(connect(socket).await?);
        Ok(ShimClient {
            hypervisor: HypervisorClient::new(client.clone()),
            info: PodVmInfoClient::new(client),
        })
    }

    /// CreateVM without a deadline; answers where the agent's socket will be.
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
        let answer =
            self.hypervisor.create_vm(Context::default(), &request).await.map_err(failed("CreateVM", id))?;
        match answer.agentSocketPath.as_str() {
            "" => Err(Error::NoAgentSocket(id.into())),
            path => Ok(path.into()),
        }
    }

    /// StartVM with the Rust shim's deadline.
    pub async fn start_vm(&self, id: &str) -> Result<(), Error> {
        self.start_vm_within(id, START_TIMEOUT).await
    }

    /// StartVM with a deadline of the caller's (the Go shim's is 600 s).
    pub async fn start_vm_within(&self, id: &str, deadline: Duration) -> Result<(), Error> {
        let mut request = hypervisor::StartVMRequest::new();
        request.id = id.into();
        let context = context::with_duration(deadline);
        self.hypervisor.start_vm(context, &request).await.map_err(failed("StartVM", id)).map(drop)
    }

    /// StopVM with the Rust shim's one second.
    pub async fn stop_vm(&self, id: &str) -> Result<(), Error> {
        let mut request = hypervisor::StopVMRequest::new();
        request.id = id.into();
        let context = context::with_duration(STOP_TIMEOUT);
        self.hypervisor.stop_vm(context, &request).await.map_err(failed("StopVM", id)).map(drop)
    }

    /// The hypervisor service's version; no shim asks for it.
    pub async fn version(&self) -> Result<String, Error> {
        let context = context::with_duration(Duration::from_secs(10));
        let answer = self.hypervisor.version(context, &hypervisor::VersionRequest::new()).await;
        Ok(answer.map_err(failed("Version", "hypervisor"))?.version)
    }

    /// Which VM is this pod's? With `wait` the answer comes when there is one, at the latest at the deadline.
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

/// Turns a ttrpc error into ours.
pub(crate) fn failed(method: &'static str, subject: &str) -> impl FnOnce(ttrpc::Error) -> Error {
    let subject = subject.to_owned();
    move |source| Error::Call { method, subject, source }
}

/// One attempt.
pub(crate) async fn connect(socket: &Path) -> Result<UnixStream, Error> {
    try_connect(socket).await.map_err(|source| Error::Connect { path: socket.into(), source })
}

/// As [`connect`], with the bare error.
pub(crate) async fn try_connect(socket: &Path) -> io::Result<UnixStream> {
    UnixStream::connect(socket).await
}

/// A ttrpc client over a connection that is there.
pub(crate) fn client(stream: UnixStream) -> Client {
    Client::new(Socket::from(stream))
}
