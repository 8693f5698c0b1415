//! Receives the kernel's events of new devices from a netlink socket, with the module alias of each device.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_sys::protocols::NETLINK_KOBJECT_UEVENT;
use netlink_sys::{Socket, SocketAddr};

/// Multicast group of the kernel.
const KERNEL: u32 = 1;
/// The kernel's buffer for one event is 2 KiB.
const ROOM: usize = 8 << 10;
/// Limit of events per call; the next poll brings the rest.
const AT_ONCE: usize = 1024;

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Added {
    /// Alias of the driver that it needs, if any.
    pub(crate) alias: Option<String>,
    /// Whether it is an input device, which may have buttons.
    pub(crate) is_input: bool,
}

pub(crate) struct Uevents(Socket);

impl Uevents {
    /// Opens the socket. From now on no event is lost (except in a flood).
    pub(crate) fn listen() -> io::Result<Uevents> {
        let mut socket = Socket::new(NETLINK_KOBJECT_UEVENT)?;
        socket.bind(&SocketAddr::new(0, KERNEL))?;
        socket.set_non_blocking(true)?;
        Ok(Uevents(socket))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Returns the events since the last call.
    pub(crate) fn take(&self) -> Vec<Added> {
        let mut taken = Vec::new();
        for _ in 0..AT_ONCE {
            let mut buffer = Vec::with_capacity(ROOM);
            match self.0.recv_from(&mut buffer, 0) {
                // Any process of the machine could send an event; only the kernel has no port.
                Ok((_, sender)) if sender.port_number() == 0 => taken.extend(parse(&buffer)),
                Ok(_) => {}
                // Too many at once: only the next inspection of all devices, if any, finds the lost ones; continue.
                Err(error) if error.raw_os_error() == Some(nix::libc::ENOBUFS) => {}
                Err(_) => break,
            }
        }
        taken
    }
}

/// Parses `add@/devices/...`, then `KEY=value`, each followed by a zero byte.
pub(crate) fn parse(message: &[u8]) -> Option<Added> {
    let mut fields = message.split(|byte| *byte == 0);
    if !fields.next()?.starts_with(b"add@") {
        return None;
    }
    let mut added = Added::default();
    for field in fields.filter_map(|field| std::str::from_utf8(field).ok()) {
        match field.split_once('=') {
            Some(("MODALIAS", alias)) => added.alias = Some(alias.to_owned()),
            Some(("SUBSYSTEM", "input")) => added.is_input = true,
            _ => {}
        }
    }
    Some(added)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_added_device_is_reported_and_a_removed_one_is_not() {
        let message = b"add@/devices/pci0000:00/0000:00:05.0/virtio2\0ACTION=add\0SUBSYSTEM=virtio\0\
            MODALIAS=virtio:d00000002v00001AF4\0SEQNUM=1400\0";
        let alias = Some("virtio:d00000002v00001AF4".to_owned());
        assert_eq!(parse(message), Some(Added { alias, is_input: false }));
        assert_eq!(parse(&message[3..]), None);
        assert_eq!(parse(b"remove@/x\0MODALIAS=virtio:d1\0"), None);
        let input = parse(b"add@/devices/x/input/input0/event0\0SUBSYSTEM=input\0").unwrap();
        assert!(input.is_input);
    }

    #[test]
    fn the_kernel_accepts_the_listener() {
        let uevents = Uevents::listen().unwrap();
        assert!(uevents.take().iter().all(|added| added.alias.as_deref() != Some("")));
    }

    proptest! {
        #[test]
        fn any_message_is_handled(message in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _maybe = parse(&message);
            let _maybe = parse(&[b"add@", &message[..]].concat());
        }
    }
}
