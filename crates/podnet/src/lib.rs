//! The pod's network over netlink: look at a pod's network namespace, make the VXLAN tunnel and the redirects on the
//! node, make the pod's interface in the VM, and undo each of them.
//!
//! Synchronous on purpose: a netlink request to the kernel is answered inside `send`, in microseconds; only deleting
//! a device waits (some 20 ms, a grace period of the kernel), and who calls that from async code moves it to a
//! blocking thread. Plain data in, plain data out. Touches the kernel through netlink sockets and nothing else: no
//! `ip`, `tc`, `nft` or `iptables` process. A network namespace is entered only by the threads of [`netns`].

use std::io;
use std::path::PathBuf;

use nix::errno::Errno;

pub mod carrier;
pub mod drift;
pub mod events;
pub mod external;
pub mod guest;
pub mod leftover;
pub(crate) mod link;
pub mod localhost;
pub mod look;
pub mod mark;
pub mod metadata;
pub mod netlink;
pub mod netns;
pub mod nft;
pub mod plan;
pub mod redirect;
pub mod room;
pub mod tunnel;
pub mod uplink;
pub mod vxlan;
pub mod wireguard;

/// What can go wrong in this room. Each text names what was attempted on what, why it failed, and where somebody can
/// do something about it, what.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A path to a network namespace cannot be opened, made or removed.
    #[error("{attempt} network namespace {path}: {source}")]
    Netns {
        /// "open", "make", "remove" or "enter".
        attempt: &'static str,
        /// The path as it was given.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A path leads to something that is no network namespace.
    #[error("open network namespace {path}: it is {what}, not a network namespace")]
    NotNetns {
        /// The path as it was given.
        path: PathBuf,
        /// What it is instead.
        what: String,
    },
    /// The kernel refused a request, or could not be asked.
    #[error("{attempt}: {source}")]
    Kernel {
        /// What was attempted on what.
        attempt: String,
        /// Why it failed.
        source: netlink::Error,
    },
    /// The pod's network has something that cannot be carried into the VM.
    #[error("look at the pod's network: {0}")]
    CannotCarry(String),
    /// More entries than any pod has; nothing was read further.
    #[error("look at the pod's network: more than {limit} {what}; no pod has so many")]
    TooMany {
        /// Which entries.
        what: &'static str,
        /// How many are read at most.
        limit: usize,
    },
    /// Another sandbox already has its tunnel in this network namespace.
    #[error(
        "reserve a tunnel in {netns}: it already carries the tunnel of {other}; two sandboxes cannot share one network namespace"
    )]
    Claimed {
        /// The namespace's path.
        netns: PathBuf,
        /// The other sandbox, as the device says.
        other: String,
    },
    /// The device that was reserved is no longer there.
    #[error(
        "connect the tunnel in {netns}: the reserved device (VNI {vni}) is gone; the network namespace was made anew or somebody deleted the device"
    )]
    Gone {
        /// The namespace's path.
        netns: PathBuf,
        /// The reserved VNI.
        vni: u32,
    },
    /// The tunnel's UDP port cannot be used.
    #[error(
        "use UDP port {port} for the pods' tunnels: {why}; set `tunnel.port` to a free one (4790, 8472 and 6789 are common, and the same on every node)"
    )]
    Port {
        /// The port that was asked for.
        port: u16,
        /// Who is in the way.
        why: String,
    },
    /// Every VNI that tunnels may have is in use.
    #[error(
        "find a free VNI on UDP port {port}: {what} of {min} to {max} are in use on this node; widen the range with \
         `tunnel.vni-min` and `tunnel.vni-max`"
    )]
    NoVni {
        /// The tunnels' port.
        port: u16,
        /// The first VNI of the range.
        min: u32,
        /// The last one.
        max: u32,
        /// How many of them were tried, in words.
        what: &'static str,
    },
    /// The kernel cannot redirect the pods' traffic.
    #[error(
        "redirect pods' traffic with tc: {0}; load the kernel's modules sch_ingress, act_mirred and one of cls_u32, \
         cls_matchall and cls_bpf"
    )]
    NoRedirect(String),
    /// The kernel cannot filter the tunnels' packets.
    #[error(
        "use nftables against forged tunnel packets: {0}; load the kernel's module nf_tables, or accept the risk with \
         `tunnel.anti-spoof: false`"
    )]
    NoFilter(String),
    /// The path between node and VM does not fit the tunnel.
    #[error("reach {peer} for the tunnel: {why}")]
    Path {
        /// The other end.
        peer: std::net::IpAddr,
        /// What is wrong with the path.
        why: String,
    },
    /// A plan that the guest cannot follow.
    #[error("read the network plan: {0}")]
    Plan(String),
}

impl Error {
    /// Attaches what was attempted to what the kernel said.
    pub(crate) fn kernel(attempt: impl Into<String>) -> impl FnOnce(netlink::Error) -> Error {
        let attempt = attempt.into();
        move |source| Error::Kernel { attempt, source }
    }

    /// The kernel's error number, where it refused a request or a system call.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Error::Kernel { source: netlink::Error::Refused(refusal), .. } => Some(refusal.errno),
            Error::Kernel { source: netlink::Error::Socket(source), .. } | Error::Netns { source, .. } => {
                source.raw_os_error().map(Errno::from_raw)
            }
            _ => None,
        }
    }

    /// Whether the thing the request was about did not exist (any more).
    pub fn is_gone(&self) -> bool {
        match self {
            Error::Kernel { source, .. } => source.is_gone(),
            Error::Netns { source, .. } => source.kind() == io::ErrorKind::NotFound,
            Error::Gone { .. } => true,
            _ => false,
        }
    }
}
