//! The node's half of a pod's network: look at the pod's namespace, reserve its tunnels, connect them to the VM, undo.
//!
//! Each step is "make it so": called again after a crash it finds what is there and completes it. The work is
//! netlink, done by `peerpod_podnet` on blocking threads; this room only puts the steps together and owns the
//! node's own sockets. It touches the pods' network namespaces, the node's VXLAN sockets and this daemon's own
//! nftables tables, nothing else; what it makes says whose it is, so that several daemons can share a machine.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use peerpod_podnet::Error;
pub use peerpod_podnet::look::Seen;
pub use peerpod_podnet::mark::Owner;
pub use peerpod_podnet::netns::{Netns, NetnsId};
pub use peerpod_podnet::redirect::Classifier;
pub use peerpod_podnet::vxlan::Vnis;
use peerpod_podnet::{look, redirect};
use peerpod_proto::guest::NetworkPlan;
use peerpod_proto::relay::TunnelPeer;
use tokio::sync::watch;

mod backend;
pub mod external;
pub mod follow;
mod gate;
mod reconcile;
mod reserved;
mod steps;
#[cfg(test)]
pub(crate) mod tests;
mod vxlan;
mod wireguard;

pub use reconcile::{Live, Reconciled};
pub use reserved::{Device, Kind, Reserved};
use steps::Steps;
pub use wireguard::{Carrier, HandIn, HandInDetail, WireguardConfig, netns_in};

/// Where container runtimes keep the pods' network namespaces, unless told otherwise.
pub const NETNS_DIR: &str = "/run/netns";

/// How this node's tunnels are made; the same on all nodes and fixed for a tunnel's life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunnelConfig {
    /// What new sandboxes' tunnels are.
    pub kind: Kind,
    /// Whether a VM that needs it gets an encrypted tunnel although `kind` says otherwise.
    pub auto: bool,
    /// The encrypted tunnel; `None`: there is none.
    pub wireguard: Option<WireguardConfig>,
    /// UDP port of the node and of the guests.
    pub port: u16,
    /// Whether IPv4 packets of the tunnel carry a UDP checksum. Off keeps the segmentation offload of many cloud NICs
    /// (2.7 times the throughput); IPv6 always has one.
    pub udp_checksum: bool,
    /// Whether packets of a tunnel are accepted from its VM's address only, and kept out of conntrack (nftables).
    pub anti_spoof: bool,
    /// What carries the redirects; `None`: the best this kernel has.
    pub redirect: Option<Classifier>,
    /// The VNIs of new tunnels.
    pub vnis: Vnis,
    /// UDP source ports, ends included; `None`: all the kernel has.
    pub source_ports: Option<(u16, u16)>,
    /// Whose tunnels these are: other daemons of this machine keep theirs.
    pub owner: Owner,
    /// The pods' way out of the cluster by their VMs; `None`: by the tunnel, as all the rest.
    pub external: Option<external::External>,
    /// Where the container runtime keeps the pods' network namespaces.
    pub netns_dir: PathBuf,
    /// How often guests try how large a packet may be on their way to the node, in whole seconds.
    pub probe_interval: Duration,
}

