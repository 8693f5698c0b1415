//! The node's steps after the reservation: the way to the VM, the connection with both redirects, and the undoing of
//! all of it. What one pod needs, in as few exchanges with the kernel as there can be.

use std::net::IpAddr;
use std::thread::sleep;
use std::time::Duration;

use nix::errno::Errno;

use super::Error;
use super::link;
use super::look::Seen;
use super::netlink::Client;
use super::netns::Netns;
use super::plan;
use super::redirect;
use super::vxlan::{self, DEVICE, Held, Shape};

/// A namespace that is being torn down or a qdisc in use answers "busy" for a moment.
const BUSY_TRIES: u32 = 5;
const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// How the node reaches a VM, and what is left for a pod's packet on that way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelWay {
    /// The node's address towards the VM.
    pub source: IpAddr,
    /// The largest inner packet that fits without fragments, in bytes.
    pub room: u32,
    vm: IpAddr,
}

impl TunnelWay {
    /// The pod's MTU in the VM: its own where that fits, else what fits.
    ///
    /// # Errors
    /// [`Error::Path`] where too little is left for the pod's families.
    pub fn pod_mtu(&self, seen: &Seen) -> Result<u32, Error> {
        let primary = seen.primary();
        plan::fit(primary.mtu, self.room, primary.has_v6(), self.vm)
    }
}

/// Asks the kernel for the way to the VM. `host` is a socket of the node's namespace.
///
/// # Errors
/// [`Error::Path`] where there is none, or the VM's address is of the other family than the reservation.
pub fn way(host: &mut Client, shape: Shape, vm: IpAddr) -> Result<TunnelWay, Error> {
    if vm.is_ipv6() != shape.v6 {
        let family = if shape.v6 { "IPv6" } else { "IPv4" };
        return Err(Error::Path { peer: vm, why: format!("the tunnel was reserved for {family}") });
    }
    let way = link::way_to(host, vm)?;
    Ok(TunnelWay { source: way.source, room: way.mtu.saturating_sub(shape.overhead()), vm })
}

/// What connects a reserved device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// The reserved device.
    pub held: Held,
    /// The VM's address.
    pub remote: IpAddr,
    /// The node's address.
    pub local: IpAddr,
    /// Index of the pod's interface.
    pub pod_interface: u32,
    /// The pod interface's MTU; the device gets the same.
    pub mtu: u32,
}

/// Gives the device its ends, takes it up, and redirects the pod's interface into it and back: one datagram of six
/// messages. Again with the same values it changes nothing.
///
/// # Errors
/// [`Error::Gone`] when the device is not (or no longer) there, [`Error::Kernel`]. What was done stays; [`undo`].
pub fn connect(netns: &Netns, connection: &Connection) -> Result<(), Error> {
    let Connection { held, remote, local, pod_interface, mtu } = *connection;
    let mut pod = netns.netlink()?;
    let mut messages = vec![(0, vxlan::connection(held, remote, local))];
    messages.push((0, vxlan::with_mtu(held.ifindex, mtu)));
    messages.extend(redirect::messages(pod_interface, held.ifindex));
    let attempt = || format!("connect the tunnel in {}", netns.path().display());
    for left in (0..BUSY_TRIES).rev() {
        let mut answers = pod.batch(&messages).map_err(Error::kernel(attempt()))?;
        let redirects = answers.split_off(2.min(answers.len()));
        match answers.into_iter().find(Result::is_err) {
            None | Some(Ok(())) => {
                return redirect::complete(&mut pod, pod_interface, held.ifindex, redirects);
            }
            Some(Err(no)) if no.errno == Errno::EBUSY && left > 0 => sleep(BUSY_PAUSE),
            Some(Err(no)) => {
                // Gone, or another device has its index now (then the kernel refuses to change kind or VNI).
                let there = link::by_index(&mut pod, held.ifindex).map_err(Error::kernel(attempt()))?;
                if there.is_none_or(|l| l.vxlan.is_none_or(|v| v.vni != held.vni)) {
                    return Err(Error::Gone { netns: netns.path().to_owned(), vni: held.vni });
                }
                return Err(Error::kernel(attempt())(no.into()));
            }
        }
    }
    Ok(())
}

/// Takes back the redirects and the device in the pod's namespace: the device of this sandbox (by its MAC), and the
/// one that was reserved (by its VNI and port). Another sandbox's device stays. Everything is tried, what failed is
/// added to `errors`; gone is fine. Takes some 20 ms when there is a device.
pub fn undo(netns: &Netns, sandbox: Option<&str>, held: Option<(Held, u16)>, errors: &mut Vec<Error>) {
    let mut pod = match netns.netlink() {
        Ok(pod) => pod,
        Err(e) => return errors.push(e),
    };
    let there = link::by_name(&mut pod, DEVICE)
        .map_err(Error::kernel(format!("look for {DEVICE} in {}", netns.path().display())));
    let device = there.unwrap_or_else(|e| {
        errors.push(e);
        None
    });
    let is_ours = |link: &link::Link| {
        sandbox.is_some_and(|sandbox| link.mac == Some(vxlan::owner_mac(sandbox)))
            || held.is_some_and(|(held, port)| {
                link.vxlan.as_ref().is_some_and(|v| v.vni == held.vni && v.port == port)
            })
    };
    let someone_elses = device.as_ref().is_some_and(|link| !is_ours(link));
    let device = device.filter(is_ours).map(|link| link.index);
    if !someone_elses {
        let mut targets: Vec<u32> = device.into_iter().collect();
        targets.extend(held.map(|(held, _)| held.ifindex));
        redirect::undo(&mut pod, &targets, errors);
    }
    if let Some(index) = device
        && let Err(e) = vxlan::remove(&mut pod, index)
    {
        errors.push(e);
    }
}
