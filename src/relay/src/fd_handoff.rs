//! Serves `relay-fds.sock`, over which the node passes descriptors. The relay has no right to open a socket in a pod's
//! netns, nor a TUN device. The node opens them, and passes them again after a restart of the node or the relay.
//!
//! Each kind of descriptors is one [`Kind`]; `app` lists the kinds. This module enforces only limits: the permitted
//! peers, the time for a message, and the number of connections. A descriptor that no kind takes is closed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use peerpod_base::fd_handoff::{Error, HandoffAnswer, HandoffHeader, SOCKET, VERSION, receive, send};
use peerpod_common::reactor;
use rustix::net::{AddressFamily, SocketType, sockopt};
use serde_json::Value;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::timeout;

use crate::handover::Pause;
use crate::id::SandboxId;
use crate::socket;

/// Protocol number of TCP.
const IPPROTO_TCP: u32 = 6;
/// Time limit for a connected peer's message.
pub(crate) const MESSAGE: Duration = Duration::from_secs(5);
/// Time limit for a kind to take its descriptors.
const TAKE: Duration = Duration::from_secs(5);
/// Limit of open connections; the node makes one at a time for each sandbox.
const CONNECTIONS: usize = 64;

pub(crate) type Kinds = Vec<Arc<dyn Kind>>;

/// One kind of descriptors.
#[async_trait]
pub(crate) trait Kind: Send + Sync {
    /// Name of the kind in the header.
    fn name(&self) -> &'static str;

    /// Describes the descriptors held for this sandbox (`None`: for the node), in the kind's own format.
    async fn held(&self, sandbox: Option<&SandboxId>) -> Option<Value>;

    /// Duplicates the node's descriptors held under these names. By default none is returned.
    fn copies(&self, _names: &[String]) -> io::Result<Vec<(String, OwnedFd)>> {
        Ok(Vec::new())
    }

    /// Takes descriptors in place of the held ones. On an error, with a text for people, the held ones stay.
    async fn take(&self, sandbox: Option<&SandboxId>, handed: Passed) -> Result<Value, String>;
}

/// Content of one message.
#[derive(Debug)]
pub(crate) struct Passed {
    pub(crate) detail: Value,
    pub(crate) descriptors: Vec<(String, OwnedFd)>,
}

impl Passed {
    /// Splits the message into detail, names and descriptors.
    pub(crate) fn into_parts(self) -> (Value, Vec<String>, Vec<OwnedFd>) {
        let (names, descriptors) = self.descriptors.into_iter().unzip();
        (self.detail, names, descriptors)
    }

    /// Removes and returns the descriptor of this name; it must be a listening TCP socket of this family.
    pub(crate) fn listener(&mut self, name: &str, family: AddressFamily) -> Result<OwnedFd, String> {
        let descriptor = self.descriptor(name)?;
        check(&descriptor, family).map_err(|why| format!("descriptor {name}: {why}"))?;
        Ok(descriptor)
    }

    /// Removes and returns the descriptor of this name, of any type.
    pub(crate) fn descriptor(&mut self, name: &str) -> Result<OwnedFd, String> {
        let at = self.descriptors.iter().position(|(given, _)| given == name);
        at.map(|at| self.descriptors.swap_remove(at).1).ok_or_else(|| format!("descriptor {name} is missing"))
    }

    /// Whether a descriptor of this name is left.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.descriptors.iter().any(|(given, _)| given == name)
    }

    /// Fails if a descriptor is left: an unused descriptor is a mistake.
    pub(crate) fn finish(&self) -> Result<(), String> {
        match self.descriptors.first() {
            Some((name, _)) => {
                Err(format!("descriptor {name} is unknown to this relay; upgrade peerpod-relay"))
            }
            None => Ok(()),
        }
    }
}

/// Checks that a descriptor is a listening TCP socket of this family.
fn check(socket: &OwnedFd, family: AddressFamily) -> Result<(), String> {
    let found: rustix::io::Result<_> = (|| {
        let protocol = sockopt::socket_protocol(socket)?.map_or(0, |protocol| protocol.as_raw().get());
        let family = sockopt::socket_domain(socket)?.as_raw();
        Ok((family, sockopt::socket_type(socket)?, protocol, sockopt::socket_acceptconn(socket)?))
    })();
    let found = found.map_err(|why| format!("it is not a socket ({why})"))?;
    let wanted = (family.as_raw(), SocketType::STREAM, IPPROTO_TCP, true);
    if found == wanted {
        return Ok(());
    }
    let text = |(family, kind, protocol, listens): (u16, SocketType, u32, bool)| {
        format!("family {family}, {kind:?}, protocol {protocol}, listening: {listens}")
    };
    Err(format!("it is a socket of {}; required is {}", text(found), text(wanted)))
}

