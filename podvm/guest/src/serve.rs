//! Runs `peerpod-guest serve`: connects the parts, and lives until the lease ends or a signal stops it.
//!
//! Independent parts run concurrently: the kata-agent starts while the node answers. When this program dies,
//! kata-agent, containers and network stay. Its next run reads its identity back, finds them and dials again.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::SigSet;
use parking_lot::Mutex;
use peerpod_link::endpoint::{Endpoint, EndpointHandle, Limits, Role};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::agent::Agent;
use crate::assignment::{self, PodAssignment};
use crate::components::Components;
use crate::config::{self, NicSetup, Settings};
use crate::control::{self, Control, Notices};
use crate::encrypted::Encrypted;
use crate::identity::GuestIdentity;
use crate::images::Images;
use crate::link::{GuestHandler, LinkSupervisor};
use crate::log::Ring;
use crate::power::{self, Finish, Lease};
use crate::status::{self, Status};
use crate::underlay::{self, Watcher};
use crate::volumes::scratch;
use crate::{entropy, init, nics, pool, sources, user_data};

/// Longest wait of all deferrable work for the node to be dialled: with one processor it would run before.
const FIRST_WORD: Duration = Duration::from_secs(3);
/// Longest wait for the remaining mounts of pid 1.
const MOUNTED: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(10);
/// Copy of user-data in the state directory, where their place was overwritten.
const KEPT_USER_DATA: &str = "user-data";
/// Longest wait of everything else for the NICs' address requests: it can run while they wait for an answer.
const ASKED: Duration = Duration::from_millis(150);

pub(crate) fn run(settings: &Settings, ring: &Ring) -> anyhow::Result<ExitCode> {
    // Pid 1 blocks signals. Kata-agent and containers must not inherit that, or only SIGKILL ends them.
    SigSet::empty().thread_set_mask()?;
    // One thread: all of a guest's traffic is one endpoint's task, and a hand-over between threads costs more than it
    // gains. Blocking work goes to the blocking pool.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let end = runtime.block_on(live(settings, ring))?;
    // A blocked flush must not delay the power-off.
    runtime.shutdown_timeout(Duration::from_millis(100));
    match end {
        End::Stopped => Ok(ExitCode::SUCCESS),
        End::LeaseOver | End::Button | End::Returned => {
            // In namespaces no power goes off, and pid 1 ends them.
            power::have_ended(end.finish(settings));
            Ok(ExitCode::from(power::POWER_OFF))
        }
    }
}

/// Waits until pid 1 has mounted the file system with the kata-agent's program and modules that it may need.
async fn complete() {
    let deadline = tokio::time::Instant::now() + MOUNTED;
    while init::is_ours() && !init::is_complete() && tokio::time::Instant::now() < deadline {
        tokio::time::sleep(LOOK).await;
    }
}

enum End {
    Stopped,
    LeaseOver,
    Button,
    /// A node requested the reboot of a machine of a pool.
    Returned,
}

impl End {
    /// Returns the end of the machine. One of a pool must be there again, unless a person presses its button.
    fn finish(&self, settings: &Settings) -> Finish {
        match self {
            End::Button => Finish::PowerOff,
            _ if settings.pool_dir.is_some() => Finish::Reboot,
            _ => Finish::PowerOff,
        }
    }
}

/// Parts of the guest that live until its end.
#[derive(Clone)]
struct Parts {
    identity: Arc<Mutex<GuestIdentity>>,
    status: Arc<Status>,
    lease: Arc<Lease>,
    agent: Arc<Agent>,
    encrypted: Arc<Encrypted>,
    images: Images,
    components: Arc<Components>,
    control: Arc<Control>,
}

