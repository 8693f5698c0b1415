//! Descriptor passing: peerpod-node passes open descriptors to peerpod-relay, which has no right to open them itself.
//!
//! It uses a `SOCK_SEQPACKET` socket ([`SOCKET`] in the run-dir) for one message, a small JSON header with the
//! descriptors (`SCM_RIGHTS`), and one answer. Both sides check the user of the other process.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use peerpod_common::fd_passing;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::time::Timespec;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Name of the socket in the run-dir.
pub const SOCKET: &str = "relay-fds.sock";
/// Version of header and answer.
pub const VERSION: u32 = 1;
/// Longest header or answer, in bytes.
pub const MAX_MESSAGE: usize = 16 << 10;
/// Most descriptors of one message.
pub const MAX_DESCRIPTORS: usize = 32;
/// Names of the descriptors of a pod's localhost listeners: IPv4, IPv6.
pub const LOCALHOST_LISTENERS: [&str; 2] = ["listen4", "listen6"];

/// Header of a message.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HandoffHeader {
    /// [`VERSION`].
    pub version: u32,
    /// Kind of the descriptors, a word that both sides know.
    pub kind: String,
    /// Sandbox of the descriptors; `None` for those of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    /// Passes nothing, but asks for the held descriptors of this kind and sandbox.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ask: bool,
    /// Name of each descriptor, in order. With `ask`: names of the descriptors to return duplicates of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub descriptors: Vec<String>,
    /// Further data of the kind.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub detail: Value,
}

impl HandoffHeader {
    /// Makes a header without descriptors.
    pub fn new(kind: &str, sandbox: Option<&str>) -> HandoffHeader {
        HandoffHeader {
            version: VERSION,
            kind: kind.to_owned(),
            sandbox: sandbox.map(str::to_owned),
            ask: false,
            descriptors: Vec::new(),
            detail: Value::Null,
        }
    }
}

/// Answer of the relay.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HandoffAnswer {
    /// [`VERSION`].
    pub version: u32,
    /// Reason of a refusal; empty on success.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub error: String,
    /// Whether descriptors of the kind are held now.
    #[serde(default)]
    pub held: bool,
    /// The kind's data on the held descriptors.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub detail: Value,
    /// Name of each descriptor in the answer, in order. Relays of 0.1.0 send none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub descriptors: Vec<String>,
}

/// Reason why the descriptors were not passed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed; the relay is away, or does not answer.
    #[error("{attempt}: {why}")]
    Io {
        /// Failed operation.
        attempt: String,
        /// Reason.
        why: io::Error,
    },
    /// The received bytes are not a message of this protocol.
    #[error("{0}")]
    Message(String),
    /// The other process runs as another user.
    #[error("the peer process runs as user {0}, not as {1}; no descriptor is passed to it")]
    Stranger(u32, u32),
    /// The relay refused descriptors of this kind, for this reason.
    #[error("peerpod-relay refuses the {0} descriptors: {1}")]
    Refused(String, String),
}

fn failed<E: Into<io::Error>>(attempt: &str) -> impl FnOnce(E) -> Error {
    let attempt = attempt.to_owned();
    move |why| Error::Io { attempt, why: why.into() }
}

/// Checks that the process at the other end runs as the same user as this process.
///
/// Its process id is not checked: it is 0 if the process is in a PID namespace that this one does not see, as in
/// another container. (`rustix::net::sockopt::socket_peercred` fails then.)
pub fn check_peer(socket: impl AsFd) -> Result<(), Error> {
    let peer =
        getsockopt(&socket, PeerCredentials).map_err(failed("read the credentials of the peer process"))?;
    let (uid, own) = (peer.uid(), rustix::process::geteuid().as_raw());
    if uid == own { Ok(()) } else { Err(Error::Stranger(uid, own)) }
}

/// Binds a non-blocking listener at `path`. The caller sets the permissions.
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    let socket = new_socket(SocketFlags::NONBLOCK)?;
    net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    net::listen(&socket, 64)?;
    Ok(socket)
}

/// Accepts a waiting connection; `WouldBlock` if there is none. The socket does not block.
pub fn accept(listener: impl AsFd) -> io::Result<OwnedFd> {
    Ok(net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?)
}

fn new_socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    Ok(net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | flags, None)?)
}

