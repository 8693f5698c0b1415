//! Serves one connection of a shim to `hypervisor.sock`. A connection that sends anything but ttrpc is closed. A ttrpc
//! frame that may not pass is answered, because the Rust shim never opens another connection.
//!
//! Partly read or written data is in [`Conn`], never in a future, so another process can continue at any point.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use peerpod_link::base64_bytes;
use peerpod_link::frame::{self, HEADER_LEN, Header, MAX_PAYLOAD};
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::Instant;

use super::call::{self, Refused, code};
use super::queue::ConnId;
use super::{Event, Events};

/// Time limit from the first byte of a frame to its last.
const FRAME_WITHIN: Duration = Duration::from_secs(60);
/// Limit of answers that wait for a shim that does not read.
const ANSWERS: usize = 256;
/// Bodies reserve memory in pieces of this size; the first piece needs no reservation.
pub(super) const PIECE: usize = 64 << 10;

/// Handle of a connection for the hypervisor proxy.
#[derive(Debug, Clone)]
pub(super) struct Peer {
    pub(super) answers: mpsc::Sender<Bytes>,
    /// Closes the connection.
    pub(super) close: Arc<Notify>,
    /// Unbounded: each attempted handover sends three orders.
    pub(super) orders: mpsc::UnboundedSender<Order>,
}

/// Order that freezes or resumes a connection.
#[derive(Debug)]
pub(super) enum Order {
    /// Stop reading.
    Hold(oneshot::Sender<()>),
    /// Stop writing and return the state.
    Show(oneshot::Sender<FrozenConn>),
    /// Resume.
    Go,
}

/// State of a frozen connection, with a duplicate of its socket.
pub(super) type FrozenConn = io::Result<(ConnState, OwnedFd)>;

/// Reason why a connection ended, for the log.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    #[error("the shim closed the connection")]
    Closed,
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("not ttrpc: the shim sent a frame of type {0}")]
    Garbage(u8),
    #[error("a frame was not complete after {FRAME_WITHIN:?}")]
    Stalled,
    #[error("the shim left {ANSWERS} answers unread")]
    DoesNotRead,
    #[error("the relay is stopping")]
    Stopping,
}

/// State of a connection as data; its socket is sent with it.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ConnState {
    /// Bytes already read of the present frame, header first.
    #[serde(with = "base64_bytes")]
    input: Vec<u8>,
    /// Bytes still to come of a skipped frame; its header is in `input`.
    skip: Option<usize>,
    /// Answers not written yet.
    #[serde(with = "base64_bytes")]
    out: Vec<u8>,
}

/// The present frame.
#[derive(Debug)]
enum Input {
    Header { bytes: [u8; HEADER_LEN], have: usize },
    Body { header: Header, body: BytesMut },
    Skip { header: Header, left: usize },
}

const START: Input = Input::Header { bytes: [0; HEADER_LEN], have: 0 };

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Running,
    Held,
    Shown,
}

/// Connection with its partial input and output.
pub(super) struct Conn {
    stream: UnixStream,
    input: Input,
    /// Time at which the present frame began.
    began: Option<Instant>,
    /// Reserved [`PIECE`]s of the present body.
    memory: Vec<OwnedSemaphorePermit>,
    out: Bytes,
    outgoing: mpsc::Receiver<Bytes>,
    orders: mpsc::UnboundedReceiver<Order>,
    close: Arc<Notify>,
}

/// Complete frame: its stream, and its body or the reason to refuse it.
type Frame = (u32, Result<BytesMut, Refused>);

impl Conn {
    /// Makes a connection and the proxy's handle of it.
    pub(super) fn new(stream: UnixStream) -> (Conn, Peer) {
        let (answers, outgoing) = mpsc::channel(ANSWERS);
        let (order, orders) = mpsc::unbounded_channel();
        let close = Arc::new(Notify::new());
        let peer = Peer { answers, close: close.clone(), orders: order };
        let (began, memory, out) = (None, Vec::new(), Bytes::new());
        (Conn { stream, input: START, began, memory, out, outgoing, orders, close }, peer)
    }

