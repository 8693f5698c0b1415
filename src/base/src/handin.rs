//! Hand-in: how peerpod-node gives open descriptors to peerpod-relay, which has no rights to open them itself.
//!
//! Over a `SOCK_SEQPACKET` socket ([`SOCKET`] in the run-dir): one message, a small JSON header with the descriptors
//! beside it (`SCM_RIGHTS`), and one answer; then the connection ends. Both sides check whose process the other is.
//! What a descriptor means is the kind's business: the header names each.

use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    time::{Duration, Instant},
};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    net::{
        self, AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    },
    time::Timespec,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The socket's name in the run-dir.
pub const SOCKET: &str = "relay-fds.sock";
/// Version of header and answer.
pub const VERSION: u32 = 1;
/// The longest header or answer, in bytes.
pub const MAX_MESSAGE: usize = 16 << 10;
/// The most descriptors of one message.
pub const MAX_DESCRIPTORS: usize = 32;
/// Names of the descriptors of a pod's localhost listeners: IPv4, IPv6.
pub const LOCALHOST_LISTENERS: [&str; 2] = ["listen4", "listen6"];

/// Room for [`MAX_DESCRIPTORS`]; the kernel cuts what is beyond, and says so.
const ROOM: usize = rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS));

/// What is handed in.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// [`VERSION`].
    pub version: u32,
    /// What it is, a word that both sides know.
    pub kind: String,
    /// Whose it is; none: the node's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    /// Nothing is handed in: what is held of this kind and sandbox?
    #[serde(default, skip_serializing_if = "is_false")]
    pub ask: bool,
    /// A name for each descriptor, in their order. With `ask`: the names of those that the answer is to bring copies of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub descriptors: Vec<String>,
    /// What else the kind needs to know.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub detail: Value,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde wants it so
fn is_false(value: &bool) -> bool {
    !value
}

impl Header {
    /// A header without descriptors yet.
    pub fn new(kind: &str, sandbox: Option<&str>) -> Header {
        Header {
            version: VERSION,
            kind: kind.to_owned(),
            sandbox: sandbox.map(str::to_owned),
            ask: false,
            descriptors: Vec::new(),
            detail: Value::Null,
        }
    }
}

/// What the relay says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    /// [`VERSION`].
    pub version: u32,
    /// Why not; empty: done.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub error: String,
    /// Whether the kind's descriptors are held now.
    #[serde(default)]
    pub held: bool,
    /// What the kind says of them.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub detail: Value,
    /// A name for each descriptor that the answer brings, in their order. Relays of 0.1.0 bring none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub descriptors: Vec<String>,
}

/// Why a hand-in did not happen.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A system call failed; the relay is away, or does not answer.
    #[error("{attempt}: {why}")]
    Io {
        /// What was attempted.
        attempt: String,
        /// Why not.
        why: io::Error,
    },
    /// What came is not a message of this protocol.
    #[error("{0}")]
    Message(String),
    /// The other process is not one of ours.
    #[error("the process at the other end runs as user {uid}, not as {own}; nothing is handed to it")]
    Stranger {
        /// Its user.
        uid: u32,
        /// Ours.
        own: u32,
    },
    /// The relay said no.
    #[error("peerpod-relay does not take the {kind} descriptors: {why}")]
    Refused {
        /// What was handed in.
        kind: String,
        /// Its words.
        why: String,
    },
}

fn failed(attempt: &str) -> impl FnOnce(Errno) -> Error {
    let attempt = attempt.to_owned();
    move |why| Error::Io { attempt, why: why.into() }
}

/// Makes sure that the process at the other end runs as the same user as this process.
///
/// Its process id is not looked at: it is 0 where the process is in a PID namespace that this one does not see, as in
/// another container. (`rustix::net::sockopt::socket_peercred` fails then.)
///
/// # Errors
/// [`Error::Stranger`], or the kernel's.
pub fn check_peer(socket: impl AsFd) -> Result<(), Error> {
    let peer = getsockopt(&socket, PeerCredentials).map_err(|why| Error::Io {
        attempt: "read the credentials of the process at the other end".to_owned(),
        why: why.into(),
    })?;
    let (uid, own) = (peer.uid(), rustix::process::geteuid().as_raw());
    if uid == own { Ok(()) } else { Err(Error::Stranger { uid, own }) }
}

/// A listener at `path`, not blocking, for the owner alone once its rights are set.
///
/// # Errors
/// The kernel's.
pub fn listen(path: &Path) -> io::Result<OwnedFd> {
    let socket = new_socket(SocketFlags::NONBLOCK)?;
    net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    net::listen(&socket, 64)?;
    Ok(socket)
}

