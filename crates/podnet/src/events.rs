//! Watches a network namespace for changes: devices, addresses, routes, rules; in a pod also neighbours and filters.
//!
//! A notification has no details: the caller inspects the namespace again, so a lost event does no harm.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use netlink_sys::Socket;
use netlink_sys::protocols::NETLINK_ROUTE;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use rtnetlink::MulticastGroup as Group;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, timeout_at};

use super::Error;
use super::netns::Netns;
use peerpod_common::reactor;

/// Groups that decide how packets of any namespace travel.
const COMMON: [Group; 7] = [
    Group::Link,
    Group::Ipv4Ifaddr,
    Group::Ipv4Route,
    Group::Ipv4Rule,
    Group::Ipv6Ifaddr,
    Group::Ipv6Route,
    Group::Ipv6Rule,
];

/// Size of the buffer. A longer message is truncated, which does no harm because the content is not used.
const ROOM: usize = 64;
/// Datagrams read at once; the next call reads the rest of a flood.
const AT_ONCE: usize = 256;

/// Watcher of one namespace.
#[derive(Debug)]
pub struct Events {
    socket: AsyncFd<OwnedFd>,
    /// Times of the first and the last change that were not returned yet.
    pending: Option<(Instant, Instant)>,
}

impl Events {
    /// Watches everything in a pod's namespace. Must be called inside a tokio runtime.
    pub fn of_pod(netns: &Netns) -> Result<Events, Error> {
        Events::open(netns, &[Group::Neigh, Group::Tc])
    }

    /// Watches everything that decides the path between node and VMs. Must be called inside a tokio runtime.
    pub fn of_underlay(netns: &Netns) -> Result<Events, Error> {
        // A device's IPv6 settings, which router advertisements change. Neighbours are no part.
        Events::open(netns, &[Group::Ipv6Ifinfo])
    }

    fn open(netns: &Netns, further: &[Group]) -> Result<Events, Error> {
        let failed = Error::netns("listen in", netns.path());
        let socket = netns.run(|| socket(further)).and_then(|made| made).map_err(&failed)?;
        Ok(Events { socket: reactor::register(socket, Interest::READABLE).map_err(failed)?, pending: None })
    }

    /// Waits for a change, then takes further ones until none comes for `quiet`, or `at_most` has passed.
    ///
    /// cancel safety: no change is lost; the next call returns those already taken.
    ///
    /// # Errors
    /// When the socket fails; the namespace is no longer watched then.
    pub async fn settled(&mut self, quiet: Duration, at_most: Duration) -> io::Result<()> {
        let (first, mut last) = match self.pending {
            Some(pending) => pending,
            None => {
                self.next().await?;
                let now = Instant::now();
                (now, now)
            }
        };
        let end = first + at_most;
        while last < end {
            self.pending = Some((first, last));
            match timeout_at((last + quiet).min(end), self.next()).await {
                Ok(more) => more?,
                Err(_) => break,
            }
            last = Instant::now();
        }
        self.pending = None;
        Ok(())
    }

    async fn next(&mut self) -> io::Result<()> {
        loop {
            let mut ready = self.socket.readable().await?;
            match ready.try_io(|socket| drain(socket.get_ref())) {
                Ok(taken) => return taken,
                Err(_would_block) => {}
            }
        }
    }
}

fn socket(further: &[Group]) -> io::Result<OwnedFd> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    for group in COMMON.iter().chain(further) {
        // A kernel without IPv6 or policy routing has no such group, and no events for it.
        match socket.add_membership(*group as u32) {
            Err(e) if *group == Group::Link => return Err(e),
            _ => {}
        }
    }
    socket.set_non_blocking(true)?;
    socket.as_fd().try_clone_to_owned()
}

/// Reads the queued messages. Returns "would block" only if there were none.
fn drain(socket: &OwnedFd) -> io::Result<()> {
    let mut buffer = [0; ROOM];
    let mut any = false;
    for _ in 0..AT_ONCE {
        match recv(socket.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
            // The queue overflowed: something changed, and the details are lost.
            Ok(_) | Err(Errno::ENOBUFS) => any = true,
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => break,
            Err(e) => return Err(e.into()),
        }
    }
    if any { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const LONG: Duration = Duration::from_secs(10);
    const QUIET: Duration = Duration::from_millis(30);

    fn ip(netns: &Netns, arguments: &str) {
        run(netns, "ip", arguments);
    }

    fn run(netns: &Netns, program: &str, arguments: &str) {
        let run = || Command::new(program).args(arguments.split(' ')).status();
        assert!(netns.run(run).unwrap().unwrap().success(), "{program} {arguments}");
    }

    #[tokio::test]
    async fn each_kind_of_change_makes_an_event_and_no_change_makes_none() {
        let netns = Netns::scratch().unwrap();
        ip(&netns, "link add a0 type veth peer name a1");
        ip(&netns, "link set a0 up");
        ip(&netns, "link set a1 up");
        let mut events = Events::of_pod(&netns).unwrap();
        for change in [
            "addr add 10.1.0.1/24 dev a0",
            "addr add fd00::1/64 dev a0",
            "route add 10.2.0.0/16 via 10.1.0.9",
            "-6 route add fd01::/64 via fd00::9",
            "rule add from 10.1.0.1 lookup 7",
            "neigh add 10.1.0.9 lladdr 02:00:00:00:00:09 dev a0 nud permanent",
            "link set a0 mtu 1400",
            "link set a0 down",
            "tc qdisc add dev a0 ingress",
            "tc filter add dev a0 ingress prio 9 protocol all u32 match u32 0 0",
        ] {
            match change.strip_prefix("tc ") {
                Some(change) => run(&netns, "tc", change),
                None => ip(&netns, change),
            }
            let pending = tokio::time::timeout(LONG, events.settled(QUIET, LONG)).await;
            pending.unwrap_or_else(|_| panic!("no event: {change}")).unwrap();
        }
        // IPv6 events of the kernel itself (duplicate address detection) may still come.
        while tokio::time::timeout(Duration::from_secs(3), events.next()).await.is_ok() {}
    }

    #[tokio::test]
    async fn a_change_before_a_cancelled_wait_is_reported_by_the_next_wait() {
        let netns = Netns::scratch().unwrap();
        ip(&netns, "link add a0 type veth peer name a1");
        let mut events = Events::of_underlay(&netns).unwrap();
        ip(&netns, "addr add 10.1.0.1/24 dev a0");
        // The change was taken and not returned: a `select!` took another branch.
        let cut = tokio::time::timeout(Duration::from_millis(200), events.settled(LONG, LONG)).await;
        assert!(cut.is_err(), "the wait had to be cancelled before its end");
        tokio::time::timeout(LONG / 2, events.settled(QUIET, LONG)).await.unwrap().unwrap();
        let more = tokio::time::timeout(Duration::from_millis(200), events.settled(QUIET, LONG)).await;
        assert!(more.is_err(), "reported once");
    }

    #[tokio::test]
    async fn a_flood_of_changes_makes_one_event_in_time() {
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
        let event = tokio::time::timeout(LONG, events.settled(LONG, at_most)).await;
        event.expect("the watcher waited for a pause in the changes").unwrap();
        noise.await.unwrap();
    }
}
