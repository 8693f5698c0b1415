//! Looks at a pod's network namespace once and copies what makes its network as plain data: every interface with its
//! addresses, routes, neighbours and settings, the policy rules, the namespace's own settings. Reads only, one request
//! per kind of thing, however many there are of it.
//!
//! What cannot be carried into the VM and changes what the pod reaches is an error that names it; what is merely
//! left out (an interface without an Ethernet address, a rule of an unknown kind) is listed in [`Seen::left_out`] for a
//! log line or an Event.

use super::Error;
use super::netns::Netns;

mod assemble;
mod picture;
mod seen;
pub(crate) mod sysctl;
mod unlisted;

pub(crate) use picture::Picture;
pub(crate) use seen::usual_broadcast;
pub use seen::{
    Address, Hop, Interface, Neighbour, Prefix, Route, Rule, Seen, Sysctl, TABLE_LOCAL, TABLE_MAIN, UNICAST,
};

pub use unlisted::unlisted;

/// Copies the pod's network.
///
/// # Errors
/// [`Error::CannotCarry`] with the thing named, [`Error::TooMany`], [`Error::Kernel`], [`Error::Netns`].
pub fn look(netns: &Netns) -> Result<Seen, Error> {
    let mut client = netns.netlink()?;
    // Beside each other: the files can be read by a thread in the namespace only, and that is most of the time.
    let (settings, picture) = netns.run_beside(sysctl::read_own, || Picture::take(&mut client));
    let picture = picture?;
    netns.keep(client);
    assemble::assemble(picture, settings.ok().as_ref(), sysctl::defaults())
}
