//! What differs between the kinds of tunnel. A pod's frames always travel in VXLAN, whose devices are always in the
//! pod's namespace; a backend says in which namespace their UDP packets go, where they go, and who lets them in.
//!
//! A new kind is a file with a [`Backend`] and a row in [`Backends::open`].

use std::fmt::Debug;
use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use peerpod_podnet::netlink::{self, Client};
use peerpod_podnet::netns::Netns;
use peerpod_podnet::plan::Underlay;
use peerpod_podnet::vxlan::Shape;
use peerpod_podnet::{Error, nft::Peer};
use peerpod_proto::guest::NetworkPlan;

use super::vxlan::Vxlan;
use super::wireguard::Wireguard;
use super::{Kind, Reserved, TunnelConfig};

/// Idle sockets that are kept.
const IDLE_SOCKETS: usize = 8;

/// The ends of a sandbox's tunnels, and what is left for its packets between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Way {
    /// What the VXLAN devices send to.
    pub(super) remote: IpAddr,
    /// What they send from.
    pub(super) local: IpAddr,
    /// The node's address as the VM reaches it, below all layers.
    pub(super) node: IpAddr,
    /// The largest inner packet that fits without fragments, in bytes.
    pub(super) room: u32,
}

/// A sandbox whose tunnels are connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Connected {
    pub(super) sandbox: String,
    pub(super) reserved: Reserved,
    pub(super) vm: IpAddr,
}

/// One kind of tunnel. Everything blocks and may be called for many sandboxes at once; what is called again finds what
/// is there and completes it.
pub(super) trait Backend: Debug + Send + Sync {
    /// The namespace whose sockets make the devices: the packets of a VXLAN device go where its maker's socket is.
    fn host(&self) -> &Host;

    /// What is fixed when a device is made. `v6`: whether node and VM talk IPv6.
    fn shape(&self, v6: bool) -> Shape;

    /// The shape that the devices of a reservation have, of an earlier configuration maybe.
    fn shape_of(&self, reserved: &Reserved) -> Shape {
        Shape { port: reserved.port, ..self.shape(reserved.v6) }
    }

    /// The range of UDP source ports, ends included, that a sandbox's flows are spread over; `None`: the kernel's own.
    fn source_ports(&self) -> Option<(u16, u16)>;

    /// The way to the VM as it is now.
    ///
    /// # Errors
    /// [`Error::Path`] where there is none, [`Error::Kernel`].
    fn way(&self, reserved: &Reserved, vm: IpAddr) -> Result<Way, Error>;

    /// Lets the VM's packets in, and nobody else's with the sandbox's VNIs. An earlier address of the VM is no longer
    /// let in. Called before the devices are up.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    fn admit(&self, connected: &Connected) -> Result<(), Error>;

    /// Takes [`Backend::admit`] back: by the reservation, or where that was never recorded by the VM's address.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    fn dismiss(&self, reserved: Option<&Reserved>, vm: Option<IpAddr>) -> Result<(), Error>;

    /// Takes back whatever this process admitted for the sandbox: a stop in the middle of a change finds a record that
    /// does not have all of it.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    fn forget(&self, _sandbox: &str) -> Result<(), Error> {
        Ok(())
    }

    /// Admits exactly these sandboxes, at the start of a daemon. Also `stay` what is known only by its devices. Returns
    /// how many others were dismissed.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    fn reconcile(&self, connected: &[Connected], stay: &[Peer]) -> Result<usize, Error>;

    /// Removes what the node has once for all sandboxes, if there is none any more.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    fn close(&self) -> Result<(), Error>;

    /// What the guest is told of the node's end.
    fn underlay(&self, connected: &Connected, way: &Way) -> Underlay;

    /// Adds to the plan what only this kind has.
    ///
    /// # Errors
    /// [`Error::Path`] while the other end could not find us yet.
    fn finish(&self, _plan: &mut NetworkPlan, _connected: &Connected, _way: &Way) -> Result<(), Error> {
        Ok(())
    }
}

