//! What the kernel says of devices that come: a netlink socket, and which module each of them announces.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
};

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_KOBJECT_UEVENT};

/// The kernel's own multicast group.
const KERNEL: u32 = 1;
/// The kernel's buffer for one event is 2 KiB.
const ROOM: usize = 8 << 10;
/// Taken at one go; the next poll brings the rest.
const AT_ONCE: usize = 1024;

/// A device that came.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Added {
    /// What it wants for a driver, if anything.
    pub(crate) alias: Option<String>,
    /// Whether it is one whose buttons may be pressed.
    pub(crate) is_input: bool,
}

/// An ear for them.
pub(crate) struct Uevents(Socket);

impl Uevents {
    /// From now on nothing is missed (but for a flood).
    pub(crate) fn listen() -> io::Result<Uevents> {
        let mut socket = Socket::new(NETLINK_KOBJECT_UEVENT)?;
        socket.bind(&SocketAddr::new(0, KERNEL))?;
        socket.set_non_blocking(true)?;
        Ok(Uevents(socket))
    }

    /// For a poll.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Those that came meanwhile.
    pub(crate) fn take(&self) -> Vec<Added> {
        let mut taken = Vec::new();
        for _ in 0..AT_ONCE {
            let mut buffer = Vec::with_capacity(ROOM);
            match self.0.recv_from(&mut buffer, 0) {
                // Anybody in the machine could send us one; only the kernel has no port.
                Ok((_, sender)) if sender.port_number() == 0 => taken.extend(parse(&buffer)),
                Ok(_) => {}
                // Too many at once: what was lost is found by the next look at all devices, if ever; go on.
                Err(error) if error.raw_os_error() == Some(nix::libc::ENOBUFS) => {}
                Err(_) => break,
            }
        }
        taken
    }
}

/// `add@/devices/...`, then `KEY=value`, each with a zero behind it.
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
    fn a_device_that_comes_is_told_and_one_that_goes_is_not() {
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
    fn the_kernel_lets_us_listen() {
        let ear = Uevents::listen().unwrap();
        assert!(ear.take().iter().all(|added| added.alias.as_deref() != Some("")));
    }

    proptest! {
        #[test]
        fn any_message_is_survived(message in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _maybe = parse(&message);
            let _maybe = parse(&[b"add@", &message[..]].concat());
        }
    }
}
