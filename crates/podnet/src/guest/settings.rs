//! Writes the pod's sysctls in the VM. A plan can name only those of the list that [`crate::inspect`] reads.

use super::transaction::Transaction;
use crate::Error;
use crate::inspect::sysctl::{self, Defaults, OF_NAMESPACE, Values};
use crate::inspect::{PodNetworkState, Sysctl};
use crate::netns::Netns;

/// Sets the plan's sysctls, and resets those that only an older plan had to the default of a new namespace. A sysctl
/// that the kernel lacks does not fail the pod: the function returns the ones that could not be set.
pub(super) fn write(
    transaction: &mut Transaction<'_>,
    netns: &Netns,
    wanted: &PodNetworkState,
    previous: Option<&PodNetworkState>,
) -> Result<Vec<String>, Error> {
    let (mut left_out, mut files) = (Vec::new(), Vec::new());
    let mut put = |path_of: &dyn Fn(&str) -> Option<String>,
                   before: &[Sysctl],
                   now: &[Sysctl],
                   new: fn(&Defaults) -> &Values| {
        let stale = before.iter().filter(|old| !now.iter().any(|sysctl| sysctl.name == old.name));
        // The defaults come from a namespace of their own, which is made for the first stale sysctl.
        let default = |name: &str| new(sysctl::defaults()).get(name);
        let reset = stale.filter_map(|old| Some((&old.name, default(&old.name)?)));
        for (name, value) in reset.chain(now.iter().map(|sysctl| (&sysctl.name, &sysctl.value))) {
            match path_of(name) {
                Some(path) => files.push((path, value.clone())),
                None => left_out.push(format!("sysctl {name}, which this program does not know")),
            }
        }
    };
    // The namespace's sysctls come first: some of them change those of every interface.
    let of_namespace = |name: &str| OF_NAMESPACE.contains(&name).then(|| name.to_owned());
    let before = previous.map(|plan| plan.sysctls.as_slice()).unwrap_or_default();
    put(&of_namespace, before, &wanted.sysctls, |defaults| &defaults.namespace);
    for interface in &wanted.interfaces {
        let before = previous.and_then(|p| p.interfaces.iter().find(|i| i.name == interface.name));
        let before = before.map(|interface| interface.sysctls.as_slice()).unwrap_or_default();
        let of_interface = |name: &str| sysctl::path_of(name, &interface.name);
        put(&of_interface, before, &interface.sysctls, |defaults| &defaults.interface);
    }
    if files.is_empty() {
        return Ok(left_out);
    }
    let written =
        netns.run(|| files.iter().map(|(path, value)| sysctl::ensure(path, value)).collect::<Vec<_>>());
    let written = written.map_err(Error::netns("enter", netns.path()))?;
    for (outcome, (path, value)) in written.into_iter().zip(&files) {
        match outcome {
            Ok(true) => transaction.note(None),
            Ok(false) => {}
            Err(e) => left_out.push(format!("sysctl {path}={value}: {e}")),
        }
    }
    Ok(left_out)
}
