//! Messages between the two processes, over a `SOCK_SEQPACKET` socket: one byte for the type, then JSON or a piece of
//! an item. An item is announced with its size, and follows in pieces, then its descriptors in batches.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use peerpod_common::{fd_passing, reactor};
use rustix::io::Errno;
use rustix::net;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Longest packet, in bytes.
const PACKET: usize = 48 << 10;
/// Descriptors per packet; the kernel allows 253.
const BATCH: usize = 128;
/// Largest item, in bytes.
const ITEM: u64 = 512 << 20;
/// Most descriptors of one item.
const DESCRIPTORS: u32 = 16 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum MessageKind {
    /// New to old: the sender and the versions that it supports.
    Hello = 1,
    /// Old to new: accepted, in this version.
    Welcome = 2,
    /// Either way: refused, with the reason; nothing has changed.
    No = 3,
    /// Old to new: an item follows.
    Item = 4,
    Piece = 5,
    Descriptors = 6,
    /// Old to new: all items were sent.
    End = 7,
    /// New to old: everything was received and can be served.
    Taken = 8,
    /// Old to new: the new process owns everything from now on.
    Yours = 9,
}

impl MessageKind {
    fn of(byte: u8) -> Option<MessageKind> {
        use MessageKind::{Descriptors, End, Hello, Item, No, Piece, Taken, Welcome, Yours};
        [Hello, Welcome, No, Item, Piece, Descriptors, End, Taken, Yours]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// Sender of a Hello or Welcome.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ProcessInfo {
    pub(super) pid: u32,
    pub(super) program: String,
    /// In Hello the oldest and newest supported version, in Welcome the chosen one, twice.
    pub(super) versions: (u32, u32),
}

impl ProcessInfo {
    pub(super) fn this(oldest: u32, newest: u32) -> ProcessInfo {
        let program = env!("CARGO_PKG_VERSION").to_owned();
        ProcessInfo { pid: std::process::id(), program, versions: (oldest, newest) }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Reason {
    pub(super) why: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Announced {
    kind: String,
    bytes: u64,
    descriptors: u32,
}

/// One part of the handover. It may contain a key, so it does not implement `Debug`.
pub(super) struct Item {
    pub(super) kind: String,
    pub(super) body: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

impl Item {
    pub(super) fn new(kind: &str, body: &impl Serialize, descriptors: Vec<OwnedFd>) -> io::Result<Item> {
        Ok(Item { kind: kind.to_owned(), body: serde_json::to_vec(body)?, descriptors })
    }

    pub(super) fn read<T: DeserializeOwned>(&self) -> Result<T, String> {
        serde_json::from_slice(&self.body).map_err(|error| format!("read the {} item: {error}", self.kind))
    }
}

#[derive(Debug)]
pub(super) struct Message {
    pub(super) kind: MessageKind,
    body: Vec<u8>,
    descriptors: Vec<OwnedFd>,
}

impl Message {
    pub(super) fn read<T: DeserializeOwned>(&self) -> io::Result<T> {
        Ok(serde_json::from_slice(&self.body)?)
    }

    pub(super) fn reason(&self) -> String {
        self.read().map_or_else(|_| "it gave no reason".to_owned(), |Reason { why }| why)
    }
}

pub(super) fn invalid(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

/// One end of the connection.
pub(super) struct Wire {
    socket: AsyncFd<OwnedFd>,
}

impl Wire {
    pub(super) fn new(socket: OwnedFd) -> io::Result<Wire> {
        Ok(Wire { socket: reactor::register(socket, Interest::READABLE | Interest::WRITABLE)? })
    }

    pub(super) async fn send(&self, kind: MessageKind, body: &impl Serialize) -> io::Result<()> {
        self.send_bytes(kind, &serde_json::to_vec(body)?, &[]).await
    }

    async fn send_bytes(&self, kind: MessageKind, body: &[u8], passed: &[BorrowedFd<'_>]) -> io::Result<()> {
        loop {
            let send = |socket: &OwnedFd| put(socket.as_fd(), kind, body, passed);
            match self.socket.async_io(Interest::WRITABLE, send).await {
                // Too many descriptors are in flight; the other end must read some first.
                Err(error) if error.raw_os_error() == Some(Errno::TOOMANYREFS.raw_os_error()) => {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
                other => return other,
            }
        }
    }

    /// Sends a message without waiting, or fails.
    pub(super) fn send_now(&self, kind: MessageKind, body: &[u8]) -> io::Result<()> {
        put(self.socket.get_ref().as_fd(), kind, body, &[])
    }

    pub(super) async fn send_item(&self, item: &Item) -> io::Result<()> {
        let descriptors =
            u32::try_from(item.descriptors.len()).map_err(|_| invalid("too many descriptors"))?;
        let announced = Announced { kind: item.kind.clone(), bytes: item.body.len() as u64, descriptors };
        if announced.bytes > ITEM || descriptors > DESCRIPTORS {
            return Err(invalid(format!("a {} item exceeds the size limit of a handover", item.kind)));
        }
        self.send(MessageKind::Item, &announced).await?;
        for piece in item.body.chunks(PACKET) {
            self.send_bytes(MessageKind::Piece, piece, &[]).await?;
        }
        for batch in item.descriptors.chunks(BATCH) {
            let batch: Vec<BorrowedFd<'_>> = batch.iter().map(AsFd::as_fd).collect();
            self.send_bytes(MessageKind::Descriptors, b"", &batch).await?;
        }
        Ok(())
    }

    /// Receives the next message; an unexpected end is an error of kind `UnexpectedEof`.
    pub(super) async fn receive(&self) -> io::Result<Message> {
        self.socket.async_io(Interest::READABLE, |socket| get(socket.as_fd())).await
    }

    /// Shuts the socket down and returns a message that has already arrived. Sending a later message fails.
    pub(super) fn drain(&self) -> io::Result<Message> {
        net::shutdown(self.socket.get_ref(), net::Shutdown::Both)?;
        get(self.socket.get_ref().as_fd())
    }

    pub(super) async fn receive_item(&self, announced: &Message) -> io::Result<Item> {
        let Announced { kind, bytes, descriptors } = announced.read()?;
        if bytes > ITEM || descriptors > DESCRIPTORS {
            return Err(invalid(format!(
                "a {kind} item of {bytes} bytes and {descriptors} descriptors exceeds the limits of a handover"
            )));
        }
        let mut item = Item { kind, body: Vec::new(), descriptors: Vec::new() };
        while (item.body.len() as u64) < bytes {
            let piece = self.receive().await?;
            if piece.kind != MessageKind::Piece
                || piece.body.is_empty()
                || item.body.len() + piece.body.len() > bytes as usize
            {
                return Err(invalid(format!("a {} item differs from its announcement", item.kind)));
            }
            item.body.extend_from_slice(&piece.body);
        }
        while item.descriptors.len() < descriptors as usize {
            let batch = self.receive().await?;
            if batch.kind != MessageKind::Descriptors || batch.descriptors.is_empty() {
                return Err(invalid(format!("a {} item lacks descriptors", item.kind)));
            }
            item.descriptors.extend(batch.descriptors);
        }
        Ok(item)
    }
}

fn put(socket: BorrowedFd<'_>, kind: MessageKind, body: &[u8], passed: &[BorrowedFd<'_>]) -> io::Result<()> {
    fd_passing::send(socket, &[IoSlice::new(&[kind as u8]), IoSlice::new(body)], passed)
}

fn get(socket: BorrowedFd<'_>) -> io::Result<Message> {
    let (mut first, mut body) = ([0], vec![0; PACKET]);
    let parts = &mut [IoSliceMut::new(&mut first), IoSliceMut::new(&mut body)];
    let (bytes, descriptors) = fd_passing::receive(socket, parts)?;
    let [first] = first;
    let kind = MessageKind::of(first).ok_or_else(|| invalid(format!("a message of kind {first}")))?;
    body.truncate(bytes - 1);
    Ok(Message { kind, body, descriptors })
}
