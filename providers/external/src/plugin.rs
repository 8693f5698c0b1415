//! Starts, watches and kills the provider's process, and forwards its output to the log.
//!
//! The environment variable `PEERPOD_PROVIDER_SOCKET` gives the program the path to listen on. Its standard input is a
//! pipe without data, which ends with this process, even if this process is killed. Only the provider's process itself
//! is ever killed, not its children: they may be the VMs.

mod forward;

use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use peerpod_common::files;
use peerpod_provider_api::Error;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::net::UnixStream;
use tokio::process::{Child, ChildStdin, Command};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use forward::{LastLines, forward};

/// Environment variable that gives a provider's program the path of its socket.
pub const SOCKET_VARIABLE: &str = "PEERPOD_PROVIDER_SOCKET";
/// Longest time for a killed process to disappear, and for a provider that was just closed to release its socket.
const END_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two attempts to lock a socket.
const LOOK: Duration = Duration::from_millis(50);
/// Suffix of the lock file beside the socket. The file is locked while a process keeps its program on the socket.
const LOCK: &str = ".lock";
/// Time to wait for the last output after the end of the program, because its children may hold the pipe.
const OUTPUT_TIMEOUT: Duration = Duration::from_millis(200);

/// Process that serves the provider.
pub(crate) struct Plugin {
    program: String,
    child: Child,
    /// Its end shows the program that this process is gone.
    _stdin: Option<ChildStdin>,
    readers: JoinSet<()>,
    words: LastLines,
    /// Last field: until the program is killed, no other process may take it for an abandoned one.
    _lock: File,
}

impl Plugin {
    /// Starts the program. First ends a program that a dead process left on the socket. A program with a living starter
    /// is left alone.
    ///
    /// # Errors
    /// [`Error::Transient`] while another opener keeps a program on the socket.
    pub(crate) async fn start(command: &[String], socket: &Path) -> Result<Plugin, Error> {
        let [program, arguments @ ..] = command else {
            return Err(Error::invalid("start the provider: no program"));
        };
        let lock = lock(socket).await?;
        clear(socket).await?;
        let mut command = Command::new(program);
        command.args(arguments).current_dir("/").env(SOCKET_VARIABLE, socket);
        // The settings of this process may hold secrets, and the program does not need them.
        for (name, _) in std::env::vars_os() {
            let ours = name.to_string_lossy().starts_with("PEERPOD_");
            if ours && name != SOCKET_VARIABLE {
                command.env_remove(name);
            }
        }
        // In a separate process group: Ctrl-C on a terminal is for this process, which may still need the program to
        // clean up.
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        let mut child = command
            .spawn()
            .map_err(|error| Error::invalid(format!("start the provider's program {program}: {error}")))?;
        let (words, mut readers) = (LastLines::default(), JoinSet::new());
        if let Some(stdout) = child.stdout.take() {
            readers.spawn(forward(stdout, "stdout", program.clone(), words.clone()));
        }
        if let Some(stderr) = child.stderr.take() {
            readers.spawn(forward(stderr, "stderr", program.clone(), words.clone()));
        }
        tracing::info!(program, pid = child.id(), socket = %socket.display(), "provider's program started");
        let (program, stdin) = (program.clone(), child.stdin.take());
        Ok(Plugin { program, _stdin: stdin, child, readers, words, _lock: lock })
    }

    /// Waits until the process ends by itself, and returns the cause. May be dropped.
    pub(crate) async fn ended(&mut self) -> Error {
        let status = self.child.wait().await;
        let all = async { while self.readers.join_next().await.is_some() {} };
        // A timeout is no error: later output belongs to another process that holds the pipe.
        drop(timeout(OUTPUT_TIMEOUT, all).await);
        let how = status.map_or_else(|error| error.to_string(), |status| status.to_string());
        let words =
            self.words.lock().as_ref().map(|words| format!("; its last output: {words}")).unwrap_or_default();
        Error::transient(format!("the provider's program {} ended: {how}{words}", self.program))
    }

