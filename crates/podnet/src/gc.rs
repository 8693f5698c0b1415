//! Removes remains of a crash: devices and redirects with an owner's mark in a namespace without its sandboxes.

use std::collections::HashSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use super::Error;
use super::mark::{Mark, Owner, sandbox_on};
use super::netns::{Netns, NetnsId};
use super::redirect::{self, Taken};
use super::tunnel::{ours_by_name, remove_all};

/// Maximum number of entries read from a folder: no node has so many pods.
const MAX_NAMESPACES: usize = 16_384;

/// Returns the namespaces with a name in one of these folders or at one of these paths, each once.
pub fn namespaces(folders: &[&Path], paths: &[PathBuf]) -> Vec<PathBuf> {
    let mut seen: HashSet<NetnsId> = HashSet::new();
    let listed = folders.iter().flat_map(|folder| {
        // A missing folder has no entries.
        let entries = std::fs::read_dir(folder).into_iter().flatten();
        entries.filter_map(Result::ok).take(MAX_NAMESPACES).map(|entry| entry.path())
    });
    listed
        .chain(paths.iter().cloned())
        .filter(|path| NetnsId::of(path).is_some_and(|id| seen.insert(id)))
        .collect()
}

/// Tunnel device that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TunnelDevice {
    /// The sandbox it was made for; `None` where its maker died before it set the alias.
    pub sandbox: Option<String>,
    /// Its VNI.
    pub vni: u32,
    /// Its UDP port.
    pub port: u16,
    /// Its remote, once it was connected.
    pub remote: Option<IpAddr>,
}

/// Result of [`sweep`] in one namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Devices of live sandboxes, which stay.
    pub kept: Vec<TunnelDevice>,
    /// Devices that were removed.
    pub removed: Vec<TunnelDevice>,
    /// Number of the pod's interfaces from which a redirect was removed.
    pub freed: usize,
}

/// Removes the remains of the owner's sandboxes from a namespace, except those in `live`.
///
/// # Errors
/// All failures; the other steps are done.
pub fn sweep(netns: &Netns, owner: Owner, live: &[&str]) -> Result<Swept, Vec<Error>> {
    let one = |e| vec![e];
    let mut pod = netns.netlink().map_err(one)?;
    let attempt = || Error::kernel(format!("look for stale devices in {}", netns.path().display()));
    let devices = ours_by_name(&mut pod).map_err(attempt()).map_err(one)?;
    let marks: Vec<Mark<'_>> = live.iter().map(|sandbox| Mark { owner, sandbox }).collect();
    let (mut swept, mut doomed) = (Swept::default(), Vec::new());
    for link in devices {
        let Some(vxlan) = &link.vxlan else { continue };
        let kept = marks.iter().any(|mark| mark.is_on(&link));
        let named = sandbox_on(owner, &link);
        if !kept && named.is_none() {
            continue; // of another daemon
        }
        let sandbox = named.flatten();
        let found = TunnelDevice { sandbox, vni: vxlan.vni, port: vxlan.port, remote: vxlan.remote };
        if kept {
            swept.kept.push(found);
            continue;
        }
        swept.removed.push(found);
        doomed.push(link.index);
    }
    let mut errors = Vec::new();
    let tags = redirect::tagged(&mut pod, owner).map_err(one)?;
    let stale: HashSet<_> = tags
        .iter()
        .filter(|(device, tag)| !doomed.contains(device) && marks.iter().all(|mark| mark.tag() != *tag))
        .collect();
    swept.freed = stale.len();
    for tag in stale.iter().map(|(_, tag)| *tag).collect::<HashSet<_>>() {
        let taken = Taken { tag, only: None, doomed: &doomed, shared: &[] };
        redirect::take_back(&mut pod, &taken, &mut errors);
    }
    remove_all(&mut pod, &doomed, &mut errors);
    if errors.is_empty() { Ok(swept) } else { Err(errors) }
}
