//! Compares the existing tunnels with the live sandboxes, once at the start of a daemon.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use peerpod_podnet::Error;
use peerpod_podnet::gc::{Swept, namespaces, sweep};
use peerpod_podnet::mark::Owner;
use peerpod_podnet::netns::{Netns, NetnsId};
use peerpod_podnet::nft::Peer;

use super::backend::ConnectedTunnel;
use super::{Reserved, Tunnel, TunnelKind};

/// Threads that sweep namespaces. Deleting a device waits 20 ms for the kernel, most of it without a lock.
const THREADS: usize = 4;

/// A sandbox that has, or may have, state in a pod's namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Live {
    pub sandbox: String,
    /// Its namespace; `None`: a record that cannot be read. Its state then stays in every namespace.
    pub netns: Option<(PathBuf, NetnsId)>,
    pub reserved: Option<Reserved>,
    /// Address of the VM at the other end of its tunnels.
    pub vm: Option<IpAddr>,
}

/// Numbers of namespaces inspected, and of tunnel devices, redirects and filter elements removed.
#[derive(Debug, Default)]
pub(crate) struct Reconciled {
    pub looked: usize,
    pub devices: usize,
    pub redirects: usize,
    pub elements: usize,
    /// Sandboxes of the removed devices, where the devices name them.
    pub sandboxes: Vec<String>,
    /// Errors of the steps that failed; all others succeeded.
    pub errors: Vec<Error>,
}

impl Tunnel {
    /// Removes the state of sandboxes that no longer live, and makes the filter contain exactly the tunnels of those
    /// that do. For the start of a daemon.
    ///
    /// Inspects each namespace of [`super::TunnelConfig::netns_dir`] and those of the live sandboxes once. Only state
    /// with this owner's mark is touched. A tunnel that is connected during the call must be in `live`: call it before
    /// sandboxes are served.
    pub(crate) fn reconcile(&self, live: &[Live]) -> Reconciled {
        let mut done = Reconciled::default();
        let paths: Vec<PathBuf> =
            live.iter().filter_map(|l| l.netns.as_ref().map(|(path, _)| path.clone())).collect();
        let mut stay = Vec::new();
        for (path, swept) in sweep_all(self.0.owner, live, &namespaces(&[&*self.0.netns_dir], &paths)) {
            done.looked += 1;
            match swept {
                Ok(swept) => {
                    done.devices += swept.removed.len();
                    done.redirects += swept.freed;
                    done.sandboxes.extend(swept.removed.into_iter().filter_map(|found| found.sandbox));
                    // For a sandbox with an unreadable record, its device is the only source of the peer.
                    let unread = |sandbox: &Option<String>| {
                        live.iter().any(|l| l.reserved.is_none() && Some(&l.sandbox) == sandbox.as_ref())
                    };
                    let kept = swept.kept.into_iter().filter(|found| unread(&found.sandbox));
                    stay.extend(kept.filter_map(|f| f.remote.map(|address| Peer { address, vni: f.vni })));
                }
                // The namespace was deleted during the inspection.
                Err(errors) if errors.iter().all(|e| e.is_gone() || matches!(e, Error::NotNetns { .. })) => {}
                Err(errors) => {
                    tracing::debug!(netns = %path.display(), "cannot inspect all of a network namespace");
                    done.errors.extend(errors);
                }
            }
        }
        done.sandboxes.sort();
        done.sandboxes.dedup();
        for (kind, backend) in self.0.backends.all() {
            let connected: Vec<ConnectedTunnel> =
                live.iter().filter_map(|live| connected(live, kind)).collect();
            let stay = if kind == TunnelKind::Vxlan { stay.as_slice() } else { &[] };
            match backend.reconcile(&connected, stay) {
                Ok(removed) => done.elements += removed,
                Err(e) => done.errors.push(e),
            }
        }
        done
    }
}

fn connected(live: &Live, kind: TunnelKind) -> Option<ConnectedTunnel> {
    let reserved = live.reserved.clone().filter(|reserved| reserved.kind == kind)?;
    Some(ConnectedTunnel { sandbox: live.sandbox.clone(), reserved, vm: live.vm? })
}

fn sweep_all(owner: Owner, live: &[Live], paths: &[PathBuf]) -> Vec<(PathBuf, Result<Swept, Vec<Error>>)> {
    let next = AtomicUsize::new(0);
    let all = Mutex::new(Vec::with_capacity(paths.len()));
    std::thread::scope(|scope| {
        for _ in 0..THREADS.min(paths.len()) {
            scope.spawn(|| {
                while let Some(path) = paths.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let swept = sweep_one(owner, live, path);
                    all.lock().push((path.clone(), swept));
                }
            });
        }
    });
    all.into_inner()
}

fn sweep_one(owner: Owner, live: &[Live], path: &Path) -> Result<Swept, Vec<Error>> {
    let netns = Netns::open(path).map_err(|e| vec![e])?;
    // A sandbox that lives in another namespace keeps nothing in this one.
    let here: Vec<&str> = live
        .iter()
        .filter(|live| live.netns.as_ref().is_none_or(|(_, id)| *id == netns.id()))
        .map(|live| live.sandbox.as_str())
        .collect();
    sweep(&netns, owner, &here)
}
