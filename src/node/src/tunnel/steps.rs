//! The steps themselves, synchronous: each puts the parts of `peerpod_link::net` in their order and keeps what the
//! node has once: a few sockets in its own namespace, and what is known of the filter's table.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use peerpod_link::net::look::{Seen, look};
use peerpod_link::net::netlink::Client;
use peerpod_link::net::netns::Netns;
use peerpod_link::net::nft::{Filter, Peer};
use peerpod_link::net::plan::{self, Underlay};
use peerpod_link::net::tunnel::{self, Connection, TunnelWay};
use peerpod_link::net::vxlan::{self, Held, Shape};
use peerpod_link::net::{Error, netlink};
use peerpod_proto::guest::NetworkPlan;

use super::{Reserved, TunnelConfig};

/// Idle sockets that are kept.
const IDLE_SOCKETS: usize = 4;

#[derive(Debug)]
pub(super) struct Steps {
    config: TunnelConfig,
    /// The node's own namespace.
    host: Netns,
    idle: Mutex<Vec<Client>>,
    filter: Option<Mutex<Filtering>>,
}

/// The filter and what is in it, so that nothing has to be read back for one pod.
#[derive(Debug)]
struct Filtering {
    filter: Filter,
    client: Client,
    known: HashSet<Peer>,
}

impl Steps {
    pub(super) fn open(config: TunnelConfig) -> Result<Steps, Error> {
        let host = Netns::current()?;
        let mut client = host.netlink()?;
        vxlan::probe(&mut client, Shape { port: config.port, v6: false, udp_checksum: config.udp_checksum })?;
        let filter =
            if config.anti_spoof { Some(Mutex::new(Filtering::open(&host, config.port)?)) } else { None };
        Ok(Steps { config, host, idle: Mutex::new(vec![client]), filter })
    }

    pub(super) fn look(netns: &Netns) -> Result<Seen, Error> {
        look(netns)
    }

    pub(super) fn reserve(
        &self,
        netns: &Netns,
        sandbox: &str,
        v6: bool,
        recorded: Option<&Reserved>,
    ) -> Result<Reserved, Error> {
        let shape = Shape { port: self.config.port, v6, udp_checksum: self.config.udp_checksum };
        let wanted = recorded.filter(|r| r.port == shape.port && r.v6 == v6).map(|r| r.vni);
        let held = self.with_host(|host| vxlan::reserve(host, netns, sandbox, shape, wanted))?;
        Ok(Reserved { vni: held.vni, ifindex: held.ifindex, v6, port: shape.port })
    }

    fn shape(&self, reserved: &Reserved) -> Shape {
        Shape { port: reserved.port, v6: reserved.v6, udp_checksum: self.config.udp_checksum }
    }

    pub(super) fn way(&self, reserved: &Reserved, vm: IpAddr) -> Result<TunnelWay, Error> {
        self.with_host(|host| tunnel::way(host, self.shape(reserved), vm))
    }

    pub(super) fn connect(
        &self,
        netns: &Netns,
        reserved: &Reserved,
        seen: &Seen,
        vm: IpAddr,
    ) -> Result<NetworkPlan, Error> {
        let shape = self.shape(reserved);
        let way = self.way(reserved, vm)?;
        let mtu = way.pod_mtu(seen)?;
        // The filter first: the device is never up without it.
        self.filter(|filtering| filtering.add(Peer { address: vm, vni: reserved.vni }))?;
        let connection = Connection {
            held: Held { vni: reserved.vni, ifindex: reserved.ifindex },
            remote: vm,
            local: way.source,
            pod_interface: seen.primary().index,
            mtu: seen.primary().mtu,
        };
        tunnel::connect(netns, &connection)?;
        let underlay = Underlay {
            node: way.source,
            vm: Some(vm),
            port: reserved.port,
            udp_checksum: self.config.udp_checksum,
            overhead: shape.overhead(),
        };
        let tunnel = plan::Tunnel { interface: seen.primary().index, vni: reserved.vni, mtu };
        Ok(plan::write(seen, &[tunnel], &underlay))
    }

