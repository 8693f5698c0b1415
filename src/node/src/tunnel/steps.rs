//! Implements the steps of a tunnel, synchronously: each calls the parts of `peerpod_podnet` in their order.

use std::net::IpAddr;
use std::path::PathBuf;

use peerpod_podnet::Error;
use peerpod_podnet::inspect::{PodNetworkState, inspect};
use peerpod_podnet::mark::{Mark, Owner};
use peerpod_podnet::netns::Netns;
use peerpod_podnet::plan::{self, Carry};
use peerpod_podnet::redirect::{self, Classifiers};
use peerpod_podnet::tunnel::{self, Connection, Pair, Undo};
use peerpod_podnet::vxlan::{self, Held, Slot, Vnis, Wanted};
use peerpod_proto::guest::NetworkPlan;

use super::backend::{Backend, Backends, Connected};
use super::external::Outside;
use super::{Device, Kind, Reserved, TunnelConfig};

#[derive(Debug)]
pub(super) struct Steps {
    pub(super) owner: Owner,
    pub(super) backends: Backends,
    vnis: Vnis,
    by: Classifiers,
    /// The pods' egress from the cluster, where it is not the tunnel.
    pub(super) outside: Option<Outside>,
    probe_seconds: u32,
    /// Folder of the pods' namespaces.
    pub(super) netns_dir: PathBuf,
}

impl Steps {
    pub(super) fn open(config: &TunnelConfig) -> Result<Steps, Error> {
        let by = redirect::choose(config.redirect)?;
        let backends = Backends::open(config)?;
        tracing::debug!(owner = %config.owner, into = by.into.name(), back = by.back.name(), "pods' tunnels are available");
        // In the calling thread's namespace, like the sockets.
        let outside = config.external.clone().map(Outside::open).transpose()?;
        let probe_seconds = u32::try_from(config.probe_interval.as_secs()).unwrap_or(u32::MAX);
        let netns_dir = config.netns_dir.clone();
        Ok(Steps { owner: config.owner, backends, vnis: config.vnis, by, outside, probe_seconds, netns_dir })
    }

