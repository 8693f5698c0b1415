//! Dials `peerpod-node`, again after every loss. It moves frames out and answers in; the queue interprets them.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use peerpod_link::frame::{self, HEADER_LEN, Header, MAX_PAYLOAD};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;

use super::{Event, Events};

/// Pause between two attempts to dial.
const REDIAL: Duration = Duration::from_millis(50);

/// Keeps a connection to `path` as long as the proxy receives events. Each new connection sends the proxy a
/// new sender; dropping that sender ends the connection.
pub(super) async fn run(path: PathBuf, events: Events) {
    let mut told = String::new();
    loop {
        let why = match UnixStream::connect(&path).await {
            Ok(stream) => {
                told.clear();
                converse(stream, &events).await
            }
            Err(error) => error,
        };
        if events.is_closed() {
            return;
        }
        // Logged once per new reason, not twenty times a second.
        let text = why.to_string();
        if text != told {
            tracing::info!(socket = %path.display(), error = %text, "peerpod-node is away; its calls wait");
            told = text;
        }
        tokio::time::sleep(REDIAL).await;
    }
}

async fn converse(stream: UnixStream, events: &Events) -> io::Error {
    // The queue's limits bound this channel: nothing is sent twice on one connection.
    let (requests, outgoing) = mpsc::unbounded_channel();
    if events.send(Event::NodeUp { requests }).await.is_err() {
        return io::ErrorKind::Interrupted.into();
    }
    let (reader, writer) = stream.into_split();
    let end = tokio::select! {
        end = read(reader, events) => end,
        end = write(writer, outgoing) => end,
    };
    // Fails only if the proxy has ended.
    drop(events.send(Event::NodeDown).await);
    end
}

async fn write(mut writer: OwnedWriteHalf, mut outgoing: mpsc::UnboundedReceiver<(u32, Bytes)>) -> io::Error {
    let mut batch = BytesMut::new();
    while let Some(first) = outgoing.recv().await {
        let mut next = Some(first);
        while let Some((stream, body)) = next {
            let header = Header { length: body.len() as u32, stream, kind: frame::REQUEST, flags: 0 };
            batch.extend_from_slice(&header.encode());
            batch.extend_from_slice(&body);
            next = if batch.len() < 64 << 10 { outgoing.try_recv().ok() } else { None };
        }
        if let Err(error) = writer.write_all(&batch).await {
            return error;
        }
        batch = BytesMut::new(); // An idle connection holds no buffer.
    }
    io::Error::new(io::ErrorKind::ConnectionAborted, "the relay closed the connection")
}

async fn read(mut reader: OwnedReadHalf, events: &Events) -> io::Error {
    loop {
        let (stream, body) = match read_answer(&mut reader).await {
            Ok(answer) => answer,
            Err(error) => return error,
        };
        if events.send(Event::NodeAnswer { stream, body }).await.is_err() {
            return io::ErrorKind::Interrupted.into();
        }
    }
}

async fn read_answer(reader: &mut OwnedReadHalf) -> io::Result<(u32, Bytes)> {
    let mut header = [0; HEADER_LEN];
    reader.read_exact(&mut header).await?;
    let header = Header::decode(&header);
    let length = header.length as usize;
    if header.kind != frame::RESPONSE || length > MAX_PAYLOAD {
        let what = format!("the node sent a frame of type {} and {length} bytes, not an answer", header.kind);
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    let mut body = BytesMut::new();
    while body.len() < length {
        let left = (length - body.len()) as u64;
        if reader.take(left).read_buf(&mut body).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok((header.stream, body.freeze()))
}
