//! Manages the node's anti-spoof filter, one nftables table per UDP port of this daemon's tunnels, and remembers its
//! elements, so that a call for one pod reads nothing back.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use parking_lot::Mutex;
use peerpod_podnet::Error;
use peerpod_podnet::mark::Owner;
use peerpod_podnet::netlink::Client;
use peerpod_podnet::netns::Netns;
use peerpod_podnet::nft::{Filter, Peer};

use super::backend::Host;

#[derive(Debug)]
pub(super) struct AntiSpoof {
    host: Host,
    owner: Owner,
    /// Elements with their ports. The lock is never held during a kernel call.
    known: Mutex<HashSet<(u16, Peer)>>,
    /// Elements that this process admitted, by sandbox. Its lock is never held together with that of `known`.
    admitted: Mutex<HashMap<String, HashSet<(u16, Peer)>>>,
}

impl AntiSpoof {
    /// Reads the elements that an earlier run of this daemon left.
    pub(super) fn open(host: &Netns, owner: Owner) -> Result<AntiSpoof, Error> {
        let host = Host::netfilter(host.clone());
        let known = host.with(|client| read(owner, client)).map_err(|e| Error::NoFilter(e.to_string()))?;
        Ok(AntiSpoof { host, owner, known: Mutex::new(flat(&known)), admitted: Mutex::default() })
    }

    fn known(&self, port: u16) -> Vec<Peer> {
        self.known.lock().iter().filter(|(of, _)| *of == port).map(|(_, peer)| *peer).collect()
    }

    /// Accepts the packets of these tunnels of a sandbox from these addresses, and from no others.
    pub(super) fn admit(&self, sandbox: &str, port: u16, peers: &[Peer]) -> Result<(), Error> {
        let all: Vec<(u16, Peer)> = peers.iter().map(|peer| (port, *peer)).collect();
        self.admitted.lock().entry(sandbox.to_owned()).or_default().extend(&all);
        // Recorded before the kernel call: another thread that makes the table anew meanwhile includes these.
        self.known.lock().extend(&all);
        let is_old = |peer: &Peer| peers.iter().any(|new| new.is_tunnel_of(peer) && new != peer);
        let old: Vec<Peer> = self.known(port).into_iter().filter(is_old).collect();
        let filter = Filter::of(self.owner, port);
        self.host.with(|client| {
            filter.add(client, peers, &|| self.known(port))?;
            old.iter().try_for_each(|old| filter.retire(client, *old))
        })?;
        let stays = |(of, peer): &(u16, Peer)| *of != port || !old.contains(peer);
        self.known.lock().retain(stays);
        if let Some(admitted) = self.admitted.lock().get_mut(sandbox) {
            admitted.retain(stays);
        }
        Ok(())
    }

    /// Removes these VNIs with all their addresses, and with `vm` also the unknown elements of that address.
    pub(super) fn dismiss(&self, port: u16, v6: bool, vnis: &[u32], vm: Option<IpAddr>) -> Result<(), Error> {
        let of_tunnel = |peer: &Peer| vnis.contains(&peer.vni) && peer.address.is_ipv6() == v6;
        let mut gone: HashSet<Peer> = self.known(port).into_iter().filter(of_tunnel).collect();
        let vm = vm.filter(|vm| vm.is_ipv6() == v6);
        gone.extend(
            vm.into_iter().flat_map(|address| vnis.iter().map(move |vni| Peer { address, vni: *vni })),
        );
        self.remove(port, &gone)
    }

    /// Removes the tunnels to a VM of which only the address is known.
    pub(super) fn dismiss_address(&self, vm: Option<IpAddr>) -> Result<(), Error> {
        let known = self.known.lock().clone();
        let gone = known.into_iter().filter(|(_, peer)| vm == Some(peer.address));
        by_port(gone).iter().try_for_each(|(port, gone)| self.remove(*port, gone))
    }

    /// Removes everything that was admitted for a sandbox.
    pub(super) fn forget(&self, sandbox: &str) -> Result<(), Error> {
        let Some(admitted) = self.admitted.lock().get(sandbox).cloned() else { return Ok(()) };
        // An element that is no longer known is no longer in the kernel's set.
        let gone = admitted.into_iter().filter(|element| self.known.lock().contains(element));
        by_port(gone).iter().try_for_each(|(port, gone)| self.remove(*port, gone))?;
        self.admitted.lock().remove(sandbox);
        Ok(())
    }

    fn remove(&self, port: u16, gone: &HashSet<Peer>) -> Result<(), Error> {
        let filter = Filter::of(self.owner, port);
        self.host.with(|client| gone.iter().try_for_each(|peer| filter.remove(client, *peer)))?;
        self.known.lock().retain(|(of, peer)| *of != port || !gone.contains(peer));
        if self.known(port).is_empty() {
            // Also if nothing was removed: a dead daemon may have left an empty table. The kernel keeps a table in use.
            self.host.with(|client| filter.remove_if_empty(client))?;
        }
        Ok(())
    }

    /// Makes the tables contain exactly these elements. Returns the number of other elements that were removed.
    pub(super) fn reconcile(&self, live: &[(u16, Peer)]) -> Result<usize, Error> {
        let there = self.host.with(|client| read(self.owner, client))?;
        let wanted = by_port(live.iter().copied());
        *self.known.lock() = flat(&there);
        let mut removed = 0;
        let ports: HashSet<u16> = there.keys().chain(wanted.keys()).copied().collect();
        for port in ports {
            let (none, filter) = (HashSet::new(), Filter::of(self.owner, port));
            let (has, wants) = (there.get(&port).unwrap_or(&none), wanted.get(&port).unwrap_or(&none));
            let missing: Vec<Peer> = wants.difference(has).copied().collect();
            if !missing.is_empty() {
                self.known.lock().extend(missing.iter().map(|peer| (port, *peer)));
                self.host.with(|client| filter.add(client, &missing, &Vec::new))?;
            }
            let mut gone: HashSet<Peer> = has.difference(wants).copied().collect();
            removed += gone.len();
            // An old address of a live tunnel: its VNI must stay guarded.
            let old: Vec<Peer> =
                gone.iter().filter(|p| wants.iter().any(|w| w.is_tunnel_of(p))).copied().collect();
            self.host.with(|client| old.iter().try_for_each(|old| filter.retire(client, *old)))?;
            self.known.lock().retain(|(of, peer)| *of != port || !old.contains(peer));
            gone.retain(|peer| !old.contains(peer));
            self.remove(port, &gone)?;
        }
        Ok(removed)
    }
}

fn by_port(elements: impl Iterator<Item = (u16, Peer)>) -> HashMap<u16, HashSet<Peer>> {
    let mut by_port: HashMap<u16, HashSet<Peer>> = HashMap::new();
    for (port, peer) in elements {
        by_port.entry(port).or_default().insert(peer);
    }
    by_port
}

fn flat(by_port: &HashMap<u16, HashSet<Peer>>) -> HashSet<(u16, Peer)> {
    by_port.iter().flat_map(|(port, peers)| peers.iter().map(|peer| (*port, *peer))).collect()
}

fn read(owner: Owner, client: &mut Client) -> Result<HashMap<u16, HashSet<Peer>>, Error> {
    let filters = Filter::all_of(owner, client)?;
    filters.iter().map(|filter| Ok((filter.port(), filter.list(client)?.into_iter().collect()))).collect()
}
