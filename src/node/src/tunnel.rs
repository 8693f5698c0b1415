//! The node's half of a pod's network: look at the pod's namespace, reserve its tunnel, connect it to the VM, undo.
//!
//! Each step is "make it so": called again after a crash it finds what is there and completes it. The work is
//! netlink, done by `peerpod_link::net` on blocking threads; this room only puts the steps together and owns the
//! node's own sockets. It touches the pod's network namespace, the node's VXLAN sockets and the nftables table
//! `peerpod`, nothing else.

use std::net::IpAddr;
use std::sync::Arc;

pub use peerpod_link::net::Error;
pub use peerpod_link::net::look::Seen;
pub use peerpod_link::net::netns::{Netns, NetnsId};
use peerpod_proto::guest::NetworkPlan;
use serde::{Deserialize, Serialize};

pub mod follow;
mod steps;
#[cfg(test)]
mod tests;

use steps::Steps;

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

/// The node's tunnels. One per daemon; cheap to clone.
#[derive(Clone, Debug)]
pub struct Tunnel {
    steps: Arc<Steps>,
}

impl Tunnel {
    /// Opens the node's sockets in the network namespace of the calling thread and makes sure that the port is
    /// usable (some 40 ms). Makes nothing that stays.
    ///
    /// # Errors
    /// [`Error::Port`] with the device that is in the way; [`Error::Kernel`] where the kernel lacks what is needed.
    pub fn open(config: TunnelConfig) -> Result<Tunnel, Error> {
        Ok(Tunnel { steps: Arc::new(Steps::open(config)?) })
    }

    /// Copies the pod's network.
    ///
    /// # Errors
    /// See [`peerpod_link::net::look::look`].
    pub async fn look(&self, netns: &Netns) -> Result<Seen, Error> {
        let netns = netns.clone();
        blocking(move || Steps::look(&netns)).await
    }

    /// Makes the device `pp-vx0` in the pod's namespace, down and without a remote, with a VNI nobody on this node
    /// has. With a recorded reservation its VNI is taken (again) if that is possible. Again for the same sandbox it
    /// finds the device that is there.
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
        let (steps, netns, sandbox) = (self.steps.clone(), netns.clone(), sandbox.to_owned());
        let recorded = recorded.copied();
        blocking(move || steps.reserve(&netns, &sandbox, v6_underlay, recorded.as_ref())).await
    }

    /// How the node reaches a VM now: its own address, and what of a packet fits through the tunnel, in bytes.
    ///
    /// # Errors
    /// [`Error::Path`] where there is no way.
    pub async fn way(&self, reserved: &Reserved, vm: IpAddr) -> Result<(IpAddr, u32), Error> {
        let (steps, reserved) = (self.steps.clone(), *reserved);
        blocking(move || steps.way(&reserved, vm).map(|way| (way.source, way.room))).await
    }

    /// Gives the reserved tunnel its remote, and redirects the pod's traffic into it. Returns the plan for the guest.
    /// Again with the same values it changes nothing and returns the same plan.
    ///
    /// # Errors
    /// [`Error::Gone`] when the device is no longer there (reserve again), [`Error::Path`], [`Error::Kernel`],
    /// [`Error::Netns`]. What was done then stays until [`Tunnel::undo_for`].
    pub async fn connect(
        &self,
        netns: &Netns,
        reserved: &Reserved,
        seen: &Seen,
        vm: IpAddr,
    ) -> Result<NetworkPlan, Error> {
        let (steps, netns, reserved, seen) = (self.steps.clone(), netns.clone(), *reserved, seen.clone());
        blocking(move || steps.connect(&netns, &reserved, &seen, vm)).await
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
        self.undo_any(None, netns, reserved, vm).await
    }

    /// As [`Tunnel::undo`], and knows the sandbox's device by the sandbox's name even when the daemon died between
    /// making it and recording it. Never touches another sandbox's device.
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
        self.undo_any(Some(sandbox.to_owned()), netns, reserved, vm).await
    }

    async fn undo_any(
        &self,
        sandbox: Option<String>,
        netns: Option<&Netns>,
        reserved: Option<&Reserved>,
        vm: Option<IpAddr>,
    ) -> Result<(), Vec<Error>> {
        let (steps, netns, reserved) = (self.steps.clone(), netns.cloned(), reserved.copied());
        let work = move || steps.undo(sandbox.as_deref(), netns.as_ref(), reserved.as_ref(), vm);
        tokio::task::spawn_blocking(work).await.unwrap_or_else(|e| Err(vec![lost(e)]))
    }

    /// Makes the filter's elements those of the live sandboxes (`live`: VM address and VNI), as after a restart or
    /// after somebody flushed the node's rules; the table goes with the last of them. Returns how many were removed.
    /// A tunnel that is connected while this runs must be in `live`: call it before new sandboxes are served.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub async fn reconcile(&self, live: &[(IpAddr, u32)]) -> Result<usize, Error> {
        let (steps, live) = (self.steps.clone(), live.to_vec());
        blocking(move || steps.reconcile(&live)).await
    }

    /// Removes the filter's table if no tunnel is in it. Undoing the last sandbox does that already; this is for the
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
