//! Makes the pod's network in this VM from the node's plan, fitted to the VM's own network. Can be repeated at any
//! time; correct parts stay untouched.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use peerpod_podnet::events::Events;
use peerpod_podnet::guest::Applied;
use peerpod_podnet::netlink::Client;
use peerpod_podnet::netns::Netns;
use peerpod_podnet::{external, plan};
use peerpod_proto::guest::NetworkPlan;
use protobuf::Message;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::config::Settings;
use crate::encrypted::{self, Encrypted};
use crate::files;
use crate::sources::{self, CloudSource};
use crate::status::Status;

const FILE: &str = "network.pb";
/// Size limit of a stored plan in bytes.
const MAX_LEN: u64 = 2 << 20;

/// Interval of probes if the plan has none: routes change without notice.
const PROBE_INTERVAL: Duration = Duration::from_secs(600);

const ADMIN: &str = "network-admin";

/// Longest wait for a missing route to the node: the node may learn an address from the cloud before the VM's NIC has
/// it. Sufficient for a lost answer of a DHCP server and the following requests. The node waits longer.
const WAY: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(100);

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("making the pod's network: {0}")]
    Network(#[from] peerpod_podnet::Error),
    #[error("{0:#}")]
    Encrypted(#[from] anyhow::Error),
    #[error("the guest ends")]
    Ending,
}

/// Part of a plan that concerns the path to the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Planned {
    /// The node's end of the tunnel on the VM's own network; `None` within WireGuard, where it is elsewhere.
    pub(crate) node: Option<IpAddr>,
    /// MTU of each of the pod's interfaces by the node, in bytes; it changes with the node's side of the path.
    pub(crate) mtus: Vec<u32>,
    /// Seconds between probes without a cause.
    interval: u32,
}

impl Planned {
    fn of(plan: &NetworkPlan) -> Planned {
        let underlay = plan.underlay.as_ref();
        let outside = underlay.filter(|underlay| underlay.kind == "vxlan");
        Planned {
            node: outside.and_then(|underlay| underlay.node_address.parse().ok()),
            mtus: plan.interfaces.iter().map(|interface| interface.mtu).collect(),
            interval: underlay.map_or(0, |underlay| underlay.probe_seconds),
        }
    }
}

pub(crate) struct Network {
    podns: PathBuf,
    /// File that exists if a container may change the pod's network itself; outlives this program.
    admin: PathBuf,
    pub(crate) encrypted: Arc<Encrypted>,
    status: Arc<Status>,
    /// Path MTU to the node, in bytes; 0 = only the kernel's routes are known.
    path: AtomicU32,
    /// Seconds between probes without a cause; 0 = not in the plan.
    probe_seconds: AtomicU32,
    /// Path settings of the last plan, once one came.
    planned: watch::Sender<Option<Planned>>,
    /// File that keeps [`Network::previous`] over a restart of the program.
    file: PathBuf,
    /// Plan that was made last: parts that a new plan does not have are removed. With it, whether IPv4 and IPv6 left the
    /// cluster by a NIC of this VM then.
    previous: tokio::sync::Mutex<(Option<NetworkPlan>, [bool; 2])>,
}

impl Network {
    pub(crate) fn new(settings: &Settings, encrypted: Arc<Encrypted>, status: Arc<Status>) -> Network {
        let file = settings.state_dir.join(FILE);
        // An unreadable plan is as good as none: then nothing is removed.
        let bytes = files::read(&file, MAX_LEN).ok().flatten();
        let previous = bytes.and_then(|bytes| NetworkPlan::parse_from_bytes(&bytes).ok());
        Network {
            podns: settings.podns.clone(),
            admin: settings.state_dir.join(ADMIN),
            file,
            encrypted,
            status,
            path: AtomicU32::new(0),
            probe_seconds: AtomicU32::new(previous.as_ref().map_or(0, |plan| plan.underlay.probe_seconds)),
            planned: watch::Sender::new(None),
            previous: tokio::sync::Mutex::new((previous, [false; 2])),
        }
    }

    /// Returns the path settings of the plans; changes when they change.
    pub(crate) fn planned(&self) -> watch::Receiver<Option<Planned>> {
        self.planned.subscribe()
    }

