//! Starts the kata-agent, or finds it running, and watches it.
//!
//! The kata-agent is a process group of its own, and pid 1 adopts it when the guest exits. It and all containers
//! therefore survive a restart of the guest; a small record on disk identifies its process. A kata-agent that dies
//! before the first container is started again, and the pod loses nothing. Later, its containers are lost with it, and
//! a new kata-agent would not know them: it stays dead, and the guest reports that to the node.
//!
//! The guest lets no stream through before the VM has its assignment, and the kata-agent the policy of the pod's
//! initdata. A kata-agent that refuses the policy is never used.

use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::Signal;
use parking_lot::Mutex;
use peerpod_common::backoff::Backoff;
use peerpod_proto::agent::SetPolicyRequest;
use peerpod_proto::agent_ttrpc::AgentServiceClient;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use ttrpc::asynchronous::transport::Socket;
use ttrpc::context;

use self::output::Output;
use crate::config::Settings;
use crate::files;
use crate::log::Ring;
use crate::proc::{Exit, ProcessId};
use crate::status::{RunningStage, Status};

mod output;

/// Interval between connects to the socket while the kata-agent starts. A refused connect costs microseconds, and the
/// first accepted one is the only proof that the kata-agent listens (the file alone is not).
const POLL: Duration = Duration::from_millis(5);
/// Pause before a start after a death, also of `serve`; doubled each time up to the maximum.
pub(crate) const PAUSE: Duration = Duration::from_millis(100);
pub(crate) const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Uptime after which a death does not count as a failed start.
pub(crate) const STABLE: Duration = Duration::from_secs(10);
/// Time limit of SetPolicy. The kata-agent compiles the policy meanwhile; a shim waits 300 s for it.
const POLICY_LIMIT: Duration = Duration::from_secs(30);
/// Size limit of the record of the policy in bytes.
const POLICY_RECORD_LEN: u64 = 4096;
const RECORD_VERSION: u32 = 1;
const DEAD: &str = "the kata-agent died with running containers, so the pod is lost";
/// Remedy of a dead kata-agent.
const RENEW: &str = "delete the pod, so that it gets a new VM";
const MORE_MEMORY: &str = "raise the pod's memory limit, or node.guest-memory-mib, and delete the pod";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Not running yet, being started again, or without the pod's policy.
    Starting,
    /// Its socket accepts connections, and it enforces the pod's policy.
    Listening,
    /// Never usable again, for this reason: it is dead and has containers, or it did not take the pod's policy.
    Unusable(String),
}

/// Record on disk that identifies the kata-agent's process.
#[derive(Serialize, Deserialize)]
struct Record {
    version: u32,
    process: Option<ProcessId>,
    exits: u32,
}

pub(crate) struct Agent {
    command: Vec<String>,
    socket: PathBuf,
    record: PathBuf,
    marker: PathBuf,
    output: Output,
    containers: AtomicBool,
    /// The pod's policy, if it has one; `None`: the VM has no assignment yet.
    policy: watch::Sender<Option<Option<String>>>,
    /// Record of the process that has the policy.
    policy_record: PathBuf,
    status: Arc<Status>,
    phase: watch::Sender<Phase>,
    /// How the last process ended, with the remedy.
    end: Mutex<Option<String>>,
}

/// Running kata-agent: a child, with a readable exit status, or a process that was found.
struct Running {
    process: ProcessId,
    exit: Exit,
    child: Option<Child>,
}

impl Agent {
    /// Makes the supervisor, which does nothing before [`Agent::run`].
    pub(crate) fn new(settings: &Settings, status: Arc<Status>, ring: Ring) -> Agent {
        let marker = settings.state_dir.join("containers");
        Agent {
            command: settings.agent.clone(),
            socket: settings.agent_socket.clone(),
            record: settings.state_dir.join("agent.json"),
            containers: AtomicBool::new(marker.exists()),
            marker,
            output: Output::new(settings.state_dir.join("agent.output"), ring),
            policy: watch::Sender::new(None),
            policy_record: settings.state_dir.join("policy.json"),
            status,
            phase: watch::Sender::new(Phase::Starting),
            end: Mutex::default(),
        }
    }

