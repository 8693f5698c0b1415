//! The provider's process, when it is ours: started, watched, listened to, killed.
//!
//! It is told where to listen by the environment (`PEERPOD_PROVIDER_SOCKET`). Its standard input is a pipe that nobody
//! writes to: its end is ours, also when we were killed. What it prints becomes log lines. Only the process itself is
//! ever killed, not its children: they may be the VMs.

mod forward;

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use peerpod_provider_api::Error;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::net::UnixStream;
use tokio::process::{Child, ChildStdin, Command};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use forward::{LastWords, forward};

/// Tells a provider's program where to listen.
pub const SOCKET_VARIABLE: &str = "PEERPOD_PROVIDER_SOCKET";
/// How long a killed process may take to be gone, and a provider that was just closed to let go of its socket.
const DEATH: Duration = Duration::from_secs(5);
/// Between two tries to lock a socket.
const LOOK: Duration = Duration::from_millis(50);
/// Behind the socket's path: the file that is locked while a process of ours keeps a program on the socket.
const LOCK: &str = ".lock";
/// How long after its end its last words are waited for: children of it may hold the pipe.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// A process that serves the provider.
pub(crate) struct Plugin {
    program: String,
    child: Child,
    /// Its end tells the plugin that we are gone.
    _stdin: Option<ChildStdin>,
    readers: JoinSet<()>,
    words: LastWords,
    /// Last: until the program is killed nobody may take it for one that was left behind.
    _lock: File,
}

impl Plugin {
    /// Ends the program that a process of ours, which is gone, left on the socket, and starts the program. A program
    /// whose starter lives is left alone.
    ///
    /// # Errors
    /// [`Error::Transient`] while another process of ours keeps a program on the socket.
    pub(crate) async fn start(command: &[String], socket: &Path) -> Result<Plugin, Error> {
        let [program, arguments @ ..] = command else {
            return Err(Error::invalid("start the provider: no program"));
        };
        let lock = lock(socket).await?;
        clear(socket).await?;
        let mut command = Command::new(program);
        command.args(arguments).current_dir("/").env(SOCKET_VARIABLE, socket);
        // Our own settings may hold secrets, and are none of its business.
        for (name, _) in std::env::vars_os() {
            let ours = name.to_string_lossy().starts_with("PEERPOD_");
            if ours && name != SOCKET_VARIABLE {
                command.env_remove(name);
            }
        }
        // A group of its own: a terminal's Ctrl-C is for us, and we may still need it to clean up.
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        let mut child = command
            .spawn()
            .map_err(|error| Error::invalid(format!("start the provider's program {program}: {error}")))?;
        let (words, mut readers) = (LastWords::default(), JoinSet::new());
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

    /// Waits until the process ends by itself, and tells how. May be dropped.
    pub(crate) async fn ended(&mut self) -> Error {
        let status = self.child.wait().await;
        let all = async { while self.readers.join_next().await.is_some() {} };
        // Late is no news: what is not there by now is another process's.
        drop(timeout(LAST_WORDS, all).await);
        let how = status.map_or_else(|error| error.to_string(), |status| status.to_string());
        let words = self.words.get().map(|words| format!("; its last words: {words}")).unwrap_or_default();
        Error::transient(format!("the provider's program {} ended: {how}{words}", self.program))
    }

    /// Its end, if that is what broke the connection: it comes a moment later.
    pub(crate) async fn just_ended(&mut self) -> Option<Error> {
        timeout(LAST_WORDS * 2, self.ended()).await.ok()
    }

    /// Ends the process for certain.
    pub(crate) async fn kill(mut self) {
        if let Err(error) = self.child.start_kill() {
            // It ended before.
            tracing::debug!(program = self.program, %error, "provider's program not killed");
        }
        match timeout(DEATH, self.ended()).await {
            Ok(how) => tracing::debug!("{how}"),
            Err(_) => tracing::warn!(program = self.program, "the provider's program does not die"),
        }
    }
}

fn failed(what: &str, socket: &Path, error: &io::Error) -> Error {
    Error::invalid(format!("{what} the provider's socket {}: {error}", socket.display()))
}

/// Makes the socket's folder, and locks the socket against every other opener, of this process and of others.
async fn lock(socket: &Path) -> Result<File, Error> {
    if let Some(folder) = socket.parent() {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.map_err(|error| failed("make the folder of", socket, &error))?;
    }
    let mut path = socket.as_os_str().to_owned();
    path.push(LOCK);
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path);
    let file = file.map_err(|error| failed("make a lock beside", socket, &error))?;
    let deadline = Instant::now() + DEATH;
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

/// Frees the socket's name; call with the socket locked. A listener that is still there must have been started by a
/// process of ours, which is gone: it is killed. Any other listener is an error.
async fn clear(socket: &Path) -> Result<(), Error> {
    if let Ok(Ok(listener)) = timeout(Duration::from_secs(1), UnixStream::connect(socket)).await {
        let pid = listener.peer_cred().ok().and_then(|peer| peer.pid()).and_then(Pid::from_raw);
        let killed = match pid {
            Some(pid) => end_predecessor(pid, socket).await,
            None => Err(io::Error::other("its process is not known")),
        };
        killed.map_err(|error| failed("another program listens on", socket, &error))?;
    }
    match std::fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", socket, &error)),
        _ => Ok(()),
    }
}

async fn end_predecessor(pid: Pid, socket: &Path) -> io::Result<()> {
    // First the handle, then the look at whom it holds: a number may have been given to another process meanwhile.
    let handle = match pidfd_open(pid, PidfdFlags::NONBLOCK) {
        Ok(handle) => handle,
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let environment = match std::fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())) {
        Ok(environment) => environment,
        // It is just ending, and has none any more.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => Vec::new(),
        Err(error) => return Err(error),
    };
    let mark = format!("{SOCKET_VARIABLE}={}", socket.display());
    let is_ours = environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes());
    if is_ours {
        tracing::warn!(
            pid = pid.as_raw_nonzero(),
            "ending the provider's program that an earlier process left behind"
        );
        pidfd_send_signal(&handle, Signal::KILL)?;
    } else if !environment.is_empty() {
        return Err(not_ours(pid));
    }
    let gone = tokio::task::spawn_blocking(move || {
        let limit = Timespec { tv_sec: DEATH.as_secs() as i64, tv_nsec: 0 };
        poll(&mut [PollFd::new(&handle, PollFlags::IN)], Some(&limit))
    });
    match gone.await.map_err(io::Error::other)? {
        Ok(0) if is_ours => Err(io::Error::other("it does not die")),
        Ok(0) => Err(not_ours(pid)),
        ended => ended.map(drop).map_err(io::Error::from),
    }
}

fn not_ours(pid: Pid) -> io::Error {
    let pid = pid.as_raw_nonzero();
    io::Error::other(format!("process {pid} was not started by us; end it or set another socket"))
}
