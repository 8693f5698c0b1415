//! Runs TLS over TCP after the handshake, without an adapter in between: a read takes all bytes that the socket has
//! (the usual adapter takes 4 KiB). An idle connection holds only the memory that rustls itself needs.

use std::io::{self, IoSlice, Read, Write};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rustls::Connection;
use tokio::io::AsyncWrite;
use tokio::net::TcpStream;

use super::transport::poll_read;
use crate::session::pool::{self, Size};

/// Most bytes that one write encrypts, so that a frame of 64 KiB, or eight records, go to the socket in one call.
const AHEAD: usize = 132 << 10;

pub(super) struct Tls {
    tcp: TcpStream,
    tls: Connection,
    /// Ciphertext for which the reader's buffer had no room.
    carry: Vec<u8>,
    /// No byte, encrypted or not, can be read without the socket.
    drained: bool,
}

impl Tls {
    pub(super) fn new(tcp: TcpStream, mut tls: Connection) -> Tls {
        tls.set_buffer_limit(Some(AHEAD));
        // Bytes behind the handshake may be decrypted already.
        Tls { tcp, tls, carry: Vec::new(), drained: false }
    }

    pub(super) fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.drained { self.tcp.poll_read_ready(cx).map(drop) } else { Poll::Ready(()) }
    }

    pub(super) fn poll_read(&mut self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        loop {
            if !self.drained {
                // Bytes decrypted earlier, and buffered ciphertext, go first.
                let carry = std::mem::take(&mut self.carry);
                let mut rest = &carry[..];
                let filled = self.decrypt(&mut rest, buffer)?;
                if !rest.is_empty() {
                    self.carry = rest.to_vec();
                }
                if let Some(filled) = filled {
                    return Poll::Ready(Ok(filled));
                }
            }
            let mut cipher = pool::take(Size::Read);
            let read = poll_read(&mut self.tcp, cx, &mut cipher);
            let Poll::Ready(Ok(n @ 1..)) = read else {
                pool::give(cipher);
                return read;
            };
            let mut rest = &cipher[..n];
            let filled = self.decrypt(&mut rest, buffer);
            if !rest.is_empty() {
                self.carry = rest.to_vec();
            }
            pool::give(cipher);
            if let Some(filled) = filled? {
                return Poll::Ready(Ok(filled));
            }
        }
    }

    /// Decrypts from `cipher` into `buffer` until one of them is used up. `None` = no byte yet; 0 = the peer closes.
    fn decrypt(&mut self, cipher: &mut &[u8], buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let mut filled = 0;
        self.drained = false;
        loop {
            match self.tls.reader().read(&mut buffer[filled..]) {
                Ok(0) => return Ok(Some(filled)), // the peer closes, or the buffer is full
                Ok(n) => filled += n,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if cipher.is_empty() {
                        self.drained = true;
                        return Ok((filled > 0).then_some(filled));
                    }
                    self.tls.read_tls(cipher)?;
                    self.tls
                        .process_new_packets()
                        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    pub(super) fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        // Bytes taken here cannot be given back, so all earlier bytes must be on their way first.
        ready!(self.poll_flush(cx))?;
        let taken = self.tls.writer().write_vectored(slices)?;
        match self.poll_flush(cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            _ => Poll::Ready(Ok(taken)),
        }
    }

    pub(super) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut Socket { tcp: &mut self.tcp, cx }) {
                Ok(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Poll::Pending,
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// Writer through which rustls writes to the socket.
struct Socket<'a, 'b> {
    tcp: &'a mut TcpStream,
    cx: &'a mut Context<'b>,
}

impl Write for Socket<'_, '_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        or_would_block(Pin::new(&mut *self.tcp).poll_write(self.cx, buffer))
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match slices {
            // The plain call is cheaper, and small calls have one slice.
            [one] => self.write(one),
            many => or_would_block(Pin::new(&mut *self.tcp).poll_write_vectored(self.cx, many)),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn or_would_block(poll: Poll<io::Result<usize>>) -> io::Result<usize> {
    match poll {
        Poll::Ready(result) => result,
        Poll::Pending => Err(io::ErrorKind::WouldBlock.into()),
    }
}
