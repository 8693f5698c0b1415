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
//! The relay needs no capability: it receives bound listeners. The node needs NET_ADMIN (`IP_TRANSPARENT`, nftables)
//! and no raw socket.
//!
//! TCP only: no answer to a UDP datagram shows whether a program listens.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use netlink_packet_core::{DefaultNla, NLM_F_APPEND, NLM_F_CREATE};
use netlink_packet_netfilter::NetfilterMessage;
use netlink_packet_netfilter::nftables::{
    Bitwise, ChainAttribute, ChainMessage, DataAttribute, Expressions, Hook, Immediate, InetHookNumber, Meta,
    MetaKey, NfTablesMessage, Register, RuleAttribute, RuleMessage, TableAttribute, TableMessage,
};
use nix::errno::Errno;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::Error;
use super::netlink;
use super::netns::Netns;
use super::nft::parts::{begin, end, equals, inet, load, verdict};

/// The table's name in family `inet` of the pod's namespace.
pub const TABLE: &str = "peerpod-localhost";

/// Addresses of the listeners, to which no program can connect (RFC 7600's dummy address, RFC 6666's discard prefix).
const DUMMY4: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 8);
const DUMMY6: Ipv6Addr = Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 1);
/// Index of `lo`, the first device of every namespace.
const LO: u32 = 1;
const BACKLOG: i32 = 1024;
const MANGLE: i32 = -150;
const NF_ACCEPT: u32 = 1;
const BASE_NETWORK: u32 = 1;
const BASE_TRANSPORT: u32 = 2;
const TCP: u8 = 6;
const FIN_SYN_RST_ACK: u8 = 0x17;
const SYN: u8 = 0x02;

/// Ports of the listeners, IPv4 and IPv6, as the rules need them; `None` = the kernel lacks that family. The relay
/// keeps them and sends them to the next node process.
pub type Ports = [Option<u16>; 2];

/// Tries the whole set-up in a scratch namespace, to check that the kernel has the modules and this process the rights.
///
/// # Errors
/// The step that failed.
pub fn probe() -> Result<(), Error> {
    let netns = Netns::scratch()?;
    let (ports, _listeners) = open(&netns)?;
    redirect(&netns, ports)
}

/// Opens the listeners in the pod's namespace, IPv4 and IPv6. Nothing is redirected to them yet.
///
/// # Errors
/// [`Error::Netns`], [`Error::Kernel`].
pub fn open(netns: &Netns) -> Result<(Ports, [Option<OwnedFd>; 2]), Error> {
    let opened = netns
        .run(|| Ok::<_, Error>([listener(Domain::IPV4)?, listener(Domain::IPV6)?]))
        .map_err(|source| Error::Netns { attempt: "enter", path: netns.path().to_owned(), source })??;
    let ports = opened.each_ref().map(|opened| opened.as_ref().map(|(port, _)| *port));
    Ok((ports, opened.map(|opened| opened.map(|(_, listener)| listener.into()))))
}

fn failed(attempt: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Kernel { attempt: attempt.to_owned(), source: netlink::Error::Socket(source) }
}

/// Opens the listener of one family; `None` = the kernel lacks that family.
fn listener(domain: Domain) -> Result<Option<(u16, Socket)>, Error> {
    let listener = match Socket::new(domain, Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP)) {
        Ok(listener) => listener,
        Err(error) if error.raw_os_error() == Some(Errno::EAFNOSUPPORT as i32) => return Ok(None),
        Err(error) => return Err(failed("open a listener for the pod's localhost")(error)),
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
    let port = bound.map_err(failed("bind a listener for the pod's localhost"))?;
    Ok(Some((port, listener)))
}

/// Makes the rules and replaces existing ones.
///
/// # Errors
/// [`Error::Netns`], [`Error::Kernel`].
pub fn redirect(netns: &Netns, ports: Ports) -> Result<(), Error> {
    let mut client = netns.netfilter()?;
    let table = || TableMessage { attributes: vec![TableAttribute::Name(TABLE.to_owned())] };
    let new_table = || (NLM_F_CREATE, inet(NfTablesMessage::NewTable(table())));
    // Made, removed, made again: removing a missing table would fail, and the whole is one transaction.
    let mut all = vec![new_table(), (0, inet(NfTablesMessage::DeleteTable(table()))), new_table()];
    let chain = ChainMessage {
        attributes: vec![
            ChainAttribute::Table(TABLE.to_owned()),
            ChainAttribute::Name("syn".to_owned()),
            ChainAttribute::Type("filter".to_owned()),
            ChainAttribute::Hook(vec![
                Hook::Number(InetHookNumber::PreRouting.into()),
                Hook::Priority(MANGLE as _),
            ]),
            ChainAttribute::Policy(NF_ACCEPT),
        ],
    };
    all.push((NLM_F_CREATE, inet(NfTablesMessage::NewChain(chain))));
    all.push(rule(vec![socket_transparent(), equals(vec![0]), verdict(NF_ACCEPT)]));
    for (v6, port) in [false, true].into_iter().zip(ports) {
        let Some(port) = port else { continue };
        let mut redirected = to_localhost(v6);
        redirected.extend(tproxy(v6, port));
        redirected.push(verdict(NF_ACCEPT));
        all.push(rule(redirected));
    }
    client
        .transaction(&begin(None), &all, &end())
        .map_err(Error::kernel(format!("redirect the pod's localhost (nftables table {TABLE})")))
}

