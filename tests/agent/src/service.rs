//! Implements the ttrpc services. A handler's future is dropped when its caller goes away, so no handler holds state
//! that would be lost with it.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use peerpod_proto::agent::health_check_response::ServingStatus;
use peerpod_proto::agent::{
    CheckRequest, CloseStdinRequest, CopyFileRequest, CreateContainerRequest, CreateSandboxRequest,
    DestroySandboxRequest, Empty, ExecProcessRequest, GetOOMEventRequest, GuestDetailsRequest,
    GuestDetailsResponse, HealthCheckResponse, OOMEvent, ReadStreamRequest, ReadStreamResponse,
    RemoveContainerRequest, SetPolicyRequest, SignalProcessRequest, StartContainerRequest,
    StatsContainerRequest, StatsContainerResponse, VersionCheckResponse, WaitProcessRequest,
    WaitProcessResponse, WriteStreamRequest, WriteStreamResponse,
};
use peerpod_proto::agent_ttrpc::{AgentService, Health};
use tokio::sync::watch;
use ttrpc::asynchronous::TtrpcContext;
use ttrpc::{Code, Result};

use crate::container::Containers;
use crate::policy::Policy;
use crate::process::Output;
use crate::storage::Storages;
use crate::{error, files, image, stats};

/// Methods of the service; all others answer UNIMPLEMENTED.
pub(crate) const METHODS: &[&str] = &[
    "SetPolicy",
    "CreateSandbox",
    "DestroySandbox",
    "GetGuestDetails",
    "GetOOMEvent",
    "CopyFile",
    "CreateContainer",
    "StartContainer",
    "ExecProcess",
    "SignalProcess",
    "WaitProcess",
    "RemoveContainer",
    "StatsContainer",
    "WriteStdin",
    "ReadStdout",
    "ReadStderr",
    "CloseStdin",
];

/// Time limit of a container's mounts, which take milliseconds.
const MOUNTED: Duration = Duration::from_secs(10);

/// Interval of the check of containers' cgroups for kills.
const LOOK: Duration = Duration::from_millis(50);

/// Values that the real agent reports, as recorded.
const MEMORY_BLOCK: u64 = 128 << 20;
const STORAGE_HANDLERS: &[&str] = &[
    "ephemeral",
    "watchable-bind",
    "nvdimm",
    "mmioblk",
    "virtio-fs",
    "image_guest_pull",
    "scsi",
    "local",
    "overlayfs",
    "blk",
];

/// The agent of one VM.
pub(crate) struct Agent {
    /// `/run/kata-containers`, or a folder of a test.
    root: PathBuf,
    containers: Containers,
    storages: Storages,
    policy: Policy,
    done: watch::Sender<bool>,
}

impl Agent {
    /// Returns the agent and a receiver that turns true when the program is to end.
    pub(crate) fn new(root: PathBuf) -> (Agent, watch::Receiver<bool>) {
        let (done, receiver) = watch::channel(false);
        (
            Agent {
                root,
                containers: Containers::default(),
                storages: Storages::default(),
                policy: Policy::default(),
                done,
            },
            receiver,
        )
    }
}

#[async_trait]
impl AgentService for Agent {
    async fn set_policy(&self, _: &TtrpcContext, request: SetPolicyRequest) -> Result<Empty> {
        self.policy.check("SetPolicyRequest")?;
        self.policy.set(&request.policy)?;
        Ok(Empty::new())
    }

    async fn create_sandbox(&self, _: &TtrpcContext, request: CreateSandboxRequest) -> Result<Empty> {
        // Like the real agent, errors included: all files below the root are removed, even the agent's own socket.
        drop(fs::remove_dir_all(&self.root));
        fs::create_dir_all(self.root.join("shared/containers")).map_err(error::io)?;
        for storage in &request.storages {
            if let Ok(below) = PathBuf::from(&storage.mount_point).strip_prefix("/run/kata-containers") {
                fs::create_dir_all(self.root.join(below)).map_err(error::io)?;
            }
        }
        if !request.dns.is_empty() {
            // The real agent overwrites the VM's /etc/resolv.conf with it. This file lets tests read it.
            fs::write(self.root.join("resolv.conf"), request.dns.join("\n")).map_err(error::io)?;
        }
        tracing::info!(sandbox = request.sandbox_id, hostname = request.hostname, "sandbox created");
        Ok(Empty::new())
    }

    async fn destroy_sandbox(&self, _: &TtrpcContext, _: DestroySandboxRequest) -> Result<Empty> {
        self.containers.remove_all();
        let done = self.done.clone();
        tokio::spawn(async move {
            // The answer is sent first.
            tokio::time::sleep(Duration::from_millis(100)).await;
            done.send_replace(true);
        });
        Ok(Empty::new())
    }

    async fn get_guest_details(
        &self,
        _: &TtrpcContext,
        request: GuestDetailsRequest,
    ) -> Result<GuestDetailsResponse> {
        let mut answer = GuestDetailsResponse::new();
        if request.mem_block_size {
            answer.mem_block_size_bytes = MEMORY_BLOCK;
        }
        let details = answer.agent_details.mut_or_insert_default();
        details.version = env!("CARGO_PKG_VERSION").into();
        details.storage_handlers = STORAGE_HANDLERS.iter().map(|name| name.to_string()).collect();
        Ok(answer)
    }

    async fn get_oom_event(&self, _: &TtrpcContext, _: GetOOMEventRequest) -> Result<OOMEvent> {
        // Waits until a container reaches its limit, or until the sandbox ends; then INTERNAL like the real one.
        let mut done = self.done.subscribe();
        loop {
            if let Some(container) = self.containers.out_of_memory() {
                let mut event = OOMEvent::new();
                event.container_id = container;
                return Ok(event);
            }
            if tokio::time::timeout(LOOK, done.wait_for(|done| *done)).await.is_ok() {
                return Err(error::status(Code::INTERNAL, "channel closed"));
            }
        }
    }

