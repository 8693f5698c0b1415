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

/// A sandbox with connected tunnels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Connected {
    pub(super) sandbox: String,
    pub(super) reserved: Reserved,
    pub(super) vm: IpAddr,
}

/// One kind of tunnel. All methods block and may be called for many sandboxes at once. A repeated call finds the
/// existing state and completes it.
pub(super) trait Backend: Debug + Send + Sync {
    /// Returns the namespace with the sockets that make the devices: a VXLAN device sends in the namespace of its
    /// maker's socket.
    fn host(&self) -> &Host;

    /// Returns the properties that are fixed when a device is made. `v6`: whether node and VM use IPv6.
    fn shape(&self, v6: bool) -> Shape;

    /// Returns the shape of a reservation's devices, which may be of an earlier configuration.
    fn shape_of(&self, reserved: &Reserved) -> Shape {
        Shape { port: reserved.port, ..self.shape(reserved.v6) }
    }

    /// Returns the range of UDP source ports, ends included, over which a sandbox's flows are spread; `None`: the
    /// kernel's own.
    fn source_ports(&self) -> Option<(u16, u16)>;

    /// Returns the present path to the VM.
    ///
    /// # Errors
    /// [`Error::Path`] where there is no path, [`Error::Kernel`].
    fn path(&self, reserved: &Reserved, vm: IpAddr) -> Result<VmPath, Error>;

    /// Admits the VM's packets, and no other packets with the sandbox's VNIs. An earlier address of the VM is no longer
    /// admitted. Called before the devices are up.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    fn admit(&self, connected: &Connected) -> Result<(), Error>;

    /// Reverts [`Backend::admit`]: by the reservation or, where that was never recorded, by the VM's address.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    fn dismiss(&self, reserved: Option<&Reserved>, vm: Option<IpAddr>) -> Result<(), Error>;

    /// Reverts everything that this process admitted for the sandbox: a stop during a change finds an incomplete
    /// record.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    fn forget(&self, _sandbox: &str) -> Result<(), Error> {
        Ok(())
    }

    /// Admits exactly these sandboxes, at the start of a daemon. It also admits `stay`, the peers that are known only
    /// by their devices. Returns the number of others that were dismissed.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    fn reconcile(&self, connected: &[Connected], stay: &[Peer]) -> Result<usize, Error>;

    /// Removes the state that the node has once for all sandboxes, if no sandbox needs it.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    fn close(&self) -> Result<(), Error>;

    /// Returns the node's end for the guest's plan.
    fn underlay(&self, connected: &Connected, path: &VmPath) -> Underlay;

    /// Adds the fields to the plan that only this kind has.
    ///
    /// # Errors
    /// [`Error::Path`] while the guest could not find the node yet.
    fn finish(&self, _plan: &mut NetworkPlan, _connected: &Connected, _path: &VmPath) -> Result<(), Error> {
        Ok(())
    }
}

/// The kinds that this node has.
#[derive(Debug)]
pub(super) struct Backends {
    /// The kind of new sandboxes.
    chosen: TunnelKind,
    rows: Vec<(TunnelKind, Arc<dyn Backend>)>,
    wireguard: Option<Arc<Wireguard>>,
}

impl Backends {
    /// Opens the kinds in the network namespace of the calling thread.
    ///
    /// # Errors
    /// The chosen kind cannot be used.
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

    /// Returns the encrypted kind, where there is one.
    pub(super) fn wireguard(&self) -> Option<&Arc<Wireguard>> {
        self.wireguard.as_ref()
    }

    /// Returns the kind of new sandboxes.
    pub(super) fn chosen(&self) -> TunnelKind {
        self.chosen
    }

    /// Returns the backend of a kind.
    ///
    /// # Errors
    /// [`Error::CannotCarry`] where this node does not have the kind (another configuration than when the sandbox was
    /// made).
    pub(super) fn of(&self, kind: TunnelKind) -> Result<&dyn Backend, Error> {
        let row = self.rows.iter().find(|(of, _)| *of == kind);
        row.map(|(_, backend)| backend.as_ref()).ok_or_else(|| {
            let what = format!(
                "its tunnel is of the kind {kind:?}, which this node does not support; see `tunnel.kind`"
            );
            Error::CannotCarry(what)
        })
    }

    /// Returns all kinds.
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

    /// Returns the namespace.
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
