//! Hears what changes in a network namespace: links, addresses, routes, rules and permanent neighbours, of both
//! families. It says only that something changed, and whether a link went down meanwhile; who hears it looks again
//! (`look`), because a lost or merged event must not matter. Reads one multicast netlink socket, changes nothing.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use netlink_sys::Socket;
use netlink_sys::protocols::NETLINK_ROUTE;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use tokio::io::{Interest, unix::AsyncFd};
use tokio::time::{Instant, timeout_at};

use super::Error;
use super::netns::Netns;
use crate::reactor;

// rtnetlink's multicast groups (linux/rtnetlink.h).
const LINK: u32 = 1;
const NEIGHBOUR: u32 = 3;
const V4_ADDRESS: u32 = 5;
const V4_ROUTE: u32 = 7;
const V4_RULE: u32 = 8;
const V6_ADDRESS: u32 = 9;
const V6_ROUTE: u32 = 11;
const V6_RULE: u32 = 19;

/// What decides how packets of a namespace travel.
const ALL: &[u32] = &[LINK, NEIGHBOUR, V4_ADDRESS, V4_ROUTE, V4_RULE, V6_ADDRESS, V6_ROUTE, V6_RULE];
/// The same for an underlay: its neighbours come and go with every conversation.
const UNDERLAY: &[u32] = &[LINK, V4_ADDRESS, V4_ROUTE, V4_RULE, V6_ADDRESS, V6_ROUTE, V6_RULE];

const RTM_NEWLINK: u16 = 16;
const RTM_DELLINK: u16 = 17;
const IFF_UP: u32 = 1;
const HEADER: usize = 16;
/// Where `ifi_flags` lies in a link message, header included.
const LINK_FLAGS: usize = HEADER + 8;
/// One event has a few hundred bytes, several KiB for a link with statistics; what is longer is cut and still heard.
const ROOM: usize = 16 * 1024;
/// Datagrams read in one go; a flood beyond it is heard the next time.
const AT_ONCE: usize = 256;

/// What happened since the last time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Noticed {
    /// A link went away or is down: the kernel then drops addresses and routes that nobody took back.
    pub link_down: bool,
}

/// An open ear in one namespace.
#[derive(Debug)]
pub struct Events {
    socket: AsyncFd<OwnedFd>,
}

impl Events {
    /// Listens to everything in a pod's namespace. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`Error::Netns`] where the namespace cannot be entered or has no room for a socket.
    pub fn of_pod(netns: &Netns) -> Result<Events, Error> {
        Events::open(netns, ALL)
    }

    /// Listens to what decides the way between node and VMs. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// As [`Events::of_pod`].
    pub fn of_underlay(netns: &Netns) -> Result<Events, Error> {
        Events::open(netns, UNDERLAY)
    }

    fn open(netns: &Netns, groups: &[u32]) -> Result<Events, Error> {
        let failed =
            |source: io::Error| Error::Netns { attempt: "listen in", path: netns.path().to_owned(), source };
        let socket = netns.run(|| socket(groups)).and_then(|made| made).map_err(failed)?;
        Ok(Events { socket: reactor::register(socket, Interest::READABLE).map_err(failed)? })
    }

    /// Waits until something happened, takes all of it, and goes on taking until nothing happened for `quiet`, or
    /// `at_most` is over: a CNI writes its routes one by one.
    ///
    /// cancel safety: what was taken is lost with the future; look once after a cancelled wait.
    ///
    /// # Errors
    /// When the socket fails; the namespace is then no longer heard.
    pub async fn settled(&mut self, quiet: Duration, at_most: Duration) -> io::Result<Noticed> {
        let mut noticed = self.next().await?;
        let end = Instant::now() + at_most;
        while Instant::now() < end {
            let until = (Instant::now() + quiet).min(end);
            match timeout_at(until, self.next()).await {
                Ok(more) => noticed.link_down |= more?.link_down,
                Err(_) => break,
            }
        }
        Ok(noticed)
    }

    async fn next(&mut self) -> io::Result<Noticed> {
        loop {
            let mut ready = self.socket.readable().await?;
            match ready.try_io(|ear| drain(ear.get_ref())) {
                Ok(noticed) => return noticed,
                Err(_would_block) => {}
            }
        }
    }
}

