//! The node's side of a pod's `localhost`: what makes connections to 127.0.0.1 and ::1 in the pod's namespace reach the
//! relay, before they are accepted. The pod's programs are in the VM; who connects here is a port-forward or a probe.
//!
//! ```text
//! table inet peerpod-localhost {
//!   chain syn { hook prerouting, mangle;                    # SYNs on lo only
//!     socket transparent 0                       accept     # somebody listens here: theirs
//!     mark ours  ip daddr 127.0.0.1  tproxy to L  accept    # the VM's port is open: the relay's listener takes it
//!     ip daddr 127.0.0.1  tproxy to L  log group G  drop    # the relay asks the VM first
//!   } }                                                     # (the same for ::1)
//! ```
//!
//! The kernel answers a SYN before any program sees the connection, so a refusal must be decided before. The first SYN
//! is logged to the relay and dropped; the relay asks the guest to connect, and sends the SYN again through a raw socket
//! whose mark is ours, or a reset. No connection tracking, no address is rewritten: an accepted socket has the very
//! addresses that the client used. `tproxy` does not match where no listener is, so a relay that died means the kernel's
//! own refusal at once. The relay needs no right for any of it: it gets the sockets, bound and marked. They reach no
//! further than `lo`.
//!
//! TCP only: a UDP datagram has no answer by which to know that nobody is there.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use netlink_packet_core::{DefaultNla, NLM_F_APPEND, NLM_F_CREATE};
use netlink_packet_netfilter::nflog::{ConfigCmd, ConfigMode, ConfigNla, ULogMessage};
use netlink_packet_netfilter::nftables::{
    Bitwise, ChainAttribute, ChainMessage, DataAttribute, Expressions, Hook, Immediate, InetHookNumber, Meta,
    MetaKey, NfTablesMessage, Register, RuleAttribute, RuleMessage, TableAttribute, TableMessage,
};
use netlink_packet_netfilter::{NetfilterHeader, NetfilterMessage, NetfilterProtoFamily};
use nix::errno::Errno;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::Error;
use super::netlink::{self, Client};
use super::netns::Netns;
use super::nft::parts::{begin, end, equals, inet, load, verdict};

/// The table's name in family `inet` of the pod's namespace.
pub const TABLE: &str = "peerpod-localhost";

/// Names of the descriptors, as they are handed in.
pub const LOG: &str = "log";
/// The listeners, of either family.
pub const LISTEN: [&str; 2] = ["listen4", "listen6"];
/// The raw sockets that SYNs are sent again through, of either family.
pub const INJECT: [&str; 2] = ["inject4", "inject6"];

/// Where the listeners are bound: addresses that nobody can connect to (RFC 7600's dummy, RFC 6666's discard prefix).
const DUMMY4: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 8);
const DUMMY6: Ipv6Addr = Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 1);
/// What a SYN that the relay sends again is marked with ("pp").
const MARK: u32 = 0x7070_0001;
/// `lo` is the first device of every namespace.
const LO: u32 = 1;
const BACKLOG: i32 = 1024;
/// Bytes of a packet that are logged: an IPv6 header and the longest TCP header; a few more for extension headers.
const LOGGED: u32 = 256;
/// SYNs that wait for the relay, in bytes; some 2,000.
const LOG_ROOM: usize = 2 << 20;
/// Log groups that are tried; somebody else may use one.
const TRIES: u32 = 16;
const MANGLE: i32 = -150;
const NF_DROP: u32 = 0;
const NF_ACCEPT: u32 = 1;
const BASE_NETWORK: u32 = 1;
const BASE_TRANSPORT: u32 = 2;
const TCP: u8 = 6;
const FIN_SYN_RST_ACK: u8 = 0x17;
const SYN: u8 = 0x02;

/// What the rules must know of the sockets. The relay keeps it and tells it to the next node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Way {
    /// The log group.
    pub group: u16,
    /// The listeners' ports; `None`: the kernel has not that family.
    pub ports: [Option<u16>; 2],
}

/// Tries everything in a namespace of its own: does this kernel have what it takes?
///
/// # Errors
/// What is missing.
pub fn probe() -> Result<(), Error> {
    let netns = Netns::scratch()?;
    let (way, _sockets) = open(&netns)?;
    redirect(&netns, &way)
}

/// Opens the sockets in the pod's namespace, each with its name. Nothing is redirected to them yet.
///
/// # Errors
/// [`Error::Netns`], [`Error::Kernel`].
pub fn open(netns: &Netns) -> Result<(Way, Vec<(String, OwnedFd)>), Error> {
    let (log, sockets) = netns
        .run(|| Ok::<_, Error>((Log::bind()?, [family(Domain::IPV4)?, family(Domain::IPV6)?])))
        .map_err(|source| Error::Netns { attempt: "enter", path: netns.path().to_owned(), source })??;
    let mut way = Way { group: log.group, ports: [None; 2] };
    let mut named = vec![(LOG.to_owned(), log.socket)];
    for (at, sockets) in sockets.into_iter().enumerate() {
        let Some((port, listener, inject)) = sockets else { continue };
        way.ports[at] = Some(port);
        named.push((LISTEN[at].to_owned(), listener.into()));
        named.push((INJECT[at].to_owned(), inject.into()));
    }
    Ok((way, named))
}