/// Removes the rules. Missing rules are no error.
///
/// # Errors
/// [`Error::Netns`], [`Error::Kernel`].
pub fn remove(netns: &Netns) -> Result<(), Error> {
    let table = TableMessage { attributes: vec![TableAttribute::Name(TABLE.to_owned())] };
    let message = (0, inet(NfTablesMessage::DeleteTable(table)));
    match netns.netfilter()?.transaction(&begin(None), &[message], &end()) {
        // EOPNOTSUPP and EINVAL: a kernel without nftables.
        Err(e) if matches!(e.errno(), Some(Errno::ENOENT | Errno::EOPNOTSUPP | Errno::EINVAL)) => Ok(()),
        other => other.map_err(Error::kernel(format!("remove the nftables table {TABLE}"))),
    }
}

/// `iif lo  l4proto tcp  tcp flags & (fin|syn|rst|ack) == syn  ...`
fn rule(what: Vec<Expressions>) -> (u16, NetfilterMessage) {
    let mut expressions = vec![
        meta(MetaKey::Iif),
        equals(LO.to_ne_bytes().to_vec()),
        meta(MetaKey::L4Proto),
        equals(vec![TCP]),
        load(BASE_TRANSPORT, 13, 1, Register::Reg1),
        Expressions::Bitwise(vec![
            Bitwise::SourceRegister(Register::Reg1),
            Bitwise::DestinationRegister(Register::Reg1),
            Bitwise::Length(1),
            Bitwise::Mask(DataAttribute::Value(vec![FIN_SYN_RST_ACK])),
            Bitwise::Xor(DataAttribute::Value(vec![0])),
        ]),
        equals(vec![SYN]),
    ];
    expressions.extend(what);
    let rule = RuleMessage {
        attributes: vec![
            RuleAttribute::Table(TABLE.to_owned()),
            RuleAttribute::Chain("syn".to_owned()),
            RuleAttribute::Expressions(expressions.into_iter().map(Into::into).collect()),
        ],
    };
    (NLM_F_CREATE | NLM_F_APPEND, inet(NfTablesMessage::NewRule(rule)))
}

fn to_localhost(v6: bool) -> Vec<Expressions> {
    let (number, offset, address) = if v6 {
        (10, 24, Ipv6Addr::LOCALHOST.octets().to_vec())
    } else {
        (2, 16, Ipv4Addr::LOCALHOST.octets().to_vec())
    };
    let length = address.len() as u32; // 4 or 16
    vec![
        meta(MetaKey::Nfproto),
        equals(vec![number]),
        load(BASE_NETWORK, offset, length, Register::Reg1),
        equals(address),
    ]
}

fn meta(key: MetaKey) -> Expressions {
    Expressions::Meta(vec![Meta::Key(key), Meta::DestinationRegister(Register::Reg1)])
}

fn other(expression_type: &str, attributes: Vec<DefaultNla>) -> Expressions {
    Expressions::Other { expression_type: expression_type.to_owned(), attributes }
}

fn number(kind: u16, value: u32) -> DefaultNla {
    DefaultNla::new(kind, value.to_be_bytes().to_vec())
}

// The kernel's numbers of registers and attributes (linux/netfilter/nf_tables.h).
const REG_1: u32 = 1;
const REG_2: u32 = 2;

/// `socket transparent`, into register 1. Does not match where no program listens.
fn socket_transparent() -> Expressions {
    other("socket", vec![number(1, 0), number(2, REG_1)])
}

/// `tproxy to dummy:port`. Does not match where no listener is.
fn tproxy(v6: bool, port: u16) -> [Expressions; 3] {
    let address = if v6 { DUMMY6.octets().to_vec() } else { DUMMY4.octets().to_vec() };
    let put = |register, value| {
        Expressions::Immediate(vec![
            Immediate::DestinationRegister(register),
            Immediate::Data(DataAttribute::Value(value)),
        ])
    };
    let family = if v6 { 10 } else { 2 };
    [
        put(Register::Reg1, address),
        put(Register::Reg2, port.to_be_bytes().to_vec()),
        other("tproxy", vec![number(1, family), number(2, REG_1), number(3, REG_2)]),
    ]
}
