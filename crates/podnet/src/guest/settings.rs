//! Writes the pod's sysctls in the VM. A thread in the pod's namespace writes them, and only those of the fixed list
//! that [`crate::inspect`] reads: a plan cannot name another file.

use std::fs;
use std::path::Path;

use super::transaction::Transaction;
use crate::Error;
use crate::inspect::Sysctl;
use crate::inspect::sysctl::{self, OF_NAMESPACE, ROOT};
use crate::netns::Netns;
use crate::plan::Planned;

/// Sets the plan's sysctls, and resets those that only an older plan had to the default of a new namespace. A sysctl
/// that the kernel lacks does not fail the pod: the function returns the ones that could not be set.
pub(super) fn write(
    transaction: &mut Transaction<'_>,
    netns: &Netns,
    wanted: &Planned,
    previous: Option<&Planned>,
) -> Result<Vec<String>, Error> {
    let mut left_out = Vec::new();
    let mut files: Vec<(String, String)> = Vec::new();
    let mut put = |path: Option<String>, of: &Sysctl| match path {
        Some(path) => files.push((path, of.value.clone())),
        None => left_out.push(format!("sysctl {}, which this program does not know", of.name)),
    };
    // The namespace's sysctls come first: some of them change those of every interface.
    let of_namespace = |name: &str| OF_NAMESPACE.contains(&name).then(|| name.to_owned());
    for old in stale(previous.map(|p| p.sysctls.as_slice()), &wanted.sysctls, &sysctl::namespace_default) {
        put(of_namespace(&old.name), &old);
    }
    for new in &wanted.sysctls {
        put(of_namespace(&new.name), new);
    }
    for interface in &wanted.interfaces {
        let before = previous.and_then(|p| p.interfaces.iter().find(|i| i.name == interface.name));
        let of_interface = |name: &str| sysctl::path_of(name, &interface.name);
        for old in stale(before.map(|i| i.sysctls.as_slice()), &interface.sysctls, &sysctl::interface_default)
        {
            put(of_interface(&old.name), &old);
        }
        for new in &interface.sysctls {
            put(of_interface(&new.name), new);
        }
    }
    if files.is_empty() {
        return Ok(left_out);
    }
    let written = netns.run(|| files.iter().map(|(path, value)| ensure(path, value)).collect::<Vec<_>>());
    let failed = |source| Error::Netns { attempt: "enter", path: netns.path().to_owned(), source };
    for (outcome, (path, value)) in written.map_err(failed)?.into_iter().zip(&files) {
        match outcome {
            Ok(true) => transaction.note(None),
            Ok(false) => {}
            Err(e) => left_out.push(format!("sysctl {path}={value}: {e}")),
        }
    }
    Ok(left_out)
}

/// Returns the sysctls that only the older plan had, with their default values.
fn stale(before: Option<&[Sysctl]>, now: &[Sysctl], default: &dyn Fn(&str) -> Option<String>) -> Vec<Sysctl> {
    let gone = before.unwrap_or_default().iter().filter(|old| !now.iter().any(|new| new.name == old.name));
    gone.filter_map(|old| Some(Sysctl { name: old.name.clone(), value: default(&old.name)? })).collect()
}

/// Writes one file if its value differs; returns whether it did.
fn ensure(path: &str, value: &str) -> std::io::Result<bool> {
    let root = Path::new(ROOT);
    if sysctl::read(root, path)? == value {
        return Ok(false);
    }
    fs::write(root.join(path), value)?;
    Ok(true)
}