    pub(super) fn undo(
        &self,
        sandbox: Option<&str>,
        netns: Option<&Netns>,
        reserved: Option<&Reserved>,
        vm: Option<IpAddr>,
    ) -> Result<(), Vec<Error>> {
        let mut errors = Vec::new();
        if let Some(netns) = netns {
            let held = reserved.map(|r| (Held { vni: r.vni, ifindex: r.ifindex }, r.port));
            tunnel::undo(netns, sandbox, held, &mut errors);
        }
        if let Err(e) = self.filter(|filtering| filtering.remove(reserved, vm)) {
            errors.push(e);
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    pub(super) fn reconcile(&self, live: &[(IpAddr, u32)]) -> Result<usize, Error> {
        let live = live.iter().map(|&(address, vni)| Peer { address, vni }).collect();
        let mut removed = 0;
        self.filter(|filtering| {
            removed = filtering.reconcile(&live)?;
            Ok(())
        })?;
        Ok(removed)
    }

    pub(super) fn close(&self) -> Result<(), Error> {
        self.filter(|filtering| filtering.filter.remove_if_empty(&mut filtering.client).map(drop))
    }

    /// Lends a socket of the node's namespace. One whose exchange failed is not used again.
    fn with_host<T>(&self, f: impl FnOnce(&mut Client) -> Result<T, Error>) -> Result<T, Error> {
        let idle = lock(&self.idle).pop();
        let mut client = match idle {
            Some(client) => client,
            None => self.host.netlink()?,
        };
        let result = f(&mut client);
        let broken = matches!(
            result,
            Err(Error::Kernel { source: netlink::Error::Socket(_) | netlink::Error::Garbled(_), .. })
        );
        let mut idle = lock(&self.idle);
        if !broken && idle.len() < IDLE_SOCKETS {
            idle.push(client);
        }
        result
    }

    fn filter(&self, f: impl FnOnce(&mut Filtering) -> Result<(), Error>) -> Result<(), Error> {
        let Some(filter) = &self.filter else { return Ok(()) };
        let mut filtering = lock(filter);
        let result = f(&mut filtering);
        if matches!(
            result,
            Err(Error::Kernel { source: netlink::Error::Socket(_) | netlink::Error::Garbled(_), .. })
        ) && let Ok(client) = self.host.netfilter()
        {
            filtering.client = client;
        }
        result
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Filtering {
    fn open(host: &Netns, port: u16) -> Result<Filtering, Error> {
        let filter = Filter::new(port);
        let missing = |e: Error| Error::NoFilter(e.to_string());
        let mut client = host.netfilter().map_err(missing)?;
        let known = filter.list(&mut client).map_err(missing)?.into_iter().collect();
        Ok(Filtering { filter, client, known })
    }

    fn add(&mut self, peer: Peer) -> Result<(), Error> {
        let known = &self.known;
        self.filter.add(&mut self.client, &[peer], &|| known.iter().copied().collect())?;
        self.known.insert(peer);
        Ok(())
    }

    /// Removes what is known of this tunnel: by its VNI, or where that was never recorded by the VM's address.
    fn remove(&mut self, reserved: Option<&Reserved>, vm: Option<IpAddr>) -> Result<(), Error> {
        let named = reserved.zip(vm).map(|(r, address)| Peer { address, vni: r.vni });
        let of_tunnel = |peer: &Peer| match (reserved, vm) {
            (Some(r), _) => peer.vni == r.vni && peer.address.is_ipv6() == r.v6,
            (None, Some(vm)) => peer.address == vm,
            (None, None) => false,
        };
        let mut gone: HashSet<Peer> = self.known.iter().copied().filter(of_tunnel).collect();
        gone.extend(named);
        self.remove_all(gone)
    }

    fn remove_all(&mut self, gone: HashSet<Peer>) -> Result<(), Error> {
        for peer in gone {
            self.filter.remove(&mut self.client, peer)?;
            self.known.remove(&peer);
        }
        // Also when there was nothing to remove: a daemon that died between the two left an empty table.
        if self.known.is_empty() {
            self.filter.remove_if_empty(&mut self.client)?;
        }
        Ok(())
    }

    fn reconcile(&mut self, live: &HashSet<Peer>) -> Result<usize, Error> {
        self.known = self.filter.list(&mut self.client)?.into_iter().collect();
        let missing: Vec<Peer> = live.difference(&self.known).copied().collect();
        if !missing.is_empty() {
            self.filter.add(&mut self.client, &missing, &Vec::new)?;
            self.known.extend(missing);
        }
        let gone: HashSet<Peer> = self.known.difference(live).copied().collect();
        let count = gone.len();
        self.remove_all(gone)?;
        Ok(count)
    }
}
