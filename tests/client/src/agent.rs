//! Client of `agent.ttrpc`, as in the shim.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use peerpod_proto::agent::{
    CheckRequest, CloseStdinRequest, CopyFileRequest, CreateContainerRequest, CreateSandboxRequest,
    DestroySandboxRequest, ExecProcessRequest, GetOOMEventRequest, GuestDetailsRequest, GuestDetailsResponse,
    HealthCheckResponse, ReadStreamRequest, RemoveContainerRequest, SignalProcessRequest,
    StartContainerRequest, StatsContainerRequest, StatsContainerResponse, VersionCheckResponse,
    WaitProcessRequest, WriteStreamRequest,
};
use peerpod_proto::agent_ttrpc::{AgentServiceClient, HealthClient};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use tokio::time::timeout;
use ttrpc::context::{self, Context};

use crate::Error;
use crate::shim::{client, failed, try_connect};

/// Time limit of the Rust shim's attempts to connect.
const CONNECT_PATIENCE: Duration = Duration::from_secs(30);
/// Pause between the Rust shim's attempts to connect.
const CONNECT_INTERVAL: Duration = Duration::from_millis(100);

/// Deadline of every request that is not a long poll. The Rust shim's `create_container_timeout` is 110 s in deploy/kata; an
/// emulated VM on a busy machine needs more.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(240);

/// Deadline of a whole exec.
const EXEC_TIMEOUT: Duration = Duration::from_secs(600);

/// Bytes that both shims read per request.
const READ_LEN: u32 = 8192;

/// The two connections of a shim to one sandbox's agent: one that carries everything, and one for log lines that never
/// sends a byte. Neither is ever redialled. Clones share them.
#[derive(Clone)]
pub struct AgentClient {
    agent: AgentServiceClient,
    health: HealthClient,
    silent: Arc<Mutex<UnixStream>>,
    /// Methods and processes of calls that got an error and are not made again.
    over: Arc<Mutex<HashSet<(&'static str, String)>>>,
}

/// Result of an ended process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Exit code; 128 + the number of the signal that ended it.
    pub status: i32,
    /// Complete standard output.
    pub stdout: Vec<u8>,
    /// Complete standard error.
    pub stderr: Vec<u8>,
}

impl AgentClient {
    /// Dials every 100 ms for 30 s, then at once a second time for the connection that stays silent.
    pub async fn connect(socket: &Path) -> Result<AgentClient, Error> {
        let began = Instant::now();
        let first = loop {
            match try_connect(socket).await {
                Ok(stream) => break stream,
                Err(last) if began.elapsed() > CONNECT_PATIENCE => {
                    return Err(Error::ConnectTimeout { path: socket.into(), waited: began.elapsed(), last });
                }
                Err(_) => tokio::time::sleep(CONNECT_INTERVAL).await,
            }
        };
        let silent = crate::shim::connect(socket).await?;
        let client = client(first);
        Ok(AgentClient {
            agent: AgentServiceClient::new(client.clone()),
            health: HealthClient::new(client),
            silent: Arc::new(Mutex::new(silent)),
            over: Arc::default(),
        })
    }

    /// Returns the generated client, for methods without a wrapper here and other deadlines.
    pub fn service(&self) -> &AgentServiceClient {
        &self.agent
    }

    /// Whether the silent connection is open and has received nothing; a shim would log all received bytes.
    pub async fn silent_is_quiet(&self) -> bool {
        let mut stream = self.silent.lock().await;
        let mut byte = [0];
        // No data is the good case, so the read must not wait for ever.
        tokio::time::timeout(Duration::from_millis(1), stream.read(&mut byte)).await.is_err()
    }

    /// Sends Health.Check.
    pub async fn check(&self) -> Result<HealthCheckResponse, Error> {
        self.health.check(bounded(), &CheckRequest::new()).await.map_err(failed("Check", "agent"))
    }

    /// Sends Health.Version.
    pub async fn version(&self) -> Result<VersionCheckResponse, Error> {
        self.health.version(bounded(), &CheckRequest::new()).await.map_err(failed("Version", "agent"))
    }

    /// Sends CreateSandbox.
    pub async fn create_sandbox(&self, request: &CreateSandboxRequest) -> Result<(), Error> {
        let subject = &request.sandbox_id;
        self.agent
            .create_sandbox(bounded(), request)
            .await
            .map_err(failed("CreateSandbox", subject))
            .map(drop)
    }