/// Serves until the future is dropped; takes no descriptors during a pause of `pause`. `patience` is [`MESSAGE`].
pub(crate) async fn serve(listener: OwnedFd, kinds: Kinds, pause: Pause, patience: Duration) {
    let kinds = Arc::new(kinds);
    let serve = |connection| one(connection, kinds.clone(), pause.clone(), patience);
    socket::serve_packets(listener, SOCKET, CONNECTIONS, serve).await;
}

/// Serves one connection: one message, one answer.
async fn one(connection: OwnedFd, kinds: Arc<Kinds>, pause: Pause, patience: Duration) {
    let Ok(connection) = reactor::register(connection, Interest::READABLE) else { return };
    let answer = match timeout(patience, message(&connection)).await {
        Ok(Ok((header, descriptors))) => {
            let _open = pause.read_owned().await;
            judge(&kinds, header, descriptors).await
        }
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no descriptors arrived within {patience:?}")),
    };
    let (mut answer, copies) = answer.unwrap_or_else(|error| {
        tracing::warn!(error, "descriptors refused");
        (HandoffAnswer { error, ..HandoffAnswer::default() }, Vec::new())
    });
    answer.version = VERSION;
    let copies: Vec<BorrowedFd<'_>> = copies.iter().map(AsFd::as_fd).collect();
    if let Err(error) = send(connection.as_fd(), &answer, &copies) {
        tracing::debug!(%error, "the node closed the connection before the answer about its descriptors");
    }
}

async fn message(connection: &AsyncFd<OwnedFd>) -> Result<(HandoffHeader, Vec<OwnedFd>), Error> {
    let failed = |why| Error::Io { attempt: "wait for descriptors".to_owned(), why };
    loop {
        let mut ready = connection.readable().await.map_err(failed)?;
        match receive(connection.as_fd()) {
            Err(Error::Io { why, .. }) if why.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
            other => return other,
        }
    }
}

/// Returns the answer and the descriptors to send with it.
async fn judge(
    kinds: &Kinds,
    header: HandoffHeader,
    descriptors: Vec<OwnedFd>,
) -> Result<(HandoffAnswer, Vec<OwnedFd>), String> {
    let HandoffHeader { kind: name, sandbox, ask, descriptors: names, detail, .. } = header;
    let kind = kinds
        .iter()
        .find(|kind| kind.name() == name)
        .ok_or_else(|| format!("kind {name:?} is unknown to this relay; upgrade peerpod-relay"))?;
    let sandbox = sandbox.as_deref().map(SandboxId::new).transpose().map_err(|error| error.to_string())?;
    if ask {
        let held = kind.held(sandbox.as_ref()).await;
        let copies = if sandbox.is_none() { kind.copies(&names) } else { Ok(Vec::new()) };
        let copies = copies.map_err(|why| format!("copy the {name} descriptors: {why}"))?;
        let (descriptors, copies) = copies.into_iter().unzip();
        let (held, detail) = (held.is_some(), held.unwrap_or_default());
        return Ok((HandoffAnswer { held, detail, descriptors, ..HandoffAnswer::default() }, copies));
    }
    if descriptors.is_empty() {
        return Err(format!("a message of kind {name} has no descriptors"));
    }
    if descriptors.len() != names.len() {
        let (came, named) = (descriptors.len(), names.len());
        return Err(format!("{came} descriptors arrived, {named} are named"));
    }
    let handed = Passed { detail, descriptors: names.into_iter().zip(descriptors).collect() };
    let taken = timeout(TAKE, kind.take(sandbox.as_ref(), handed)).await;
    let detail = taken.map_err(|_| format!("the relay did not accept the descriptors within {TAKE:?}"))??;
    // The kind logs the pod, which is not known here.
    tracing::debug!(kind = name, "descriptors accepted");
    Ok((HandoffAnswer { held: true, detail, ..HandoffAnswer::default() }, Vec::new()))
}

#[cfg(test)]
mod tests;
