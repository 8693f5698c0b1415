//! Runs the controller process: builds the parts, takes part in the leader election, stops in order.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use kube::runtime::events::Recorder;
use peerpod_base::admin::{self, Ready};
use peerpod_base::lifecycle::{Drain, Shutdown};
use peerpod_kube::client;
use peerpod_kube::lease::{Election, ElectionConfig, Leader, Standing};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::{info, warn};

use super::config::ControllerConfig;
use super::parts::Settings;
use super::{Context, Part};

/// Limit for the operations in flight at the end.
const DRAIN: Duration = Duration::from_secs(10);
/// Limit for giving the Lease back.
const RESIGN: Duration = Duration::from_secs(3);

/// A controller with a bound port.
pub struct BoundController {
    /// Bound address of the admin port.
    pub admin: SocketAddr,
    context: Context,
    election: Election,
    leading: Gauge,
    /// The leader's parts, then the others.
    parts: (Vec<Part>, Vec<Part>),
}

/// Reads credentials, opens the provider and binds the port. Sends no request to the API server yet.
///
/// # Errors
/// Something is missing. The error names it and a remedy.
pub async fn build(settings: Settings, shutdown: &Shutdown) -> anyhow::Result<BoundController> {
    let mut registry = Registry::default();
    let leading = leading(&mut registry);
    let config = settings.controller.clone();
    let client = client::connect(config.kubeconfig.as_deref()).await?;
    let namespace = config.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
    let parts = settings.parts(&mut registry).await?;
    let ready = Ready::new();
    ready.not_ready("lease", "the API server was not asked yet");
    let admin = admin::serve(config.admin_listen, Arc::new(registry), ready.clone()).await?;
    let election = Election::new(client.clone(), election_of(&config, &namespace));
    let context = Context {
        events: Recorder::new(client.clone(), Context::reporter(&config.identity)),
        client,
        namespace,
        identity: config.identity,
        ready,
        shutdown: shutdown.clone(),
        drain: Drain::new(),
        term: None,
    };
    let parts = parts.into_iter().partition(|part| part.leader_only);
    Ok(BoundController { admin, context, election, leading, parts })
}

/// Registers the metric of the leader election.
pub(super) fn leading(registry: &mut Registry) -> Gauge {
    let leading = Gauge::default();
    registry.register("peerpod_controller_leading", "1 in the replica that leads", leading.clone());
    leading
}

fn election_of(config: &ControllerConfig, namespace: &str) -> ElectionConfig {
    ElectionConfig {
        namespace: namespace.to_owned(),
        name: config.lease_name.clone(),
        identity: config.identity.clone(),
        duration: config.lease_duration,
        renew_deadline: config.lease_renew_deadline,
        retry: config.lease_retry,
    }
}

impl BoundController {
    /// Runs until a shutdown. A lost Lease ends only the term; the process then takes part in the election again.
    ///
    /// # Errors
    /// A part ended that never should.
    pub async fn run(self) -> anyhow::Result<()> {
        let BoundController { admin, context, election, leading, parts: (led, always) } = self;
        info!(%admin, identity = context.identity, namespace = context.namespace, "controller runs");
        let mut tasks = start(&always, &context);
        tasks.spawn(tell(election.standing(), context.ready.clone()));
        let mut terms = std::pin::pin!(terms(&election, &led, &context, &leading));
        let (ended, over) = tokio::select! {
            // After a shutdown the others end by themselves.
            biased;
            () = context.shutdown.wait() => (Ok(()), false),
            ended = &mut terms => (ended, true),
            ended = ended(&mut tasks) => (ended, false),
        };
        context.ready.not_ready("shutdown", "stopping");
        if !over {
            // Ends the leader's parts first and then the Lease.
            context.shutdown.trigger("a part ended");
            if let Err(error) = terms.await {
                warn!(error = peerpod_base::chain::chain(error.as_ref()), "a part failed at the end");
            }
        }
        if let Err(busy) = context.drain.drain(DRAIN).await {
            warn!(%busy, "cut off");
        }
        tasks.shutdown().await;
        info!("stopped");
        ended
    }
}

/// Leads, waits and leads again, until a shutdown.
async fn terms(
    election: &Election,
    parts: &[Part],
    context: &Context,
    leading: &Gauge,
) -> anyhow::Result<()> {
    loop {
        let leader = tokio::select! {
            leader = election.lead() => leader,
            () = context.shutdown.wait() => return Ok(()),
        };
        let term = leader.term().clone();
        info!(token = term.token(), "leads");
        leading.set(1);
        let context = Context { term: Some(term.clone()), ..context.clone() };
        let mut tasks = start(parts, &context);
        let ended = tokio::select! {
            // The order matters: a process that was stopped past the end of its term must do nothing more.
            biased;
            () = term.lost() => Ok(()),
            () = context.shutdown.wait() => Ok(()),
            ended = ended(&mut tasks) => ended,
        };
        // All tasks have ended before the Lease is given back.
        tasks.shutdown().await;
        leading.set(0);
        resign(leader, &term).await;
        ended?;
        if context.shutdown.is_triggered() {
            return Ok(());
        }
    }
}

async fn resign(leader: Leader, term: &peerpod_kube::lease::Term) {
    if term.check().is_err() {
        warn!(token = term.token(), "the lease is lost; waiting for it again");
        return;
    }
    match tokio::time::timeout(RESIGN, leader.resign()).await {
        Ok(Ok(())) => info!(token = term.token(), "the lease is given back"),
        Ok(Err(error)) => warn!(%error, "the lease is not given back; it ends by itself"),
        Err(_) => warn!("the lease is not given back: the API server does not answer; it ends by itself"),
    }
}

fn start(parts: &[Part], context: &Context) -> JoinSet<(&'static str, anyhow::Result<()>)> {
    let mut tasks = JoinSet::new();
    for part in parts {
        let (name, run) = (part.name, part.run(context.clone()));
        tasks.spawn(async move { (name, run.await) });
    }
    tasks
}

/// Waits for a part that ends without a shutdown.
async fn ended(tasks: &mut JoinSet<(&'static str, anyhow::Result<()>)>) -> anyhow::Result<()> {
    match tasks.join_next().await {
        Some(Ok((name, Ok(())))) => anyhow::bail!("a part of the controller ended: {name}"),
        Some(Ok((name, Err(error)))) => {
            Err(error).with_context(|| format!("a part of the controller: {name}"))
        }
        Some(Err(error)) => Err(error).context("a part of the controller"),
        None => std::future::pending().await,
    }
}

/// Reports an unreachable API server in `/readyz`. A replica that waits for another leader is ready.
async fn tell(mut standing: watch::Receiver<Standing>, ready: Ready) -> (&'static str, anyhow::Result<()>) {
    loop {
        let now = standing.borrow_and_update().clone();
        match &now {
            Standing::Asking => {}
            Standing::Waiting { holder } => {
                info!(holder, "another replica leads");
                ready.ready("lease");
            }
            Standing::Leading { .. } => ready.ready("lease"),
            Standing::Unreachable { why } => {
                warn!(why, "the lease cannot be had");
                ready.not_ready("lease", why);
            }
        }
        if standing.changed().await.is_err() {
            // Never happens while the election exists, which outlives this task.
            std::future::pending::<()>().await;
        }
    }
}
