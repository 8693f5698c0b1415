//! Connects a pod's network namespace to the pod's VM: inspects the namespace, reserves the tunnels, connects them to
//! the VM, and undoes all of it.
//!
//! Each step is idempotent: called again after a crash, it finds the existing state and completes it. The work is
//! netlink, done by `peerpod_podnet` on blocking threads; this module orders the steps and owns the node's own
//! sockets. It touches the pods' network namespaces, the node's VXLAN sockets and this daemon's own nftables tables,
//! nothing else. Everything that it makes carries an owner mark, so that several daemons can share a machine.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use peerpod_podnet::Error;
pub use peerpod_podnet::inspect::PodNetworkState;
pub use peerpod_podnet::mark::Owner;
pub use peerpod_podnet::netns::{Netns, NetnsId};
pub use peerpod_podnet::redirect::Classifier;
pub use peerpod_podnet::vxlan::Vnis;
use peerpod_podnet::{inspect, redirect};
use peerpod_proto::guest::NetworkPlan;
use peerpod_proto::relay::TunnelPeer;
use tokio::sync::watch;

mod anti_spoof;
mod backend;
pub mod external;
pub mod follow;
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
pub use wireguard::{FdHandoff, FdHandoffDetail, WireguardConfig, WireguardFds, netns_in};

/// Default folder in which container runtimes keep the pods' network namespaces.
pub const NETNS_DIR: &str = "/run/netns";

