//! Passes open descriptors with a message over a Unix socket (`SCM_RIGHTS`). No call waits.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Most descriptors of one message, a limit of the kernel.
pub const MOST: usize = 253;

const SPACE: usize = rustix::cmsg_space!(ScmRights(MOST));

/// Sends the parts as one message, with descriptors.
///
/// # Errors
/// `InvalidInput` for more than [`MOST`] descriptors; the error of the kernel, such as `WouldBlock`.
pub fn send(socket: impl AsFd, parts: &[IoSlice<'_>], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::new(ErrorKind::InvalidInput, "the descriptors do not fit in one message"));
    }
    sendmsg(socket, parts, &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}

/// Receives a message into the parts. Returns its number of bytes and its descriptors, which are closed on exec.
///
/// # Errors
/// `UnexpectedEof` at the end of the connection; `InvalidData` if a part of the message or a descriptor was lost; the
/// error of the kernel, such as `WouldBlock`. All received descriptors are closed then.
pub fn receive(socket: impl AsFd, parts: &mut [IoSliceMut<'_>]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(socket, parts, &mut control, RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT)?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    let lost = |why| Err(io::Error::new(ErrorKind::InvalidData, why));
    if got.flags.contains(ReturnFlags::CTRUNC) {
        return lost(
            "the message has more descriptors than this process may open; raise its limit of open files",
        );
    }
    if got.flags.contains(ReturnFlags::TRUNC) {
        return lost("the message is too long");
    }
    if got.bytes == 0 {
        return Err(io::Error::new(ErrorKind::UnexpectedEof, "the peer closed the connection"));
    }
    Ok((got.bytes, descriptors))
}
