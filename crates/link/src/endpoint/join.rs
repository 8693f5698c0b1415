//! Exchanges Hello and Welcome on a new transport.

use std::io::IoSlice;
use std::task::{Context, Poll, ready};

use tokio::time::Instant;

use super::{Role, Transport};
use crate::record::{self, BadRecord, Hello, RecordKind, Welcome};

/// Longest first record in bytes: a handshake is short, even if its header announces more.
const MOST: u32 = 1024;

pub(super) struct Joining {
    pub(super) transport: Transport,
    pub(super) deadline: Instant,
    /// The guest's Hello, and the number of bytes sent of it.
    out: Vec<u8>,
    taken: usize,
    input: Vec<u8>,
}

pub(super) enum First {
    Hello(Hello),
    Welcome(Welcome),
}

impl Joining {
    /// Relay: waits for Hello. Guest: sends `hello` and waits for Welcome.
    pub(super) fn new(
        transport: Transport,
        hello: Option<&Hello>,
        deadline: Instant,
    ) -> Result<Joining, BadRecord> {
        let out = hello.map_or(Ok(Vec::new()), |hello| record::plain(RecordKind::Hello, &hello.encode()))?;
        Ok(Joining { transport, deadline, out, taken: 0, input: Vec::new() })
    }

    /// Returns the peer's first record and the bytes after it.
    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        role: Role,
    ) -> Poll<Result<(First, Vec<u8>), String>> {
        self.poll_out(cx).map_err(|error| error.to_string())?;
        loop {
            let mut input = &self.input[..];
            if let Some(first) = first(&mut input, role)? {
                return Poll::Ready(Ok((first, input.to_vec())));
            }
            let mut buffer = [0; 2048];
            match ready!(self.transport.poll_read(cx, &mut buffer)) {
                Ok(0) => return Poll::Ready(Err("the peer closed the connection".into())),
                Ok(n) => self.input.extend_from_slice(&buffer[..n]),
                Err(error) => return Poll::Ready(Err(error.to_string())),
            }
        }
    }

    fn poll_out(&mut self, cx: &mut Context<'_>) -> std::io::Result<()> {
        while self.taken < self.out.len() {
            match self.transport.poll_write(cx, &[IoSlice::new(&self.out[self.taken..])]) {
                Poll::Pending => return Ok(()),
                Poll::Ready(n) => self.taken += n?,
            }
        }
        match self.transport.poll_flush(cx) {
            Poll::Ready(result) => result,
            Poll::Pending => Ok(()),
        }
    }
}

fn first(input: &mut &[u8], role: Role) -> Result<Option<First>, String> {
    if let Some(head) = input.first_chunk() {
        let header = record::RecordHeader::decode(head).map_err(|why| why.to_string())?;
        let due = if role == Role::Relay { RecordKind::Hello } else { RecordKind::Welcome };
        if header.kind != due || header.length > MOST {
            return Err(format!(
                "a {:?} record of {} bytes where {due:?} was due",
                header.kind, header.length
            ));
        }
    }
    let mut read = || -> Result<Option<First>, BadRecord> {
        let Some((header, payload)) = record::split(input)? else { return Ok(None) };
        Ok(Some(match header.kind {
            RecordKind::Hello => First::Hello(Hello::decode(payload)?),
            _ => First::Welcome(Welcome::decode(payload)?),
        }))
    };
    read().map_err(|why| why.to_string())
}
