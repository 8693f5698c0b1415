//! Manages one connection to libvirtd: tasks that read, write and ping, and a table of pending calls.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::calls::Domain;
use super::message::{self, MessageHeader, MessageKind, MessageStatus};
use super::xdr::{self, Garbled};
use super::{RpcError, calls};

/// Maximum number of calls in flight. libvirtd works on five calls of one client at a time and then stops reading,
/// pings included; one stays free.
const AT_ONCE: usize = 4;
/// Interval of the pings.
const PING_EVERY: Duration = Duration::from_secs(5);
/// Time without any message after which libvirtd counts as gone.
const SILENCE: Duration = Duration::from_secs(20);
/// Maximum number of messages that wait to be written. A piece of a stream has 256 KiB.
const OUTGOING: usize = 4;
/// Maximum number of events that a slow listener may lag behind. A listener that missed events compares the list.
const EVENTS: usize = 1024;

/// Events that the provider registers for.
pub(crate) const EVENTS_HEARD: [i32; 3] =
    [calls::EVENT_LIFECYCLE, calls::EVENT_DEVICE_REMOVED, calls::EVENT_DEVICE_KEPT];

/// Event of a domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DomainEvent {
    /// The domain was defined, started, stopped, …
    Lifecycle {
        domain: Domain,
        /// `virDomainEventType`.
        event: i32,
        detail: i32,
    },
    /// A device was removed from the guest, or the guest does not release it.
    Device { domain: Domain, alias: String },
}

/// Open connection. Dropping it closes it.
pub(crate) struct LibvirtConnection {
    shared: Arc<Shared>,
    /// End with the connection.
    _tasks: JoinSet<()>,
    patience: Duration,
}

struct Shared {
    outgoing: mpsc::Sender<Vec<u8>>,
    waiting: Mutex<Waiting>,
    slots: Arc<Semaphore>,
    events: broadcast::Sender<DomainEvent>,
    /// Reason why the connection is closed, once it is.
    closed: watch::Sender<Option<String>>,
    received_at: Mutex<Instant>,
}

#[derive(Default)]
struct Waiting {
    serial: u32,
    calls: HashMap<u32, Waiter>,
}

struct Waiter {
    reply: Option<oneshot::Sender<Result<Vec<u8>, RpcError>>>,
    stream: Option<Incoming>,
    /// Released when libvirtd has answered, not when the caller drops the call.
    _slot: OwnedSemaphorePermit,
}

/// Receiving side of a stream, with the number of bytes that may still arrive.
struct Incoming {
    pieces: mpsc::UnboundedSender<Result<Option<Vec<u8>>, RpcError>>,
    budget: usize,
}

/// The part of a call that is a stream.
pub(super) struct Stream {
    serial: u32,
    procedure: i32,
    pieces: mpsc::UnboundedReceiver<Result<Option<Vec<u8>>, RpcError>>,
    shared: Arc<Shared>,
}

impl Drop for Stream {
    fn drop(&mut self) {
        // libvirtd ends the stream with the connection, or when it has sent the requested data.
        self.shared.waiting.lock().calls.remove(&self.serial);
    }
}

impl Shared {
    fn close(&self, why: &str) {
        self.closed.send_if_modified(|closed| {
            let first = closed.is_none();
            closed.get_or_insert_with(|| why.to_owned());
            first
        });
        // This ends the receivers of the calls.
        self.waiting.lock().calls.clear();
    }

    fn why_closed(&self) -> RpcError {
        let why = self.closed.borrow().clone();
        RpcError::Lost(why.unwrap_or_else(|| "the connection to libvirtd is closed".to_owned()))
    }

    /// Handles one message of libvirtd; an error ends the connection.
    fn take(&self, body: &[u8]) -> Result<(), Garbled> {
        let Some((header, payload)) = message::read(body)? else { return Ok(()) };
        if header.program == message::KEEPALIVE {
            if header.procedure == message::PING {
                let pong = MessageHeader { procedure: message::PONG, ..header };
                // A full queue means that messages are being written, which proves as much as a pong.
                drop(self.outgoing.try_send(message::write(&pong, &[])));
            }
            return Ok(());
        }
        match header.kind {
            MessageKind::Reply => self.answer(&header, payload),
            MessageKind::Stream => self.stream(&header, payload),
            MessageKind::DomainEvent => {
                if let Some(event) = event(header.procedure, payload)? {
                    // Without a listener the event is not needed.
                    self.events.send(event).ok();
                }
                Ok(())
            }
            MessageKind::Call => Ok(()),
        }
    }

    fn answer(&self, header: &MessageHeader, payload: &[u8]) -> Result<(), Garbled> {
        let mut waiting = self.waiting.lock();
        let Some(waiter) = waiting.calls.get_mut(&header.serial) else { return Ok(()) };
        let answer = match header.status {
            MessageStatus::Error => Err(RpcError::Failed(message::failure(payload)?)),
            _ => Ok(payload.to_vec()),
        };
        let goes_on = answer.is_ok() && waiter.stream.is_some();
        if let Some(reply) = waiter.reply.take() {
            // The caller may have dropped the call.
            reply.send(answer).ok();
        }
        if !goes_on {
            waiting.calls.remove(&header.serial);
        }
        Ok(())
    }

