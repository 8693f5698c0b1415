//! The pod's network as this VM makes it: the node's plan, fitted to what is known of the VM's own network. May be made
//! again at any time; what is as it should be stays.

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use peerpod_podnet::{events::Events, external, guest::Applied, netlink::Client, netns::Netns, room};
use peerpod_proto::guest::NetworkPlan;
use protobuf::Message;
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

use crate::{
    config::Settings,
    encrypted::{self, Encrypted},
    files, sources,
    status::Status,
};

const FILE: &str = "network.pb";
/// As much as a plan may have, and nothing besides.
const MAX_LEN: u64 = 2 << 20;

/// Where the plan does not say: routes change without a word.
const PROBE_INTERVAL: Duration = Duration::from_secs(600);

const ADMIN: &str = "network-admin";

/// The node may hear of an address from the cloud before the VM's card has it: so long the way to the node may be missing.
/// Enough for a DHCP server's answer that is lost, and the questions after it. The node waits longer.
const WAY: Duration = Duration::from_secs(20);
/// Between two looks for it.
const LOOK: Duration = Duration::from_millis(100);

/// Why there is no network.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("making the pod's network: {0}")]
    Network(#[from] peerpod_podnet::Error),
    #[error("{0}")]
    Encrypted(#[from] encrypted::Error),
    #[error("the guest ends")]
    Ending,
}

/// What of a plan concerns the path to the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    /// The node's end of the tunnel on the VM's own network; within WireGuard it is elsewhere.
    pub(crate) node: Option<IpAddr>,
    /// What there is for each of the pod's interfaces by what the node knows, in bytes: another figure may mean that the
    /// node's side of the path is another one.
    pub(crate) room: Vec<u32>,
    /// How often the path is tried without a reason.
    interval: u32,
}

impl Told {
    fn of(plan: &NetworkPlan) -> Told {
        let underlay = plan.underlay.as_ref();
        let outside = underlay.filter(|underlay| underlay.kind == "vxlan");
        Told {
            node: outside.and_then(|underlay| underlay.node_address.parse().ok()),
            room: plan.interfaces.iter().map(|interface| interface.mtu).collect(),
            interval: underlay.map_or(0, |underlay| underlay.probe_seconds),
        }
    }
}

/// What is known of the pod's network and its way home.
pub(crate) struct Network {
    podns: PathBuf,
    /// There when a container may change the pod's network itself; outlives this program.
    admin: PathBuf,
    encrypted: Arc<Encrypted>,
    status: Arc<Status>,
    /// The largest packet on the way to the node, in bytes; 0 = only the kernel's routes say.
    path: AtomicU32,
    /// How often the path is tried again without a reason, in seconds; 0 = the plan does not say.
    probe_seconds: AtomicU32,
    /// What the last plan says of the path, once one came.
    told: watch::Sender<Option<Told>>,
    /// Where [`Network::previous`] is kept over a restart of the program.
    file: PathBuf,
    /// What was made last: what a new plan has no more is removed.
    previous: tokio::sync::Mutex<Option<NetworkPlan>>,
    /// Whether IPv4 and IPv6 left the cluster by a card of this VM when the network was made last.
    left: [AtomicBool; 2],
}

