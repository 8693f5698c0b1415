//! Lists the changed kernel settings of a pod that are not carried into the VM, as an explanation of a pod that behaves
//! differently there. It reads all of some five hundred files, in a millisecond or two, and never during a start.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::OnceLock;

use super::seen::PodNetworkState;
use super::sysctl::{OF_NAMESPACE, ROOT, path_of, read};
use crate::netns::Netns;

/// Maximum number of named settings; one more entry counts the rest.
const MOST: usize = 16;
/// Counters and values that the kernel makes, duplicates of other files, and values that follow from the MTU.
const NO_SETTINGS: &[&str] = &[
    "base_reachable_time",
    "mc_forwarding",
    "mtu",
    "nf_conntrack_count",
    "retrans_time",
    "stable_secret",
    "tcp_fastopen_key",
    "unres_qlen",
];

type All = BTreeMap<String, String>;

/// Returns texts that begin with "sysctl": the settings that differ from a new namespace's and are on none of the lists
/// by which [`super::inspect()`] carries them. Settings of an interface are included only if `seen` has the interface.
pub fn unlisted(netns: &Netns, seen: &PodNetworkState) -> io::Result<Vec<String>> {
    let all = netns.run(read_all)?;
    let mut found: Vec<String> = all
        .iter()
        .filter(|(name, value)| default_of(name, seen).is_some_and(|default| default != value.as_str()))
        .map(|(name, value)| format!("sysctl {name}={value}"))
        .collect();
    let more = found.len().saturating_sub(MOST);
    found.truncate(MOST);
    if more > 0 {
        found.push(format!("sysctls, {more} more"));
    }
    Ok(found)
}

/// Returns a setting's value in a new namespace; `None` for a carried one, and for other files.
fn default_of(name: &str, seen: &PodNetworkState) -> Option<&'static str> {
    if OF_NAMESPACE.contains(&name) || name.rsplit('/').next().is_some_and(|last| NO_SETTINGS.contains(&last))
    {
        return None;
    }
    let parts: Vec<&str> = name.split('/').collect();
    let new = match parts[..] {
        // Defaults of later interfaces, and `lo`, which every namespace has.
        [_, "conf" | "neigh", "default" | "lo", _] => return None,
        [_, "conf", "all", _] => name.to_owned(),
        [family, group @ ("conf" | "neigh"), interface, setting] => {
            seen.interfaces.iter().find(|carried| carried.name == interface)?;
            let (short, like) = match group {
                "conf" => (format!("{family}/{setting}"), "default"),
                _ => (format!("{family}/{group}/{setting}"), "lo"),
            };
            if path_of(&short, interface).is_some() {
                return None;
            }
            format!("{family}/{group}/{like}/{setting}")
        }
        _ => name.to_owned(),
    };
    new_namespace().get(&new).map(String::as_str)
}

fn new_namespace() -> &'static All {
    static NEW: OnceLock<All> = OnceLock::new();
    NEW.get_or_init(|| {
        // Empty where no new namespace can be made: then no setting is listed.
        Netns::scratch().ok().and_then(|scratch| scratch.run(read_all).ok()).unwrap_or_default()
    })
}

/// Reads every readable file; for a thread in the namespace.
fn read_all() -> All {
    let mut all = All::new();
    read_below(Path::new(ROOT), "", &mut all);
    all
}

fn read_below(root: &Path, folder: &str, all: &mut All) {
    for entry in fs::read_dir(root.join(folder)).into_iter().flatten().flatten() {
        let name = format!("{folder}{}", entry.file_name().to_string_lossy());
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            read_below(root, &format!("{name}/"), all);
        } else if let Ok(value) = read(root, &name) {
            all.insert(name, value);
        }
    }
}
