//! Abstracts the differences between the kinds of tunnel. A pod's frames always travel in VXLAN, and the VXLAN devices
//! are always in the pod's namespace. A backend chooses the namespace and the destination of the devices' UDP packets,
//! and admits the VM's packets.
//!
//! A new kind is a file with a [`Backend`] and a row in [`Backends::open`].

use std::fmt::Debug;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use peerpod_podnet::Error;
use peerpod_podnet::netlink::{self, Client};
use peerpod_podnet::netns::Netns;
use peerpod_podnet::nft::Peer;
use peerpod_podnet::plan::Underlay;
use peerpod_podnet::vxlan::Shape;
use peerpod_proto::guest::NetworkPlan;

use super::vxlan::Vxlan;
use super::wireguard::Wireguard;
use super::{Reserved, TunnelConfig, TunnelKind};

/// Idle sockets that are kept.
const IDLE_SOCKETS: usize = 8;

/// The ends of a sandbox's tunnels, and the packet size that fits between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VmPath {
    /// Destination of the VXLAN devices' packets.
    pub(super) remote: IpAddr,
    /// Source of the VXLAN devices' packets.
    pub(super) local: IpAddr,
    /// The node's address as the VM reaches it, below all layers.
    pub(super) node: IpAddr,
    /// The largest inner packet that fits without fragments, in bytes.
    pub(super) mtu: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ConnectedTunnel {
    pub(super) sandbox: String,
    pub(super) reserved: Reserved,
    pub(super) vm: IpAddr,
}

/// One kind of tunnel. All methods block, and a repeated call completes the existing state.
pub(super) trait Backend: Debug + Send + Sync {
    /// Returns the namespace in which the devices are made: a VXLAN device sends where its maker's socket is.
    fn host(&self) -> &Host;

    /// Returns the properties that are fixed when a device is made. `v6`: whether node and VM use IPv6.
    fn shape(&self, v6: bool) -> Shape;

    /// Returns the shape of a reservation's devices, which may be of an earlier configuration.
    fn shape_of(&self, reserved: &Reserved) -> Shape {
        Shape { port: reserved.port, ..self.shape(reserved.v6) }
    }

    /// Returns the UDP source ports of a sandbox's flows, ends included; `None`: the kernel's own.
    fn source_ports(&self) -> Option<(u16, u16)>;

    /// Returns the present path to the VM. Fails with [`Error::Path`] if there is no path.
    fn path(&self, reserved: &Reserved, vm: IpAddr) -> Result<VmPath, Error>;

    /// Admits only the VM's packets with the sandbox's VNIs, before the devices are up. Its earlier address is out.
    fn admit(&self, connected: &ConnectedTunnel) -> Result<(), Error>;

    /// Reverts [`Backend::admit`]: by the reservation or, where that was never recorded, by the VM's address.
    fn dismiss(&self, reserved: Option<&Reserved>, vm: Option<IpAddr>) -> Result<(), Error>;

    /// Dismisses all that this process admitted for the sandbox: a stop during a change finds an incomplete record.
    fn forget(&self, _sandbox: &str) -> Result<(), Error> {
        Ok(())
    }

    /// Admits exactly these sandboxes and `stay`, at a daemon's start. Returns the number of others dismissed.
    fn reconcile(&self, connected: &[ConnectedTunnel], stay: &[Peer]) -> Result<usize, Error>;

    /// Returns the node's end for the guest's plan.
    fn underlay(&self, connected: &ConnectedTunnel, path: &VmPath) -> Underlay;

    /// Adds this kind's fields to the plan. Fails with [`Error::Path`] while the guest could not find the node yet.
    fn finish(&self, _plan: &mut NetworkPlan, _path: &VmPath) -> Result<(), Error> {
        Ok(())
    }
}

/// The kinds that this node has.
#[derive(Debug)]
pub(super) struct Backends {
    pub chosen: TunnelKind,
    rows: Vec<(TunnelKind, Arc<dyn Backend>)>,
    pub wireguard: Option<Arc<Wireguard>>,
}

impl Backends {
    /// Opens the kinds in the network namespace of the calling thread. Fails if the chosen kind cannot be used.
    pub(super) fn open(config: &TunnelConfig) -> Result<Backends, Error> {
        let mut rows: Vec<(TunnelKind, Arc<dyn Backend>)> = Vec::new();
        match Vxlan::open(config) {
            Ok(vxlan) => rows.push((TunnelKind::Vxlan, Arc::new(vxlan))),
            Err(e) if config.kind == TunnelKind::Vxlan => return Err(e),
            Err(error) => {
                tracing::info!(%error, "no plain tunnels here: pods of an earlier configuration have none")
            }
        }
        let wireguard = match &config.wireguard {
            None => None,
            Some(own) => match Wireguard::open(own, config.port) {
                Ok(wireguard) => Some(Arc::new(wireguard)),
                // Configured but not available: there is no fallback to a plain tunnel.
                Err(e) if config.kind == TunnelKind::Wireguard => return Err(e),
                Err(error) => {
                    tracing::warn!(%error, "no encrypted tunnels here: a VM that needs one will fail to start");
                    None
                }
            },
        };
        if let Some(wireguard) = &wireguard {
            rows.push((TunnelKind::Wireguard, wireguard.clone()));
        }
        Ok(Backends { chosen: config.kind, rows, wireguard })
    }

    /// Returns the backend of a kind, which a node with another configuration may lack.
    pub(super) fn of(&self, kind: TunnelKind) -> Result<&dyn Backend, Error> {
        let backend = self.all().find(|(of, _)| *of == kind).map(|(_, backend)| backend);
        backend.ok_or_else(|| {
            let what = format!(
                "its tunnel is of the kind {kind:?}, which this node does not support; see `tunnel.kind`"
            );
            Error::CannotCarry(what)
        })
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (TunnelKind, &dyn Backend)> {
        self.rows.iter().map(|(kind, backend)| (*kind, backend.as_ref()))
    }
}

/// A namespace, and a pool of sockets in it. No lock is held during a kernel call.
#[derive(Debug)]
pub(super) struct Host {
    netns: Netns,
    open: fn(&Netns) -> Result<Client, Error>,
    idle: Mutex<Vec<Client>>,
}

impl Host {
    pub(super) fn new(netns: Netns) -> Host {
        Host { netns, open: Netns::netlink, idle: Mutex::default() }
    }

    /// Returns a pool of netfilter sockets.
    pub(super) fn netfilter(netns: Netns) -> Host {
        Host { open: Netns::netfilter, ..Host::new(netns) }
    }

    pub(super) fn netns(&self) -> &Netns {
        &self.netns
    }

    /// Lends a socket. A socket with a failed exchange is not used again.
    pub(super) fn with<T>(&self, f: impl FnOnce(&mut Client) -> Result<T, Error>) -> Result<T, Error> {
        let idle = self.idle.lock().pop();
        let mut client = idle.map_or_else(|| (self.open)(&self.netns), Ok)?;
        let result = f(&mut client);
        let mut idle = self.idle.lock();
        if !is_broken(&result) && idle.len() < IDLE_SOCKETS {
            idle.push(client);
        }
        result
    }
}

/// Whether a socket may have been left in the middle of an exchange.
fn is_broken<T>(result: &Result<T, Error>) -> bool {
    matches!(
        result,
        Err(Error::Kernel { source: netlink::Error::Socket(_) | netlink::Error::Garbled(_), .. })
    )
}