    /// Notes that a container of the pod has the capability to change the pod's network.
    pub(crate) fn pod_may_change(&self) {
        if !self.is_pods_own()
            && let Err(error) = files::write(&self.admin, &[])
        {
            tracing::warn!(%error, "cannot note that the pod may change its network");
        }
    }

    /// Returns whether the pod may change its network, so that missing parts may be intended.
    pub(crate) fn is_pods_own(&self) -> bool {
        self.admin.exists()
    }

    /// Opens a watcher of the pod's namespace, once that exists.
    pub(crate) fn listen(&self) -> Option<Events> {
        let events = Netns::open(&self.podns).and_then(|netns| Events::of_pod(&netns));
        events.inspect_err(|error| tracing::debug!(%error, "cannot watch the pod's network yet")).ok()
    }

    /// Returns the parts of the last plan that the pod's network lacks, as text.
    pub(crate) async fn drift(&self) -> Vec<String> {
        let previous = self.previous.lock().await;
        let Some(plan) = previous.0.clone() else { return Vec::new() };
        let podns = self.podns.clone();
        match tokio::task::spawn_blocking(move || peerpod_podnet::drift::drift(&plan, &podns)).await {
            Ok(Ok(lacks)) => lacks,
            Ok(Err(error)) => vec![error.to_string()],
            Err(_) => Vec::new(),
        }
    }

    /// Returns whether an IP family leaves the cluster by other means than when the network was made last, after a
    /// change of the VM's NICs. Waits for a network that is being made.
    pub(crate) async fn leaves_otherwise(&self) -> bool {
        let previous = self.previous.lock().await;
        let (Some(plan), left) = previous.clone() else { return false };
        let inspect = move || match external::read(&plan)? {
            Some(external) => external::leaves(&external),
            None => Ok((false, false)),
        };
        match tokio::task::spawn_blocking(inspect).await {
            Ok(Ok((v4, v6))) => [v4, v6] != left,
            // The next event causes another check.
            Ok(Err(_)) | Err(_) => false,
        }
    }

    /// Sets the path MTU between VM and node; returns whether it changed.
    pub(crate) fn set_path(&self, bytes: u32) -> bool {
        self.path.swap(bytes, Relaxed) != bytes
    }

    /// Returns the interval between probes of the path to the node without a cause.
    pub(crate) fn probe_interval(&self) -> Duration {
        match self.probe_seconds.load(Relaxed) {
            0 => PROBE_INTERVAL,
            seconds => Duration::from_secs(seconds.into()),
        }
    }

    /// Acts as [`Network::make`], but before the first network waits for NICs that may still be getting addresses.
    pub(crate) async fn make_soon(&self, plan: &NetworkPlan) -> Result<Applied, Error> {
        let is_first = self.previous.lock().await.0.is_none();
        if let Some(node) = Planned::of(plan).node.filter(|_| is_first) {
            // If no route comes, the attempt reports the fault.
            let way = async {
                while lacks_way(node).await {
                    sleep(LOOK).await;
                }
            };
            drop(timeout(WAY, way).await);
        }
        self.make(plan).await
    }

    /// Makes the pod's network as planned, fitted to the current state of the VM's own network.
    pub(crate) async fn make(&self, plan: &NetworkPlan) -> Result<Applied, Error> {
        self.probe_seconds.store(plan.underlay.probe_seconds, Relaxed);
        let planned = Some(Planned::of(plan));
        self.planned.send_if_modified(|before| std::mem::replace(before, planned.clone()) != planned);
        let path = self.path.load(Relaxed);
        let mut previous = self.previous.lock().await;
        let (podns, plan, before) = (self.podns.clone(), plan.clone(), previous.0.clone());
        let encrypted = self.encrypted.clone();
        // Netlink is synchronous, and the link's heartbeat must not wait for it.
        let made = tokio::task::spawn_blocking(move || {
            make(plan, path, before.as_ref(), &podns, &encrypted, &sources::here())
        });
        let Made { plan, applied, left, notes } = made.await.map_err(|_| Error::Ending)??;
        // Stored afterwards: until then the previous plan describes the network better.
        if previous.0.as_ref() != Some(&plan) {
            let kept = plan.write_to_bytes().map_err(std::io::Error::other);
            if let Err(error) = kept.and_then(|bytes| files::write(&self.file, &bytes)) {
                tracing::warn!(%error, "cannot store the plan of the pod's network");
            }
        }
        *previous = (Some(plan), left);
        for (subject, note) in notes {
            self.status.note(subject, note);
        }
        self.status.lock().pod_mtu = applied.mtu;
        self.status.note("filter", applied.unfiltered.clone());
        let left_out = Some(applied.left_out.join("; ")).filter(|text| !text.is_empty());
        self.status.note("settings", left_out);
        Ok(applied)
    }
}

