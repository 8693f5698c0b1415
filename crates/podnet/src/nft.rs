//! Filters tunnel packets on the node with one nftables table, regardless of the number of pods. The table accepts the
//! packets of a tunnel only from its own VM (anti-spoof) and keeps them out of conntrack.
//!
//! ```text
//! table inet peerpod-<owner> {             # another port than 4789: peerpod-<owner>-<port>; in a VM without owner
//!   set peers4 { ipv4_addr . vni }         # a VM and its tunnel          (peers6: the same for IPv6)
//!   set vnis4  { vni }                     # every VNI that is ours       (vnis6)
//!   chain pre { hook prerouting, raw;  udp dport P  saddr . vni @peers  notrack }
//!   chain in  { hook input, raw;       udp dport P  saddr . vni @peers  accept
//!                                      udp dport P  vni @vnis           drop }
//!   chain out { hook output, raw;      udp dport P  daddr . vni @peers  notrack }
//! }
//! ```
//!
//! Packets with a VNI outside the sets pass: the cluster's own VXLAN may share the port. The drop is at `input`, where
//! fragments are reassembled: at `prerouting` a fragment without the VNI would slip through. The VNI is the three bytes
//! at offset 12 from the UDP header's start. The table is made with its first element and removed with its last one.
//!
//! Touches only its own table, in the namespace of the given socket. Starts no nft process.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_netfilter::nftables::{
    DataAttribute, Expressions, InetHookNumber, ListAttribute, Lookup, MetaKey, NfTablesMessage, Register,
    SetAttribute, SetElementAttribute, SetElementList, SetElementMessage, SetFlags, SetMessage, TableMessage,
};
use nix::errno::Errno;

use super::Error;
use super::mark::Owner;
use super::netlink::{self, Client};

pub mod egress_firewall;
pub(super) mod parts;

use parts::{
    BASE_TRANSPORT, Family, Message, NF_ACCEPT, NF_DROP, Table, commit, equals, generation, inet,
    key_of_peer, keys_in, load, meta, or_gone, other, peer_of_key, table_in, verdict, vni_key,
};

/// Maximum number of elements that are read back: no node has so many tunnels.
const MAX_ELEMENTS: usize = 65_536;
/// Elements per message: an attribute's length is 16 bits.
const PER_MESSAGE: usize = 1000;
/// Attempts at a change that collides with another program's change.
const TRIES: u32 = 16;
const RAW: i32 = -300;
const UDP: u8 = 17;
// nft's numbers of its types, so that `nft list` can print the sets; a concatenation shifts by 6 bits.
const TYPE_IPV4: u32 = 7;
const TYPE_IPV6: u32 = 8;
const TYPE_MARK: u32 = 19;

/// Tunnel in the filter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Peer {
    /// The VM's address.
    pub address: IpAddr,
    /// The tunnel's VNI.
    pub vni: u32,
}

impl Peer {
    /// Returns whether both are ends of the same tunnel: they have the same VNI and family.
    pub fn is_tunnel_of(&self, other: &Peer) -> bool {
        self.vni == other.vni && self.address.is_ipv6() == other.address.is_ipv6()
    }
}

const TABLE: &str = "peerpod";
const USUAL_PORT: u16 = 4789;
const MAX_TABLES: usize = 4096;

/// The table for tunnels on one UDP port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    table: String,
    port: u16,
}

impl Filter {
    /// Returns the filter for tunnels on UDP `port` where no other daemon has any; makes nothing yet.
    pub fn new(port: u16) -> Filter {
        Filter { table: on_port(TABLE.to_owned(), port), port }
    }

    /// Returns the filter for one daemon's tunnels on UDP `port`; makes nothing yet.
    pub fn of(owner: Owner, port: u16) -> Filter {
        Filter { table: on_port(format!("{TABLE}-{owner}"), port), port }
    }

