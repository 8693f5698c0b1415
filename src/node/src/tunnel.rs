//! Connects a pod's network namespace to the pod's VM: inspects the namespace, reserves the tunnels, connects them to
//! the VM, and undoes all of it. Each step is idempotent: called again after a crash, it completes the existing state.
//! `peerpod_podnet` does the netlink work; this module orders the steps and owns the node's own sockets. Its methods
//! block. Everything that it makes carries an owner mark, so that several daemons can share a machine.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use peerpod_podnet::Error;
pub use peerpod_podnet::inspect::{PodNetworkState, inspect};
use peerpod_podnet::mark::{Mark, Owner};
pub use peerpod_podnet::netns::{Netns, NetnsId};
use peerpod_podnet::plan::{self, Carry};
use peerpod_podnet::redirect::{self, Classifier, Classifiers};
use peerpod_podnet::tunnel::{self, Connection, Pair};
use peerpod_podnet::vxlan::{Held, Reservation, Slot, Vnis};
use peerpod_proto::guest::NetworkPlan;
use peerpod_proto::relay::TunnelPeer;
use tokio::sync::watch;

mod anti_spoof;
mod backend;
pub(crate) mod external;
pub(crate) mod follow;
mod reconcile;
mod reserved;
#[cfg(test)]
pub(crate) mod tests;
mod vxlan;
mod wireguard;

use backend::{Backends, ConnectedTunnel, VmPath};
use external::Outside;
pub(crate) use reconcile::{Live, Reconciled};
use reserved::{Device, assign, carried};
pub use reserved::{Reserved, TunnelKind};
pub use wireguard::{FdHandoff, Wireguard, WireguardConfig};
pub(crate) use wireguard::{KIND as WIREGUARD, netns_in};

/// Default folder in which container runtimes keep the pods' network namespaces.
pub(crate) const NETNS_DIR: &str = "/run/netns";

/// Settings of this node's tunnels; the same on all nodes and fixed for a tunnel's life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunnelConfig {
    /// TunnelKind of new sandboxes' tunnels.
    pub kind: TunnelKind,
    /// Whether a VM that needs an encrypted tunnel gets one although `kind` is a plain one.
    pub auto: bool,
    /// Settings of the encrypted tunnel; `None`: there is none.
    pub wireguard: Option<WireguardConfig>,
    /// UDP port of the node and of the guests.
    pub port: u16,
    /// Whether IPv4 packets of the tunnel carry a UDP checksum. Without it, many cloud NICs keep their segmentation
    /// offload (2.7 times the throughput). IPv6 packets always carry one.
    pub udp_checksum: bool,
    /// Whether packets of a tunnel are accepted from its VM's address only, and kept out of conntrack (nftables).
    pub anti_spoof: bool,
    /// Classifier of the redirects; `None`: the best one of this kernel.
    pub redirect: Option<Classifier>,
    /// Range of the VNIs of new tunnels.
    pub vnis: Vnis,
    /// UDP source ports, ends included; `None`: the kernel's whole range.
    pub source_ports: Option<(u16, u16)>,
    /// Owner mark of these tunnels; other daemons of this machine have another one.
    pub owner: Owner,
    /// Egress of the pods from the cluster by their VMs; `None`: by the tunnel, like all other traffic.
    pub external: Option<external::External>,
    /// Folder in which the container runtime keeps the pods' network namespaces.
    pub netns_dir: PathBuf,
    /// Interval at which guests probe the path MTU to the node, in whole seconds.
    pub probe_interval: Duration,
}

impl Default for TunnelConfig {
    fn default() -> TunnelConfig {
        TunnelConfig {
            kind: TunnelKind::default(),
            auto: false,
            wireguard: None,
            port: 4789,
            udp_checksum: false,
            anti_spoof: true,
            redirect: None,
            vnis: Vnis::default(),
            source_ports: None,
            owner: Owner::of(&["peerpod"]),
            external: None,
            netns_dir: PathBuf::from(NETNS_DIR),
            probe_interval: Duration::from_secs(600),
        }
    }
}

/// The node's tunnels. One per daemon; cheap to clone. The methods block on the kernel.
#[derive(Clone, Debug)]
pub struct Tunnel(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    owner: Owner,
    backends: Backends,
    auto: bool,
    vnis: Vnis,
    by: Classifiers,
    /// The pods' egress from the cluster, where it is not the tunnel.
    outside: Option<Outside>,
    probe_seconds: u32,
    /// Folder of the pods' namespaces.
    netns_dir: PathBuf,
}