fn socket(groups: &[u32]) -> io::Result<OwnedFd> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    for group in groups {
        // A kernel without IPv6 or without policy routing has no such group, and nothing to tell about it.
        match socket.add_membership(*group) {
            Err(e) if *group == LINK => return Err(e),
            _ => {}
        }
    }
    socket.set_non_blocking(true)?;
    socket.as_fd().try_clone_to_owned()
}

/// Takes what is queued. "Would block" only where nothing was.
fn drain(socket: &OwnedFd) -> io::Result<Noticed> {
    let mut buffer = [0; ROOM];
    let mut noticed = None;
    for _ in 0..AT_ONCE {
        match recv(socket.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
            Ok(length) => {
                let noticed = noticed.get_or_insert(Noticed::default());
                noticed.link_down |= tells_link_down(&buffer[..length]);
            }
            // The queue ran over: something happened, nobody knows what.
            Err(Errno::ENOBUFS) => noticed = Some(Noticed { link_down: true }),
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => break,
            Err(e) => return Err(e.into()),
        }
    }
    noticed.ok_or_else(|| io::ErrorKind::WouldBlock.into())
}

/// Whether one of the datagram's messages says that a link is down or gone.
fn tells_link_down(mut rest: &[u8]) -> bool {
    while let Some(header) = rest.get(..HEADER) {
        let length = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let kind = u16::from_ne_bytes([header[4], header[5]]);
        let flags =
            rest.get(LINK_FLAGS..LINK_FLAGS + 4).map(|b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]));
        match (kind, flags) {
            (RTM_DELLINK, _) => return true,
            (RTM_NEWLINK, Some(flags)) if flags & IFF_UP == 0 => return true,
            _ => {}
        }
        let step = length.max(HEADER).next_multiple_of(4);
        let Some(next) = rest.get(step..) else { return false };
        rest = next;
    }
    false
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const LONG: Duration = Duration::from_secs(10);
    const QUIET: Duration = Duration::from_millis(30);

    fn ip(netns: &Netns, arguments: &str) {
        let run = || Command::new("ip").args(arguments.split(' ')).status();
        assert!(netns.run(run).unwrap().unwrap().success(), "ip {arguments}");
    }

    #[test]
    fn garbage_is_no_link_and_no_panic() {
        assert!(!tells_link_down(&[]));
        assert!(!tells_link_down(&[0xff; 7]));
        assert!(!tells_link_down(&[0; 64]));
        assert!(!tells_link_down(&[0xff; 64]));
        let mut gone = [0; 32];
        gone[..4].copy_from_slice(&32u32.to_ne_bytes());
        gone[4..6].copy_from_slice(&RTM_DELLINK.to_ne_bytes());
        assert!(tells_link_down(&gone));
    }

    #[tokio::test]
    async fn a_route_is_heard_and_a_link_that_went_down_is_told_apart() {
        let netns = Netns::scratch().unwrap();
        ip(&netns, "link add a0 type veth peer name a1");
        ip(&netns, "link set a0 up");
        ip(&netns, "link set a1 up");
        let mut events = Events::of_pod(&netns).unwrap();
        ip(&netns, "addr add 10.1.0.1/24 dev a0");
        ip(&netns, "route add 10.2.0.0/16 via 10.1.0.9");
        let noticed = tokio::time::timeout(LONG, events.settled(QUIET, LONG)).await.unwrap().unwrap();
        assert_eq!(noticed, Noticed { link_down: false });
        ip(&netns, "link set a0 down");
        let noticed = tokio::time::timeout(LONG, events.settled(QUIET, LONG)).await.unwrap().unwrap();
        assert_eq!(noticed, Noticed { link_down: true });
    }

    #[tokio::test]
    async fn a_flood_of_changes_ends_in_one_answer_in_time() {
        let netns = Netns::scratch().unwrap();
        ip(&netns, "link add a0 type veth peer name a1");
        let mut events = Events::of_underlay(&netns).unwrap();
        let inside = netns.clone();
        let noise = tokio::task::spawn_blocking(move || {
            for i in 0..60 {
                ip(&inside, &format!("addr add 10.1.{i}.1/24 dev a0"));
            }
        });
        let at_most = Duration::from_millis(50);
        let start = Instant::now();
        tokio::time::timeout(LONG, events.settled(LONG, at_most)).await.unwrap().unwrap();
        assert!(start.elapsed() < LONG / 2, "a quiet moment never came and it waited for one");
        noise.await.unwrap();
    }
}