    /// Returns the existing filters of one daemon, on any port.
    pub fn all_of(owner: Owner, client: &mut Client) -> Result<Vec<Filter>, Error> {
        let question = inet(NfTablesMessage::GetTable(TableMessage { attributes: Vec::new() }));
        let mine = |name: &str| {
            let rest = name.strip_prefix(TABLE)?.strip_prefix('-')?.strip_prefix(&owner.to_string())?;
            match rest.strip_prefix('-') {
                Some(port) => port.parse().ok(),
                None => rest.is_empty().then_some(USUAL_PORT),
            }
        };
        client
            .dump_raw(&question, MAX_TABLES, |kind, payload| {
                let table = table_in(kind, payload)?;
                Ok(table.and_then(|table| mine(&table).map(|port| Filter { table, port })))
            })
            .map_err(Error::kernel("list the nftables tables"))
    }

    /// Returns the tunnels' UDP port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Accepts packets of these tunnels, and no others with their VNIs. Existing elements stay. A missing table (at the
    /// first tunnel, or after a flush of the rules) is made, also with the tunnels that `others` returns.
    ///
    /// # Errors
    /// [`Error::Kernel`], also where the kernel has no nftables.
    pub fn add(
        &self,
        client: &mut Client,
        peers: &[Peer],
        others: &dyn Fn() -> Vec<Peer>,
    ) -> Result<(), Error> {
        let mut result = Ok(());
        for _ in 0..TRIES {
            result = commit(client, None, &self.elements(peers, true));
            match result.as_ref().map_err(netlink::Error::errno) {
                Err(Some(Errno::ENOENT)) => {}
                Err(Some(Errno::EAGAIN | Errno::EINTR)) => continue,
                _ => break,
            }
            let mut all = self.skeleton();
            all.append(&mut self.elements(peers, true));
            all.append(&mut self.elements(&others(), true));
            result = commit(client, None, &all);
            match result.as_ref().map_err(netlink::Error::errno) {
                // Another program made it meanwhile, or removed a part of it.
                Err(Some(Errno::EEXIST)) => self.repair(client)?,
                Err(Some(Errno::EAGAIN | Errno::EINTR)) => {}
                _ => break,
            }
        }
        result.map_err(Error::kernel(format!("add a tunnel to the nftables table {}", self.table)))
    }

    /// Removes one tunnel. A missing one is no error. The table stays; see [`Filter::remove_if_empty`].
    pub fn remove(&self, client: &mut Client, peer: Peer) -> Result<(), Error> {
        let messages = self.elements(&[peer], false);
        match commit(client, None, &messages) {
            Err(e) if e.errno() == Some(Errno::ENOENT) => {}
            other => return other.map_err(self.removing()),
        }
        // One of the two elements was missing, so the whole was refused: each is removed separately.
        for message in messages {
            or_gone(commit(client, None, &[message])).map_err(self.removing())?;
        }
        Ok(())
    }

    /// Stops accepting a tunnel's packets from an address that its VM no longer has; the VNI stays guarded.
    pub fn retire(&self, client: &mut Client, old: Peer) -> Result<(), Error> {
        let set = Family::of(old.address).named("peers");
        let message = self.element_message(set, vec![key_of_peer(old)], false);
        or_gone(commit(client, None, &[message])).map_err(self.removing())
    }

    /// Returns the tunnels in the filter; none where the table is missing.
    pub fn list(&self, client: &mut Client) -> Result<Vec<Peer>, Error> {
        let mut peers = Vec::new();
        for set in ["peers4", "peers6"] {
            peers.extend(self.keys(client, set)?.iter().filter_map(|key| peer_of_key(key)));
        }
        Ok(peers)
    }

    /// Removes the table if it holds no tunnel; returns whether it did. A concurrent addition by another program wins:
    /// the kernel refuses the removal if the rules changed after they were read.
    pub fn remove_if_empty(&self, client: &mut Client) -> Result<bool, Error> {
        for _ in 0..TRIES {
            let generation = generation(client).map_err(self.removing())?;
            if !self.list(client)?.is_empty() {
                return Ok(false);
            }
            match commit(client, Some(generation), &[Table(&self.table).delete()]) {
                Ok(()) => return Ok(true),
                Err(e) if e.errno() == Some(Errno::ENOENT) => return Ok(false),
                Err(e) if matches!(e.errno(), Some(Errno::ERESTART | Errno::EAGAIN | Errno::EINTR)) => {}
                Err(e) => return Err(self.removing()(e)),
            }
        }
        Ok(false)
    }