/// Settings of this node's tunnels; the same on all nodes and fixed for a tunnel's life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunnelConfig {
    /// Kind of new sandboxes' tunnels.
    pub kind: Kind,
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
    /// Opens the node's sockets in the network namespace of the calling thread. Chooses the classifier of this kernel's
    /// redirects, and checks that the port is usable (some 40 ms). Makes nothing that stays.
    ///
    /// # Errors
    /// [`Error::Port`] with the device that uses the port; [`Error::NoRedirect`], [`Error::NoFilter`] and
    /// [`Error::Kernel`] where the kernel lacks a needed function.
    pub fn open(config: TunnelConfig) -> Result<Tunnel, Error> {
        Ok(Tunnel { auto: config.auto, steps: Arc::new(Steps::open(&config)?) })
    }

    /// Inspects the pod's network.
    ///
    /// # Errors
    /// See [`peerpod_podnet::inspect::inspect`].
    pub async fn inspect(&self, netns: &Netns) -> Result<PodNetworkState, Error> {
        let netns = netns.clone();
        blocking(move || Steps::inspect(&netns)).await
    }

    /// Returns the pod's sysctls that are not carried into the VM, as text; see [`peerpod_podnet::inspect::unlisted`].
    /// Slow. Empty where they cannot be read.
    pub async fn unlisted(&self, netns: &Netns, seen: &PodNetworkState) -> Vec<String> {
        let (netns, seen) = (netns.clone(), seen.clone());
        let read = move || inspect::unlisted(&netns, &seen).unwrap_or_default();
        tokio::task::spawn_blocking(read).await.unwrap_or_default()
    }

    /// Returns the programs of others that run before the redirects, as text; see [`redirect::tcx`]. Takes a thread in
    /// the namespace, so no start may wait for it.
    pub async fn hooked(&self, netns: &Netns, seen: &PodNetworkState) -> Vec<String> {
        let (netns, interfaces) = (netns.clone(), seen.interfaces.clone());
        let ask = move || redirect::tcx::obstacles(&netns, &interfaces).unwrap_or_default();
        tokio::task::spawn_blocking(ask).await.unwrap_or_default()
    }

    /// Makes a device for each interface (`pp-vx0`, `pp-vx1`, …) in the pod's namespace, down and without a remote.
    /// Their VNIs are free on this node. Either all devices are made, or none. The VNIs of a recorded reservation are
    /// taken (again) if that is possible. Interfaces that are new since get devices, and those that are gone lose them.
    /// A repeated call for the same sandbox finds the existing devices.
    ///
    /// # Errors
    /// [`Error::Claimed`] when another sandbox has its tunnel in this namespace, [`Error::NoVni`], [`Error::Kernel`],
    /// [`Error::Netns`].
    pub async fn reserve(
        &self,
        netns: &Netns,
        sandbox: &str,
        seen: &PodNetworkState,
        v6_underlay: bool,
        recorded: Option<&Reserved>,
    ) -> Result<Reserved, Error> {
        let (steps, netns, sandbox) = (self.steps.clone(), netns.clone(), sandbox.to_owned());
        let (seen, recorded) = (seen.clone(), recorded.cloned());
        blocking(move || steps.reserve(&netns, &sandbox, &seen, v6_underlay, recorded.as_ref())).await
    }

    /// Reserves as [`Tunnel::reserve`] does, for a VM that a plain tunnel does not suit.
    ///
    /// # Errors
    /// The errors of [`Tunnel::reserve`], and [`Error::CannotCarry`] where this node has no encrypted tunnel.
    pub async fn reserve_encrypted(
        &self,
        netns: &Netns,
        sandbox: &str,
        seen: &PodNetworkState,
        v6_underlay: bool,
    ) -> Result<Reserved, Error> {
        let (steps, netns, sandbox) = (self.steps.clone(), netns.clone(), sandbox.to_owned());
        let seen = seen.clone();
        blocking(move || steps.reserve_as(Kind::Wireguard, &netns, &sandbox, &seen, v6_underlay, None)).await
    }

    /// Whether a plain tunnel does not suit a VM with these addresses and a link from `from`: it would cross a public
    /// network, or a NAT. Always false unless `tunnel.kind` is `auto`.
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

    /// Returns the guest's end of an encrypted tunnel, in the form for the relay; `None` for a plain one.
    pub fn peer(&self, reserved: &Reserved, key: &[u8]) -> Option<TunnelPeer> {
        (reserved.kind == Kind::Wireguard).then(|| wireguard::Wireguard::peer(reserved, key)).flatten()
    }

    /// Returns the supplier of the encrypted tunnel's descriptors for the relay, where there is such a tunnel.
    pub fn carrier(&self) -> Option<WireguardFds> {
        self.steps.backends.wireguard().cloned().map(WireguardFds)
    }

    /// Returns the node's own addresses that its guests keep to the tunnel, as they were last read; `None`: their pods
    /// have no other egress.
    pub fn own_addresses(&self) -> Option<Arc<Vec<IpAddr>>> {
        self.steps.outside.as_ref().map(|outside| outside.own())
    }

    /// Reads the node's own addresses again, after a change of its network; returns whether they have changed. The next
    /// [`Tunnel::connect`] of each sandbox writes them into its plan.
    ///
    /// # Errors
    /// [`Error::Netns`].
    pub async fn look_at_own_addresses(&self) -> Result<bool, Error> {
        if self.steps.outside.is_none() {
            return Ok(false);
        }
        let steps = self.steps.clone();
        blocking(move || steps.outside.as_ref().map_or(Ok(false), external::Outside::inspect)).await
    }

    /// Receiver that ticks when guests of tunnels of this kind need the node's new endpoints; `None` for tunnels that
    /// need only the path to the VM.
    pub fn news(&self, reserved: &Reserved) -> Option<watch::Receiver<u64>> {
        let wireguard = self.steps.backends.wireguard().filter(|_| reserved.kind == Kind::Wireguard);
        wireguard.map(|wireguard| wireguard.news())
    }

    /// Returns the node's address towards the VM, and the largest packet of a pod that fits on the path.
    ///
    /// # Errors
    /// [`Error::Path`] where there is no path.
    pub async fn way(&self, reserved: &Reserved, vm: IpAddr) -> Result<(IpAddr, u32), Error> {
        let (steps, reserved) = (self.steps.clone(), reserved.clone());
        blocking(move || steps.way(&reserved, vm)).await
    }

    /// Sets the remote of the reserved tunnels, and redirects the pod's traffic into them. Returns the plan for the
    /// guest.
    ///
    /// A repeated call repairs deviations: a device that is down, has another MTU or another remote, a missing qdisc,
    /// redirect or filter element. It also follows a new address of the VM or of the node. With the same values and
    /// nothing to repair, it changes nothing and returns the same plan. An interface without a tunnel (new since
    /// [`Tunnel::reserve`]) is left out.
    ///
    /// # Errors
    /// [`Error::Gone`] when a device no longer exists (reserve again), [`Error::Path`], [`Error::Kernel`],
    /// [`Error::Netns`]. Completed steps stay until [`Tunnel::undo`].
    pub async fn connect(
        &self,
        netns: &Netns,
        sandbox: &str,
        reserved: &Reserved,
        seen: &PodNetworkState,
        vm: IpAddr,
    ) -> Result<NetworkPlan, Error> {
        self.connect_telling(netns, sandbox, reserved, seen, vm).await.map(|(plan, _)| plan)
    }

    /// Connects as [`Tunnel::connect`] does. Also returns, as text, obstacles that may keep the pod's traffic from the
    /// tunnel: filters of other programs, which the node must not change.
    ///
    /// # Errors
    /// The errors of [`Tunnel::connect`].
    pub async fn connect_telling(
        &self,
        netns: &Netns,
        sandbox: &str,
        reserved: &Reserved,
        seen: &PodNetworkState,
        vm: IpAddr,
    ) -> Result<(NetworkPlan, Vec<String>), Error> {
        let (steps, netns, sandbox) = (self.steps.clone(), netns.clone(), sandbox.to_owned());
        let (reserved, seen) = (reserved.clone(), seen.clone());
        blocking(move || steps.connect(&netns, &sandbox, &reserved, &seen, vm)).await
    }

    /// Removes everything that [`Tunnel::reserve`] and [`Tunnel::connect`] made, recorded or not: devices, redirects,
    /// filter elements. All steps are tried. Missing state is no error, and the state of another sandbox is never
    /// touched.
    ///
    /// # Errors
    /// All errors that occurred.
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

    /// Removes the state of sandboxes that no longer live, and makes the filter contain exactly the tunnels of those
    /// that do. For the start of a daemon.
    ///
    /// Inspects each namespace of [`TunnelConfig::netns_dir`] and those of the live sandboxes once. Only state with
    /// this owner's mark is touched. A tunnel that is connected during the call must be in `live`: call it before
    /// sandboxes are served.
    pub async fn reconcile(&self, live: Vec<Live>) -> Reconciled {
        let steps = self.steps.clone();
        let work = move || reconcile::reconcile(&steps, &live);
        tokio::task::spawn_blocking(work)
            .await
            .unwrap_or_else(|e| Reconciled { errors: vec![lost(e)], ..Reconciled::default() })
    }

    /// Removes the filter's tables if no tunnel is in them. Undoing the last sandbox does that already; this is a
    /// safeguard for the end of a daemon.
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
    Error::Kernel {
        attempt: "run a task on a pod's network".to_owned(),
        source: std::io::Error::other(e).into(),
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
