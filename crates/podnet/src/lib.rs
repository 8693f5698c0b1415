//! Inspects, sets up and removes the pod's network over netlink, on the node and in the VM.
//!
//! On the node it reads the pod's namespace and makes the VXLAN tunnel and the redirects, in the VM the interfaces.
//!
//! Netlink calls are synchronous on purpose: the kernel answers a request inside `send`, in microseconds. Only deleting
//! a device blocks, for some 20 ms (a grace period of the kernel). The module starts no process: it uses netlink
//! sockets, sysctl files and, for redirects, bpf(2). Only the threads of [`netns`] enter a network namespace.
//!
//! Each function that returns a `Result` may return [`Error::Kernel`] and [`Error::Netns`], and a function that reads a
//! plan also [`Error::Plan`]. Its documentation names the further errors.

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

pub mod carrier;
pub mod drift;
pub mod events;
pub mod external;
pub mod gc;
pub mod guest;
pub mod inspect;
pub mod link;
pub mod localhost;
pub mod mark;
pub mod metadata;
pub mod netlink;
pub mod netns;
pub mod nft;
pub mod plan;
pub mod redirect;
pub mod tunnel;
pub mod underlay;
pub mod vxlan;
pub mod wireguard;

/// Error of this module. Each text names the failed operation, its object, the cause, and the remedy if there is one.
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
        /// The kernel's error.
        source: io::Error,
    },
    /// A path leads to a file that is not a network namespace.
    #[error("open network namespace {0}: it is {1}, not a network namespace")]
    NotNetns(PathBuf, &'static str),
    /// The kernel refused a request, or the request could not be sent.
    #[error("{attempt}: {source}")]
    Kernel {
        /// The failed operation and its object.
        attempt: String,
        /// Why it failed.
        source: netlink::Error,
    },
    /// Part of the pod's network cannot be carried into the VM.
    #[error("look at the pod's network: {0}")]
    CannotCarry(String),
    /// The pod has more entries of a kind than the limit; reading stopped there.
    #[error("look at the pod's network: more than {1} {0}; no pod has so many")]
    TooMany(&'static str, usize),
    /// Another sandbox already has its tunnel in this network namespace.
    #[error(
        "reserve a tunnel in {netns}: it already carries the tunnel of {other}; two sandboxes cannot share one network namespace"
    )]
    Claimed {
        /// The namespace's path.
        netns: PathBuf,
        /// The other sandbox, from the device's alias.
        other: String,
    },
    /// The reserved device no longer exists.
    #[error(
        "connect the tunnel in {0}: the reserved device (VNI {1}) is gone: the network namespace was made anew, or \
         another program deleted the device or took its VNI; stop that program, and delete the pod to get another VNI"
    )]
    Gone(PathBuf, u32),
    /// The tunnel's UDP port cannot be used. The cause names the conflicting device where it is known.
    #[error(
        "use UDP port {0} for the pods' tunnels: {1}; set `tunnel.port` to a free one (4790, 8472 and 6789 are common, and the same on every node)"
    )]
    Port(u16, String),
    /// Every VNI that tunnels on a port may have is in use.
    #[error("find a free VNI on UDP port {0}: {1} are in use on this node; widen `tunnel.vnis`")]
    NoVni(u16, String),
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
    /// The kernel has no TUN devices.
    #[error(
        "open /dev/net/tun for the encrypted tunnel: {0}; load the kernel's module tun, or set `tunnel.kind: vxlan`"
    )]
    NoTun(io::Error),
    /// The path between node and VM does not fit the tunnel.
    #[error("reach {peer} for the tunnel: {why}")]
    Path {
        /// Address of the other end.
        peer: std::net::IpAddr,
        /// Defect of the path.
        why: String,
    },
    /// The network plan is invalid or unsupported.
    #[error("read the network plan: {0}")]
    Plan(String),
}

impl Error {
    /// Refuses a value of the plan that fits no netlink message.
    pub(crate) fn plan(why: impl Display) -> Error {
        Error::Plan(why.to_string())
    }

    /// Returns the function that adds the failed operation and its object to the kernel's refusal.
    pub fn kernel(attempt: impl Into<String>) -> impl FnOnce(netlink::Error) -> Error {
        let attempt = attempt.into();
        move |source| Error::Kernel { attempt, source }
    }

    /// Wraps an error of the operating system with the attempt at a network namespace.
    pub(crate) fn netns(attempt: &'static str, path: &Path) -> impl Fn(io::Error) -> Error {
        move |source| Error::Netns { attempt, path: path.to_owned(), source }
    }

    /// Wraps the error of [`netlink::Client::route`] and [`netlink::Client::netfilter`].
    pub(crate) fn socket(source: io::Error) -> Error {
        Error::kernel("open a netlink socket")(source.into())
    }

    /// Returns the kernel's error number, where the kernel refused a request or a system call failed.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Error::Kernel { source: netlink::Error::Refused(refusal), .. } => Some(refusal.errno),
            Error::Kernel { source: netlink::Error::Socket(source), .. } | Error::Netns { source, .. } => {
                source.raw_os_error().map(Errno::from_raw)
            }
            _ => None,
        }
    }

    /// Returns whether the object of the request did not exist (any more).
    pub fn is_gone(&self) -> bool {
        match self {
            Error::Kernel { source, .. } => source.is_gone(),
            Error::Netns { source, .. } => source.kind() == io::ErrorKind::NotFound,
            Error::Gone { .. } => true,
            _ => false,
        }
    }
}