    /// Returns the end of the process, if that broke the connection. The end is visible a moment later.
    pub(crate) async fn just_ended(&mut self) -> Option<Error> {
        timeout(OUTPUT_TIMEOUT * 2, self.ended()).await.ok()
    }

    pub(crate) async fn kill(mut self) {
        if let Err(error) = self.child.start_kill() {
            // The process ended before.
            tracing::debug!(program = self.program, %error, "provider's program not killed");
        }
        match timeout(END_TIMEOUT, self.ended()).await {
            Ok(how) => tracing::debug!("{how}"),
            Err(_) => tracing::warn!(program = self.program, "the provider's program does not end"),
        }
    }
}

fn failed(what: &str, socket: &Path, error: &io::Error) -> Error {
    Error::invalid(format!("{what} the provider's socket {}: {error}", socket.display()))
}

/// Creates the folder of the socket, and locks the socket against every other opener, in this process and in others.
async fn lock(socket: &Path) -> Result<File, Error> {
    if let Some(folder) = socket.parent() {
        files::make_folders(folder).map_err(|error| failed("make the folder of", socket, &error))?;
    }
    let mut path = socket.as_os_str().to_owned();
    path.push(LOCK);
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path);
    let file = file.map_err(|error| failed("make a lock beside", socket, &error))?;
    let deadline = Instant::now() + END_TIMEOUT;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(error)) => return Err(failed("lock", socket, &error)),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => sleep(LOOK).await,
            Err(TryLockError::WouldBlock) => {
                return Err(Error::transient(format!(
                    "start the provider's program on {}: another process keeps its own program there; end that process, \
                     or set provider.external.socket to another path",
                    socket.display()
                )));
            }
        }
    }
}

/// Removes the socket. The caller must hold its lock. A remaining listener must be the program of a dead opener, and is
/// killed. Any other listener is an error.
async fn clear(socket: &Path) -> Result<(), Error> {
    if let Ok(Ok(listener)) = timeout(Duration::from_secs(1), UnixStream::connect(socket)).await {
        let pid = listener.peer_cred().ok().and_then(|peer| peer.pid()).and_then(Pid::from_raw);
        let killed = match pid {
            Some(pid) => end_predecessor(pid, socket).await,
            None => Err(io::Error::other("its process is not known")),
        };
        killed.map_err(|error| failed("another program listens on", socket, &error))?;
    }
    files::remove_volatile(socket).map(drop).map_err(|error| failed("remove", socket, &error))
}

async fn end_predecessor(pid: Pid, socket: &Path) -> io::Result<()> {
    // Opens the handle before checking the process, because the pid may be reused in the meantime.
    let handle = match pidfd_open(pid, PidfdFlags::NONBLOCK) {
        Ok(handle) => handle,
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let environment = match std::fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())) {
        Ok(environment) => environment,
        // The process is just ending and has no environment any more.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => Vec::new(),
        Err(error) => return Err(error),
    };
    let mark = format!("{SOCKET_VARIABLE}={}", socket.display());
    let is_ours = environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes());
    if is_ours {
        tracing::warn!(
            pid = pid.as_raw_nonzero(),
            "ending the provider's program, which an earlier process started"
        );
        pidfd_send_signal(&handle, Signal::KILL)?;
    } else if !environment.is_empty() {
        return Err(not_ours(pid));
    }
    let gone = tokio::task::spawn_blocking(move || {
        let limit = Timespec { tv_sec: END_TIMEOUT.as_secs() as i64, tv_nsec: 0 };
        poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&limit))
    });
    match gone.await.map_err(io::Error::other)? {
        Ok(0) if is_ours => Err(io::Error::other("it does not end")),
        Ok(0) => Err(not_ours(pid)),
        ended => ended.map(drop).map_err(io::Error::from),
    }
}

fn not_ours(pid: Pid) -> io::Error {
    let pid = pid.as_raw_nonzero();
    io::Error::other(format!("process {pid} was not started by us; end it or set another socket"))
}