    /// Removes the table with all its contents. A missing table is no error.
    pub fn delete(&self, client: &mut Client) -> Result<(), Error> {
        Table(&self.table).remove(client).map_err(self.removing())
    }

    fn removing(&self) -> impl FnOnce(netlink::Error) -> Error + use<> {
        Error::kernel(format!("remove from the nftables table {}", self.table))
    }

    /// Makes the table anew with its present tunnels, if another program removed a set. The caller tries again.
    fn repair(&self, client: &mut Client) -> Result<(), Error> {
        let attempt = || Error::kernel(format!("make the nftables table {} anew", self.table));
        let generation = generation(client).map_err(attempt())?;
        if self.is_whole(client)? {
            return Ok(());
        }
        let peers = self.list(client)?;
        let mut all = vec![Table(&self.table).delete()];
        all.append(&mut self.skeleton());
        all.append(&mut self.elements(&peers, true));
        let done = commit(client, Some(generation), &all);
        match done.as_ref().map_err(netlink::Error::errno) {
            Err(Some(Errno::ERESTART | Errno::EAGAIN | Errno::EINTR | Errno::ENOENT)) => Ok(()),
            _ => done.map_err(attempt()),
        }
    }

    fn is_whole(&self, client: &mut Client) -> Result<bool, Error> {
        for set in ["peers4", "peers6", "vnis4", "vnis6"] {
            let question = inet(NfTablesMessage::GetSet(SetMessage {
                attributes: vec![SetAttribute::Table(self.table.clone()), SetAttribute::Name(set.to_owned())],
            }));
            match client.tell(0, question) {
                Ok(()) => {}
                Err(e) if e.errno() == Some(Errno::ENOENT) => return Ok(false),
                Err(e) => return Err(Error::kernel(format!("look at the nftables table {}", self.table))(e)),
            }
        }
        Ok(true)
    }

    /// Returns the messages for the table without its elements.
    fn skeleton(&self) -> Vec<Message> {
        let table = Table(&self.table);
        let mut all = vec![table.make(NLM_F_EXCL)];
        let sets = [
            ("peers4", (TYPE_IPV4 << 6) | TYPE_MARK, 8),
            ("peers6", (TYPE_IPV6 << 6) | TYPE_MARK, 20),
            ("vnis4", TYPE_MARK, 4),
            ("vnis6", TYPE_MARK, 4),
        ];
        for (id, (name, key_type, length)) in (1..).zip(sets) {
            let set = SetMessage {
                attributes: vec![
                    SetAttribute::Table(self.table.clone()),
                    SetAttribute::Name(name.to_owned()),
                    SetAttribute::Flags(SetFlags::empty()),
                    SetAttribute::KeyType(key_type),
                    SetAttribute::KeyLen(length),
                    SetAttribute::Id(id),
                ],
            };
            all.push((NLM_F_CREATE | NLM_F_EXCL, inet(NfTablesMessage::NewSet(set))));
        }
        let hooks = [
            ("pre", InetHookNumber::PreRouting),
            ("in", InetHookNumber::LocalIn),
            ("out", InetHookNumber::LocalOut),
        ];
        all.extend(hooks.map(|(name, hook)| table.chain(name, Some(("filter", hook, RAW)))));
        let notrack = || other("notrack", Vec::new());
        for family in [Family::V4, Family::V6] {
            let peers = family.named("peers");
            all.push(self.rule("pre", family, Some(Family::source), &peers, notrack()));
            all.push(self.rule("in", family, Some(Family::source), &peers, verdict(NF_ACCEPT)));
            all.push(self.rule("in", family, None, &family.named("vnis"), verdict(NF_DROP)));
            all.push(self.rule("out", family, Some(Family::destination), &peers, notrack()));
        }
        all
    }