/// Connects to the listener at `path`; fails if its queue is full. The socket does not block.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    let socket = new_socket(SocketFlags::NONBLOCK)?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Sends a message with its descriptors.
///
/// # Errors
/// Fails if it is too long, has too many descriptors, or the kernel refuses.
pub fn send(
    socket: impl AsFd,
    message: &impl Serialize,
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), Error> {
    let bytes =
        serde_json::to_vec(message).map_err(|error| Error::Message(format!("write the message: {error}")))?;
    if bytes.len() > MAX_MESSAGE || descriptors.len() > MAX_DESCRIPTORS {
        let (size, count) = (bytes.len(), descriptors.len());
        return Err(Error::Message(format!(
            "the message has {size} bytes and {count} descriptors; at most {MAX_MESSAGE} and \
             {MAX_DESCRIPTORS} are allowed"
        )));
    }
    fd_passing::send(socket, &[IoSlice::new(&bytes)], descriptors).map_err(failed("send"))
}

/// Receives a waiting message. Its descriptors are closed on drop and on every error.
///
/// # Errors
/// Returns `WouldBlock` as [`Error::Io`] if none is there, and [`Error::Message`] for a truncated or invalid one.
pub fn receive<T: for<'a> Deserialize<'a>>(socket: impl AsFd) -> Result<(T, Vec<OwnedFd>), Error> {
    let mut bytes = vec![0; MAX_MESSAGE];
    let got = fd_passing::receive(socket, &mut [IoSliceMut::new(&mut bytes)]);
    let (length, descriptors) = got.map_err(|why| match why.kind() {
        ErrorKind::InvalidData | ErrorKind::UnexpectedEof => Error::Message(why.to_string()),
        _ => failed("receive")(why),
    })?;
    if descriptors.len() > MAX_DESCRIPTORS {
        return Err(Error::Message(format!("the message has more descriptors than {MAX_DESCRIPTORS}")));
    }
    // The version is read first: the rest may have another format.
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    let unreadable = |error: serde_json::Error| Error::Message(format!("read the message: {error}"));
    let Versioned { version } = serde_json::from_slice(&bytes[..length]).map_err(unreadable)?;
    if version != VERSION {
        return Err(Error::Message(format!(
            "the message has version {version}, this program supports {VERSION}; upgrade the older program"
        )));
    }
    let message = serde_json::from_slice(&bytes[..length]).map_err(unreadable)?;
    Ok((message, descriptors))
}

/// Passes descriptors: connects, sends, waits for the answer. Blocks for at most `patience`.
///
/// # Errors
/// See [`Error`]. The relay then holds nothing, except after a late answer.
pub fn hand_off(
    path: &Path,
    header: &HandoffHeader,
    descriptors: &[BorrowedFd<'_>],
    patience: Duration,
) -> Result<HandoffAnswer, Error> {
    exchange(path, header, descriptors, patience).map(|(answer, _none)| answer)
}

/// Asks for a duplicate of the node's descriptor `name` of this kind, held by the relay. Blocks for at most `patience`.
pub fn copy_of(path: &Path, kind: &str, name: &str, patience: Duration) -> Result<Option<OwnedFd>, Error> {
    let header =
        HandoffHeader { ask: true, descriptors: vec![name.to_owned()], ..HandoffHeader::new(kind, None) };
    let (answer, descriptors) = exchange(path, &header, &[], patience)?;
    let mut named = answer.descriptors.iter().zip(descriptors);
    Ok(named.find(|(given, _)| *given == name).map(|(_, descriptor)| descriptor))
}

fn exchange(
    path: &Path,
    header: &HandoffHeader,
    descriptors: &[BorrowedFd<'_>],
    patience: Duration,
) -> Result<(HandoffAnswer, Vec<OwnedFd>), Error> {
    let deadline = Instant::now() + patience;
    let connect = format!("connect to {}", path.display());
    let socket = new_socket(SocketFlags::NONBLOCK).map_err(failed(&connect))?;
    let address = SocketAddrUnix::new(path).map_err(failed(&connect))?;
    // Only a full queue makes this connect wait; the relay empties it as long as it lives.
    while let Err(why) = net::connect(&socket, &address) {
        if why != Errno::AGAIN || Instant::now() >= deadline {
            return Err(failed(&connect)(why));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    check_peer(&socket)?;
    send(&socket, header, descriptors)?;
    wait(&socket, deadline)?;
    let (answer, brought) = receive::<HandoffAnswer>(&socket)?;
    if answer.error.is_empty() {
        Ok((answer, brought))
    } else {
        Err(Error::Refused(header.kind.clone(), answer.error))
    }
}

fn wait(socket: &OwnedFd, deadline: Instant) -> Result<(), Error> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_| failed("wait for the answer")(Errno::INVAL))?;
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Err(failed("wait for the answer")(Errno::TIMEDOUT)),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(why) => return Err(failed("wait for the answer")(why)),
        }
    }
}
