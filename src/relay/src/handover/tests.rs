//! Tests with both ends of the connection in one process.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::protocol::{Item, Message, MessageKind, Wire};

fn pair() -> (Wire, Wire) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (one, two) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    (Wire::new(one).unwrap(), Wire::new(two).unwrap())
}

async fn next(wire: &Wire) -> io::Result<Item> {
    let announced: Message = wire.receive().await?;
    assert_eq!(announced.kind, MessageKind::Item);
    wire.receive_item(&announced).await
}

#[tokio::test]
async fn an_item_of_any_size_arrives_with_all_its_descriptors() {
    let (old, new) = pair();
    let socket = OwnedFd::from(UnixStream::pair().unwrap().0);
    for (bytes, many) in [(0, 0), (1, 1), (48 << 10, 128), (3 << 20, 300), (10, 129)] {
        let text = "x".repeat(bytes);
        let descriptors = (0..many).map(|_| socket.as_fd().try_clone_to_owned().unwrap()).collect();
        let item = Item::new("sandbox", &text, descriptors).unwrap();
        let (sent, came) = tokio::join!(old.send_item(&item), next(&new));
        sent.unwrap();
        let came = came.unwrap();
        assert_eq!((came.kind.as_str(), came.descriptors.len()), ("sandbox", many));
        assert!(came.read::<String>().unwrap() == text);
    }
}

#[tokio::test]
async fn wrong_or_oversized_items_are_refused() {
    let announce = |bytes: u64, descriptors: u64| serde_json::json!({ "kind": "sandbox", "bytes": bytes, "descriptors": descriptors });
    for (bytes, descriptors, then) in [
        (1 << 40, 0, None),
        (5, 1 << 20, None),
        (5, 0, Some(MessageKind::End)),
        (5, 0, Some(MessageKind::Piece)),
        (0, 3, Some(MessageKind::Descriptors)),
    ] {
        let (old, new) = pair();
        old.send(MessageKind::Item, &announce(bytes, descriptors)).await.unwrap();
        if let Some(kind) = then {
            old.send(kind, &"longer than that").await.unwrap();
        }
        assert_eq!(next(&new).await.err().unwrap().kind(), io::ErrorKind::InvalidData, "{bytes} {then:?}");
    }
    let (old, new) = pair();
    drop(old);
    assert_eq!(new.receive().await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
}

#[tokio::test]
async fn no_message_can_follow_a_drain() {
    let (old, new) = pair();
    old.send_now(MessageKind::Yours, b"{}").unwrap();
    assert_eq!(new.drain().unwrap().kind, MessageKind::Yours, "sent in time");
    let (old, new) = pair();
    new.drain().unwrap_err();
    old.send_now(MessageKind::Yours, b"{}").unwrap_err();
}