/// A waiting connection; not blocking.
///
/// # Errors
/// `WouldBlock` when there is none.
pub fn accept(listener: impl AsFd) -> io::Result<OwnedFd> {
    Ok(net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?)
}

fn new_socket(flags: SocketFlags) -> io::Result<OwnedFd> {
    Ok(net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | flags, None)?)
}

/// A connection to the listener at `path`; not blocking.
///
/// # Errors
/// The kernel's: nobody listens, or its queue is full.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    let socket = new_socket(SocketFlags::NONBLOCK)?;
    net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Sends a message with its descriptors.
///
/// # Errors
/// It is too long, has too many descriptors, or the kernel's.
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
            "a message of {size} bytes and {count} descriptors; at most {MAX_MESSAGE} and {MAX_DESCRIPTORS} are taken"
        )));
    }
    let mut room = [MaybeUninit::uninit(); ROOM];
    let mut control = SendAncillaryBuffer::new(&mut room);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Error::Message("the descriptors do not fit".to_owned()));
    }
    net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)
        .map(drop)
        .map_err(failed("send"))
}

/// Receives a message that is there; its descriptors are closed when they are dropped, and on every error.
///
/// # Errors
/// `WouldBlock` as [`Error::Io`] when nothing is there; [`Error::Message`] for what is cut off, or no message.
pub fn receive<T: for<'a> Deserialize<'a>>(socket: impl AsFd) -> Result<(T, Vec<OwnedFd>), Error> {
    let mut bytes = vec![0; MAX_MESSAGE];
    let mut room = [MaybeUninit::uninit(); ROOM];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let got = net::recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)
        .map_err(failed("receive"))?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    let bad = |why: &str| Err(Error::Message(why.to_owned()));
    if got.flags.contains(ReturnFlags::CTRUNC) {
        return bad("more descriptors than a message may have, or than this process may open");
    }
    if got.flags.contains(ReturnFlags::TRUNC) {
        return bad("the message is too long");
    }
    if got.bytes == 0 {
        return bad("the other end closed the connection");
    }
    // The version before anything else: what follows may have another form.
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    let unreadable = |error: serde_json::Error| Error::Message(format!("read the message: {error}"));
    let Versioned { version } = serde_json::from_slice(&bytes[..got.bytes]).map_err(unreadable)?;
    if version != VERSION {
        return Err(Error::Message(format!(
            "the message has version {version}, this program knows {VERSION}; upgrade the older one"
        )));
    }
    let message = serde_json::from_slice(&bytes[..got.bytes]).map_err(unreadable)?;
    Ok((message, descriptors))
}

/// Hands in: connects, sends, waits for the answer. Blocks for at most `patience`.
///
/// # Errors
/// See [`Error`]. Nothing is held by the relay then, except after an answer that came too late.
pub fn hand_in(
    path: &Path,
    header: &Header,
    descriptors: &[BorrowedFd<'_>],
    patience: Duration,
) -> Result<Answer, Error> {
    exchange(path, header, descriptors, patience).map(|(answer, _none)| answer)
}

/// Asks for a copy of the descriptor `name` that the relay holds of the node's descriptors of this kind. Blocks for at
/// most `patience`.
///
/// # Errors
/// See [`Error`].
pub fn copy_of(path: &Path, kind: &str, name: &str, patience: Duration) -> Result<Option<OwnedFd>, Error> {
    let header = Header { ask: true, descriptors: vec![name.to_owned()], ..Header::new(kind, None) };
    let (answer, descriptors) = exchange(path, &header, &[], patience)?;
    let mut named = answer.descriptors.iter().zip(descriptors);
    Ok(named.find(|(given, _)| *given == name).map(|(_, descriptor)| descriptor))
}

fn exchange(
    path: &Path,
    header: &Header,
    descriptors: &[BorrowedFd<'_>],
    patience: Duration,
) -> Result<(Answer, Vec<OwnedFd>), Error> {
    let deadline = Instant::now() + patience;
    let connect = format!("connect to {}", path.display());
    let io = |why: io::Error| Error::Io { attempt: connect.clone(), why };
    let socket = new_socket(SocketFlags::NONBLOCK).map_err(io)?;
    let address = SocketAddrUnix::new(path).map_err(failed(&connect))?;
    // A full queue is the only thing that a connect waits for here; the relay empties it as long as it lives.
    while let Err(why) = net::connect(&socket, &address) {
        if why != Errno::AGAIN || Instant::now() >= deadline {
            return Err(failed(&connect)(why));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    check_peer(&socket)?;
    send(&socket, header, descriptors)?;
    wait(&socket, deadline)?;
    let (answer, brought) = receive::<Answer>(&socket)?;
    if answer.error.is_empty() {
        Ok((answer, brought))
    } else {
        Err(Error::Refused { kind: header.kind.clone(), why: answer.error })
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