impl Tunnel {
    /// Opens the node's sockets in the network namespace of the calling thread. Chooses the classifier of this kernel's
    /// redirects, and checks that the port is usable (some 40 ms). Makes nothing that stays. Fails if another device
    /// uses the port, or the kernel lacks a needed function.
    pub fn open(config: TunnelConfig) -> Result<Tunnel, Error> {
        let by = redirect::choose(config.redirect)?;
        let backends = Backends::open(&config)?;
        tracing::debug!(owner = %config.owner, into = by.into.name(), back = by.back.name(), "pods' tunnels are available");
        let TunnelConfig { owner, auto, vnis, external, netns_dir, probe_interval, .. } = config;
        // In the calling thread's namespace, like the sockets.
        let outside = external.map(Outside::open).transpose()?;
        let probe_seconds = u32::try_from(probe_interval.as_secs()).unwrap_or(u32::MAX);
        Ok(Tunnel(Arc::new(Inner { owner, backends, auto, vnis, by, outside, probe_seconds, netns_dir })))
    }

    fn mark<'a>(&self, sandbox: &'a str) -> Mark<'a> {
        Mark { owner: self.0.owner, sandbox }
    }

    /// Makes a device for each interface (`pp-vx0`, `pp-vx1`, …) in the pod's namespace, down and without a remote.
    /// Their VNIs are free on this node. Either all devices are made, or none. The kind, family, port and VNIs of a
    /// recorded reservation are taken (again) where they still apply. Interfaces that are new since get devices, and
    /// those that are gone lose them. A repeated call for the same sandbox finds the existing devices. Fails with
    /// [`Error::Claimed`] if another sandbox has its tunnel in this namespace.
    pub fn reserve(
        &self,
        netns: &Netns,
        sandbox: &str,
        seen: &PodNetworkState,
        v6: bool,
        recorded: Option<&Reserved>,
    ) -> Result<Reserved, Error> {
        let kind = recorded.map_or(self.0.backends.chosen, |recorded| recorded.kind);
        self.reserve_as(kind, netns, sandbox, seen, v6, recorded)
    }

    /// Reserves as [`Tunnel::reserve`] does, with the given kind, which must be the recorded one where there is a record.
    pub(crate) fn reserve_as(
        &self,
        kind: TunnelKind,
        netns: &Netns,
        sandbox: &str,
        seen: &PodNetworkState,
        v6: bool,
        recorded: Option<&Reserved>,
    ) -> Result<Reserved, Error> {
        let backend = self.0.backends.of(kind)?;
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
        let wanted = Reservation {
            mark,
            shape,
            source_ports: backend.source_ports(),
            vnis: self.0.vnis,
            slots: &slots,
        };
        let held = backend.host().with(|host| peerpod_podnet::vxlan::reserve(host, netns, wanted))?;
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
        self.0.backends.of(recorded.kind)?.dismiss(Some(&gone), None)
    }

    /// Whether a plain tunnel does not suit a VM with these addresses and a link from `from`: it would cross a public
    /// network, or a NAT. Always false unless `tunnel.kind` is `auto`.
    pub(crate) fn is_unsuited(
        &self,
        reserved: &Reserved,
        vm: IpAddr,
        addresses: &[IpAddr],
        from: Option<IpAddr>,
    ) -> bool {
        self.0.auto
            && reserved.kind == TunnelKind::Vxlan
            && (is_public(vm) || from.is_some_and(|from| !addresses.contains(&from)))
    }

    /// Returns the guest's end of an encrypted tunnel, in the form for the relay; `None` for a plain one.
    pub(crate) fn peer(&self, reserved: &Reserved, key: &[u8]) -> Option<TunnelPeer> {
        (reserved.kind == TunnelKind::Wireguard).then(|| Wireguard::peer(reserved, key)).flatten()
    }

    /// Returns the encrypted kind, where this node has it.
    pub fn wireguard(&self) -> Option<&Arc<Wireguard>> {
        self.0.backends.wireguard.as_ref()
    }

    /// Returns the node's own addresses that its guests keep to the tunnel, as they were last read; `None`: their pods
    /// have no other egress.
    pub(crate) fn own_addresses(&self) -> Option<Arc<Vec<IpAddr>>> {
        self.0.outside.as_ref().map(Outside::own)
    }

    /// Reads the node's own addresses again, after a change of its network; returns whether they have changed. The next
    /// [`Tunnel::connect`] of each sandbox writes them into its plan.
    pub(crate) fn read_own_addresses(&self) -> Result<bool, Error> {
        self.0.outside.as_ref().map_or(Ok(false), Outside::inspect)
    }

    /// Receiver that ticks when guests of tunnels of this kind need the node's new endpoints; `None` for tunnels that
    /// need only the path to the VM.
    pub(crate) fn news(&self, reserved: &Reserved) -> Option<watch::Receiver<u64>> {
        let wireguard = self.wireguard().filter(|_| reserved.kind == TunnelKind::Wireguard);
        wireguard.map(|wireguard| wireguard.news())
    }

    /// Returns the node's address towards the VM, and the largest packet of a pod that fits on the path.
    pub(crate) fn path(&self, reserved: &Reserved, vm: IpAddr) -> Result<(IpAddr, u32), Error> {
        let path = self.0.backends.of(reserved.kind)?.path(reserved, vm)?;
        Ok((path.node, path.mtu))
    }

    /// Sets the remote of the reserved tunnels, and redirects the pod's traffic into them. Returns the plan for the
    /// guest, and, as text, obstacles that may keep the pod's traffic from the tunnel: filters of other programs, which
    /// the node must not change.
    ///
    /// A repeated call repairs deviations: a device that is down, has another MTU or another remote, a missing qdisc,
    /// redirect or filter element. It also follows a new address of the VM or of the node. With the same values and
    /// nothing to repair, it changes nothing and returns the same plan. An interface without a tunnel (new since
    /// [`Tunnel::reserve`]) is left out. Fails with [`Error::Gone`] if a device no longer exists (reserve again).
    /// Completed steps stay until [`Tunnel::undo`].
    pub fn connect(
        &self,
        netns: &Netns,
        sandbox: &str,
        reserved: &Reserved,
        seen: &PodNetworkState,
        vm: IpAddr,
    ) -> Result<(NetworkPlan, Vec<String>), Error> {
        let backend = self.0.backends.of(reserved.kind)?;
        let path = backend.path(reserved, vm)?;
        let carried = carried(reserved, plan::node(seen, path.mtu, vm)?);
        if path.remote.is_ipv6() {
            warn_of_too_large(&carried);
        }
        let connected = ConnectedTunnel { sandbox: sandbox.to_owned(), reserved: reserved.clone(), vm };
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
        let (mark, by, VmPath { remote, local, .. }) = (self.mark(sandbox), self.0.by, path);
        let connection = Connection { mark, remote, local, by, pairs: &pairs };
        let obstacles = tunnel::connect(netns, &connection)?;
        let tunnels: Vec<plan::Tunnel> = carried
            .iter()
            .map(|(carry, device)| plan::Tunnel {
                interface: carry.interface,
                vni: device.vni,
                mtu: carry.mtu,
            })
            .collect();
        let mut plan = plan::write(seen, &tunnels, &backend.underlay(&connected, &path));
        plan.external =
            self.0.outside.as_ref().map(|outside| outside.wanted.write(path.node, &outside.own())).into();
        plan.underlay.mut_or_insert_default().probe_seconds = self.0.probe_seconds;
        backend.finish(&mut plan, &path)?;
        Ok((plan, obstacles))
    }

    /// Removes everything that [`Tunnel::reserve`] and [`Tunnel::connect`] made, recorded or not: devices, redirects,
    /// filter elements. All steps are tried, and all errors returned. Missing state is no error, and the state of
    /// another sandbox is never touched.
    pub fn undo(
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
            tunnel::undo(netns, self.mark(sandbox), (&held, port), &shared, &mut errors);
        }
        let of = |kind| reserved.is_none_or(|reserved| reserved.kind == kind);
        for (_, backend) in self.0.backends.all().filter(|(kind, _)| of(*kind)) {
            errors.extend(backend.dismiss(reserved, vm).err());
            errors.extend(backend.forget(sandbox).err());
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }
}

/// Warns of packets that are larger than the path. Over IPv4 the kernel fragments them; over IPv6 it drops them. The
/// VM's own packets fit, and so does TCP to the VM, by the MSS that the VM announces.
fn warn_of_too_large(carried: &[(Carry, Device)]) {
    for (carry, _) in carried.iter().filter(|(carry, _)| carry.device_mtu > carry.mtu) {
        tracing::warn!(
            interface = carry.name,
            pod_mtu = carry.device_mtu,
            fits = carry.mtu,
            "larger packets to the pod (UDP) are lost on the IPv6 path to its VM; give pods an MTU that fits"
        );
    }
}

/// Whether an address is one of the public Internet, where others may listen.
fn is_public(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(a) => {
            let shared = a.octets()[0] == 100 && a.octets()[1] & 0xc0 == 64; // carrier-grade NAT
            !(a.is_private() || a.is_link_local() || a.is_loopback() || shared)
        }
        IpAddr::V6(a) => !(a.is_unique_local() || a.is_unicast_link_local() || a.is_loopback()),
    }
}
