//! Inspects a pod's network namespace once and returns it as plain data: interfaces, addresses, routes, neighbours,
//! policy rules and settings. Only reads, with one request per kind of object, regardless of their number.
//!
//! An object that cannot be carried is an error if the pod would reach other networks without it. Other omitted objects
//! (an interface without an Ethernet address, an unknown rule) are in [`PodNetworkState::left_out`], as text.

use super::Error;
use super::netns::Netns;

mod assemble;
mod parse;
mod seen;
pub(crate) mod sysctl;
mod unlisted;

pub(crate) use parse::Picture;
pub(crate) use seen::usual_broadcast;
pub use seen::{
    Address, FibPlace, Hop, Interface, Neighbour, PodNetworkState, Prefix, Route, Rule, RuleFlow,
    RuleSelector, Sysctl, TABLE_LOCAL, TABLE_MAIN, UNICAST,
};

pub use unlisted::unlisted;

/// Reads the pod's network.
///
/// # Errors
/// [`Error::CannotCarry`], which names the object, [`Error::TooMany`].
pub fn inspect(netns: &Netns) -> Result<PodNetworkState, Error> {
    let mut client = netns.netlink()?;
    // In parallel: only a thread in the namespace can read the files, and that takes most of the time.
    let (settings, picture) = netns.run_beside(sysctl::read_own, || Picture::take(&mut client));
    let picture = picture?;
    netns.keep(client);
    assemble::assemble(picture, settings.ok().as_ref(), sysctl::defaults())
}