    fn stream(&self, header: &MessageHeader, payload: &[u8]) -> Result<(), Garbled> {
        let mut waiting = self.waiting.lock();
        let found = waiting.calls.get_mut(&header.serial).and_then(|waiter| waiter.stream.as_mut());
        let Some(incoming) = found else { return Ok(()) };
        let piece = match header.status {
            MessageStatus::Ok => Ok(None),
            MessageStatus::Error => Err(RpcError::Failed(message::failure(payload)?)),
            MessageStatus::Continue => {
                let limit = incoming.budget;
                incoming.budget =
                    limit.checked_sub(payload.len()).ok_or(Garbled::Long { length: payload.len(), limit })?;
                Ok(Some(payload.to_vec()))
            }
        };
        let ended = !matches!(piece, Ok(Some(_)));
        incoming.pieces.send(piece).ok();
        if ended {
            waiting.calls.remove(&header.serial);
        }
        Ok(())
    }
}

/// Parses the events that the provider registers for.
pub(crate) fn event(procedure: i32, payload: &[u8]) -> Result<Option<DomainEvent>, Garbled> {
    Ok(match procedure {
        calls::EVENT_LIFECYCLE => {
            let (_callback, domain, event, detail): (i32, Domain, i32, i32) = xdr::read(payload)?;
            Some(DomainEvent::Lifecycle { domain, event, detail })
        }
        calls::EVENT_DEVICE_REMOVED | calls::EVENT_DEVICE_KEPT => {
            let (_callback, domain, alias): (i32, Domain, String) = xdr::read(payload)?;
            Some(DomainEvent::Device { domain, alias })
        }
        _ => None,
    })
}

