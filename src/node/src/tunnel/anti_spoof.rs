//! Manages the node's anti-spoof filter and remembers its elements, so that a call for one pod reads nothing back.
//! There is one nftables table per UDP port of this daemon's tunnels (one port, except for pods of an earlier
//! configuration).

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
    /// Elements by port. The lock is never held during a kernel call.
    known: Mutex<HashMap<u16, HashSet<Peer>>>,
    /// Elements that this process admitted, by sandbox. Its lock is never held together with that of `known`.
    admitted: Mutex<HashMap<String, HashSet<(u16, Peer)>>>,
}

impl AntiSpoof {
    /// Reads the elements that an earlier run of this daemon left.
    pub(super) fn open(host: &Netns, owner: Owner) -> Result<AntiSpoof, Error> {
        let host = Host::netfilter(host.clone());
        let known = host.with(|client| read(owner, client));
        let known = Mutex::new(known.map_err(|e| Error::NoFilter(e.to_string()))?);
        Ok(AntiSpoof { host, owner, known, admitted: Mutex::default() })
    }

    fn filter(&self, port: u16) -> Filter {
        Filter::of(self.owner, port)
    }

    /// Accepts the packets of these tunnels of a sandbox from these addresses, and from no others.
    pub(super) fn admit(&self, sandbox: &str, port: u16, peers: &[Peer]) -> Result<(), Error> {
        let all = peers.iter().map(|peer| (port, *peer));
        self.admitted.lock().entry(sandbox.to_owned()).or_default().extend(all);
        let old: Vec<Peer> = {
            let mut known = self.known.lock();
            let known = known.entry(port).or_default();
            // Recorded before the kernel call: another thread that makes the table anew meanwhile includes these.
            known.extend(peers);
            let is_old = |peer: &&Peer| peers.iter().any(|new| new.is_tunnel_of(peer) && new != *peer);
            known.iter().filter(is_old).copied().collect()
        };
        let others = || self.known.lock().get(&port).into_iter().flatten().copied().collect();
        let filter = self.filter(port);
        self.host.with(|client| {
            filter.add(client, peers, &others)?;
            old.iter().try_for_each(|old| filter.retire(client, *old))
        })?;
        if let Some(known) = self.known.lock().get_mut(&port) {
            known.retain(|peer| !old.contains(peer));
        }
        if let Some(admitted) = self.admitted.lock().get_mut(sandbox) {
            admitted.retain(|(of, peer)| *of != port || !old.contains(peer));
        }
        Ok(())
    }

    /// Removes these VNIs with all their addresses. With `vm`, it also removes elements of that address that are not
    /// known.
    pub(super) fn dismiss(&self, port: u16, v6: bool, vnis: &[u32], vm: Option<IpAddr>) -> Result<(), Error> {
        let of_tunnel = |peer: &&Peer| vnis.contains(&peer.vni) && peer.address.is_ipv6() == v6;
        let mut gone: HashSet<Peer> =
            self.known.lock().get(&port).into_iter().flatten().filter(of_tunnel).copied().collect();
        let vm = vm.filter(|vm| vm.is_ipv6() == v6);
        gone.extend(
            vm.into_iter().flat_map(|address| vnis.iter().map(move |vni| Peer { address, vni: *vni })),
        );
        self.remove(port, &gone)
    }

    /// Removes the tunnels to a VM of which only the address is known.
    pub(super) fn dismiss_address(&self, vm: Option<IpAddr>) -> Result<(), Error> {
        let known = self.known.lock().clone();
        for (port, peers) in known {
            let gone = peers.into_iter().filter(|peer| vm == Some(peer.address)).collect();
            self.remove(port, &gone)?;
        }
        Ok(())
    }

    /// Removes everything that was admitted for a sandbox.
    pub(super) fn forget(&self, sandbox: &str) -> Result<(), Error> {
        let Some(admitted) = self.admitted.lock().get(sandbox).cloned() else { return Ok(()) };
        let mut by_port: HashMap<u16, HashSet<Peer>> = HashMap::new();
        for (port, peer) in admitted {
            // An element that is no longer known is no longer in the kernel's set.
            if self.known.lock().get(&port).is_some_and(|known| known.contains(&peer)) {
                by_port.entry(port).or_default().insert(peer);
            }
        }
        by_port.iter().try_for_each(|(port, gone)| self.remove(*port, gone))?;
        self.admitted.lock().remove(sandbox);
        Ok(())
    }

    fn remove(&self, port: u16, gone: &HashSet<Peer>) -> Result<(), Error> {
        let filter = self.filter(port);
        self.host.with(|client| gone.iter().try_for_each(|peer| filter.remove(client, *peer)))?;
        let empty = {
            let mut known = self.known.lock();
            if let Some(peers) = known.get_mut(&port) {
                peers.retain(|peer| !gone.contains(peer));
            }
            known.get(&port).is_none_or(HashSet::is_empty)
        };
        if empty {
            // Also if nothing was removed: a daemon that died between the two steps left an empty table. If a tunnel is
            // admitted meanwhile, the kernel refuses to remove its table.
            self.host.with(|client| filter.remove_if_empty(client))?;
        }
        Ok(())
    }

    /// Makes the tables contain exactly these elements. Returns the number of other elements that were removed.
    pub(super) fn reconcile(&self, live: &[(u16, Peer)]) -> Result<usize, Error> {
        let there = self.host.with(|client| read(self.owner, client))?;
        let mut wanted: HashMap<u16, HashSet<Peer>> = HashMap::new();
        for (port, peer) in live {
            wanted.entry(*port).or_default().insert(*peer);
        }
        self.known.lock().clone_from(&there);
        let mut removed = 0;
        let ports: HashSet<u16> = there.keys().chain(wanted.keys()).copied().collect();
        for port in ports {
            let none = HashSet::new();
            let (has, wants) = (there.get(&port).unwrap_or(&none), wanted.get(&port).unwrap_or(&none));
            let missing: Vec<Peer> = wants.difference(has).copied().collect();
            if !missing.is_empty() {
                self.known.lock().entry(port).or_default().extend(&missing);
                self.host.with(|client| self.filter(port).add(client, &missing, &Vec::new))?;
            }
            let mut gone: HashSet<Peer> = has.difference(wants).copied().collect();
            removed += gone.len();
            // An old address of a live tunnel: its VNI must stay guarded.
            let old: Vec<Peer> =
                gone.iter().filter(|p| wants.iter().any(|w| w.is_tunnel_of(p))).copied().collect();
            self.host.with(|client| old.iter().try_for_each(|old| self.filter(port).retire(client, *old)))?;
            if let Some(known) = self.known.lock().get_mut(&port) {
                known.retain(|peer| !old.contains(peer));
            }
            gone.retain(|peer| !old.contains(peer));
            self.remove(port, &gone)?;
        }
        Ok(removed)
    }

    /// Removes the empty tables.
    pub(super) fn close(&self) -> Result<(), Error> {
        let filters = self.host.with(|client| Filter::all_of(self.owner, client))?;
        self.host
            .with(|client| filters.iter().try_for_each(|filter| filter.remove_if_empty(client).map(drop)))
    }
}

fn read(owner: Owner, client: &mut Client) -> Result<HashMap<u16, HashSet<Peer>>, Error> {
    let filters = Filter::all_of(owner, client)?;
    filters.iter().map(|filter| Ok((filter.port(), filter.list(client)?.into_iter().collect()))).collect()
}
