//! One connection of a shim to `hypervisor.sock`: frames in, answers out. A connection that says something that is
//! not ttrpc is closed; what is ttrpc and may not pass is answered, and the connection goes on, because the Rust shim
//! never opens another one.

use std::{io, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use peerpod_link::frame::{self, HEADER_LEN, Header, MAX_PAYLOAD};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc},
};

use super::{
    Event,
    call::{self, Refused, code},
    queue::ConnId,
};

/// A frame that began must be whole in this time.
const FRAME_WITHIN: Duration = Duration::from_secs(60);
/// Answers that may wait for a shim that does not read.
const ANSWERS: usize = 256;
/// Bodies take their memory in pieces of this size, and the first one without asking.
pub(super) const PIECE: usize = 64 << 10;

/// The door's end of a connection.
#[derive(Debug, Clone)]
pub(super) struct Peer {
    pub(super) answers: mpsc::Sender<Bytes>,
    /// Closes the connection.
    pub(super) close: Arc<Notify>,
}

/// Why a connection ended, for the log.
#[derive(Debug, thiserror::Error)]
pub(super) enum End {
    #[error("the shim closed it")]
    Closed,
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("not ttrpc: a frame of type {0}")]
    Garbage(u8),
    #[error("a frame was not complete after {FRAME_WITHIN:?}")]
    Stalled,
    #[error("{ANSWERS} answers were not read")]
    DoesNotRead,
    #[error("the relay stops")]
    Stopping,
}

/// Serves the connection until it ends. `budget` counts [`PIECE`]s of half-read bodies over all connections.
pub(super) async fn serve(
    stream: UnixStream,
    conn: ConnId,
    events: mpsc::Sender<Event>,
    budget: Arc<Semaphore>,
) -> End {
    let (answers, outgoing) = mpsc::channel(ANSWERS);
    let peer = Peer { answers: answers.clone(), close: Arc::new(Notify::new()) };
    let close = peer.close.clone();
    if events.send(Event::Opened { conn, peer }).await.is_err() {
        return End::Stopping;
    }
    let (reader, writer) = stream.into_split();
    let end = tokio::select! {
        end = read(reader, conn, &events, answers, budget) => end,
        end = write(writer, outgoing) => end,
        () = close.notified() => End::DoesNotRead,
    };
    // When the door is gone there is nobody to tell.
    drop(events.send(Event::Closed { conn }).await);
    end
}

async fn write(mut writer: OwnedWriteHalf, mut outgoing: mpsc::Receiver<Bytes>) -> End {
    while let Some(answer) = outgoing.recv().await {
        if let Err(error) = writer.write_all(&answer).await {
            return error.into();
        }
    }
    End::Stopping
}

async fn read(
    mut reader: OwnedReadHalf,
    conn: ConnId,
    events: &mpsc::Sender<Event>,
    answers: mpsc::Sender<Bytes>,
    budget: Arc<Semaphore>,
) -> End {
    loop {
        // A silent connection is normal and costs this array.
        let mut header = [0; HEADER_LEN];
        let have = match reader.read(&mut header).await {
            Ok(0) => return End::Closed,
            Ok(have) => have,
            Err(error) => return error.into(),
        };
        let frame = tokio::time::timeout(FRAME_WITHIN, read_frame(&mut reader, header, have, &budget)).await;
        let (header, body) = match frame {
            Err(_) => return End::Stalled,
            Ok(Err(end)) => return end,
            Ok(Ok(frame)) => frame,
        };
        let refused = match body {
            Body::Refused(refused) => refused,
            Body::Whole(body, memory) => match call::read(&body) {
                Ok(incoming) => {
                    drop((body, memory)); // From here on the queue counts it.
                    let request = Event::Request { conn, stream: header.stream, incoming };
                    if events.send(request).await.is_err() {
                        return End::Stopping;
                    }
                    continue;
                }
                Err(refused) => refused,
            },
        };
        let answer = frame::error_response(header.stream, refused.code, &refused.message);
        if answers.send(answer.into()).await.is_err() {
            return End::Stopping;
        }
    }
}

enum Body {
    Whole(BytesMut, Vec<OwnedSemaphorePermit>),
    /// It was skipped.
    Refused(Refused),
}

async fn read_frame(
    reader: &mut OwnedReadHalf,
    mut header: [u8; HEADER_LEN],
    have: usize,
    budget: &Arc<Semaphore>,
) -> Result<(Header, Body), End> {
    reader.read_exact(&mut header[have..]).await?;
    let header = Header::decode(&header);
    let length = header.length as usize;
    let refused = match header.kind {
        frame::REQUEST if length > MAX_PAYLOAD => {
            Some(format!("message length {length} exceed maximum message size of {MAX_PAYLOAD}"))
        }
        frame::REQUEST if header.stream.is_multiple_of(2) => Some("stream id must be odd".to_owned()),
        frame::REQUEST => None,
        frame::DATA => Some("no method of this socket streams".to_owned()),
        other => return Err(End::Garbage(other)),
    };
    if let Some(message) = refused {
        skip(reader, length).await?;
        return Ok((header, Body::Refused(Refused { code: code::INVALID_ARGUMENT, message })));
    }
    let mut body = BytesMut::new();
    let mut memory = Vec::new();
    while body.len() < length {
        if body.len() / PIECE > memory.len() {
            // Fails only when the semaphore is closed, and nobody closes it.
            memory.push(budget.clone().acquire_owned().await.map_err(|_| End::Stopping)?);
        }
        let piece = PIECE.min(length - body.len()) as u64;
        if reader.take(piece).read_buf(&mut body).await? == 0 {
            return Err(End::Closed);
        }
    }
    Ok((header, Body::Whole(body, memory)))
}

async fn skip(reader: &mut OwnedReadHalf, length: usize) -> Result<(), End> {
    let skipped = tokio::io::copy(&mut reader.take(length as u64), &mut tokio::io::sink()).await?;
    if skipped < length as u64 { Err(End::Closed) } else { Ok(()) }
}