    /// Continues a connection that another process served until now.
    pub(super) fn restore(socket: OwnedFd, state: ConnState) -> io::Result<(Conn, Peer)> {
        let stream = std::os::unix::net::UnixStream::from(socket);
        stream.set_nonblocking(true)?;
        let (mut conn, peer) = Conn::new(UnixStream::from_std(stream)?);
        conn.out = state.out.into();
        let have = state.input.len();
        if have > 0 {
            conn.began = Some(Instant::now());
        }
        conn.input = match state.input.split_first_chunk::<HEADER_LEN>() {
            None => {
                let mut bytes = [0; HEADER_LEN];
                bytes[..have].copy_from_slice(&state.input);
                Input::Header { bytes, have }
            }
            Some((header, body)) => {
                let header = Header::decode(header);
                let whole = header.length as usize;
                match state.skip {
                    Some(left) if left <= whole && left > 0 => Input::Skip { header, left },
                    None if body.len() < whole && whole <= MAX_PAYLOAD => {
                        Input::Body { header, body: BytesMut::from(body) }
                    }
                    _ => {
                        return Err(io::Error::new(
                            io::ErrorKind::InvalidData,
                            "the kept part of a frame is longer than the frame",
                        ));
                    }
                }
            }
        };
        Ok((conn, peer))
    }

    fn show(&mut self) -> FrozenConn {
        let mut out = self.out.to_vec();
        while let Ok(answer) = self.outgoing.try_recv() {
            out.extend_from_slice(&answer);
        }
        // Written from here if the connection resumes.
        self.out = Bytes::from(out.clone());
        let (input, skip) = match &self.input {
            Input::Header { bytes, have } => (bytes[..*have].to_vec(), None),
            Input::Body { header, body } => ([&header.encode()[..], body].concat(), None),
            Input::Skip { header, left } => (header.encode().to_vec(), Some(*left)),
        };
        let socket = std::os::fd::AsFd::as_fd(&self.stream).try_clone_to_owned()?;
        Ok((ConnState { input, skip, out }, socket))
    }

    /// Whether the next bytes of a body need memory that is not reserved yet.
    fn wants_memory(&self) -> bool {
        matches!(&self.input, Input::Body { body, .. } if body.len() / PIECE > self.memory.len())
    }