impl Network {
    pub(crate) fn new(settings: &Settings, encrypted: Arc<Encrypted>, status: Arc<Status>) -> Network {
        let file = settings.state_dir.join(FILE);
        // One that cannot be read is as good as none: then nothing is removed.
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
            told: watch::Sender::new(None),
            previous: tokio::sync::Mutex::new(previous),
            left: Default::default(),
        }
    }

    /// What plans say of the path; changes with what they say.
    pub(crate) fn told(&self) -> watch::Receiver<Option<Told>> {
        self.told.subscribe()
    }

    /// Counts how often the encrypted tunnel ended by itself.
    pub(crate) fn ended(&self) -> watch::Receiver<u64> {
        self.encrypted.ended()
    }

    /// The link to the node was made anew.
    pub(crate) fn linked(&self) {
        self.encrypted.linked();
    }

    /// A container of the pod has the capability to change the pod's network.
    pub(crate) fn pod_may_change(&self) {
        if !self.is_pods_own()
            && let Err(error) = files::write(&self.admin, &[])
        {
            tracing::warn!(%error, "cannot note that the pod may change its network");
        }
    }

    /// Whether the pod may change its network, so that what is missing may be as the pod wants it.
    pub(crate) fn is_pods_own(&self) -> bool {
        self.admin.exists()
    }

    /// An ear in the pod's namespace, once there is one.
    pub(crate) fn listen(&self) -> Option<Events> {
        let events = Netns::open(&self.podns).and_then(|netns| Events::of_pod(&netns));
        events.inspect_err(|error| tracing::debug!(%error, "cannot watch the pod's network yet")).ok()
    }

    /// What the pod's network lacks of the last plan, in words.
    pub(crate) async fn drift(&self) -> Vec<String> {
        let previous = self.previous.lock().await;
        let Some(plan) = previous.clone() else { return Vec::new() };
        let podns = self.podns.clone();
        match tokio::task::spawn_blocking(move || peerpod_podnet::drift::drift(&plan, &podns)).await {
            Ok(Ok(lacks)) => lacks,
            Ok(Err(error)) => vec![error.to_string()],
            Err(_) => Vec::new(),
        }
    }

    /// Whether an IP family leaves the cluster by other means than when the network was made last: the VM's cards changed.
    /// Waits for a network that is being made.
    pub(crate) async fn leaves_otherwise(&self) -> bool {
        let previous = self.previous.lock().await;
        let Some(plan) = previous.clone() else { return false };
        let look = move || match external::read(&plan)? {
            Some(external) => external::leaves(&external),
            None => Ok((false, false)),
        };
        match tokio::task::spawn_blocking(look).await {
            Ok(Ok((v4, v6))) => [v4, v6] != [self.left[0].load(Relaxed), self.left[1].load(Relaxed)],
            // The next event brings another look.
            Ok(Err(_)) | Err(_) => false,
        }
    }

    /// What passes between VM and node; true when it is another figure than before.
    pub(crate) fn set_path(&self, bytes: u32) -> bool {
        self.path.swap(bytes, Relaxed) != bytes
    }

    /// How often the path to the node is tried again without a reason.
    pub(crate) fn probe_interval(&self) -> Duration {
        match self.probe_seconds.load(Relaxed) {
            0 => PROBE_INTERVAL,
            seconds => Duration::from_secs(seconds.into()),
        }
    }

    /// As [`Network::make`], for a VM whose cards may still be getting addresses: before its first network is made.
    pub(crate) async fn make_soon(&self, plan: &NetworkPlan) -> Result<Applied, Error> {
        let is_first = self.previous.lock().await.is_none();
        if let Some(node) = Told::of(plan).node.filter(|_| is_first) {
            // Without one, the attempt says what is wrong.
            drop(
                timeout(WAY, async {
                    while lacks_way(node).await {
                        sleep(LOOK).await
                    }
                })
                .await,
            );
        }
        self.make(plan).await
    }

    /// Makes the pod's network as planned, with what is known now.
    pub(crate) async fn make(&self, plan: &NetworkPlan) -> Result<Applied, Error> {
        self.probe_seconds.store(plan.underlay.probe_seconds, Relaxed);
        let told = Some(Told::of(plan));
        self.told.send_if_modified(|before| {
            let differs = *before != told;
            *before = told;
            differs
        });
        let path = self.path.load(Relaxed);
        let mut previous = self.previous.lock().await;
        let (podns, plan, before) = (self.podns.clone(), plan.clone(), previous.clone());
        let encrypted = self.encrypted.clone();
        // Netlink is synchronous, and the link's heartbeat must not wait for it.
        let made = tokio::task::spawn_blocking(move || {
            make(plan, path, before.as_ref(), &podns, &encrypted, &Metadata::look())
        });
        let Made { plan, applied, left, path_note, external_note, metadata_note } =
            made.await.map_err(|_| Error::Ending)??;
        for (kept, leaves) in self.left.iter().zip(left) {
            kept.store(leaves, Relaxed);
        }
        // After it was made: until then the one before says more of what is there.
        if previous.as_ref() != Some(&plan) {
            let kept = plan.write_to_bytes().map_err(std::io::Error::other);
            if let Err(error) = kept.and_then(|bytes| files::write(&self.file, &bytes)) {
                tracing::warn!(%error, "cannot keep what was made of the pod's network");
            }
        }
        *previous = Some(plan);
        self.status.note("path", path_note);
        self.status.note("external", external_note);
        self.status.note("metadata", metadata_note);
        self.status.pod_mtu(applied.mtu);
        self.status.note("filter", applied.unfiltered.clone());
        let left_out = Some(applied.left_out.join("; ")).filter(|text| !text.is_empty());
        self.status.note("settings", left_out);
        Ok(applied)
    }
}