    /// Sends DestroySandbox, which only the Go shim sends.
    pub async fn destroy_sandbox(&self) -> Result<(), Error> {
        let answer = self.agent.destroy_sandbox(bounded(), &DestroySandboxRequest::new()).await;
        answer.map_err(failed("DestroySandbox", "sandbox")).map(drop)
    }

    /// Sends GetGuestDetails with both questions, like the Rust shim.
    pub async fn guest_details(&self) -> Result<GuestDetailsResponse, Error> {
        let mut request = GuestDetailsRequest::new();
        request.mem_block_size = true;
        request.mem_hotplug_probe = true;
        self.agent.get_guest_details(bounded(), &request).await.map_err(failed("GetGuestDetails", "agent"))
    }

    /// Sends GetOOMEvent, which stays pending for the life of the sandbox unless a process runs out of memory.
    pub async fn oom_event(&self) -> Result<String, Error> {
        let answer = self.agent.get_oom_event(Context::default(), &GetOOMEventRequest::new()).await;
        Ok(answer.map_err(failed("GetOOMEvent", "agent"))?.container_id)
    }

    /// Sends CopyFile.
    pub async fn copy_file(&self, request: &CopyFileRequest) -> Result<(), Error> {
        self.agent.copy_file(bounded(), request).await.map_err(failed("CopyFile", &request.path)).map(drop)
    }

    /// Sends CreateContainer.
    pub async fn create_container(&self, request: &CreateContainerRequest) -> Result<(), Error> {
        let subject = &request.container_id;
        self.agent
            .create_container(bounded(), request)
            .await
            .map_err(failed("CreateContainer", subject))
            .map(drop)
    }

    /// Sends StartContainer.
    pub async fn start_container(&self, container: &str) -> Result<(), Error> {
        let mut request = StartContainerRequest::new();
        request.container_id = container.into();
        self.agent
            .start_container(bounded(), &request)
            .await
            .map_err(failed("StartContainer", container))
            .map(drop)
    }

    /// Sends ExecProcess.
    pub async fn exec_process(&self, request: &ExecProcessRequest) -> Result<(), Error> {
        let subject = process_name(&request.container_id, &request.exec_id);
        self.agent.exec_process(bounded(), request).await.map_err(failed("ExecProcess", &subject)).map(drop)
    }

    /// Sends WaitProcess and returns the exit code once there is one. An empty `exec` is the container's first process.
    pub async fn wait_process(&self, container: &str, exec: &str) -> Result<i32, Error> {
        let mut request = WaitProcessRequest::new();
        request.container_id = container.into();
        request.exec_id = exec.into();
        let call = self.agent.wait_process(Context::default(), &request);
        Ok(self.unless_over("WaitProcess", process_name(container, exec), call).await?.status)
    }

    /// Makes a call about a process. Both shims take an error of WaitProcess as the process's end, and an error of a read
    /// as the stream's end, and never ask again.
    async fn unless_over<T>(
        &self,
        method: &'static str,
        process: String,
        call: impl Future<Output = ttrpc::Result<T>>,
    ) -> Result<T, Error> {
        let key = (method, process.clone());
        if self.over.lock().await.contains(&key) {
            return Err(Error::Over { method, subject: process });
        }
        let answer = call.await.map_err(failed(method, &process));
        if answer.is_err() {
            self.over.lock().await.insert(key);
        }
        answer
    }

    /// Sends SignalProcess.
    pub async fn signal_process(&self, container: &str, exec: &str, signal: u32) -> Result<(), Error> {
        let mut request = SignalProcessRequest::new();
        request.container_id = container.into();
        request.exec_id = exec.into();
        request.signal = signal;
        let answer = self.agent.signal_process(bounded(), &request).await;
        answer.map_err(failed("SignalProcess", &process_name(container, exec))).map(drop)
    }

    /// Sends RemoveContainer with the Rust shim's timeout of ten seconds.
    pub async fn remove_container(&self, container: &str) -> Result<(), Error> {
        let mut request = RemoveContainerRequest::new();
        request.container_id = container.into();
        request.timeout = 10;
        self.agent
            .remove_container(bounded(), &request)
            .await
            .map_err(failed("RemoveContainer", container))
            .map(drop)
    }