    /// Reads the available bytes, up to the end of a frame.
    fn read(&mut self) -> Result<Option<Frame>, End> {
        let read = match &mut self.input {
            Input::Header { bytes, have } => self.stream.try_read(&mut bytes[*have..]),
            Input::Body { header, body } => {
                let piece = PIECE.min(header.length as usize - body.len());
                self.stream.try_read_buf(&mut body.limit(piece))
            }
            Input::Skip { left, .. } => {
                let mut nothing = [0; 8 << 10];
                let most = (*left).min(nothing.len());
                self.stream.try_read(&mut nothing[..most])
            }
        };
        let n = match read {
            Ok(0) => return Err(End::Closed),
            Ok(n) => n,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        self.began.get_or_insert_with(Instant::now);
        self.took(n)
    }

    fn took(&mut self, n: usize) -> Result<Option<Frame>, End> {
        match &mut self.input {
            Input::Header { bytes, have } => {
                *have += n;
                if *have < HEADER_LEN {
                    return Ok(None);
                }
                let header = Header::decode(bytes);
                let left = header.length as usize;
                self.input = match refusal(&header)? {
                    None => Input::Body { header, body: BytesMut::new() },
                    Some(_) => Input::Skip { header, left },
                };
            }
            Input::Body { .. } => {}
            Input::Skip { left, .. } => *left -= n,
        }
        let frame = match &mut self.input {
            Input::Body { header, body } if body.len() == header.length as usize => {
                (header.stream, Ok(std::mem::take(body)))
            }
            Input::Skip { header, left: 0 } => {
                let message = refusal(header)?.unwrap_or_default();
                (header.stream, Err(Refused { code: code::INVALID_ARGUMENT, message }))
            }
            _ => return Ok(None),
        };
        (self.input, self.began) = (START, None);
        Ok(Some(frame))
    }

    /// Serves the connection until it ends. `budget` counts [`PIECE`]s of half-read bodies over all connections.
    pub(super) async fn serve(mut self, conn: ConnId, events: Events, budget: Arc<Semaphore>) -> End {
        let end = self.run(conn, &events, &budget).await;
        // Fails only if the proxy has ended.
        drop(events.send(Event::Closed { conn }).await);
        end
    }

    async fn run(&mut self, conn: ConnId, events: &Events, budget: &Arc<Semaphore>) -> End {
        let mut mode = Mode::Running;
        loop {
            let late = self.began.map(|began| began + FRAME_WITHIN);
            let (writes, hungry) = (mode != Mode::Shown && !self.out.is_empty(), self.wants_memory());
            // A shim that does not read its answers is not read either.
            let reads = mode == Mode::Running && self.out.len() < PIECE;
            let more = mode != Mode::Shown && self.out.is_empty();
            tokio::select! {
                biased;
                order = self.orders.recv() => match order {
                    // The requester may have left; the proxy then sends `Go`.
                    Some(Order::Hold(held)) => {
                        mode = Mode::Held;
                        held.send(()).ok();
                    }
                    Some(Order::Show(shown)) => { mode = Mode::Shown; drop(shown.send(self.show())); }
                    Some(Order::Go) => mode = Mode::Running,
                    None => return End::Stopping,
                },
                () = self.close.notified() => return End::DoesNotRead,
                answer = self.outgoing.recv(), if more => match answer {
                    Some(answer) => self.out = answer,
                    None => return End::Stopping,
                },
                ready = self.stream.writable(), if writes => {
                    match ready.and_then(|()| self.stream.try_write(&self.out)) {
                        Ok(n) => self.out.advance(n),
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        Err(error) => return error.into(),
                    }
                },
                memory = budget.clone().acquire_owned(), if hungry && reads => match memory {
                    Ok(memory) => self.memory.push(memory),
                    // Fails only if the semaphore is closed, which never happens.
                    Err(_) => return End::Stopping,
                },
                ready = self.stream.readable(), if !hungry && reads => {
                    let frame = match ready.map_err(End::from).and_then(|()| self.read()) {
                        Ok(Some(frame)) => frame,
                        Ok(None) => continue,
                        Err(end) => return end,
                    };
                    if let Err(end) = self.handle(conn, frame, events).await {
                        return end;
                    }
                },
                () = sleep_until(late), if mode == Mode::Running => return End::Stalled,
            }
        }
    }

    async fn handle(&mut self, conn: ConnId, frame: Frame, events: &Events) -> Result<(), End> {
        let (stream, body) = frame;
        let read = body.and_then(|body| call::read(&body));
        self.memory.clear(); // The queue counts this memory from here on.
        match read {
            Ok(incoming) => {
                events.send(Event::Request { conn, stream, incoming }).await.map_err(|_| End::Stopping)
            }
            Err(refused) => {
                let answer = frame::error_response(stream, refused.code, &refused.message);
                self.out = [&self.out[..], &answer].concat().into();
                Ok(())
            }
        }
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Returns the reason to skip a frame and answer it.
fn refusal(header: &Header) -> Result<Option<String>, End> {
    let length = header.length as usize;
    Ok(match header.kind {
        frame::REQUEST if length > MAX_PAYLOAD => {
            Some(format!("message length {length} exceed maximum message size of {MAX_PAYLOAD}"))
        }
        frame::REQUEST if header.stream.is_multiple_of(2) => Some("stream id must be odd".to_owned()),
        frame::REQUEST => None,
        frame::DATA => Some("no method of this socket streams".to_owned()),
        other => return Err(End::Garbage(other)),
    })
}
