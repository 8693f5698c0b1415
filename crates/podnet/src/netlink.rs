//! Sends netlink requests synchronously: a batch of messages in one datagram. Each gets the kernel's answer.
//!
//! May touch: one socket, made in the namespace of the thread that made it. The kernel is trusted to send valid
//! netlink, yet none of its answers makes this code panic, grow without bound, or wait for ever.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering};

use netlink_packet_core::{
    Emitable, NLM_F_ACK, NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR, NetlinkHeader,
    NetlinkSerializable,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::Socket;
use netlink_sys::protocols::{NETLINK_NETFILTER, NETLINK_ROUTE};
use nix::errno::Errno;
use nix::sys::socket::sockopt::{ReceiveTimeout, SndBufForce};
use nix::sys::socket::{MsgFlags, recv, send, setsockopt};
use nix::sys::time::TimeVal;

mod parse;

pub(crate) use parse::parse_route;
use parse::{has_end, next_message, parse_answer, refusal};

const HEADER: usize = 16;
/// Messages per datagram: the kernel queues an answer to each before the first is read, and the queue is finite.
const BATCH: usize = 64;
/// Receive buffer. The kernel never sends more than 32 KiB at once; a longer datagram is refused as truncated.
const ROOM: usize = 32 * 1024;
/// Send buffer for an nftables transaction: some 70 bytes for each of ten thousand tunnels.
const SEND_ROOM: usize = 4 * 1024 * 1024;
/// Receive timeout, in seconds. The kernel answers inside `send`; the timeout only keeps a defect from becoming a hang.
const PATIENCE: i64 = 10;
/// Attempts at a dump; a change of the table during the dump causes another one.
const DUMP_TRIES: u32 = 8;

/// Failure of a request, or the kernel's refusal.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel refused the request.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The socket failed.
    #[error("{0}")]
    Socket(#[from] io::Error),
    /// The answer is malformed.
    #[error("read the kernel's netlink answer: {0}")]
    Garbled(String),
    /// A dump has more entries than the caller accepts.
    #[error("more than {0} entries")]
    TooMany(usize),
}

impl Error {
    /// Returns the kernel's error number, where it refused.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Error::Refused(refusal) => Some(refusal.errno),
            _ => None,
        }
    }

    /// Returns whether the kernel reported that the object does not exist.
    pub fn is_gone(&self) -> bool {
        matches!(self, Error::Refused(refusal) if refusal.is_gone())
    }
}

/// The kernel's refusal of one message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} ({errno:?}){}", .errno.desc(), .text.iter().map(|text| format!(": {text}")).collect::<String>())]
pub struct Refusal {
    /// The error number.
    pub errno: Errno,
    /// The kernel's explanation (extended ACK), where it gave one.
    pub text: Option<String>,
}

impl Refusal {
    /// Returns whether it means that the object does not exist.
    pub fn is_gone(&self) -> bool {
        matches!(self.errno, Errno::ENOENT | Errno::ENODEV | Errno::ESRCH | Errno::EADDRNOTAVAIL)
    }
}

/// The answer to one message of a batch.
pub type Ack = Result<(), Refusal>;

/// One netlink socket. Sequence numbers let an exchange ignore late answers of one that failed half-way.
#[derive(Debug)]
pub struct Client {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
    /// Sequence number of a dump that was not read to its end.
    unfinished: Option<u32>,
}

static SENT: AtomicU64 = AtomicU64::new(0);

/// Returns the number of netlink messages that this process has sent so far, for benches.
pub fn messages_sent() -> u64 {
    SENT.load(Ordering::Relaxed)
}

impl Client {
    /// Opens a socket for devices, addresses, routes, neighbours and tc, in the namespace of the calling thread.
    pub fn route() -> io::Result<Client> {
        let client = Client::new(NETLINK_ROUTE)?;
        // The kernel then filters dumps, and an unknown filter is an error instead of being ignored.
        client.socket.set_netlink_get_strict_chk(true)?;
        Ok(client)
    }

    /// Frees the receive buffer until it is needed again: a thousand pods may each have an idle socket.
    pub(crate) fn rest(&mut self) {
        self.buffer = Vec::new();
    }

    /// Opens a socket for nftables, in the namespace of the calling thread. Fails where the kernel has no netfilter.
    pub fn netfilter() -> io::Result<Client> {
        let client = Client::new(NETLINK_NETFILTER)?;
        // A whole table is one datagram. Needs CAP_NET_ADMIN, as every change of nftables does.
        setsockopt(&client.socket.as_fd(), SndBufForce, &SEND_ROOM)?;
        Ok(client)
    }