impl LibvirtConnection {
    /// Starts the tasks for a connected stream; sends no message yet.
    pub(crate) fn start<S>(stream: S, patience: Duration) -> LibvirtConnection
    where
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        let (input, output) = tokio::io::split(stream);
        let (outgoing, queue) = mpsc::channel(OUTGOING);
        let shared = Arc::new(Shared {
            outgoing,
            waiting: Mutex::default(),
            slots: Arc::new(Semaphore::new(AT_ONCE)),
            events: broadcast::channel(EVENTS).0,
            closed: watch::channel(None).0,
            received_at: Mutex::new(Instant::now()),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(read_all(input, Arc::clone(&shared)));
        tasks.spawn(write_all(output, queue, Arc::clone(&shared)));
        tasks.spawn(ping(Arc::clone(&shared)));
        LibvirtConnection { shared, _tasks: tasks, patience }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.shared.closed.borrow().is_some()
    }

    /// Waits until the connection is closed; returns the reason.
    pub(crate) async fn closed(&self) -> String {
        let mut closed = self.shared.closed.subscribe();
        match closed.wait_for(Option::is_some).await {
            Ok(why) => why.clone().unwrap_or_default(),
            Err(_) => String::new(),
        }
    }

    /// Returns the events from now on.
    pub(crate) fn events(&self) -> broadcast::Receiver<DomainEvent> {
        self.shared.events.subscribe()
    }

    /// Makes one call and returns its answer. Fails if libvirt refuses, without a connection, and without an answer in time.
    pub(super) async fn call(&self, procedure: i32, payload: &[u8]) -> Result<Vec<u8>, RpcError> {
        self.in_time(async {
            let (_, reply) = self.send(procedure, payload, None).await?;
            reply.await.unwrap_or_else(|_| Err(self.shared.why_closed()))
        })
        .await
    }

    async fn in_time<T>(&self, work: impl Future<Output = Result<T, RpcError>>) -> Result<T, RpcError> {
        timeout(self.patience, work).await.unwrap_or(Err(RpcError::Late(self.patience)))
    }

    async fn send(
        &self,
        procedure: i32,
        payload: &[u8],
        stream: Option<Incoming>,
    ) -> Result<(u32, oneshot::Receiver<Result<Vec<u8>, RpcError>>), RpcError> {
        let slot = Arc::clone(&self.shared.slots).acquire_owned().await;
        let slot = slot.map_err(|_| self.shared.why_closed())?;
        let (sender, reply) = oneshot::channel();
        let serial = {
            let mut waiting = self.shared.waiting.lock();
            waiting.serial = waiting.serial.wrapping_add(1);
            let serial = waiting.serial;
            waiting.calls.insert(serial, Waiter { reply: Some(sender), stream, _slot: slot });
            serial
        };
        let header = MessageHeader {
            program: message::REMOTE,
            procedure,
            kind: MessageKind::Call,
            serial,
            status: MessageStatus::Ok,
        };
        let sent = self.shared.outgoing.send(message::write(&header, payload)).await;
        if sent.is_err() || self.is_closed() {
            self.shared.waiting.lock().calls.remove(&serial);
            return Err(self.shared.why_closed());
        }
        Ok((serial, reply))
    }

    /// Makes a call that goes on as a stream, which may bring at most `budget` bytes.
    pub(super) async fn open_stream(
        &self,
        procedure: i32,
        payload: &[u8],
        budget: usize,
    ) -> Result<Stream, RpcError> {
        let (sender, pieces) = mpsc::unbounded_channel();
        let incoming = Incoming { pieces: sender, budget };
        self.in_time(async {
            let (serial, reply) = self.send(procedure, payload, Some(incoming)).await?;
            let stream = Stream { serial, procedure, pieces, shared: Arc::clone(&self.shared) };
            reply.await.unwrap_or_else(|_| Err(self.shared.why_closed()))?;
            Ok(stream)
        })
        .await
    }

    /// Returns the next piece; empty at the end.
    pub(super) async fn next_piece(&self, stream: &mut Stream) -> Result<Vec<u8>, RpcError> {
        self.in_time(async {
            let piece = stream.pieces.recv().await.ok_or_else(|| self.shared.why_closed())?;
            Ok(piece?.unwrap_or_default())
        })
        .await
    }

    /// Sends a piece of a stream. Returns an error that libvirtd sent meanwhile.
    pub(super) async fn send_piece(&self, stream: &mut Stream, piece: &[u8]) -> Result<(), RpcError> {
        if let Ok(Err(error)) = stream.pieces.try_recv() {
            return Err(error);
        }
        self.send_stream(stream, MessageStatus::Continue, piece).await
    }

    /// Ends the sent stream, and waits until libvirtd has received it.
    pub(super) async fn finish(&self, stream: &mut Stream) -> Result<(), RpcError> {
        self.send_stream(stream, MessageStatus::Ok, &[]).await?;
        loop {
            if self.next_piece(stream).await?.is_empty() {
                return Ok(());
            }
        }
    }

    async fn send_stream(
        &self,
        stream: &Stream,
        status: MessageStatus,
        piece: &[u8],
    ) -> Result<(), RpcError> {
        let Stream { serial, procedure, .. } = *stream;
        let header =
            MessageHeader { program: message::REMOTE, procedure, kind: MessageKind::Stream, serial, status };
        self.in_time(async {
            let sent = self.shared.outgoing.send(message::write(&header, piece)).await;
            sent.map_err(|_| self.shared.why_closed())
        })
        .await
    }
}

impl Drop for LibvirtConnection {
    fn drop(&mut self) {
        self.shared.close("we closed the connection to libvirtd");
    }
}

async fn read_all(mut input: impl AsyncRead + Unpin, shared: Arc<Shared>) {
    let why = loop {
        match read_one(&mut input).await {
            Ok(body) => {
                *shared.received_at.lock() = Instant::now();
                if let Err(garbled) = shared.take(&body) {
                    break format!("libvirtd sent an unreadable message: {garbled}");
                }
            }
            Err(why) => break why,
        }
    };
    shared.close(&why);
}

/// Reads the next message without its length. Memory grows as bytes arrive, not by the announced length.
async fn read_one(input: &mut (impl AsyncRead + Unpin)) -> Result<Vec<u8>, String> {
    let mut prefix = [0; 4];
    let lost = |error: std::io::Error| format!("libvirtd closed the connection: {error}");
    input.read_exact(&mut prefix).await.map_err(lost)?;
    let length = message::length(prefix).map_err(|garbled| format!("libvirtd sent no message: {garbled}"))?;
    let mut body = Vec::with_capacity(length.min(64 << 10));
    input.take(length as u64).read_to_end(&mut body).await.map_err(lost)?;
    if body.len() < length {
        return Err("libvirtd closed the connection in the middle of a message".to_owned());
    }
    Ok(body)
}

async fn write_all(
    mut output: impl AsyncWrite + Unpin,
    mut queue: mpsc::Receiver<Vec<u8>>,
    shared: Arc<Shared>,
) {
    while let Some(message) = queue.recv().await {
        let written = async {
            output.write_all(&message).await?;
            output.flush().await
        };
        if let Err(error) = written.await {
            shared.close(&format!("write to libvirtd: {error}"));
            return;
        }
    }
}

async fn ping(shared: Arc<Shared>) {
    loop {
        sleep(PING_EVERY).await;
        let silent = shared.received_at.lock().elapsed();
        if silent >= SILENCE {
            shared.close(&format!(
                "libvirtd sent nothing for {} s, not even an answer to a ping",
                silent.as_secs()
            ));
            return;
        }
        let ping = MessageHeader {
            program: message::KEEPALIVE,
            procedure: message::PING,
            kind: MessageKind::DomainEvent,
            serial: 0,
            status: MessageStatus::Ok,
        };
        // A full queue means that messages are being written anyway.
        drop(shared.outgoing.try_send(message::write(&ping, &[])));
    }
}