    fn mark<'a>(&self, sandbox: &'a str) -> Mark<'a> {
        Mark { owner: self.owner, sandbox }
    }

    pub(super) fn inspect(netns: &Netns) -> Result<PodNetworkState, Error> {
        inspect(netns)
    }

    /// Reserves with the recorded kind, family and port where they still apply, else with those of a new reservation.
    pub(super) fn reserve(
        &self,
        netns: &Netns,
        sandbox: &str,
        seen: &PodNetworkState,
        v6: bool,
        recorded: Option<&Reserved>,
    ) -> Result<Reserved, Error> {
        let kind = recorded.map_or_else(|| self.backends.chosen(), |recorded| recorded.kind);
        self.reserve_as(kind, netns, sandbox, seen, v6, recorded)
    }

    /// Reserves with the given kind, which must be the recorded one where there is a record.
    pub(super) fn reserve_as(
        &self,
        kind: Kind,
        netns: &Netns,
        sandbox: &str,
        seen: &PodNetworkState,
        v6: bool,
        recorded: Option<&Reserved>,
    ) -> Result<Reserved, Error> {
        let backend = self.backends.of(kind)?;
        let recorded = recorded.filter(|recorded| recorded.v6 == v6);
        let shape = recorded.map_or_else(|| backend.shape(v6), |recorded| backend.shape_of(recorded));
        let mark = self.mark(sandbox);
        let interfaces: Vec<u32> = seen.interfaces.iter().map(|interface| interface.index).collect();
        let mut devices = assign(&interfaces, recorded);
        let unknown: Vec<u32> =
            devices.iter().filter(|device| device.vni == 0).map(|device| device.interface).collect();
        if !unknown.is_empty() {
            // Only now is the owner of each qdisc certain; it is recorded with the rest.
            let shared = tunnel::shared(netns, mark, &unknown)?;
            for device in &mut devices {
                device.shared |= shared.contains(&device.interface);
            }
        }
        self.retire(netns, mark, &devices, recorded)?;
        let slots: Vec<Slot> = devices
            .iter()
            .map(|device| Slot { number: device.slot, vni: (device.vni != 0).then_some(device.vni) })
            .collect();
        let wanted =
            Wanted { mark, shape, source_ports: backend.source_ports(), vnis: self.vnis, slots: &slots };
        let held = backend.host().with(|host| vxlan::reserve(host, netns, wanted))?;
        for (device, Held { vni, ifindex }) in devices.iter_mut().zip(held) {
            (device.vni, device.ifindex) = (vni, ifindex);
        }
        Ok(Reserved { kind, v6, port: shape.port, devices })
    }

    /// Removes the tunnels of interfaces that the pod no longer has.
    fn retire(
        &self,
        netns: &Netns,
        mark: Mark<'_>,
        devices: &[Device],
        recorded: Option<&Reserved>,
    ) -> Result<(), Error> {
        let Some(recorded) = recorded else { return Ok(()) };
        let gone: Vec<Device> =
            recorded.devices.iter().filter(|old| devices.iter().all(|d| d.vni != old.vni)).copied().collect();
        if gone.is_empty() {
            return Ok(());
        }
        let held: Vec<Held> = gone.iter().map(Device::held).collect();
        tunnel::retire(netns, mark, &held, recorded.port)?;
        let gone = Reserved { devices: gone, ..recorded.clone() };
        self.backends.of(recorded.kind)?.dismiss(Some(&gone), None)
    }

    pub(super) fn way(&self, reserved: &Reserved, vm: IpAddr) -> Result<(IpAddr, u32), Error> {
        let way = self.backends.of(reserved.kind)?.way(reserved, vm)?;
        Ok((way.node, way.room))
    }

    pub(super) fn connect(
        &self,
        netns: &Netns,
        sandbox: &str,
        reserved: &Reserved,
        seen: &PodNetworkState,
        vm: IpAddr,
    ) -> Result<(NetworkPlan, Vec<String>), Error> {
        let backend = self.backends.of(reserved.kind)?;
        let way = backend.way(reserved, vm)?;
        let carried = carried(reserved, plan::node(seen, way.room, vm)?);
        if way.remote.is_ipv6() {
            warn_of_too_large(&carried);
        }
        let connected = Connected { sandbox: sandbox.to_owned(), reserved: reserved.clone(), vm };
        // The filter first: the devices are never up without it.
        backend.admit(&connected)?;
        let pairs: Vec<Pair> = carried
            .iter()
            .map(|(carry, device)| Pair {
                held: device.held(),
                interface: carry.interface,
                mtu: carry.device_mtu,
            })
            .collect();
        let connection = Connection {
            mark: self.mark(sandbox),
            remote: way.remote,
            local: way.local,
            by: self.by,
            pairs: &pairs,
        };
        let obstacles = tunnel::connect(netns, &connection)?;
        let tunnels: Vec<plan::Tunnel> = carried
            .iter()
            .map(|(carry, device)| plan::Tunnel {
                interface: carry.interface,
                vni: device.vni,
                mtu: carry.mtu,
            })
            .collect();
        let mut plan = plan::write(seen, &tunnels, &backend.underlay(&connected, &way));
        plan.external = self.outside.as_ref().map(|outside| outside.write(way.node)).into();
        plan.underlay.mut_or_insert_default().probe_seconds = self.probe_seconds;
        backend.finish(&mut plan, &connected, &way)?;
        Ok((plan, obstacles))
    }

    pub(super) fn undo(
        &self,
        sandbox: &str,
        netns: Option<&Netns>,
        reserved: Option<&Reserved>,
        vm: Option<IpAddr>,
    ) -> Result<(), Vec<Error>> {
        let mut errors = Vec::new();
        if let Some(netns) = netns {
            let devices = reserved.map(|reserved| reserved.devices.as_slice()).unwrap_or_default();
            let held: Vec<Held> = devices.iter().map(Device::held).collect();
            let shared: Vec<u32> = devices.iter().filter(|d| d.shared).map(|d| d.interface).collect();
            let port = reserved.map_or(0, |reserved| reserved.port);
            let undo = Undo { mark: self.mark(sandbox), held: &held, port, shared: &shared };
            tunnel::undo(netns, undo, &mut errors);
        }
        let of = |kind| reserved.is_none_or(|reserved| reserved.kind == kind);
        for (_, backend) in self.backends.all().filter(|(kind, _)| of(*kind)) {
            errors.extend(backend.dismiss(reserved, vm).err());
            errors.extend(backend.forget(sandbox).err());
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    pub(super) fn close(&self) -> Result<(), Error> {
        self.backends.all().try_for_each(|(_, backend)| Backend::close(backend))
    }
}

/// Warns of packets that are larger than the path. Over IPv4 the kernel fragments them; over IPv6 it drops them. The
/// VM's own packets fit, and so does TCP to the VM, by the MSS that the VM announces.
fn warn_of_too_large(carried: &[(Carry, Device)]) {
    for (Carry { name, device_mtu, mtu, .. }, _) in
        carried.iter().filter(|(carry, _)| carry.device_mtu > carry.mtu)
    {
        tracing::warn!(
            interface = name,
            pod_mtu = device_mtu,
            fits = mtu,
            "larger packets to the pod (UDP) are lost on the IPv6 path to its VM; give pods an MTU that fits"
        );
    }
}

/// Assigns one device to each interface: the recorded one, or else the first free number. VNI 0 means that the VNI is
/// not known yet.
fn assign(interfaces: &[u32], recorded: Option<&Reserved>) -> Vec<Device> {
    let known = |at: usize, interface: u32| {
        let device = recorded.and_then(|recorded| recorded.device_of(interface, at == 0))?;
        Some(Device { interface, ..*device })
    };
    let mut devices: Vec<Option<Device>> =
        interfaces.iter().enumerate().map(|(at, interface)| known(at, *interface)).collect();
    // Includes interfaces that are gone: their devices may still exist.
    let mut taken: Vec<u32> =
        recorded.into_iter().flat_map(|recorded| &recorded.devices).map(|device| device.slot).collect();
    for (device, interface) in devices.iter_mut().zip(interfaces) {
        if device.is_none() {
            let slot = (0..).find(|slot| !taken.contains(slot)).unwrap_or_default();
            taken.push(slot);
            *device = Some(Device { interface: *interface, slot, vni: 0, ifindex: 0, shared: false });
        }
    }
    devices.into_iter().flatten().collect()
}

/// Pairs the interfaces with their tunnels. An interface that came up since the reservation has no tunnel yet.
fn carried(reserved: &Reserved, carries: Vec<Carry>) -> Vec<(Carry, Device)> {
    let device = |carry: &Carry| reserved.device_of(carry.interface, carry.slot == 0).copied();
    carries.into_iter().filter_map(|carry| device(&carry).map(|device| (carry, device))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reserved(devices: &[(u32, u32)]) -> Reserved {
        let devices = devices
            .iter()
            .map(|&(interface, slot)| Device {
                interface,
                slot,
                vni: 100 + interface,
                ifindex: 1000 + slot,
                shared: false,
            })
            .collect();
        Reserved { kind: Kind::Vxlan, v6: false, port: 4789, devices }
    }

    #[test]
    fn interfaces_keep_their_tunnels_when_others_come_and_go() {
        let slots =
            |devices: &[Device]| devices.iter().map(|d| (d.interface, d.slot, d.vni)).collect::<Vec<_>>();
        assert_eq!(slots(&assign(&[2, 5], None)), [(2, 0, 0), (5, 1, 0)]);
        let recorded = reserved(&[(2, 0), (5, 1), (7, 2)]);
        assert_eq!(slots(&assign(&[2, 7, 9], Some(&recorded))), [(2, 0, 102), (7, 2, 107), (9, 3, 0)]);
        // A record of version 1 has no interface: it was the primary one.
        let old = reserved(&[(0, 0)]);
        assert_eq!(slots(&assign(&[2, 5], Some(&old))), [(2, 0, 100), (5, 1, 0)]);
    }
}
