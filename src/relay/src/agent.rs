//! Serves the `agent.ttrpc` of a sandbox. Connections of shims are accepted and passed to the sandbox's endpoint. A
//! silent connection costs nothing in the guest and never times out.

pub mod filter;

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use peerpod_common::accept::Acceptor;
use peerpod_common::files;
use tokio::net::UnixListener;
use tokio::task::JoinHandle;

use crate::sandboxes::Attached;
use crate::socket::{self, Bound};
use crate::store::SandboxRecord;

/// Time for which the socket of a removed sandbox closes connections. A late shim was seen to dial within 1.2 s.
const LINGER: Duration = Duration::from_secs(3);

/// Limit of shim connections to one sandbox.
pub(crate) const CONNECTIONS: usize = 1024;

/// A listening agent socket; dropping it unlinks the socket and its folder.
pub(crate) struct AgentSocket {
    path: PathBuf,
    listener: Arc<UnixListener>,
    sandbox: Attached,
    accepting: JoinHandle<()>,
    /// The accept loop is stopped, or about to be.
    held: bool,
    bound: Option<Bound>,
}

impl AgentSocket {
    /// Listens on `path`, in a folder of its own that is made for the owner alone.
    pub(crate) fn open(path: &Path, sandbox: &Attached) -> io::Result<AgentSocket> {
        if let Some(folder) = path.parent() {
            files::make_folder(folder)?;
        }
        let (listener, bound) = socket::bind(path)?;
        Ok(AgentSocket::serve(path, listener, Some(bound), sandbox))
    }

    /// Continues with the listener of another process.
    pub(crate) fn go_on(path: &Path, listener: UnixListener, sandbox: &Attached) -> AgentSocket {
        // The node puts the sandbox again if the name is gone meanwhile.
        AgentSocket::serve(path, listener, Bound::of(path).ok(), sandbox)
    }

    fn serve(path: &Path, listener: UnixListener, bound: Option<Bound>, sandbox: &Attached) -> AgentSocket {
        let (path, listener, sandbox) = (path.to_owned(), Arc::new(listener), sandbox.clone());
        let accepting = tokio::spawn(accept(&path, listener.clone(), sandbox.clone()));
        AgentSocket { path, listener, sandbox, accepting, held: false, bound }
    }

    /// Stops the accept loop and duplicates the listener. The endpoint then owns every accepted connection.
    pub(crate) async fn hold(&mut self) -> io::Result<OwnedFd> {
        self.held = true;
        self.accepting.abort();
        // The task's result is not needed.
        drop((&mut self.accepting).await);
        self.listener.as_fd().try_clone_to_owned()
    }

    pub(crate) fn accept_again(&mut self) {
        if std::mem::take(&mut self.held) {
            self.accepting = tokio::spawn(accept(&self.path, self.listener.clone(), self.sandbox.clone()));
        }
    }

    /// Closes the connections of late shims for [`LINGER`], because the sandbox is removed. Kata's Go shim may dial
    /// once more after StopVM: its health check runs, or GetOOMEvent ended. It dials an absent socket without a pause,
    /// for 30 s each time, and its pod's end waits for that.
    pub(crate) fn linger(self) {
        self.accepting.abort();
        let mut acceptor = Acceptor::new(self.path.display().to_string());
        let end = tokio::time::Instant::now() + LINGER;
        tokio::spawn(async move {
            while tokio::time::timeout_at(end, acceptor.next(|| self.listener.accept())).await.is_ok() {}
        });
    }

    /// Whether a shim that dials `path` reaches this listener.
    pub(crate) fn listens_on(&self, path: &Path) -> bool {
        self.path == path && self.bound.as_ref().is_some_and(Bound::is_there)
    }
}

impl Drop for AgentSocket {
    fn drop(&mut self) {
        self.accepting.abort();
        self.bound = None; // Unlinks, so that the folder is empty.
        if let Some(folder) = self.path.parent() {
            // A folder that is not empty is also used by another program.
            drop(std::fs::remove_dir(folder));
        }
    }
}

/// Removes the sockets of sandboxes without a record: a relay was killed within [`LINGER`] after their removal. No other
/// process may serve `run_dir` meanwhile. A socket that cannot be removed costs a late shim some time, and nothing else.
pub(crate) fn sweep(run_dir: &Path, records: &[SandboxRecord]) {
    let kept: HashSet<&Path> = records.iter().map(|record| record.agent_socket.as_path()).collect();
    let folders = match std::fs::read_dir(run_dir.join("pods")) {
        Ok(folders) => folders,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return,
        Err(error) => return tracing::warn!(%error, "cannot look for sockets of removed sandboxes"),
    };
    for folder in folders.flatten().map(|folder| folder.path()) {
        let path = folder.join("agent.ttrpc");
        let is_socket = std::fs::symlink_metadata(&path).is_ok_and(|there| there.file_type().is_socket());
        if !is_socket || kept.contains(path.as_path()) {
            continue;
        }
        match std::fs::remove_file(&path).and_then(|()| std::fs::remove_dir(&folder)) {
            Ok(()) => tracing::info!(socket = %path.display(), "socket of a removed sandbox deleted"),
            Err(error) => {
                tracing::warn!(socket = %path.display(), %error, "socket of a removed sandbox not deleted");
            }
        }
    }
}

fn accept(path: &Path, listener: Arc<UnixListener>, sandbox: Attached) -> impl Future<Output = ()> + use<> {
    let mut acceptor = Acceptor::new(path.display().to_string());
    async move {
        loop {
            let (stream, _) = acceptor.next(|| listener.accept()).await;
            if sandbox.guest.has_place() {
                sandbox.endpoint.adopt(stream);
            }
        }
    }
}
