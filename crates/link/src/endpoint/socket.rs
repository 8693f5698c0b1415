//! The Unix socket of a local connection.
//!
//! The kernel reports a Unix socket as writable after each read at its other end. A [`UnixStream`] wakes its task for
//! every such report, once per call of a shim. This socket asks for the reports only while bytes wait.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::task::{Context, Poll, ready};

use peerpod_common::reactor;
use rustix::net::SendFlags;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;

pub(super) struct LocalSocket {
    readable: AsyncFd<OwnedFd>,
    /// A copy of the descriptor, while a write waits.
    writable: Option<AsyncFd<OwnedFd>>,
}

impl LocalSocket {
    pub(super) fn new(stream: UnixStream) -> io::Result<LocalSocket> {
        let socket = OwnedFd::from(stream.into_std()?);
        Ok(LocalSocket { readable: reactor::register(socket, Interest::READABLE)?, writable: None })
    }

    pub(super) fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        // An error is reported by the read.
        self.readable.poll_read_ready(cx).map(drop)
    }

    /// Returns whether the other side has ended, without a read; pending while neither bytes nor an end are there.
    pub(super) fn poll_ended(&self, cx: &mut Context<'_>) -> Poll<bool> {
        let guard = ready!(self.readable.poll_read_ready(cx));
        Poll::Ready(guard.is_ok_and(|guard| guard.ready().is_read_closed()))
    }

    pub(super) fn poll_read(&self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.readable.poll_read_ready(cx))?;
            match guard.try_io(|socket| Ok(rustix::io::read(socket, &mut *buffer)?)) {
                Ok(Ok(length)) => {
                    if length > 0 && length < buffer.len() {
                        // The socket is empty: the kernel reports the next bytes, and no read has to find out.
                        guard.clear_ready();
                    }
                    return Poll::Ready(Ok(length));
                }
                Ok(failed) => return Poll::Ready(failed),
                Err(_would_block) => {}
            }
        }
    }

    /// Reads into several buffers at once. Costs one more system call when there are no bytes to read.
    pub(super) fn poll_read_vectored(
        &self,
        cx: &mut Context<'_>,
        slices: &mut [IoSliceMut<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = ready!(self.readable.poll_read_ready(cx))?;
            match guard.try_io(|socket| Ok(rustix::io::readv(socket, slices)?)) {
                Ok(result) => return Poll::Ready(result),
                Err(_would_block) => {}
            }
        }
    }

    /// Writes the slices in one call, as far as the socket takes them.
    pub(super) fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            let mut guard = match &self.writable {
                Some(writable) => Some(ready!(writable.poll_write_ready(cx))?),
                None => None,
            };
            let written = match slices {
                // The plain call is cheaper, and small calls have one piece.
                [one] => rustix::net::send(&self.readable, one, SendFlags::NOSIGNAL),
                many => rustix::io::writev(&self.readable, many),
            };
            match (written, &mut guard) {
                (Err(rustix::io::Errno::AGAIN), Some(guard)) => guard.clear_ready(),
                (Err(rustix::io::Errno::AGAIN), None) => {
                    let copy = self.as_fd().try_clone_to_owned()?;
                    self.writable = Some(reactor::register(copy, Interest::WRITABLE)?);
                }
                (written, _) => {
                    self.writable = None;
                    return Poll::Ready(Ok(written?));
                }
            }
        }
    }
}

impl AsFd for LocalSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readable.as_fd()
    }
}
