//! Fuzzes the first bytes of unauthenticated peers: to the relay's port (a ticket or a session's name, and the
//! answers), to a stream that opens, and to `relay-fds.sock`.

use std::os::fd::AsRawFd;

use futures_util::FutureExt;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, send, socketpair};
use peerpod_base::fd_handoff::{self, HandoffAnswer, HandoffHeader};
use peerpod_link::claim::{First, first_record};
use peerpod_link::record::{HEADER_LEN, Hello, StreamKind, Welcome};

pub(crate) fn run(input: &[u8]) {
    let mut rest = input;
    // A slice is always ready.
    if let Some(Ok(first)) = first_record(&mut rest).now_or_never() {
        assert!(input.len() - rest.len() >= HEADER_LEN);
        if let First::Hello(hello) = first {
            same(&hello);
        }
    }
    if let Ok(hello) = Hello::decode(input) {
        same(&hello);
    }
    if let Ok(welcome) = Welcome::decode(input) {
        assert_eq!(Welcome::decode(&welcome.encode()).as_ref(), Ok(&welcome));
        assert!(!welcome.program.contains(char::is_control), "it goes into a log");
    }
    if let Some(kind) = StreamKind::decode(input) {
        let (bytes, length) = kind.encode();
        assert_eq!(&bytes[..length], input);
    }
    handed_in(input);
}

fn same(hello: &Hello) {
    assert_eq!(Hello::decode(&hello.encode()).as_ref(), Ok(hello));
    assert!(!hello.program.contains(char::is_control), "it goes into a log");
}

/// Sends the input as one message over a real socket, because the reader needs one.
fn handed_in(input: &[u8]) {
    if input.is_empty() || input.len() > 2 * fd_handoff::MAX_MESSAGE {
        return;
    }
    let ends = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC);
    let (ours, theirs) = ends.expect("a pair of sockets");
    for answer in [false, true] {
        send(ours.as_raw_fd(), input, MsgFlags::MSG_NOSIGNAL).expect("it fits the socket");
        let version = if answer {
            fd_handoff::receive::<HandoffAnswer>(&theirs).map(|(answer, _)| answer.version)
        } else {
            fd_handoff::receive::<HandoffHeader>(&theirs).map(|(header, _)| header.version)
        };
        assert!(version.is_err() || version.is_ok_and(|version| version == fd_handoff::VERSION));
        assert!(
            input.len() <= fd_handoff::MAX_MESSAGE || fd_handoff::receive::<HandoffHeader>(&theirs).is_err()
        );
    }
}