    /// Sends StatsContainer.
    pub async fn stats_container(&self, container: &str) -> Result<StatsContainerResponse, Error> {
        let mut request = StatsContainerRequest::new();
        request.container_id = container.into();
        self.agent.stats_container(bounded(), &request).await.map_err(failed("StatsContainer", container))
    }

    /// Sends WriteStdin and returns the number of accepted bytes. Empty data is the end of input.
    pub async fn write_stdin(&self, container: &str, exec: &str, data: Vec<u8>) -> Result<u32, Error> {
        let mut request = WriteStreamRequest::new();
        request.container_id = container.into();
        request.exec_id = exec.into();
        request.data = data;
        let answer = self.agent.write_stdin(Context::default(), &request).await;
        Ok(answer.map_err(failed("WriteStdin", &process_name(container, exec)))?.len)
    }

    /// Sends CloseStdin.
    pub async fn close_stdin(&self, container: &str, exec: &str) -> Result<(), Error> {
        let mut request = CloseStdinRequest::new();
        request.container_id = container.into();
        request.exec_id = exec.into();
        match self.agent.close_stdin(bounded(), &request).await {
            // The relay's answer to a success, for Kata's Go shim.
            Err(ttrpc::Error::RpcStatus(status)) if status.code() == ttrpc::Code::FAILED_PRECONDITION => {
                Ok(())
            }
            answer => answer.map_err(failed("CloseStdin", &process_name(container, exec))).map(drop),
        }
    }

    /// Sends ReadStdout and returns the available bytes, up to `len`; empty at the end of the stream.
    pub async fn read_stdout(&self, container: &str, exec: &str, len: u32) -> Result<Vec<u8>, Error> {
        let request = read_request(container, exec, len);
        let call = self.agent.read_stdout(Context::default(), &request);
        Ok(self.unless_over("ReadStdout", process_name(container, exec), call).await?.data)
    }

    /// Sends ReadStderr, as [`AgentClient::read_stdout`] does.
    pub async fn read_stderr(&self, container: &str, exec: &str, len: u32) -> Result<Vec<u8>, Error> {
        let request = read_request(container, exec, len);
        let call = self.agent.read_stderr(Context::default(), &request);
        Ok(self.unless_over("ReadStderr", process_name(container, exec), call).await?.data)
    }

    /// Reads both streams of a process to their ends, with one pending request for each. It then waits for the exit and
    /// sends the SIGKILL that the Rust shim always sends after it, ignoring the answer.
    pub async fn output(&self, container: &str, exec: &str) -> Result<Output, Error> {
        let (stdout, stderr) = tokio::try_join!(
            async {
                let mut all = Vec::new();
                loop {
                    match self.read_stdout(container, exec, READ_LEN).await? {
                        data if data.is_empty() => return Ok::<_, Error>(all),
                        data => all.extend(data),
                    }
                }
            },
            async {
                let mut all = Vec::new();
                loop {
                    match self.read_stderr(container, exec, READ_LEN).await? {
                        data if data.is_empty() => return Ok::<_, Error>(all),
                        data => all.extend(data),
                    }
                }
            },
        )?;
        let status = self.wait_process(container, exec).await?;
        // The agent no longer knows an exec after WaitProcess; the shim ignores this error, and so does this client.
        drop(self.signal_process(container, exec, 9).await);
        Ok(Output { status, stdout, stderr })
    }

    /// Sends ExecProcess and returns its [`AgentClient::output`].
    pub async fn exec(&self, request: &ExecProcessRequest) -> Result<Output, Error> {
        let whole = async {
            self.exec_process(request).await?;
            self.output(&request.container_id, &request.exec_id).await
        };
        let late = |_| {
            let text = format!("no end within {EXEC_TIMEOUT:?}: {:?}", request.process.Args);
            let subject = process_name(&request.container_id, &request.exec_id);
            Err(Error::Call { method: "ExecProcess", subject, source: ttrpc::Error::Others(text) })
        };
        timeout(EXEC_TIMEOUT, whole).await.unwrap_or_else(late)
    }
}

fn bounded() -> Context {
    context::with_duration(REQUEST_TIMEOUT)
}

fn read_request(container: &str, exec: &str, len: u32) -> ReadStreamRequest {
    let mut request = ReadStreamRequest::new();
    request.container_id = container.into();
    request.exec_id = exec.into();
    request.len = len;
    request
}

fn process_name(container: &str, exec: &str) -> String {
    if exec.is_empty() { container.into() } else { format!("{container}/{exec}") }
}
