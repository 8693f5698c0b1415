//! Assigns a booted VM to a pod: network, lease, kata-agent. The plan is stored before it is applied, so that a
//! restarted guest restores it. The same plan again changes nothing; another sandbox is refused.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::sys::stat::{Mode, mkdirat};
use peerpod_link::initdata::Initdata;
use peerpod_proto::guest::Personalise;
use protobuf::Message;
use tokio::sync::{Mutex, watch};

use crate::agent::Agent;
use crate::components::Components;
use crate::config::Settings;
use crate::encrypted::Encrypted;
use crate::files;
use crate::images::Images;
use crate::init;
use crate::network::{self, Network};
use crate::power::Lease;
use crate::status::Status;
use crate::volumes::Volumes;

const VERSION: u32 = 1;
const FILE: &str = "plan.pb";
const INITDATA: &str = "initdata";
const DIGEST: &str = "initdata.digest";
/// File of initdata with the kata-agent's policy.
const POLICY: &str = "policy.rego";
/// Size limit of a plan in bytes: a plan is mostly initdata, which came in one ttrpc frame.
pub(crate) const MAX_LEN: u64 = 5 << 20;
/// Limit of the node's stored addresses.
const MAX_HOMES: usize = 16;
/// Time limit for the kata-agent if the node sets none.
const AGENT_TIMEOUT: Duration = Duration::from_secs(30);
/// Directories in which bind sources may be made.
const SOURCES: &[&str] = &["/run/kata-containers/shared/containers", "/run/peerpod/volumes"];

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(
        "the assignment has version {0}, this guest reads {VERSION}; node and VM image must be upgraded \
         together"
    )]
    Version(u32),
    #[error("this VM belongs to sandbox {ours}, not to {theirs}; a VM is never given to a second pod")]
    OtherSandbox { ours: String, theirs: String },
    #[error(
        "this VM has initdata {ours:?}, not {theirs:?}; the first assignment's initdata counts for a VM's whole life"
    )]
    OtherInitdata { ours: String, theirs: String },
    #[error("the assignment has no {0}")]
    Missing(&'static str),
    #[error("{0}")]
    Network(#[from] network::Error),
    /// Failure of another part; its text names the part.
    #[error("{0}")]
    Part(String),
}

impl From<String> for Error {
    fn from(text: String) -> Error {
        Error::Part(text)
    }
}

/// Adds the cause to an error without the image's drivers, which is a symptom alone: "unknown device type".
fn with_cause(error: Error) -> Error {
    if !init::is_ours() || init::is_complete() {
        return error;
    }
    Error::Part(format!(
        "{error}; the image's /usr is not mounted, and its drivers are missing (see the VM's console)"
    ))
}

pub(crate) struct PodAssignment {
    pub(crate) network: Network,
    file: PathBuf,
    status: Arc<Status>,
    agent: Arc<Agent>,
    lease: Arc<Lease>,
    /// Whether no plan ever came: the lease of user-data counts then.
    pub(crate) is_new: bool,
    initdata_dir: PathBuf,
    pub(crate) images: Images,
    components: Arc<Components>,
    /// Number of the VM's GPUs by the last plan.
    pub(crate) gpus: AtomicU32,
    /// Volumes of the pod by the last plan.
    pub(crate) volumes: Arc<Volumes>,
    /// Addresses of the node by the last plan, besides those in user-data; empty before the first.
    pub(crate) node_endpoints: watch::Sender<Vec<SocketAddr>>,
    /// Last plan. Locked while a plan is applied: one at a time.
    current: Mutex<Option<Personalise>>,
}

impl PodAssignment {
    /// Loads the plan of the previous run, without applying it.
    pub(crate) fn load(
        settings: &Settings,
        status: Arc<Status>,
        agent: Arc<Agent>,
        lease: Arc<Lease>,
        encrypted: Arc<Encrypted>,
        images: Images,
        components: Arc<Components>,
    ) -> PodAssignment {
        let file = settings.state_dir.join(FILE);
        let bytes = files::read(&file, MAX_LEN).ok().flatten();
        let current = bytes.and_then(|bytes| Personalise::parse_from_bytes(&bytes).ok());
        PodAssignment {
            network: Network::new(settings, encrypted, status.clone()),
            file,
            status,
            agent,
            lease,
            is_new: current.is_none(),
            initdata_dir: settings.initdata_dir.clone(),
            images,
            components,
            gpus: AtomicU32::new(0),
            volumes: Arc::default(),
            node_endpoints: watch::Sender::new(current.as_ref().map(node_endpoints).unwrap_or_default()),
            current: Mutex::new(current),
        }
    }

    /// Makes the network of the last plan, if any, again, fitted to the current state of the VM's own network.
    pub(crate) async fn network_again(&self) -> Result<(), Error> {
        let current = self.current.lock().await;
        let Some(network) = current.as_ref().and_then(|plan| plan.network.as_ref()) else { return Ok(()) };
        let applied = self.network.make(network).await?;
        tracing::info!(mtu = applied.mtu, changed = applied.changed, "checked the pod's network");
        Ok(())
    }

    pub(crate) async fn restore(&self) -> Result<(), Error> {
        let current = self.current.lock().await;
        match &*current {
            Some(plan) => self.apply(plan).await,
            None => Ok(()),
        }
    }

    /// Applies the node's plan to the VM, which belongs to sandbox `ours`.
    pub(crate) async fn personalise(&self, ours: &str, plan: Personalise) -> Result<(), Error> {
        check(ours, &plan)?;
        let initdata = initdata_of(&plan)?;
        if let Some(initdata) = &initdata {
            initdata.is(&plan.initdata_digest).map_err(|error| error.to_string())?;
        }
        let mut current = self.current.lock().await;
        if let Some(before) = &*current {
            same_initdata(initdata_of(before)?, initdata)?;
        }
        let plan = with_secret_of(plan, current.as_ref());
        let before = current.clone();
        if current.as_ref() != Some(&plan) {
            // Before the plan: a guest that is killed between the two must not take the plan for carried out.
            if !plan.initdata.is_empty() {
                write(&self.file.with_file_name(INITDATA), plan.initdata.as_bytes())?;
            }
            self.keep(&plan)?;
            *current = Some(plan.clone());
        }
        let applied = self.apply(&plan).await.map_err(with_cause);
        if let Err(error) = &applied {
            self.status.error(&error.to_string());
            // The pod goes on with its present network, also after a restart of this program.
            if let (Error::Network(_), Some(before)) = (error, before) {
                self.keep(&before)?;
                *current = Some(before);
            }
        }
        applied
    }

    fn keep(&self, plan: &Personalise) -> Result<(), String> {
        let bytes = plan
            .write_to_bytes()
            .map_err(|error| format!("keeping the plan in {}: {error}", self.file.display()))?;
        write(&self.file, &bytes)
    }

    async fn apply(&self, plan: &Personalise) -> Result<(), Error> {
        self.node_endpoints.send_replace(node_endpoints(plan));
        if plan.lease_seconds > 0 {
            self.lease.set_length(Duration::from_secs(u64::from(plan.lease_seconds)));
        }
        self.gpus.store(plan.gpus, Relaxed);
        self.volumes.learn(&plan.volumes).map_err(|error| format!("the pod's volumes: {error}"))?;
        self.initdata(plan)?;
        self.images.access(plan.images.as_ref())?;
        self.components.start(&plan.images.pull_secret).await?;
        let stage = self.status.begin("network");
        let network = plan.network.as_ref().ok_or(Error::Missing("network plan"))?;
        let applied = self.network.make_soon(network).await?;
        tracing::info!(mtu = applied.mtu, changed = applied.changed, "the pod's network is ready");
        self.status.done(stage);

        let limit = match plan.agent_timeout_ms {
            0 => AGENT_TIMEOUT,
            ms => Duration::from_millis(u64::from(ms)),
        };
        self.agent.listening(limit).await?;
        self.status.ready();
        Ok(())
    }

    /// Writes initdata's files to the place where components read them, and its digest for measuring programs.
    fn initdata(&self, plan: &Personalise) -> Result<(), String> {
        let Some(initdata) = initdata_of(plan)? else {
            self.agent.assign(None);
            return Ok(());
        };
        let dir = &self.initdata_dir;
        std::fs::create_dir_all(dir).map_err(|error| format!("making {}: {error}", dir.display()))?;
        for (name, content) in &initdata.files {
            write(&dir.join(name), content.as_bytes())?;
        }
        // In the format for programs that extend a measurement with it: the hex alone.
        let hex = initdata.digest.split_once(':').map_or("", |(_, hex)| hex);
        write(&dir.join(DIGEST), hex.as_bytes())?;
        self.status.lock().initdata_digest.clone_from(&initdata.digest);
        tracing::info!(digest = initdata.digest, files = initdata.files.len(), "initdata is in place");
        self.agent.assign(initdata.files.get(POLICY).map(String::as_str));
        Ok(())
    }
}

fn initdata_of(plan: &Personalise) -> Result<Option<Initdata>, String> {
    let is_given = !plan.initdata.is_empty();
    is_given.then(|| Initdata::parse(&plan.initdata)).transpose().map_err(|error| error.to_string())
}

fn same_initdata(ours: Option<Initdata>, theirs: Option<Initdata>) -> Result<(), Error> {
    let digest = |initdata: Option<Initdata>| initdata.map_or_else(String::new, |initdata| initdata.digest);
    match (digest(ours), digest(theirs)) {
        (ours, theirs) if ours == theirs => Ok(()),
        (ours, theirs) => Err(Error::OtherInitdata { ours, theirs }),
    }
}

fn write(path: &Path, content: &[u8]) -> Result<(), String> {
    files::write(path, content).map_err(|error| format!("keeping the plan in {}: {error}", path.display()))
}

/// Restores secrets from the previous plan. A node that does not know the pod's pull secrets at present removes none.
/// Neither does a node that no longer has a share's credentials, because the share is being unpublished.
fn with_secret_of(mut plan: Personalise, before: Option<&Personalise>) -> Personalise {
    if plan.images.keep_pull_secret
        && let Some(images) = plan.images.as_mut()
    {
        images.keep_pull_secret = false;
        if let Some(before) = before {
            images.pull_secret.clone_from(&before.images.pull_secret);
        }
    }
    for volume in plan.volumes.iter_mut().filter(|volume| volume.credentials.is_empty()) {
        let mut known = before.iter().flat_map(|before| &before.volumes);
        if let Some(known) = known.find(|known| known.descriptor == volume.descriptor) {
            volume.credentials.clone_from(&known.credentials);
        }
    }
    plan
}

/// Returns the node's addresses. Unreadable ones are left out: the others may suffice.
fn node_endpoints(plan: &Personalise) -> Vec<SocketAddr> {
    plan.node_addresses.iter().take(MAX_HOMES).filter_map(|address| address.parse().ok()).collect()
}

fn check(ours: &str, plan: &Personalise) -> Result<(), Error> {
    if plan.version != VERSION {
        return Err(Error::Version(plan.version));
    }
    if plan.sandbox_id.is_empty() {
        return Err(Error::Missing("sandbox id"));
    }
    if plan.sandbox_id != ours {
        return Err(Error::OtherSandbox { ours: ours.to_owned(), theirs: plan.sandbox_id.clone() });
    }
    if plan.network.is_none() {
        return Err(Error::Missing("network plan"));
    }
    Ok(())
}

/// Makes the source of a bind mount, a directory, if it is missing and lies where such sources may lie. The kata-agent
/// refuses any other. No symlink is followed: a container that shares a volume must not redirect the path.
pub(crate) fn make_bind_source(source: &str) {
    for root in SOURCES {
        let Ok(relative) = Path::new(source).strip_prefix(root) else { continue };
        match make_below(Path::new(root), relative) {
            Ok(false) => {}
            Ok(true) => tracing::warn!(source, "made a missing bind source as an empty directory"),
            Err(error) => tracing::warn!(source, %error, "cannot make a missing bind source"),
        }
    }
}

/// Returns whether anything had to be made. The root itself must exist.
fn make_below(root: &Path, relative: &Path) -> nix::Result<bool> {
    if relative.as_os_str().is_empty() {
        return Ok(false);
    }
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC;
    let mut folder = open(root, flags | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW, Mode::empty())?;
    let how =
        OpenHow::new().flags(flags).resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    // The source may also be a file: then it exists and nothing is to be made.
    match openat2(folder.as_fd(), relative, how) {
        Ok(_) => return Ok(false),
        Err(Errno::ENOENT) => {}
        Err(error) => return Err(error),
    }
    let how = how.flags(flags | OFlag::O_DIRECTORY);
    for part in relative.components() {
        let std::path::Component::Normal(name) = part else { return Err(Errno::EXDEV) };
        match mkdirat(folder.as_fd(), name, Mode::from_bits_truncate(0o755)) {
            Ok(()) | Err(Errno::EEXIST) => {}
            Err(error) => return Err(error),
        }
        folder = openat2(folder.as_fd(), name, how)?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::testing::TempDir;

    fn plan(sandbox: &str) -> Personalise {
        let mut plan = Personalise::new();
        (plan.version, plan.sandbox_id) = (VERSION, sandbox.to_owned());
        plan.network.mut_or_insert_default().version = 1;
        plan
    }

    #[test]
    fn plans_for_others_and_of_other_versions_are_refused() {
        assert!(check("a", &plan("a")).is_ok());
        let error = check("a", &plan("b")).unwrap_err().to_string();
        assert!(error.contains("belongs to sandbox a, not to b"), "{error}");
        let mut later = plan("a");
        later.version = 2;
        assert!(matches!(check("a", &later), Err(Error::Version(2))));
        let mut bare = plan("a");
        bare.network.take();
        assert!(matches!(check("a", &bare), Err(Error::Missing("network plan"))));
        assert!(matches!(check("", &plan("")), Err(Error::Missing("sandbox id"))));
    }

    #[test]
    fn an_assignment_without_pull_secrets_keeps_the_old_ones() {
        let of = |secret: &str, keep| {
            let mut plan = plan("a");
            let images = plan.images.mut_or_insert_default();
            (images.pull_secret, images.keep_pull_secret) = (secret.to_owned(), keep);
            plan
        };
        let before = of("had", false);
        assert_eq!(with_secret_of(of("new", false), Some(&before)), of("new", false));
        assert_eq!(
            with_secret_of(of("", false), Some(&before)),
            of("", false),
            "the assignment has no pull secret any more"
        );
        assert_eq!(with_secret_of(of("", true), Some(&before)), before);
        assert_eq!(with_secret_of(of("node's", true), None), of("node's", false));
        assert_eq!(with_secret_of(plan("a"), Some(&before)), plan("a"));
    }

    #[test]
    fn a_share_keeps_its_credentials_until_new_ones_arrive() {
        let of = |descriptor: &[u8], credentials: &[u8]| {
            let mut plan = plan("a");
            let mut volume = peerpod_proto::guest::Volume::new();
            (volume.descriptor, volume.credentials) = (descriptor.to_vec(), credentials.to_vec());
            plan.volumes.push(volume);
            plan
        };
        let before = of(b"v", b"old");
        assert_eq!(with_secret_of(of(b"v", b""), Some(&before)), before);
        assert_eq!(with_secret_of(of(b"v", b"new"), Some(&before)), of(b"v", b"new"));
        assert_eq!(with_secret_of(of(b"w", b""), Some(&before)), of(b"w", b""), "another volume");
        assert_eq!(with_secret_of(of(b"v", b""), None), of(b"v", b""));
    }

    #[test]
    fn the_first_initdata_counts_for_the_whole_life() {
        let of = |text: &str| {
            let text = match text {
                "" => String::new(),
                text => format!(
                    "algorithm = \"sha256\"\nversion = \"0.1.0\"\n[data]\n\"policy.rego\" = \"{text}\"\n"
                ),
            };
            initdata_of(&Personalise { initdata: text, ..plan("a") }).unwrap()
        };
        for same in ["", "one"] {
            assert!(same_initdata(of(same), of(same)).is_ok());
        }
        for (ours, theirs) in [("one", "two"), ("one", ""), ("", "two")] {
            let error = same_initdata(of(ours), of(theirs)).unwrap_err().to_string();
            assert!(error.contains("whole life"), "{error}");
        }
    }

    #[test]
    fn bind_sources_are_made_below_their_root_only() {
        let dir = TempDir::new();
        let root = dir.path().join("volumes");
        let outside = dir.path().join("outside");
        assert_eq!(make_below(&root, Path::new("v0")), Err(Errno::ENOENT), "the root must be there");
        std::fs::create_dir_all(&root).unwrap();
        std::fs::create_dir_all(&outside).unwrap();
        assert_eq!(make_below(&root, Path::new("v0/sub/deep")), Ok(true));
        assert!(root.join("v0/sub/deep").is_dir());
        assert_eq!(make_below(&root, Path::new("v0/sub/deep")), Ok(false));
        std::fs::write(root.join("file"), "").unwrap();
        assert_eq!(make_below(&root, Path::new("file")), Ok(false));

        std::os::unix::fs::symlink(&outside, root.join("link")).unwrap();
        for way_out in ["link/x", "link", "../outside/x", "v0/../../outside/x", "file/x"] {
            assert!(make_below(&root, Path::new(way_out)).is_err(), "{way_out}");
        }
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
    }
}