impl Parts {
    fn new(
        settings: &Settings,
        ring: &Ring,
        status: Arc<Status>,
        identity: GuestIdentity,
    ) -> anyhow::Result<Parts> {
        let identity = Arc::new(Mutex::new(identity));
        let lease = Arc::new(Lease::load(&settings.state_dir));
        let agent = Arc::new(Agent::new(settings, status.clone(), ring.clone()));
        let encrypted = Arc::new(Encrypted::load_or_make(&settings.state_dir)?);
        let images = Images::new(
            &config::Images { store: scratch::store(&settings.images.store), ..settings.images.clone() },
            status.clone(),
        );
        let components = Components::new(settings, status.clone());
        let person = PodAssignment::load(
            settings,
            status.clone(),
            agent.clone(),
            lease.clone(),
            encrypted.clone(),
            images.clone(),
            components.clone(),
        );
        let flushing = tokio::sync::Mutex::new(());
        let control =
            Arc::new(Control { identity: identity.clone(), status: status.clone(), person, flushing });
        Ok(Parts { identity, status, lease, agent, encrypted, images, components, control })
    }
}

async fn live(settings: &Settings, ring: &Ring) -> anyhow::Result<End> {
    entropy::wait()?;
    power::limit_unwritten();
    let identity = GuestIdentity::load(&settings.state_dir)?;
    let restarted = identity.is_granted();
    let status = Arc::new(Status::new(&settings.state_dir, restarted));
    if restarted {
        tracing::info!(sandbox = identity.sandbox_id(), "the guest program was restarted");
        status.lost(
            "the guest program was restarted: connections to the agent that were open ended".to_owned(),
        );
    }
    let configures_nics = match settings.uplink {
        NicSetup::On => true,
        NicSetup::Off => false,
        NicSetup::Auto => init::is_ours(),
    };
    let nics_task = configures_nics.then(|| tokio::spawn(nics::keep(status.clone())));
    if configures_nics {
        status.asked.wait(ASKED).await;
    }
    let parts = Parts::new(settings, ring, status, identity)?;
    let agent_task = tokio::spawn(run_agent(parts.clone(), restarted, settings.state_dir.clone()));
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut end = tokio::select! {
        () = parts.lease.expired() => End::LeaseOver,
        () = init::button::pressed(), if status::in_first_pid_namespace() && !init::is_ours() => End::Button,
        () = returned(settings) => End::Returned,
        _ = terminate.recv() => End::Stopped,
        _ = interrupt.recv() => End::Stopped,
        () = keep_link(settings, ring, &parts) => End::Stopped,
    };
    if let End::LeaseOver | End::Button | End::Returned = end {
        flush(&end, &parts.control).await;
        if power::is_ended_by_systemd(end.finish(settings))
            && tokio::time::timeout(power::ORDERLY, terminate.recv()).await.is_ok()
        {
            end = End::Stopped;
        }
    }
    agent_task.abort();
    // The NICs keep their addresses: other processes depend on them.
    if let Some(task) = nics_task {
        task.abort();
    }
    Ok(end)
}

/// Waits until a node requests the reboot of a machine of a pool.
async fn returned(settings: &Settings) {
    match &settings.pool_dir {
        Some(folder) => pool::returned(folder).await,
        None => std::future::pending().await,
    }
}

/// Writes the volumes' data out before the machine ends.
async fn flush(end: &End, control: &Control) {
    match end {
        End::Button => tracing::warn!("the power button was pressed: powering off"),
        End::Returned => tracing::info!("a node requested the reboot: the machine returns to its pool"),
        _ => tracing::error!("the link was silent for the whole lease: the machine ends"),
    }
    match tokio::time::timeout(power::LAST_FLUSH, control.flush()).await {
        Ok(Ok(())) => {}
        Ok(Err(problems)) => tracing::error!(problems, "the last flush is not complete"),
        Err(_) => tracing::error!("the last flush takes too long"),
    }
}