fn failed(attempt: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Kernel { attempt: attempt.to_owned(), source: netlink::Error::Socket(source) }
}

/// The listener and the raw socket of one family.
fn family(domain: Domain) -> Result<Option<(u16, Socket, Socket)>, Error> {
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
    let inject: io::Result<Socket> = (|| {
        // IPPROTO_RAW: whole packets are sent, none is received.
        let raw = Protocol::from(nix::libc::IPPROTO_RAW);
        let socket = Socket::new(domain, Type::RAW.nonblocking().cloexec(), Some(raw))?;
        socket.set_mark(MARK)?;
        // Cannot be changed by a program without rights.
        socket.bind_device(Some(b"lo"))?;
        Ok(socket)
    })();
    let inject = inject.map_err(failed("open a raw socket for the pod's localhost"))?;
    Ok(Some((port, listener, inject)))
}

/// A netlink socket that gets the SYNs of one log group; the group goes with it.
struct Log {
    group: u16,
    socket: OwnedFd,
}

impl Log {
    fn bind() -> Result<Log, Error> {
        let mut client = Client::netfilter().map_err(failed("open a socket for the pod's logged packets"))?;
        let attempt = || Error::kernel("have packets logged (the kernel's nfnetlink_log)".to_owned());
        for _ in 0..TRIES {
            let mut random = [0; 2];
            getrandom::fill(&mut random)
                .map_err(|error| failed("choose a log group")(io::Error::other(error.to_string())))?;
            let group = u16::from_ne_bytes(random) | 0x4000;
            let say = |nlas| {
                let header = NetfilterHeader::new(NetfilterProtoFamily::Unspec, 0, group);
                NetfilterMessage::new(header, ULogMessage::Config(nlas))
            };
            match client.tell(0, say(vec![ConfigNla::Cmd(ConfigCmd::Bind)])) {
                Err(error) if error.errno() == Some(Errno::EBUSY) => continue,
                other => other.map_err(attempt())?,
            }
            client.tell(0, say(vec![ConfigNla::Mode(ConfigMode::new_packet(LOGGED))])).map_err(attempt())?;
            // Each at once, in a small buffer.
            client.tell(0, say(vec![ConfigNla::QThresh(1), ConfigNla::NlBufSiz(2048)])).map_err(attempt())?;
            let socket = client.into_receiver(LOG_ROOM).map_err(failed("make room for logged packets"))?;
            return Ok(Log { group, socket });
        }
        Err(failed("find a free log group")(io::ErrorKind::AddrInUse.into()))
    }
}

/// Makes the rules, instead of those that are there.
///
/// # Errors
/// [`Error::Netns`], [`Error::Kernel`].
pub fn redirect(netns: &Netns, way: &Way) -> Result<(), Error> {
    let mut client = netns.netfilter()?;
    let table = || TableMessage { attributes: vec![TableAttribute::Name(TABLE.to_owned())] };
    let new_table = || (NLM_F_CREATE, inet(NfTablesMessage::NewTable(table())));
    // Made, removed, made: removing what is not there would fail, and the whole is one transaction.
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
    for (v6, port) in [false, true].into_iter().zip(way.ports) {
        let Some(port) = port else { continue };
        let marked = vec![meta(MetaKey::Mark), equals(MARK.to_ne_bytes().to_vec())];
        let mut accepted = to_localhost(v6);
        accepted.extend(marked);
        accepted.extend(tproxy(v6, port));
        accepted.push(verdict(NF_ACCEPT));
        all.push(rule(accepted));
        let mut asked = to_localhost(v6);
        asked.extend(tproxy(v6, port));
        asked.extend([log(way.group), verdict(NF_DROP)]);
        all.push(rule(asked));
    }
    client
        .transaction(&begin(None), &all, &end())
        .map_err(Error::kernel(format!("redirect the pod's localhost (nftables table {TABLE})")))
}

/// Removes the rules. Not there is fine.
///
/// # Errors
/// [`Error::Netns`], [`Error::Kernel`].
pub fn remove(netns: &Netns) -> Result<(), Error> {
    let table = TableMessage { attributes: vec![TableAttribute::Name(TABLE.to_owned())] };
    let message = (0, inet(NfTablesMessage::DeleteTable(table)));
    match netns.netfilter()?.transaction(&begin(None), &[message], &end()) {
        // The last two: a kernel without nftables.
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

/// `socket transparent`, into register 1. Does not match where nobody listens.
fn socket_transparent() -> Expressions {
    other("socket", vec![number(1, 0), number(2, REG_1)])
}

/// `tproxy to dummy:port`. Does not match where nobody listens there.
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

/// `log group G queue-threshold 1`
fn log(group: u16) -> Expressions {
    let short = |kind, value: u16| DefaultNla::new(kind, value.to_be_bytes().to_vec());
    other("log", vec![short(1, group), number(3, LOGGED), short(4, 1)])
}
