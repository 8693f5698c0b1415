//! The guest's half of the pod's network.

use std::path::Path;

use peerpod_proto::guest::NetworkPlan;

use super::Error;

/// What [`apply`] made or found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// The MTU of the pod's interface, in bytes.
    pub mtu: u32,
    /// False where all of it was already as planned.
    pub changed: bool,
}

/// Makes the pod's network in the namespace at `podns` as the plan says: all of it or nothing. Called again with the
/// same plan it verifies and leaves what is right alone. Must be called from a thread in the VM's own network
/// namespace: that is where the tunnel's packets leave.
///
/// # Errors
/// [`Error::Plan`] for a plan that makes no sense, [`Error::Path`] where the node cannot be reached, [`Error::Kernel`].
pub fn apply(plan: &NetworkPlan, podns: &Path) -> Result<Applied, Error> {
    let _ = (plan, podns);
    Err(Error::Plan("not built yet".to_owned()))
}

/// Removes what [`apply`] made. Gone is fine; everything is tried.
///
/// # Errors
/// All that failed.
pub fn remove(plan: &NetworkPlan, podns: &Path) -> Result<(), Vec<Error>> {
    let _ = (plan, podns);
    Ok(())
}