/// The kinds that this node has.
#[derive(Debug)]
pub(super) struct Backends {
    /// What new sandboxes get.
    chosen: Kind,
    rows: Vec<(Kind, Arc<dyn Backend>)>,
    wireguard: Option<Arc<Wireguard>>,
}

impl Backends {
    /// Opens the kinds in the network namespace of the calling thread.
    ///
    /// # Errors
    /// Why the chosen kind cannot be used.
    pub(super) fn open(config: &TunnelConfig) -> Result<Backends, Error> {
        let mut rows: Vec<(Kind, Arc<dyn Backend>)> = Vec::new();
        match Vxlan::open(config) {
            Ok(vxlan) => rows.push((Kind::Vxlan, Arc::new(vxlan))),
            Err(e) if config.kind == Kind::Vxlan => return Err(e),
            Err(error) => tracing::info!(%error, "pods of an earlier configuration have no plain tunnel now"),
        }
        let wireguard = match &config.wireguard {
            None => None,
            Some(own) => match Wireguard::open(own, config.port) {
                Ok(wireguard) => Some(Arc::new(wireguard)),
                // Asked for, and refused: never a plain tunnel instead.
                Err(e) if config.kind == Kind::Wireguard => return Err(e),
                Err(error) => {
                    tracing::warn!(%error, "no encrypted tunnels here: a VM that needs one will fail to start");
                    None
                }
            },
        };
        if let Some(wireguard) = &wireguard {
            rows.push((Kind::Wireguard, wireguard.clone()));
        }
        Ok(Backends { chosen: config.kind, rows, wireguard })
    }

    /// The encrypted kind, where there is one.
    pub(super) fn wireguard(&self) -> Option<&Arc<Wireguard>> {
        self.wireguard.as_ref()
    }

    /// The kind of new sandboxes.
    pub(super) fn chosen(&self) -> Kind {
        self.chosen
    }

    /// The backend of a kind.
    ///
    /// # Errors
    /// [`Error::Path`]-like words where this node does not have it (another configuration than when the sandbox was made).
    pub(super) fn of(&self, kind: Kind) -> Result<&dyn Backend, Error> {
        let row = self.rows.iter().find(|(of, _)| *of == kind);
        row.map(|(_, backend)| backend.as_ref()).ok_or_else(|| {
            let what = format!(
                "its tunnel is of the kind {kind:?}, which this node does not have; see `tunnel.kind`"
            );
            Error::CannotCarry(what)
        })
    }

    /// All of them.
    pub(super) fn all(&self) -> impl Iterator<Item = (Kind, &dyn Backend)> {
        self.rows.iter().map(|(kind, backend)| (*kind, backend.as_ref()))
    }
}

/// A namespace, and a few sockets in it for whoever needs one. No lock is held while the kernel is asked.
#[derive(Debug)]
pub(super) struct Host {
    netns: Netns,
    idle: Mutex<Vec<Client>>,
}

impl Host {
    pub(super) fn new(netns: Netns) -> Host {
        Host { netns, idle: Mutex::default() }
    }

    /// The namespace.
    pub(super) fn netns(&self) -> &Netns {
        &self.netns
    }

    /// Lends a socket. One whose exchange failed is not used again.
    pub(super) fn with<T>(&self, f: impl FnOnce(&mut Client) -> Result<T, Error>) -> Result<T, Error> {
        let idle = self.idle.lock().pop();
        let mut client = match idle {
            Some(client) => client,
            None => self.netns.netlink()?,
        };
        let result = f(&mut client);
        let mut idle = self.idle.lock();
        if !is_broken(&result) && idle.len() < IDLE_SOCKETS {
            idle.push(client);
        }
        result
    }
}

/// Whether a socket may have been left in the middle of an exchange.
pub(super) fn is_broken<T>(result: &Result<T, Error>) -> bool {
    matches!(
        result,
        Err(Error::Kernel { source: netlink::Error::Socket(_) | netlink::Error::Garbled(_), .. })
    )
}