/// Returns whether the kernel knows no route to the node. The attempt reports any other fault.
async fn lacks_way(node: IpAddr) -> bool {
    let inspect = move || {
        let mut client = Client::route().ok()?;
        peerpod_podnet::underlay::towards(&mut client, node).err()
    };
    matches!(tokio::task::spawn_blocking(inspect).await, Ok(Some(peerpod_podnet::Error::Path { .. })))
}

struct Made {
    /// Plan as it was carried out.
    plan: NetworkPlan,
    applied: Applied,
    /// Whether IPv4 and IPv6 leave the cluster by a NIC of this VM.
    left: [bool; 2],
    notes: [(&'static str, Option<String>); 3],
}

/// Makes the tunnel without the routes that leave it, then the way out: no packet takes the wrong one in between.
fn make(
    mut plan: NetworkPlan,
    path: u32,
    previous: Option<&NetworkPlan>,
    podns: &Path,
    encrypted: &Encrypted,
    clouds: &[CloudSource],
) -> Result<Made, Error> {
    peerpod_podnet::netns::create_named(podns)?;
    let open: Vec<_> = clouds.iter().flat_map(CloudSource::open_to_pods).map(|a| (*a, bits(*a))).collect();
    let mut external = external::read(&plan)?;
    if let Some(external) = &mut external {
        // The egress firewall around the VM's network must not close addresses that the cloud's description opens.
        external.allow.extend(&open);
    }
    let (mut external_note, mut left) = (None, [false; 2]);
    match &external {
        None => external::undo()?,
        Some(external) => {
            let (v4, v6) = external::leaves(external)?;
            left = [v4, v6];
            external::split(&mut plan, external, |is_v6| if is_v6 { v6 } else { v4 });
            let stays = |v6: bool| external.pod.iter().any(|address| address.is_ipv6() == v6);
            let families = [(v4, false, "IPv4"), (v6, true, "IPv6")].into_iter();
            let staying = families.filter(|(leaves, v6, _)| !leaves && stays(*v6)).map(|(.., name)| name);
            let staying = staying.collect::<Vec<_>>().join(" and ");
            if !staying.is_empty() {
                external_note =
                    Some(format!("{staying} leaves the cluster through the tunnel: {}", external.lacks()));
            }
        }
    }
    let path_note = if path > 0 { plan::fit_to_path(&mut plan, path) } else { None };
    let applied = tunnel(&plan, previous, podns, encrypted)?;
    match &external {
        Some(external) if external::leaves(external)? != (false, false) => {
            external::apply(external, podns)?;
        }
        Some(_) => external::undo()?,
        None => {}
    }
    // Last: there is no pod while its network is being made.
    let allowed = external.as_ref().map(|external| external.allow.as_slice()).unwrap_or_default();
    let closed: Vec<_> = clouds.iter().flat_map(CloudSource::closed_to_pods).copied().collect();
    let closed = peerpod_podnet::metadata::closed(&closed, &[allowed, &open[..]].concat());
    let metadata_note = peerpod_podnet::metadata::close(podns, &closed)
        .err()
        .map(|error| format!("the cloud's metadata service is not closed to the pod: {error}"));
    let notes = [("path", path_note), ("external", external_note), ("metadata", metadata_note)];
    Ok(Made { plan, applied, left, notes })
}

fn bits(address: IpAddr) -> u8 {
    if address.is_ipv6() { 128 } else { 32 }
}

fn tunnel(
    plan: &NetworkPlan,
    previous: Option<&NetworkPlan>,
    podns: &Path,
    encrypted: &Encrypted,
) -> Result<Applied, Error> {
    if plan.underlay.kind != encrypted::KIND {
        return Ok(peerpod_podnet::guest::apply(plan, previous, podns)?);
    }
    let mut host = encrypted.make(plan)?.netlink()?;
    let (inside, before) = (encrypted::inside(plan), previous.map(encrypted::inside));
    Ok(peerpod_podnet::guest::apply_from(&mut host, &inside, before.as_ref(), podns)?)
}
