//! The pod's network as this VM makes it: the node's plan, fitted to what is known of the VM's own network. May be made
//! again at any time; what is as it should be stays.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
};

use peerpod_link::net::{self, external, guest::Applied, room};
use peerpod_proto::guest::NetworkPlan;
use tokio::sync::watch;

use crate::{
    encrypted::{self, Encrypted},
    status::Status,
};

/// Why there is no network.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("making the pod's network: {0}")]
    Network(#[from] net::Error),
    #[error("{0}")]
    Encrypted(#[from] encrypted::Error),
    #[error("the guest ends")]
    Ending,
}

/// What is known of the pod's network and its way home.
pub(crate) struct Network {
    podns: PathBuf,
    encrypted: Arc<Encrypted>,
    status: Arc<Status>,
    /// The largest packet on the way to the node, in bytes; 0 = only the kernel's routes say.
    path: AtomicU32,
    /// The node's end of the tunnel, once a plan came.
    node: watch::Sender<Option<IpAddr>>,
    /// What was made last, in this life of the program.
    previous: tokio::sync::Mutex<Option<NetworkPlan>>,
}

impl Network {
    pub(crate) fn new(podns: PathBuf, encrypted: Arc<Encrypted>, status: Arc<Status>) -> Network {
        Network {
            podns,
            encrypted,
            status,
            path: AtomicU32::new(0),
            node: watch::Sender::new(None),
            previous: Default::default(),
        }
    }

    /// Where the pod's tunnel leads.
    pub(crate) fn node(&self) -> watch::Receiver<Option<IpAddr>> {
        self.node.subscribe()
    }

    /// The link to the node was made anew.
    pub(crate) fn linked(&self) {
        self.encrypted.linked();
    }

    /// What passes between VM and node; true when it is another figure than before.
    pub(crate) fn set_path(&self, bytes: u32) -> bool {
        self.path.swap(bytes, Relaxed) != bytes
    }

    /// Makes the pod's network as planned, with what is known now.
    pub(crate) async fn make(&self, plan: &NetworkPlan) -> Result<Applied, Error> {
        let node = tunnel_end(plan);
        self.node.send_if_modified(|known| std::mem::replace(known, node) != node);
        let path = self.path.load(Relaxed);
        let mut previous = self.previous.lock().await;
        let (podns, plan, before) = (self.podns.clone(), plan.clone(), previous.clone());
        let encrypted = self.encrypted.clone();
        // Netlink is synchronous, and the link's heartbeat must not wait for it.
        let made = tokio::task::spawn_blocking(move || make(plan, path, before.as_ref(), &podns, &encrypted));
        let Made { plan, applied, path_note, external_note } = made.await.map_err(|_| Error::Ending)??;
        *previous = Some(plan);
        self.status.note("path", path_note);
        self.status.note("external", external_note);
        self.status.pod_mtu(applied.mtu);
        self.status.note("filter", applied.unfiltered.clone());
        Ok(applied)
    }
}

/// The node's end of the tunnel on the VM's own network; within WireGuard it is elsewhere.
fn tunnel_end(plan: &NetworkPlan) -> Option<IpAddr> {
    let underlay = plan.underlay.as_ref().filter(|underlay| underlay.kind == "vxlan")?;
    underlay.node_address.parse().ok()
}

struct Made {
    /// As it was carried out.
    plan: NetworkPlan,
    applied: Applied,
    path_note: Option<String>,
    external_note: Option<String>,
}

/// The tunnel first, without the routes that leave it, then the way out: no packet takes the wrong one in between.
fn make(
    mut plan: NetworkPlan,
    path: u32,
    previous: Option<&NetworkPlan>,
    podns: &Path,
    encrypted: &Encrypted,
) -> Result<Made, Error> {
    net::netns::create_named(podns)?;
    let external = external::read(&plan)?;
    let mut external_note = None;
    match &external {
        None => external::undo()?,
        Some(external) => {
            let (v4, v6) = external::leaves(external)?;
            external::split(&mut plan, external, |is_v6| if is_v6 { v6 } else { v4 });
            let stays = |v6: bool| external.pod.iter().any(|address| address.is_ipv6() == v6);
            let staying = [(v4, false, "IPv4"), (v6, true, "IPv6")];
            let staying: Vec<&str> = staying
                .iter()
                .filter(|(leaves, v6, _)| !leaves && stays(*v6))
                .map(|(.., name)| *name)
                .collect();
            if !staying.is_empty() {
                external_note = Some(format!(
                    "{} takes the tunnel out of the cluster: the VM has no default route for it",
                    staying.join(" and ")
                ));
            }
        }
    }
    let path_note = if path > 0 { room::fit(&mut plan, path) } else { None };
    let applied = tunnel(&plan, previous, podns, encrypted)?;
    match &external {
        Some(external) if external::leaves(external)? != (false, false) => {
            external::apply(external, podns)?;
        }
        Some(_) => external::undo()?,
        None => {}
    }
    Ok(Made { plan, applied, path_note, external_note })
}

fn tunnel(
    plan: &NetworkPlan,
    previous: Option<&NetworkPlan>,
    podns: &Path,
    encrypted: &Encrypted,
) -> Result<Applied, Error> {
    if plan.underlay.kind != encrypted::KIND {
        return Ok(net::guest::apply(plan, previous, podns)?);
    }
    let mut host = encrypted.make(plan)?.netlink()?;
    let (inside, before) = (encrypted::inside(plan), previous.map(encrypted::inside));
    Ok(net::guest::apply_from(&mut host, &inside, before.as_ref(), podns)?)
}
