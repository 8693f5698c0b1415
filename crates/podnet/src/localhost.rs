//! Redirects connections to 127.0.0.1 and ::1 in the pod's namespace on the node to the relay, with rules and
//! listeners. The pod's programs are in the VM; port-forward and probes connect here.
//!
//! ```text
//! table inet peerpod-localhost {
//!   chain syn { hook prerouting, mangle;                    # SYNs on lo only
//!     socket transparent 0                       accept     # a local program listens on that port: its connection
//!     ip daddr 127.0.0.1  tproxy to L            accept     # the relay's listener takes it
//!   } }                                                     # (the same for ::1)
//! ```
//!
//! The relay accepts a connection and dials the same port in the VM. It resets the connection when no program listens
//! there. No connection is tracked and no address is rewritten: an accepted socket has the addresses that the client
//! used. `tproxy` does not match without a listener, so the kernel refuses connections at once after the relay died.
//! The relay needs no capability: it receives bound listeners. The node needs NET_ADMIN alone.
//!
//! TCP only: no answer to a UDP datagram shows whether a program listens.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use netlink_packet_netfilter::nftables::{
    DataAttribute, Expressions, Immediate, InetHookNumber, MetaKey, Register,
};
use nix::errno::Errno;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::Error;
use super::netns::Netns;
use super::nft::parts::{
    BASE_TRANSPORT, Family, Message, NF_ACCEPT, Table, address_is, commit, equals, load, masked, meta,
    number, octets, other, verdict,
};

/// The table's name in family `inet` of the pod's namespace.
pub const TABLE: &str = "peerpod-localhost";

/// Addresses of the listeners, to which no program can connect (RFC 7600's dummy address, RFC 6666's discard prefix).
const DUMMY4: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 8);
const DUMMY6: Ipv6Addr = Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 1);
/// Index of `lo`, the first device of every namespace.
const LO: u32 = 1;
const BACKLOG: i32 = 1024;
const MANGLE: i32 = -150;
const TCP: u8 = 6;
const FIN_SYN_RST_ACK: u8 = 0x17;
const SYN: u8 = 0x02;

/// Ports of the listeners, IPv4 and IPv6, which the relay keeps; `None` = the kernel lacks that family.
pub type Ports = [Option<u16>; 2];

/// Tries the whole set-up in a scratch namespace, to check that the kernel has the modules and this process the rights.
pub fn probe() -> Result<(), Error> {
    let netns = Netns::scratch()?;
    let (ports, _listeners) = open(&netns)?;
    redirect(&netns, ports)
}

/// Opens the listeners in the pod's namespace, IPv4 and IPv6. Nothing is redirected to them yet.
pub fn open(netns: &Netns) -> Result<(Ports, [Option<OwnedFd>; 2]), Error> {
    let opened = netns
        .run(|| Ok::<_, Error>([listener(Domain::IPV4)?, listener(Domain::IPV6)?]))
        .map_err(Error::netns("enter", netns.path()))??;
    let ports = opened.each_ref().map(|opened| opened.as_ref().map(|(port, _)| *port));
    Ok((ports, opened.map(|opened| opened.map(|(_, listener)| listener.into()))))
}

/// Opens the listener of one family; `None` = the kernel lacks that family.
fn listener(domain: Domain) -> Result<Option<(u16, Socket)>, Error> {
    let listener = match Socket::new(domain, Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP)) {
        Ok(listener) => listener,
        Err(error) if error.raw_os_error() == Some(Errno::EAFNOSUPPORT as i32) => return Ok(None),
        Err(error) => return Err(Error::kernel("open a listener for the pod's localhost")(error.into())),
    };
    let bound: io::Result<u16> = (|| {
        let address: SocketAddr = if domain == Domain::IPV4 {
            listener.set_ip_transparent_v4(true)?;
            (DUMMY4, 0).into()
        } else {
            listener.set_only_v6(true)?;
            listener.set_ip_transparent_v6(true)?;
            (DUMMY6, 0).into()
        };
        listener.bind(&SockAddr::from(address))?;
        listener.listen(BACKLOG)?;
        let port = listener.local_addr()?.as_socket().map(|address| address.port());
        port.ok_or_else(|| io::Error::other("it has no port"))
    })();
    let port = bound.map_err(|e| Error::kernel("bind a listener for the pod's localhost")(e.into()))?;
    Ok(Some((port, listener)))
}

/// Makes the rules and replaces existing ones.
pub fn redirect(netns: &Netns, ports: Ports) -> Result<(), Error> {
    let mut client = netns.netfilter()?;
    let table = Table(TABLE);
    let mut all = table.replace();
    all.push(table.chain("syn", Some(("filter", InetHookNumber::PreRouting, MANGLE))));
    all.push(rule(vec![socket_transparent(), equals(vec![0]), verdict(NF_ACCEPT)]));
    let ends: [(IpAddr, IpAddr); 2] =
        [(Ipv4Addr::LOCALHOST.into(), DUMMY4.into()), (Ipv6Addr::LOCALHOST.into(), DUMMY6.into())];
    for ((localhost, dummy), port) in ends.into_iter().zip(ports) {
        let Some(port) = port else { continue };
        let mut redirected = address_is(Family::destination, localhost);
        redirected.extend(tproxy(dummy, port));
        redirected.push(verdict(NF_ACCEPT));
        all.push(rule(redirected));
    }
    commit(&mut client, None, &all)
        .map_err(Error::kernel(format!("redirect the pod's localhost (nftables table {TABLE})")))
}

/// Removes the rules. Missing rules are no error.
pub fn remove(netns: &Netns) -> Result<(), Error> {
    match Table(TABLE).remove(&mut netns.netfilter()?) {
        // A kernel without nftables.
        Err(e) if matches!(e.errno(), Some(Errno::EOPNOTSUPP | Errno::EINVAL)) => Ok(()),
        other => other.map_err(Error::kernel(format!("remove the nftables table {TABLE}"))),
    }
}

/// `iif lo  l4proto tcp  tcp flags & (fin|syn|rst|ack) == syn  ...`
fn rule(what: Vec<Expressions>) -> Message {
    let mut expressions = vec![
        meta(MetaKey::Iif),
        equals(LO.to_ne_bytes().to_vec()),
        meta(MetaKey::L4Proto),
        equals(vec![TCP]),
        load(BASE_TRANSPORT, 13, 1, Register::Reg1),
        masked(vec![FIN_SYN_RST_ACK]),
        equals(vec![SYN]),
    ];
    expressions.extend(what);
    Table(TABLE).rule("syn", expressions)
}

/// `socket transparent`, into register 1. Does not match where no program listens.
fn socket_transparent() -> Expressions {
    other("socket", vec![number(1, 0), number(2, Register::Reg1.into())])
}

/// `tproxy to dummy:port`. Does not match where no listener is.
fn tproxy(dummy: IpAddr, port: u16) -> [Expressions; 3] {
    let put = |register, value| {
        Expressions::Immediate(vec![
            Immediate::DestinationRegister(register),
            Immediate::Data(DataAttribute::Value(value)),
        ])
    };
    let family = Family::of(dummy).number().into();
    [
        put(Register::Reg1, octets(dummy)),
        put(Register::Reg2, port.to_be_bytes().to_vec()),
        other(
            "tproxy",
            vec![number(1, family), number(2, Register::Reg1.into()), number(3, Register::Reg2.into())],
        ),
    ]
}
