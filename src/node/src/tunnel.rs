//! The node's half of a pod's network: look at the pod's namespace, reserve its tunnel, connect it to the VM, undo.
//!
//! Each step is "make it so": called again after a crash it finds what is there and completes it. The work is
//! netlink, done by `peerpod_link::net` on blocking threads; this room only puts the steps together and owns the
//! node's own sockets. It touches the pod's network namespace, the node's VXLAN sockets and the nftables table
//! `peerpod`, nothing else.

use std::net::IpAddr;

pub use peerpod_link::net::Error;
pub use peerpod_link::net::look::Seen;
pub use peerpod_link::net::netns::{Netns, NetnsId};
use peerpod_proto::guest::NetworkPlan;
use serde::{Deserialize, Serialize};

/// How this node's tunnels are made; the same on all nodes and fixed for a tunnel's life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunnelConfig {
    /// UDP port of the node and of the guests.
    pub port: u16,
    /// Whether IPv4 packets of the tunnel carry a UDP checksum. Off keeps the segmentation offload of many cloud NICs
    /// (2.7 times the throughput); IPv6 always has one.
    pub udp_checksum: bool,
    /// Whether packets of a tunnel are accepted from its VM's address only, and kept out of conntrack (nftables).
    pub anti_spoof: bool,
}

impl Default for TunnelConfig {
    fn default() -> TunnelConfig {
        TunnelConfig { port: 4789, udp_checksum: false, anti_spoof: true }
    }
}

/// A tunnel whose VNI the kernel holds for us. Goes into the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserved {
    /// The VXLAN network identifier, 24 bits, unique on this node for port and family.
    pub vni: u32,
    /// The device's index in the pod's namespace.
    pub ifindex: u32,
    /// Whether node and VM talk IPv6.
    pub v6: bool,
    /// The UDP port.
    pub port: u16,
}

/// The node's tunnels. One per daemon.
#[derive(Debug)]
pub struct Tunnel {
    config: TunnelConfig,
}

impl Tunnel {
    /// Opens the node's sockets in the network namespace of the calling thread and makes sure that the port is
    /// usable. Makes nothing that stays.
    ///
    /// # Errors
    /// [`Error::Port`] with the device that is in the way.
    pub fn open(config: TunnelConfig) -> Result<Tunnel, Error> {
        Ok(Tunnel { config })
    }

    /// Copies the pod's network.
    ///
    /// # Errors
    /// See [`peerpod_link::net::look::look`].
    pub async fn look(&self, netns: &Netns) -> Result<Seen, Error> {
        peerpod_link::net::look::look(netns)
    }

    /// Makes the device `pp-vx0` in the pod's namespace, down and without a remote, with a VNI nobody on this node
    /// has. With a recorded reservation its VNI is taken (again) if that is possible.
    ///
    /// # Errors
    /// [`Error::Claimed`] when another sandbox has its tunnel in this namespace, [`Error::Kernel`], [`Error::Netns`].
    pub async fn reserve(
        &self,
        netns: &Netns,
        sandbox: &str,
        v6_underlay: bool,
        recorded: Option<&Reserved>,
    ) -> Result<Reserved, Error> {
        let _ = (netns, sandbox, v6_underlay, recorded, &self.config);
        Err(Error::Plan("not built yet".to_owned()))
    }

    /// Gives the reserved tunnel its remote, and redirects the pod's traffic into it. Returns the plan for the guest.
    ///
    /// # Errors
    /// [`Error::Gone`] when the device is no longer there, [`Error::Path`], [`Error::Kernel`], [`Error::Netns`].
    pub async fn connect(
        &self,
        netns: &Netns,
        reserved: &Reserved,
        seen: &Seen,
        vm: IpAddr,
    ) -> Result<NetworkPlan, Error> {
        let _ = (netns, reserved, seen, vm);
        Err(Error::Plan("not built yet".to_owned()))
    }

    /// Takes back whatever of [`Tunnel::reserve`] and [`Tunnel::connect`] is there: device, redirects, filter
    /// elements. All of it is tried; what is gone already is fine. With `reserved` only a device of that VNI is
    /// removed. Prefer [`Tunnel::undo_for`], which also finds a device whose reservation was not recorded.
    ///
    /// # Errors
    /// Everything that failed.
    pub async fn undo(
        &self,
        netns: Option<&Netns>,
        reserved: Option<&Reserved>,
        vm: Option<IpAddr>,
    ) -> Result<(), Vec<Error>> {
        let _ = (netns, reserved, vm);
        Ok(())
    }

    /// As [`Tunnel::undo`], and knows the sandbox's device by the sandbox's name even when the daemon died between
    /// making it and recording it.
    ///
    /// # Errors
    /// Everything that failed.
    pub async fn undo_for(
        &self,
        sandbox: &str,
        netns: Option<&Netns>,
        reserved: Option<&Reserved>,
        vm: Option<IpAddr>,
    ) -> Result<(), Vec<Error>> {
        let _ = sandbox;
        self.undo(netns, reserved, vm).await
    }

    /// Removes filter elements of tunnels that no live sandbox has (`live`: VM address and VNI), as after a restart;
    /// the table goes with the last of them. Returns how many were removed.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub async fn reconcile(&self, live: &[(IpAddr, u32)]) -> Result<usize, Error> {
        let _ = live;
        Ok(0)
    }
}