impl Default for TunnelConfig {
    fn default() -> TunnelConfig {
        TunnelConfig {
            kind: Kind::default(),
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

/// The node's tunnels. One per daemon; cheap to clone.
#[derive(Clone, Debug)]
pub struct Tunnel {
    steps: Arc<Steps>,
    auto: bool,
}

impl Tunnel {
    /// Opens the node's sockets in the network namespace of the calling thread, finds out what this kernel redirects
    /// with, and makes sure that the port is usable (some 40 ms). Makes nothing that stays.
    ///
    /// # Errors
    /// [`Error::Port`] with the device that is in the way; [`Error::NoRedirect`], [`Error::NoFilter`] and
    /// [`Error::Kernel`] where the kernel lacks what is needed.
    pub fn open(config: TunnelConfig) -> Result<Tunnel, Error> {
        Ok(Tunnel { auto: config.auto, steps: Arc::new(Steps::open(&config)?) })
    }

    /// Copies the pod's network.
    ///
    /// # Errors
    /// See [`peerpod_podnet::look::look`].
    pub async fn look(&self, netns: &Netns) -> Result<Seen, Error> {
        let netns = netns.clone();
        blocking(move || Steps::look(&netns)).await
    }

    /// The pod's sysctls that are not carried into the VM, in words; see [`peerpod_podnet::look::unlisted`]. Takes a
    /// while. Nothing where they cannot be read.
    pub async fn unlisted(&self, netns: &Netns, seen: &Seen) -> Vec<String> {
        let (netns, seen) = (netns.clone(), seen.clone());
        let read = move || look::unlisted(&netns, &seen).unwrap_or_default();
        tokio::task::spawn_blocking(read).await.unwrap_or_default()
    }

    /// Programs of others that run before the redirects, in words; see [`redirect::tcx`]. Takes a thread in the namespace,
    /// so not while a start waits for it.
    pub async fn hooked(&self, netns: &Netns, seen: &Seen) -> Vec<String> {
        let (netns, interfaces) = (netns.clone(), seen.interfaces.clone());
        let ask = move || redirect::tcx::obstacles(&netns, &interfaces).unwrap_or_default();
        tokio::task::spawn_blocking(ask).await.unwrap_or_default()
    }

    /// Makes a device for each interface (`pp-vx0`, `pp-vx1`, …) in the pod's namespace, down and without a remote, with
    /// VNIs nobody on this node has: all of them or none. With a recorded reservation its VNIs are taken (again) if that
    /// is possible; interfaces that are new since get devices, those that are gone lose them. Again for the same sandbox
    /// it finds the devices that are there.
    ///
    /// # Errors
    /// [`Error::Claimed`] when another sandbox has its tunnel in this namespace, [`Error::NoVni`], [`Error::Kernel`],
    /// [`Error::Netns`].
    pub async fn reserve(
        &self,
        netns: &Netns,
        sandbox: &str,
        seen: &Seen,
        v6_underlay: bool,
        recorded: Option<&Reserved>,
    ) -> Result<Reserved, Error> {
        let (steps, netns, sandbox) = (self.steps.clone(), netns.clone(), sandbox.to_owned());
        let (seen, recorded) = (seen.clone(), recorded.cloned());
        blocking(move || steps.reserve(&netns, &sandbox, &seen, v6_underlay, recorded.as_ref())).await
    }

    /// As [`Tunnel::reserve`] for a VM that a plain tunnel does not suit.
    ///
    /// # Errors
    /// As there; [`Error::CannotCarry`] where this node has no encrypted tunnel.
    pub async fn reserve_encrypted(
        &self,
        netns: &Netns,
        sandbox: &str,
        seen: &Seen,
        v6_underlay: bool,
    ) -> Result<Reserved, Error> {
        let (steps, netns, sandbox) = (self.steps.clone(), netns.clone(), sandbox.to_owned());
        let seen = seen.clone();
        blocking(move || steps.reserve_as(Kind::Wireguard, &netns, &sandbox, &seen, v6_underlay, None)).await
    }

    /// Whether the tunnel does not suit a VM with these addresses, whose link comes from `from`: a plain one over a
    /// public network, or through a NAT. Always false unless the kind is chosen by that.
    pub fn is_unsuited(
        &self,
        reserved: &Reserved,
        vm: IpAddr,
        addresses: &[IpAddr],
        from: Option<IpAddr>,
    ) -> bool {
        self.auto
            && reserved.kind == Kind::Vxlan
            && (is_public(vm) || from.is_some_and(|from| !addresses.contains(&from)))
    }

    /// The guest's end of an encrypted tunnel, as the relay is told it; `None` for a plain one.
    pub fn peer(&self, reserved: &Reserved, key: &[u8]) -> Option<TunnelPeer> {
        (reserved.kind == Kind::Wireguard).then(|| wireguard::Wireguard::peer(reserved, key)).flatten()
    }

    /// Whoever supplies the relay with the encrypted tunnel's descriptors, where there is one.
    pub fn carrier(&self) -> Option<Carrier> {
        self.steps.backends.wireguard().cloned().map(Carrier)
    }

    /// The node's own addresses that its guests keep to the tunnel, as they were last looked at; `None`: their pods
    /// have no other way.
    pub fn own_addresses(&self) -> Option<Arc<Vec<IpAddr>>> {
        self.steps.outside.as_ref().map(|outside| outside.own())
    }

    /// Looks at them again, after something changed around the node; whether they are others now. The next
    /// [`Tunnel::connect`] of each sandbox writes them into its plan.
    ///
    /// # Errors
    /// [`Error::Netns`].
    pub async fn look_at_own_addresses(&self) -> Result<bool, Error> {
        if self.steps.outside.is_none() {
            return Ok(false);
        }
        let steps = self.steps.clone();
        blocking(move || steps.outside.as_ref().map_or(Ok(false), external::Outside::look)).await
    }

    /// Ticks when guests of tunnels of this kind must hear anew where they find this node; `None` where the way to the
    /// VM says all there is.
    pub fn news(&self, reserved: &Reserved) -> Option<watch::Receiver<u64>> {
        let wireguard = self.steps.backends.wireguard().filter(|_| reserved.kind == Kind::Wireguard);
        wireguard.map(|wireguard| wireguard.news())
    }

    /// The node's address towards the VM, and the largest packet of a pod that fits on the way.
    ///
    /// # Errors
    /// [`Error::Path`] where there is none.
    pub async fn way(&self, reserved: &Reserved, vm: IpAddr) -> Result<(IpAddr, u32), Error> {
        let (steps, reserved) = (self.steps.clone(), reserved.clone());
        blocking(move || steps.way(&reserved, vm)).await
    }

    /// Gives the reserved tunnels their remote, and redirects the pod's traffic into them. Returns the plan for the
    /// guest. Called again it mends whatever is no longer so (a device that is down, has another MTU or leads elsewhere,
    /// a missing qdisc, redirect or filter element) and follows another address of the VM or of the node; with the same
    /// values and nothing to mend it changes nothing and returns the same plan. An interface without a tunnel (new since
    /// [`Tunnel::reserve`]) is left out.
    ///
    /// # Errors
    /// [`Error::Gone`] when a device is no longer there (reserve again), [`Error::Path`], [`Error::Kernel`],
    /// [`Error::Netns`]. What was done then stays until [`Tunnel::undo`].
    pub async fn connect(
        &self,
        netns: &Netns,
        sandbox: &str,
        reserved: &Reserved,
        seen: &Seen,
        vm: IpAddr,
    ) -> Result<NetworkPlan, Error> {
        self.connect_telling(netns, sandbox, reserved, seen, vm).await.map(|(plan, _)| plan)
    }

    /// As [`Tunnel::connect`]; and what may keep the pod's traffic from the tunnel although all of it stands, in words:
    /// filters of somebody else, which are not ours to change.
    ///
    /// # Errors
    /// As there.
    pub async fn connect_telling(
        &self,
        netns: &Netns,
        sandbox: &str,
        reserved: &Reserved,
        seen: &Seen,
        vm: IpAddr,
    ) -> Result<(NetworkPlan, Vec<String>), Error> {
        let (steps, netns, sandbox) = (self.steps.clone(), netns.clone(), sandbox.to_owned());
        let (reserved, seen) = (reserved.clone(), seen.clone());
        blocking(move || steps.connect(&netns, &sandbox, &reserved, &seen, vm)).await
    }

    /// Takes back whatever of [`Tunnel::reserve`] and [`Tunnel::connect`] is there, recorded or not: devices, redirects,
    /// filter elements. All of it is tried; what is gone already is fine, and another sandbox's is never touched.
    ///
    /// # Errors
    /// Everything that failed.
    pub async fn undo(
        &self,
        sandbox: &str,
        netns: Option<&Netns>,
        reserved: Option<&Reserved>,
        vm: Option<IpAddr>,
    ) -> Result<(), Vec<Error>> {
        let (steps, sandbox) = (self.steps.clone(), sandbox.to_owned());
        let (netns, reserved) = (netns.cloned(), reserved.cloned());
        let work = move || steps.undo(&sandbox, netns.as_ref(), reserved.as_ref(), vm);
        tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(vec![lost(e)]))
    }

    /// At the start of a daemon: removes what sandboxes that no longer live left behind, and makes the filter have
    /// exactly the tunnels of those that do. Looks once at each namespace of [`TunnelConfig::netns_dir`] and at those of the live
    /// sandboxes. Only what carries this owner's mark is touched. A tunnel that is connected while this runs must be in
    /// `live`: call it before sandboxes are served.
    pub async fn reconcile(&self, live: Vec<Live>) -> Reconciled {
        let steps = self.steps.clone();
        let work = move || reconcile::reconcile(&steps, &live);
        tokio::task::spawn_blocking(work)
            .await
            .unwrap_or_else(|e| Reconciled { errors: vec![lost(e)], ..Reconciled::default() })
    }

    /// Removes the filter's tables if no tunnel is in them. Undoing the last sandbox does that already; this is for the
    /// end of a daemon that wants to be sure.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub async fn close(&self) -> Result<(), Error> {
        let steps = self.steps.clone();
        blocking(move || steps.close()).await
    }
}

async fn blocking<T: Send + 'static>(
    f: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    tokio::task::spawn_blocking(f).await.unwrap_or_else(|e| Err(lost(e)))
}

fn lost(e: tokio::task::JoinError) -> Error {
    Error::Kernel { attempt: "work on a pod's network".to_owned(), source: std::io::Error::other(e).into() }
}

/// Whether an address is one of the public Internet, where others may listen.
fn is_public(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(a) => {
            let shared = a.octets()[0] == 100 && a.octets()[1] & 0xc0 == 64; // carriers' own NAT
            !(a.is_private() || a.is_link_local() || a.is_loopback() || shared)
        }
        IpAddr::V6(a) => !(a.is_unique_local() || a.is_unicast_link_local() || a.is_loopback()),
    }
}