    async fn copy_file(&self, _: &TtrpcContext, request: CopyFileRequest) -> Result<Empty> {
        files::copy(&self.root, &request)?;
        Ok(Empty::new())
    }

    async fn create_container(&self, _: &TtrpcContext, request: CreateContainerRequest) -> Result<Empty> {
        let id = request.container_id.clone();
        if id.is_empty() || id.contains('/') {
            return Err(error::invalid("Invalid container id"));
        }
        let rootfs = image::pull(&self.root, &request).await?;
        self.storages.add(&request)?;
        self.containers.create(request, rootfs)?;
        fs::create_dir_all(self.root.join(&id).join("rootfs")).map_err(error::io)?;
        Ok(Empty::new())
    }

    async fn start_container(&self, _: &TtrpcContext, request: StartContainerRequest) -> Result<Empty> {
        self.containers.start(&request.container_id)?;
        if let Some(ready) = self.containers.waits_for(&request.container_id) {
            // The real agent makes all mounts before the first process runs.
            let deadline = tokio::time::Instant::now() + MOUNTED;
            while !ready.exists() {
                if tokio::time::Instant::now() > deadline {
                    return Err(error::status(
                        Code::INTERNAL,
                        "its mounts could not be made; see the agent's log",
                    ));
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
        Ok(Empty::new())
    }

    async fn exec_process(&self, _: &TtrpcContext, request: ExecProcessRequest) -> Result<Empty> {
        self.policy.check("ExecProcessRequest")?;
        let specification =
            request.process.as_ref().ok_or_else(|| error::errno(nix::errno::Errno::EINVAL))?;
        self.containers.exec(&request.container_id, request.exec_id, specification)?;
        Ok(Empty::new())
    }

    async fn signal_process(&self, _: &TtrpcContext, request: SignalProcessRequest) -> Result<Empty> {
        if request.exec_id.is_empty() {
            self.containers.signal_all(&request.container_id, request.signal)?;
        } else {
            let process = self.containers.process(&request.container_id, &request.exec_id)?;
            process.signal(request.signal).map_err(error::errno)?;
        }
        Ok(Empty::new())
    }

    async fn wait_process(
        &self,
        _: &TtrpcContext,
        request: WaitProcessRequest,
    ) -> Result<WaitProcessResponse> {
        let process = self.containers.process(&request.container_id, &request.exec_id)?;
        let mut answer = WaitProcessResponse::new();
        answer.status = process.wait().await;
        if !request.exec_id.is_empty() {
            self.containers.reaped(&request.container_id, &request.exec_id);
        }
        Ok(answer)
    }

    async fn remove_container(&self, _: &TtrpcContext, request: RemoveContainerRequest) -> Result<Empty> {
        let (processes, _cgroup) = self.containers.remove(&request.container_id)?;
        let all = async {
            for process in &processes {
                process.wait().await;
            }
        };
        if request.timeout == 0 {
            all.await;
        } else if tokio::time::timeout(Duration::from_secs(request.timeout.into()), all).await.is_err() {
            return Err(error::status(Code::DEADLINE_EXCEEDED, "ETIME: Timer expired"));
        }
        self.storages.remove(&request.container_id);
        image::unmount(&self.root.join(&request.container_id).join("rootfs"));
        // The bundle may never have been made; the container is removed either way.
        drop(fs::remove_dir_all(self.root.join(&request.container_id)));
        Ok(Empty::new())
    }

    async fn stats_container(
        &self,
        _: &TtrpcContext,
        request: StatsContainerRequest,
    ) -> Result<StatsContainerResponse> {
        Ok(stats::of(&self.containers.processes(&request.container_id)?))
    }

    async fn write_stdin(
        &self,
        _: &TtrpcContext,
        request: WriteStreamRequest,
    ) -> Result<WriteStreamResponse> {
        let process = self.containers.process(&request.container_id, &request.exec_id)?;
        let mut answer = WriteStreamResponse::new();
        answer.len = process.write(&request.data).await?;
        Ok(answer)
    }

    async fn read_stdout(&self, _: &TtrpcContext, request: ReadStreamRequest) -> Result<ReadStreamResponse> {
        self.read(request, Output::Stdout).await
    }

    async fn read_stderr(&self, _: &TtrpcContext, request: ReadStreamRequest) -> Result<ReadStreamResponse> {
        self.read(request, Output::Stderr).await
    }

    async fn close_stdin(&self, _: &TtrpcContext, request: CloseStdinRequest) -> Result<Empty> {
        self.containers.process(&request.container_id, &request.exec_id)?.close_stdin().await;
        Ok(Empty::new())
    }
}

impl Agent {
    async fn read(&self, request: ReadStreamRequest, which: Output) -> Result<ReadStreamResponse> {
        let process = self.containers.process(&request.container_id, &request.exec_id)?;
        let mut answer = ReadStreamResponse::new();
        answer.data = process.read(which, request.len).await?;
        Ok(answer)
    }
}

#[async_trait]
impl Health for Agent {
    async fn check(&self, _: &TtrpcContext, _: CheckRequest) -> Result<HealthCheckResponse> {
        let mut answer = HealthCheckResponse::new();
        answer.status = ServingStatus::SERVING.into();
        Ok(answer)
    }

    async fn version(&self, _: &TtrpcContext, _: CheckRequest) -> Result<VersionCheckResponse> {
        let mut answer = VersionCheckResponse::new();
        answer.grpc_version = "0.0.1".into();
        answer.agent_version = env!("CARGO_PKG_VERSION").into();
        Ok(answer)
    }
}
