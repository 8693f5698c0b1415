//! What a crash left behind: devices and redirects that carry an owner's mark in a namespace where none of its
//! sandboxes lives. Found by looking, at the start of a daemon, once.

use std::collections::HashSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use super::Error;
use super::link::Link;
use super::mark::{Mark, Owner, sandbox_on};
use super::netns::{Netns, NetnsId};
use super::redirect::{self, Taken};
use super::tunnel::{ours_by_name, remove_all};

/// More entries of a folder are not looked at: no node has so many pods.
const MAX_NAMESPACES: usize = 16_384;

/// The namespaces that have a name in one of these folders or at one of these paths, each once.
pub fn namespaces(folders: &[&Path], paths: &[PathBuf]) -> Vec<PathBuf> {
    let mut seen: HashSet<NetnsId> = HashSet::new();
    let listed = folders.iter().flat_map(|folder| {
        // A folder that is not there has none.
        let entries = std::fs::read_dir(folder).into_iter().flatten();
        entries.filter_map(Result::ok).take(MAX_NAMESPACES).map(|entry| entry.path())
    });
    listed
        .chain(paths.iter().cloned())
        .filter(|path| NetnsId::of(path).is_some_and(|id| seen.insert(id)))
        .collect()
}

/// A tunnel device that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The sandbox it was made for; `None`: whoever made it died before it was named.
    pub sandbox: Option<String>,
    /// Its VNI.
    pub vni: u32,
    /// Its UDP port.
    pub port: u16,
    /// Where it leads, once it was connected.
    pub remote: Option<IpAddr>,
}

/// What was found in one namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Devices of sandboxes that live, which stay.
    pub kept: Vec<Found>,
    /// Devices that were removed.
    pub removed: Vec<Found>,
    /// Interfaces of the pod from which a redirect of ours was taken.
    pub freed: usize,
}

/// Removes from a namespace what the owner's sandboxes left there, but for those in `live`.
///
/// # Errors
/// Everything that failed; the rest is done.
pub fn sweep(netns: &Netns, owner: Owner, live: &[&str]) -> Result<Swept, Vec<Error>> {
    let one = |e| vec![e];
    let mut pod = netns.netlink().map_err(one)?;
    let attempt = || Error::kernel(format!("look for leftovers in {}", netns.path().display()));
    let devices = ours_by_name(&mut pod).map_err(attempt()).map_err(one)?;
    let marks: Vec<Mark<'_>> = live.iter().map(|sandbox| Mark { owner, sandbox }).collect();
    let lives = |link: &Link| marks.iter().any(|mark| mark.is_on(link));
    let (mut swept, mut doomed) = (Swept::default(), Vec::new());
    for link in devices {
        let Some(vxlan) = &link.vxlan else { continue };
        let kept = lives(&link);
        let named = sandbox_on(owner, &link);
        if !kept && named.is_none() {
            continue; // another daemon's
        }
        let sandbox = named.flatten();
        let found = Found { sandbox, vni: vxlan.vni, port: vxlan.port, remote: vxlan.remote };
        if kept {
            swept.kept.push(found);
        } else {
            swept.removed.push(found);
            doomed.push(link.index);
        }
    }
    let mut errors = Vec::new();
    let tags = redirect::tagged(&mut pod, owner).map_err(one)?;
    let stale: HashSet<_> = tags
        .iter()
        .filter(|(device, tag)| !doomed.contains(device) && marks.iter().all(|mark| mark.tag() != *tag))
        .collect();
    swept.freed = stale.len();
    for tag in stale.iter().map(|(_, tag)| *tag).collect::<HashSet<_>>() {
        let taken = Taken { tag: Some(tag), only: None, unmarked: None, doomed: &doomed, shared: &[] };
        redirect::take_back(&mut pod, &taken, &mut errors);
    }
    remove_all(&mut pod, &doomed, &mut errors);
    if errors.is_empty() { Ok(swept) } else { Err(errors) }
}