/// Opens the image store, then runs the kata-agent.
async fn run_agent(parts: Parts, restarted: bool, state_dir: PathBuf) {
    if !restarted {
        parts.status.called.wait(FIRST_WORD).await;
        // While the node works on its answer. A later request for the key returns the error.
        drop(parts.identity.lock().prepare());
        init::go_on();
        complete().await;
    }
    // Beside the kata-agent: only pulls wait for it.
    tokio::spawn(open_images(parts.images.clone(), parts.status.clone(), state_dir));
    // Before the kata-agent, which looks for the socket once, at its start.
    let _images = parts.images.serve().await.unwrap_or_else(|error| {
        // Pods with images from elsewhere must run.
        let text = format!("images cannot be pulled in this VM: {error:#}");
        parts.status.note("images", Some(text));
        None
    });
    parts.components.wait().await;
    parts.agent.run().await;
}

/// Mounts the image store's disk, if one is wanted, and opens the store.
async fn open_images(images: Images, status: Arc<Status>, state_dir: PathBuf) {
    let ours = init::is_ours() && status::in_first_pid_namespace();
    let mounted = match ours && scratch::is_wanted(images.store()) {
        true => scratch::mount(&state_dir).await,
        false => Ok(None),
    };
    if let Ok(Some(text)) | Err(text) = &mounted {
        status.say("disk", Some(text.clone()));
    }
    images.open(mounted.map(drop));
}

/// Reads user-data, makes the link to the node, and keeps it for ever.
async fn keep_link(settings: &Settings, ring: &Ring, parts: &Parts) {
    let Parts { status, control, .. } = parts;
    let restore = tokio::spawn(restore(control.clone()));
    if let Some(folder) = &settings.pool_dir {
        pool::claimed(folder, &parts.lease).await;
    }
    let stage = status.begin("user-data");
    let (sources, wrong) = sources::load(Path::new(sources::FOLDER));
    for error in wrong {
        tracing::error!(error, "sources of user-data");
    }
    let kept = settings.state_dir.join(KEPT_USER_DATA);
    let user_data = user_data::wait(&settings.user_data, &sources, &kept).await;
    status.done(stage);
    if control.person.is_new {
        parts.lease.set_length(Duration::from_secs(u64::from(user_data.lease_seconds)));
    }

    let notice = Arc::new(Notices { agent: parts.agent.clone(), control: control.clone() });
    let podns = settings.podns.display().to_string();
    let (handler, links, controls) = GuestHandler::new(parts.agent.clone(), notice, podns, ring.clone());
    let limits = Limits { control_message: assignment::MAX_LEN as usize, ..Limits::default() };
    let (endpoint, handle) = Endpoint::new(Role::Guest, handler, limits);
    let endpoint = tokio::spawn(endpoint.run());
    let answering = tokio::spawn(control.clone().serve(handle.clone(), controls));
    let reporting = tokio::spawn(control::report(parts.agent.clone(), status.clone(), handle.clone()));
    let reached = user_data.node.addresses.clone();
    let addressing = tokio::spawn(sources::addresses::report(sources.clone(), reached));
    let noticing = tokio::spawn(sources::notice::watch(sources, status.clone()));

    let link = underlay::Link::new(None);
    let watching = tokio::spawn(watch_underlay(control.clone(), handle.clone(), link.subscribe()));
    let supervisor = LinkSupervisor {
        user_data,
        identity: parts.identity.clone(),
        encrypted: parts.encrypted.clone(),
        status: status.clone(),
        lease: parts.lease.clone(),
        uplink: link,
        node_endpoints: control.person.node_endpoints.subscribe(),
    };
    supervisor.run(&handle, links).await;
    for task in [restore, answering, reporting, addressing, noticing, watching] {
        task.abort();
    }
    drop(endpoint.await);
}

async fn restore(control: Arc<Control>) {
    if let Err(error) = control.person.restore().await {
        tracing::error!(%error, "cannot restore the state of the previous run");
        control.status.error(&error.to_string());
    }
}

async fn watch_underlay(
    control: Arc<Control>,
    handle: EndpointHandle,
    links: watch::Receiver<Option<underlay::Linked>>,
) {
    control.status.called.wait(FIRST_WORD).await;
    Watcher::run(control, handle, links).await;
}