/// Whether the kernel knows no way to the node. What is wrong besides is for the attempt to say.
async fn lacks_way(node: IpAddr) -> bool {
    let look = move || {
        let mut client = Client::route().ok()?;
        peerpod_podnet::uplink::towards(&mut client, node).err()
    };
    matches!(tokio::task::spawn_blocking(look).await, Ok(Some(peerpod_podnet::Error::Path { .. })))
}

struct Made {
    /// As it was carried out.
    plan: NetworkPlan,
    applied: Applied,
    /// Whether IPv4 and IPv6 leave the cluster by a card of this VM.
    left: [bool; 2],
    path_note: Option<String>,
    external_note: Option<String>,
    metadata_note: Option<String>,
}

/// The tunnel first, without the routes that leave it, then the way out: no packet takes the wrong one in between.
fn make(
    mut plan: NetworkPlan,
    path: u32,
    previous: Option<&NetworkPlan>,
    podns: &Path,
    encrypted: &Encrypted,
    metadata: &Metadata,
) -> Result<Made, Error> {
    peerpod_podnet::netns::create_named(podns)?;
    let mut external = external::read(&plan)?;
    if let Some(external) = &mut external {
        // The wall around the VM's network is not to close what the cloud's author opened.
        external.allow.extend(metadata.open.iter().map(|address| (*address, bits(*address))));
    }
    let (mut external_note, mut left) = (None, [false; 2]);
    match &external {
        None => external::undo()?,
        Some(external) => {
            let (v4, v6) = external::leaves(external)?;
            left = [v4, v6];
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
                    "{} takes the tunnel out of the cluster: {}",
                    staying.join(" and "),
                    external.lacks()
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
    // Last: while the pod's network was being made there was no pod.
    let allowed = external.as_ref().map(|external| external.allow.as_slice()).unwrap_or_default();
    let open: Vec<_> = allowed.iter().copied().chain(metadata.open.iter().map(|a| (*a, bits(*a)))).collect();
    let closed = peerpod_podnet::metadata::closed(&metadata.closed, &open);
    let metadata_note = peerpod_podnet::metadata::close(podns, &closed)
        .err()
        .map(|error| format!("the cloud's metadata service is not closed to the pod: {error}"));
    Ok(Made { plan, applied, left, path_note, external_note, metadata_note })
}

fn bits(address: IpAddr) -> u8 {
    if address.is_ipv6() { 128 } else { 32 }
}

/// What the clouds' authors say of their metadata services and pods.
#[derive(Clone, Debug, Default)]
pub(crate) struct Metadata {
    closed: Vec<IpAddr>,
    open: Vec<IpAddr>,
}

impl Metadata {
    /// Of the clouds that this VM runs in.
    fn look() -> Metadata {
        let (sources, _) = sources::load(Path::new(sources::FOLDER));
        let here: Vec<_> = sources.into_iter().filter(sources::Source::is_here).collect();
        Metadata {
            closed: here.iter().flat_map(|source| source.closed_to_pods()).copied().collect(),
            open: here.iter().flat_map(|source| source.open_to_pods()).copied().collect(),
        }
    }
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