    /// Notes that a container is about to be made: from now on the death of the kata-agent is the death of the pod.
    pub(crate) fn has_containers(&self) {
        if !self.containers.swap(true, Relaxed)
            && let Err(error) = files::write(&self.marker, b"")
        {
            // Worst case: after the deaths of the guest and then of the kata-agent, it is started in vain.
            tracing::warn!(path = %self.marker.display(), %error, "cannot note that there are containers");
        }
    }

    /// Lets others reach the kata-agent, after it has this policy (Rego), if any. The first call counts.
    pub(crate) fn assign(&self, policy: Option<&str>) {
        self.policy.send_if_modified(|assigned| {
            let is_first = assigned.is_none();
            assigned.get_or_insert_with(|| policy.map(str::to_owned));
            is_first
        });
    }

    /// Returns a receiver of every later change of state.
    pub(crate) fn watch(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    pub(crate) async fn listening(&self, limit: Duration) -> Result<(), String> {
        match timeout(limit, self.usable()).await {
            Ok(usable) => usable,
            Err(_) => Err(format!(
                "the kata-agent did not listen on {} within {limit:?}; the VM's console has its messages",
                self.socket.display()
            )),
        }
    }

    /// Connects to the kata-agent. Waits while it starts: the caller bounds the time.
    pub(crate) async fn connect(&self) -> io::Result<UnixStream> {
        let usable = self.usable().await;
        usable.map_err(|reason| io::Error::new(io::ErrorKind::NotConnected, reason))?;
        UnixStream::connect(&self.socket).await
    }

    /// Waits while the kata-agent starts. Fails with the reason if it is never usable.
    async fn usable(&self) -> Result<(), String> {
        let mut phase = self.phase.subscribe();
        match phase.wait_for(|phase| *phase != Phase::Starting).await.as_deref() {
            Ok(Phase::Unusable(reason)) => Err(reason.clone()),
            // The sender lives as long as `self`.
            _ => Ok(()),
        }
    }

    /// Supervises the kata-agent. Returns when it is unusable, or when it listens and another program started it.
    pub(crate) async fn run(&self) {
        let mut stage = Some(self.status.begin("agent"));
        if !self.command.is_empty()
            && let Err(error) = self.output.read()
        {
            tracing::warn!(%error, "the agent's output goes to the console only");
        }
        let (mut found, mut exits) = self.look_for_one().await;
        let mut pause = Backoff::new(PAUSE, LONGEST_PAUSE);
        loop {
            if exits > 0 && self.containers.load(Relaxed) && found.is_none() {
                self.is_running(false, exits);
                let end = self.end.lock().take().unwrap_or_else(|| RENEW.to_owned());
                self.unusable(format!("{DEAD}: {end}"));
                return;
            }
            let (began, kills) = (Instant::now(), memory_kills());
            let running = match found.take() {
                Some(running) => Ok(running),
                None => self.start(),
            };
            match running {
                Ok(mut running) => {
                    self.write_record(Some(running.process), exits);
                    self.is_running(true, exits);
                    self.status.agent.store(running.process.pid, Relaxed);
                    self.serve(&running, &mut stage).await;
                    if matches!(*self.phase.borrow(), Phase::Unusable(_)) {
                        return;
                    }
                    exits += 1;
                    self.report_exit(&mut running, exits, memory_kills() > kills);
                    self.write_record(None, exits);
                }
                Err(error) if self.command.is_empty() => {
                    // Another program starts the kata-agent: its socket shows when it listens; a failed dial, its
                    // death.
                    tracing::debug!(%error, "another program starts the agent");
                    self.wait_for_socket(&mut stage).await;
                    self.is_running(true, exits);
                    self.enforce_policy().await;
                    return;
                }
                Err(error) => self.fault(&format!("cannot start {}: {error}", self.command.join(" "))),
            }
            if began.elapsed() > STABLE {
                pause.reset();
            }
            if !self.containers.load(Relaxed) {
                sleep(pause.pause()).await;
            }
        }
    }

    fn is_running(&self, running: bool, exits: u32) {
        let mut status = self.status.lock();
        (status.agent_running, status.agent_exits) = (running, exits);
    }

    fn fault(&self, text: &str) {
        tracing::error!(error = text, "agent");
        self.status.error(text);
    }

    /// Watches the process until its end, or until it is unusable.
    async fn serve(&self, running: &Running, stage: &mut Option<RunningStage>) {
        let begin = async {
            self.wait_for_socket(stage).await;
            self.enforce_policy().await
        };
        tokio::select! {
            is_usable = begin => if !is_usable { return },
            () = running.exit.wait() => return,
        }
        running.exit.wait().await;
        self.phase.send_if_modified(|phase| std::mem::replace(phase, Phase::Starting) != Phase::Starting);
    }

    async fn wait_for_socket(&self, stage: &mut Option<RunningStage>) {
        while UnixStream::connect(&self.socket).await.is_err() {
            sleep(POLL).await;
        }
        if let Some(stage) = stage.take() {
            self.status.done(stage);
        }
    }

    /// Waits for the assignment, and gives its policy to the kata-agent that listens. Returns whether it is usable.
    async fn enforce_policy(&self) -> bool {
        let mut assigned = self.policy.subscribe();
        // The sender lives as long as `self`.
        let policy =
            assigned.wait_for(Option::is_some).await.ok().and_then(|policy| policy.clone().flatten());
        let mut pause = Backoff::new(PAUSE, LONGEST_PAUSE);
        while let Some(policy) = &policy {
            match self.set_policy(policy).await {
                Ok(()) => break,
                Err(error @ ttrpc::Error::RpcStatus(_)) => {
                    self.unusable(format!(
                        "the kata-agent refuses the policy.rego of the pod's initdata, and the pod must not run \
                         without it: {error}; use a VM image whose kata-agent enforces policies and permits SetPolicy"
                    ));
                    return false;
                }
                // The kata-agent may have ended: then it is started again, and this future is dropped.
                Err(error) => self.fault(&format!("cannot give the kata-agent its policy: {error}")),
            }
            sleep(pause.pause()).await;
        }
        self.phase.send_replace(Phase::Listening);
        true
    }

    /// Fails with the kata-agent's status if it refuses the policy; any other error decides nothing.
    async fn set_policy(&self, policy: &str) -> ttrpc::Result<()> {
        let failed = |attempt: &str, error: io::Error| ttrpc::Error::Others(format!("{attempt}: {error}"));
        let process = self.listener().await.map_err(|error| failed("look for its process", error))?;
        let record = files::read(&self.policy_record, POLICY_RECORD_LEN).ok().flatten();
        let holder: Option<ProcessId> = record.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        // An earlier run of this program has set it; the policy itself may forbid to set another.
        if process.is_some() && process == holder {
            return Ok(());
        }
        let stream = UnixStream::connect(&self.socket).await.map_err(|error| failed("connect", error))?;
        let client = AgentServiceClient::new(ttrpc::asynchronous::Client::new(Socket::from(stream)));
        let request = SetPolicyRequest { policy: policy.to_owned(), ..SetPolicyRequest::default() };
        client.set_policy(context::with_duration(POLICY_LIMIT), &request).await?;
        tracing::info!("the kata-agent enforces the pod's policy");
        files::write_json(&self.policy_record, &process).map_err(|error| failed("record it", error))
    }

    fn unusable(&self, reason: String) {
        self.fault(&reason);
        self.status.say("agent", Some(reason.clone()));
        self.phase.send_replace(Phase::Unusable(reason));
    }

    /// Returns a kata-agent that runs already, if any, and the number of earlier deaths. Repeats a failed look-up: a
    /// second kata-agent beside an undetected one would be worse than a wait.
    async fn look_for_one(&self) -> (Option<Running>, u32) {
        let mut pause = Backoff::new(PAUSE, LONGEST_PAUSE);
        loop {
            match self.find().await {
                Ok(answer) => return answer,
                Err(error) => self.fault(&format!("cannot find out whether an agent runs: {error}")),
            }
            sleep(pause.pause()).await;
        }
    }

    /// Finds a kata-agent that an earlier run of this program started. The record identifies it, or the listener of its
    /// socket if that run died before it wrote one.
    async fn find(&self) -> io::Result<(Option<Running>, u32)> {
        let record = self.read_record()?;
        let exits = record.as_ref().map_or(0, |record| record.exits);
        let process = match record.and_then(|record| record.process) {
            Some(process) => Some(process),
            None => self.listener().await?,
        };
        let Some(process) = process else { return Ok((None, exits)) };
        if let Some(exit) = process.watch()? {
            tracing::info!(pid = process.pid, "found the agent running");
            return Ok((Some(Running { process, exit, child: None }), exits));
        }
        let exits = exits + 1;
        self.status.lost("the kata-agent died while the guest program was restarted".to_owned());
        self.write_record(None, exits);
        Ok((None, exits))
    }

    /// Returns the process that listens on the kata-agent's socket.
    async fn listener(&self) -> io::Result<Option<ProcessId>> {
        let stream = match UnixStream::connect(&self.socket).await {
            Ok(stream) => stream,
            Err(error) if says_nothing(&error) => return Err(error),
            Err(_) => return Ok(None),
        };
        let pid = stream.peer_cred()?.pid().and_then(|pid| u32::try_from(pid).ok());
        pid.map_or(Ok(None), ProcessId::inspect)
    }

    fn start(&self) -> io::Result<Running> {
        let command = self.command.split_first();
        let (program, arguments) =
            command.ok_or_else(|| io::Error::other("the image names no agent to start"))?;
        remove_stale_socket(&self.socket)?;
        if let Some(folder) = self.socket.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let mut child = Command::new(program)
            .args(arguments)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(self.output.stdio())
            .stderr(self.output.stdio())
            .process_group(0) // signals to this process group do not reach it
            .spawn()?;
        let watched = ProcessId::inspect(child.id()).and_then(|process| match process {
            Some(process) => Ok(process.watch()?.map(|exit| (process, exit))),
            None => Ok(None),
        });
        if watched.is_err() {
            // An unwatched process would live beside the next one.
            child.kill()?;
            child.wait()?;
        }
        let Some((process, exit)) = watched? else {
            let status = child.wait()?; // a zombie already
            return Err(io::Error::other(format!("it ended at once: {status}")));
        };
        tracing::info!(pid = process.pid, program, "started the agent");
        Ok(Running { process, exit, child: Some(child) })
    }

    /// Reports the end of the process. `no_memory`: the kernel killed a process for lack of memory meanwhile.
    fn report_exit(&self, running: &mut Running, exits: u32, no_memory: bool) {
        // Reaps a child; pid 1 reaps any other process.
        let status = running.child.as_mut().and_then(|child| child.wait().ok());
        let is_killed = status.is_none_or(|status| status.signal() == Some(Signal::SIGKILL as i32));
        let how = status.map_or("ended".to_owned(), |status| status.to_string());
        *self.end.lock() = Some(match is_killed && no_memory {
            true => format!("the kernel killed it for lack of memory; {MORE_MEMORY}"),
            false => format!("it ended ({how}); see the VM's console for its last lines, and {RENEW}"),
        });
        tracing::error!(pid = running.process.pid, how, exits, "the agent ended");
        self.is_running(false, exits);
        self.status.agent.store(0, Relaxed);
        self.status.error(&format!("the kata-agent ended ({how})"));
    }

    /// Returns the record; an unreadable one counts as none.
    fn read_record(&self) -> io::Result<Option<Record>> {
        let content = match files::read(&self.record, 4096) {
            Err(error) if says_nothing(&error) => return Err(error),
            read => read.ok().flatten().unwrap_or_default(),
        };
        let record = serde_json::from_slice(&content).ok();
        Ok(record.filter(|record: &Record| record.version == RECORD_VERSION))
    }

    fn write_record(&self, process: Option<ProcessId>, exits: u32) {
        let record = Record { version: RECORD_VERSION, process, exits };
        if let Err(error) = files::write_json(&self.record, &record) {
            tracing::warn!(path = %self.record.display(), %error, "cannot record the agent");
        }
    }
}

/// Number of processes that the VM's kernel has killed for lack of memory, also in a cgroup.
fn memory_kills() -> u64 {
    let text = std::fs::read_to_string("/proc/vmstat").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or_default()
}

/// Returns whether an error concerns this process and not the request: no descriptors, no memory, a full backlog.
fn says_nothing(error: &io::Error) -> bool {
    let number = error.raw_os_error().map(Errno::from_raw);
    matches!(number, Some(Errno::EMFILE | Errno::ENFILE | Errno::ENOMEM | Errno::ENOBUFS | Errno::EAGAIN))
}

/// Removes a stale socket, which would refuse every connection and fail the bind of the new kata-agent. Called only
/// when no kata-agent is alive.
fn remove_stale_socket(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => std::fs::remove_file(path),
        Ok(_) => Err(io::Error::other(format!("{} exists and is not a socket", path.display()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