    /// `meta nfproto F  udp dport P  [address .] vni @set  then`
    fn rule(
        &self,
        chain: &str,
        family: Family,
        address: Option<fn(Family) -> (u32, u32)>,
        set: &str,
        then: Expressions,
    ) -> Message {
        let mut what = family.expressions();
        what.extend([
            meta(MetaKey::L4Proto),
            equals(vec![UDP]),
            load(BASE_TRANSPORT, 2, 2, Register::Reg1),
            equals(self.port.to_be_bytes().to_vec()),
        ]);
        what.extend(address.map(|place| family.load(place)));
        let vni_register = address.map_or(Register::Reg1, |_| family.behind_address());
        let set = vec![Lookup::Set(set.to_owned()), Lookup::SourceRegister(Register::Reg1)];
        what.extend([load(BASE_TRANSPORT, 12, 3, vni_register), Expressions::Lookup(set), then]);
        Table(&self.table).rule(chain, what)
    }

    fn elements(&self, peers: &[Peer], add: bool) -> Vec<Message> {
        let mut messages = Vec::new();
        for family in [Family::V4, Family::V6] {
            let of_family: Vec<Peer> =
                peers.iter().copied().filter(|p| Family::of(p.address) == family).collect();
            for part in of_family.chunks(PER_MESSAGE) {
                let pairs = part.iter().map(|peer| key_of_peer(*peer)).collect();
                let vnis = part.iter().map(|peer| vni_key(peer.vni).to_vec()).collect();
                messages.push(self.element_message(family.named("peers"), pairs, add));
                messages.push(self.element_message(family.named("vnis"), vnis, add));
            }
        }
        messages
    }

    fn element_message(&self, set: String, keys: Vec<Vec<u8>>, add: bool) -> Message {
        let elements = keys
            .into_iter()
            .map(|key| ListAttribute::Element(vec![SetElementAttribute::Key(DataAttribute::Value(key))]));
        let message = SetElementMessage {
            attributes: vec![
                SetElementList::Table(self.table.clone()),
                SetElementList::Set(set),
                SetElementList::Elements(elements.collect()),
            ],
        };
        if add {
            (NLM_F_CREATE, inet(NfTablesMessage::NewSetElement(message)))
        } else {
            (0, inet(NfTablesMessage::DeleteSetElement(message)))
        }
    }

    /// Returns the keys of one of the sets; none where the set is missing.
    fn keys(&self, client: &mut Client, set: &str) -> Result<Vec<Vec<u8>>, Error> {
        let question = inet(NfTablesMessage::GetSetElement(SetElementMessage {
            attributes: vec![SetElementList::Table(self.table.clone()), SetElementList::Set(set.to_owned())],
        }));
        let found =
            client.dump_raw(&question, MAX_ELEMENTS, |kind, payload| Ok(Some(keys_in(kind, payload)?)));
        match found {
            Ok(lists) => Ok(lists.into_iter().flatten().collect()),
            Err(e) if e.errno() == Some(Errno::ENOENT) => Ok(Vec::new()),
            Err(e) => Err(Error::kernel(format!("read the nftables table {}", self.table))(e)),
        }
    }
}

fn on_port(name: String, port: u16) -> String {
    if port == USUAL_PORT { name } else { format!("{name}-{port}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_the_address_and_three_bytes_of_vni() {
        let peer = Peer { address: "192.168.100.2".parse().unwrap(), vni: 555_000 };
        assert_eq!(key_of_peer(peer), [0xc0, 0xa8, 0x64, 0x02, 0x08, 0x77, 0xf8, 0x00]);
        assert_eq!(peer_of_key(&key_of_peer(peer)), Some(peer));
        let peer = Peer { address: "fd99::2".parse().unwrap(), vni: 0xff_ffff };
        assert_eq!(key_of_peer(peer).len(), 20);
        assert_eq!(peer_of_key(&key_of_peer(peer)), Some(peer));
        assert_eq!(peer_of_key(b"short"), None);
    }
}