    fn new(protocol: isize) -> io::Result<Client> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.set_ext_ack(true)?;
        socket.set_cap_ack(true)?;
        setsockopt(&socket.as_fd(), ReceiveTimeout, &TimeVal::new(PATIENCE, 0))?;
        Ok(Client { socket, sequence: 0, buffer: Vec::new(), unfinished: None })
    }

    /// Sends the messages (flags without REQUEST and ACK, message) in order, in as few datagrams as the kernel's queue
    /// allows. Returns the kernel's answer to each. A refusal does not stop later messages.
    ///
    /// # Errors
    /// [`Error::Socket`] and [`Error::Garbled`]; some messages may have been executed then.
    pub fn batch<M: NetlinkSerializable>(&mut self, messages: &[(u16, M)]) -> Result<Vec<Ack>, Error> {
        let mut answers = Vec::with_capacity(messages.len());
        for part in messages.chunks(BATCH) {
            let first = self.sequence.wrapping_add(1);
            let mut datagram = Vec::with_capacity(part.len() * 128);
            for (flags, message) in part {
                self.put(&mut datagram, flags | NLM_F_REQUEST | NLM_F_ACK, message);
            }
            self.send(&datagram)?;
            answers.append(&mut self.collect(first, part.len())?);
        }
        Ok(answers)
    }

    /// Sends one message that only has to succeed; a refusal is an error.
    pub fn tell<M: NetlinkSerializable>(&mut self, flags: u16, message: M) -> Result<(), Error> {
        match self.batch(&[(flags, message)])?.pop() {
            Some(answer) => Ok(answer?),
            None => Err(Error::Garbled("no answer".to_owned())),
        }
    }

    /// Requests one object (a GET without DUMP) and returns it.
    ///
    /// # Errors
    /// [`Error::Refused`] (for a missing object see [`Error::is_gone`]), [`Error::Socket`], [`Error::Garbled`].
    pub fn ask(&mut self, message: RouteNetlinkMessage) -> Result<RouteNetlinkMessage, Error> {
        let mut found = None;
        self.ask_raw(0, &message, |kind, payload| {
            found = Some(parse_route(kind, payload)?);
            Ok(())
        })?;
        found.ok_or_else(|| Error::Garbled("no answer".to_owned()))
    }

    /// Dumps a whole table and returns the results of `keep` for its entries, at most `limit`.
    ///
    /// # Errors
    /// [`Error::TooMany`] beyond `limit` (the rest is not read), else as [`Client::ask`].
    pub fn dump<T>(
        &mut self,
        message: &RouteNetlinkMessage,
        limit: usize,
        mut keep: impl FnMut(RouteNetlinkMessage) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        self.dump_raw(message, limit, |kind, payload| Ok(keep(parse_route(kind, payload)?)))
    }

    /// Like [`Client::dump`], for any family of messages; `keep` receives type and payload.
    pub(crate) fn dump_raw<M: NetlinkSerializable, T>(
        &mut self,
        message: &M,
        limit: usize,
        mut keep: impl FnMut(u16, &[u8]) -> Result<Option<T>, Error>,
    ) -> Result<Vec<T>, Error> {
        for _ in 0..DUMP_TRIES {
            let mut kept = Vec::new();
            let consistent = self.ask_raw(NLM_F_DUMP, message, |kind, payload| {
                if let Some(entry) = keep(kind, payload)? {
                    if kept.len() == limit {
                        return Err(Error::TooMany(limit));
                    }
                    kept.push(entry);
                }
                Ok(())
            })?;
            if consistent {
                return Ok(kept);
            }
            // The table changed meanwhile: the list may miss an entry.
        }
        Err(Error::Garbled(format!("the table changed during each of {DUMP_TRIES} dumps")))
    }

    /// Sends one request and passes each answer to `each`. Returns whether the answer is consistent.
    pub(crate) fn ask_raw<M: NetlinkSerializable>(
        &mut self,
        flags: u16,
        message: &M,
        mut each: impl FnMut(u16, &[u8]) -> Result<(), Error>,
    ) -> Result<bool, Error> {
        let mut datagram = Vec::with_capacity(128);
        let sequence = self.put(&mut datagram, flags | NLM_F_REQUEST, message);
        self.send(&datagram)?;
        let dump = flags & NLM_F_DUMP != 0;
        let mut consistent = true;
        loop {
            let length = self.receive()?;
            let mut rest = self.buffer.get(..length).unwrap_or_default();
            while let Some((header, payload)) = next_message(&mut rest)? {
                if header.sequence_number != sequence {
                    continue;
                }
                consistent &= header.flags & NLM_F_DUMP_INTR == 0;
                match header.message_type {
                    NLMSG_ERROR => {
                        parse_answer(header.flags, payload)??;
                        return Ok(consistent);
                    }
                    NLMSG_DONE => {
                        // Carries the error with which a dump ended early.
                        if let Some(code) = payload.first_chunk().map(|c| i32::from_ne_bytes(*c)) {
                            refusal(code, None)?;
                        }
                        return Ok(consistent);
                    }
                    kind => {
                        if let Err(e) = each(kind, payload) {
                            // The rest is read only before the next use of the socket.
                            self.unfinished = (dump && !has_end(rest, sequence)?).then_some(sequence);
                            return Err(e);
                        }
                    }
                }
                if !dump {
                    return Ok(consistent);
                }
            }
        }
    }

    /// Appends one message; returns its sequence number.
    fn put<M: NetlinkSerializable>(&mut self, datagram: &mut Vec<u8>, flags: u16, message: &M) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        SENT.fetch_add(1, Ordering::Relaxed);
        let start = datagram.len();
        let length = HEADER + message.buffer_len();
        let mut header = NetlinkHeader::default();
        header.length = length as u32; // a few hundred bytes
        header.message_type = message.message_type();
        header.flags = flags;
        header.sequence_number = self.sequence;
        datagram.resize(start + length, 0);
        if let Some((head, body)) = datagram.get_mut(start..).and_then(|new| new.split_at_mut_checked(HEADER))
        {
            header.emit(head);
            message.serialize(body);
        }
        datagram.resize(start + length.next_multiple_of(4), 0);
        self.sequence
    }

    fn send(&mut self, datagram: &[u8]) -> Result<(), Error> {
        if let Some(sequence) = self.unfinished.take() {
            self.drain(sequence)?;
        }
        loop {
            match send(self.socket.as_raw_fd(), datagram, MsgFlags::empty()) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(e) => return Err(Error::Socket(e.into())),
            }
        }
    }

    /// Reads a dump to its end and discards it: the kernel runs one dump at a time per socket.
    fn drain(&mut self, dump: u32) -> Result<(), Error> {
        loop {
            let length = self.receive()?;
            if has_end(self.buffer.get(..length).unwrap_or_default(), dump)? {
                return Ok(());
            }
        }
    }

    fn receive(&mut self) -> Result<usize, Error> {
        let late = || io::Error::new(io::ErrorKind::TimedOut, format!("no answer for {PATIENCE} s"));
        self.receive_with(MsgFlags::empty())?.ok_or_else(|| late().into())
    }

    /// Reads one datagram into the buffer; `None` if there is none.
    fn receive_with(&mut self, flags: MsgFlags) -> Result<Option<usize>, Error> {
        self.buffer.resize(ROOM, 0);
        let errno = loop {
            match recv(self.socket.as_raw_fd(), &mut self.buffer, flags | MsgFlags::MSG_TRUNC) {
                // With MSG_TRUNC the length is that of the datagram, even if only a part fitted.
                Ok(length) if length > ROOM => break Errno::EMSGSIZE,
                Ok(0) => break Errno::EPROTO,
                Ok(length) => return Ok(Some(length)),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(None),
                Err(errno) => break errno,
            }
        };
        Err(Error::Socket(errno.into()))
    }

    /// Waits for the answers to `count` messages; the first message has the sequence number `first`.
    fn collect(&mut self, first: u32, count: usize) -> Result<Vec<Ack>, Error> {
        let mut answers: Vec<Option<Ack>> = vec![None; count];
        let mut missing = count;
        while missing > 0 {
            let length = self.receive()?;
            let mut rest = self.buffer.get(..length).unwrap_or_default();
            while let Some((header, payload)) = next_message(&mut rest)? {
                let index = header.sequence_number.wrapping_sub(first) as usize;
                if let (NLMSG_ERROR, Some(slot @ None)) = (header.message_type, answers.get_mut(index)) {
                    *slot = Some(parse_answer(header.flags, payload)?);
                    missing -= 1;
                }
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }

    /// Sends an nftables transaction: the messages between a begin and an end, all or nothing. Unlike with
    /// [`Client::batch`], the kernel may answer the frame only; then it refused the whole. Fails with the first
    /// refusal.
    pub(crate) fn transaction<M: NetlinkSerializable>(
        &mut self,
        begin: &M,
        messages: &[(u16, M)],
        end: &M,
    ) -> Result<(), Error> {
        let mut datagram = Vec::with_capacity(128 * (messages.len() + 2));
        let frame = self.put(&mut datagram, NLM_F_REQUEST, begin);
        for (flags, message) in messages {
            self.put(&mut datagram, flags | NLM_F_REQUEST | NLM_F_ACK, message);
        }
        self.put(&mut datagram, NLM_F_REQUEST, end);
        self.send(&datagram)?;
        let mut answered = 0;
        let mut refused = None;
        // Every answer is in the queue when `send` returns. Only some kernels answer the frame, and a failed commit is
        // reported after the answers to all messages. So the queue is read until it is empty.
        while let Some(length) = self.receive_with(MsgFlags::MSG_DONTWAIT)? {
            let mut rest = self.buffer.get(..length).unwrap_or_default();
            while let Some((header, payload)) = next_message(&mut rest)? {
                let index = header.sequence_number.wrapping_sub(frame) as usize;
                if header.message_type == NLMSG_ERROR && index <= messages.len() + 1 {
                    answered += usize::from((1..=messages.len()).contains(&index));
                    refused = refused.or(parse_answer(header.flags, payload)?.err());
                }
            }
        }
        match refused {
            Some(refusal) => Err(Error::Refused(refusal)),
            None if answered == messages.len() => Ok(()),
            None => Err(Error::Garbled(format!("{answered} of {} answers", messages.len()))),
        }
    }
}
