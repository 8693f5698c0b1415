//! Runs the controller process: builds the parts, takes part in the leader election, stops in order.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use kube::Api;
use kube::runtime::events::{Recorder, Reporter};
use peerpod_base::admin::{self, Ready};
use peerpod_base::chain::chain;
use peerpod_base::lifecycle::{Drain, Shutdown};
use peerpod_base::metrics::program;
use peerpod_kube::client;
use peerpod_kube::lease::{Election, Leader, Standing, Term};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{info, warn};

use super::Context;
use super::parts::{ControllerSettings, Parts, Tasks};

/// Limit for the operations in flight at the end.
const DRAIN: Duration = Duration::from_secs(10);
/// Limit for giving the Lease back.
const RESIGN: Duration = Duration::from_secs(3);

/// A controller with a bound port.
pub(crate) struct BoundController {
    admin: SocketAddr,
    identity: String,
    context: Context,
    election: Election,
    leading: Gauge,
    parts: Parts,
}

/// Reads credentials and the cluster's UID, which marks its VMs, opens the provider and binds the port. Waits while the
/// API server is away, and answers on the port meanwhile. Fails if something is missing; the error names it and a
/// remedy.
pub(crate) async fn build(
    settings: ControllerSettings,
    shutdown: &Shutdown,
) -> anyhow::Result<BoundController> {
    let ControllerSettings { controller: config, .. } = &settings;
    let mut registry = program("peerpod-cluster", env!("CARGO_PKG_VERSION"));
    let leading = leading(&mut registry);
    let client = client::connect(config.kubeconfig.as_deref()).await?;
    let namespace = config.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
    let (admin_listen, election) = (config.admin_listen, config.election.clone());
    let ready = Ready::default();
    let ask = || client::cluster_uid(&client);
    let installation = admin::wait_for("installation", (admin_listen, &ready), ask).await?;
    let parts = Parts::open(settings, installation, &mut registry).await?;
    ready.not_ready("lease", "the API server was not asked yet");
    let admin = admin::serve(admin_listen, Arc::new(registry), ready.clone()).await?;
    let identity = election.identity.clone();
    let reporter = Reporter { controller: "peerpod-controller".to_owned(), instance: Some(identity.clone()) };
    let election = Election::new(Api::namespaced(client.clone(), &namespace), election);
    let context = Context {
        events: Recorder::new(client.clone(), reporter),
        client,
        namespace,
        ready,
        shutdown: shutdown.clone(),
        drain: Drain::default(),
    };
    Ok(BoundController { admin, identity, context, election, leading, parts })
}

/// Registers the metric of the leader election.
pub(super) fn leading(registry: &mut Registry) -> Gauge {
    let leading = Gauge::default();
    registry.register("peerpod_controller_leading", "1 in the replica that leads", leading.clone());
    leading
}

impl BoundController {
    /// Runs until a shutdown. A lost Lease ends only the term; the process then takes part in the election again. Fails
    /// if a part ended that never should.
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        let BoundController { admin, identity, context, election, leading, parts } = self;
        info!(%admin, identity, namespace = context.namespace, "controller runs");
        let mut tasks = parts.start(&context);
        tasks.spawn(tell(election.standing(), context.ready.clone()));
        let mut terms = std::pin::pin!(terms(&election, &parts, &context, &leading));
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
            context.shutdown.trigger();
            if let Err(error) = terms.await {
                warn!(error = chain(error.as_ref()), "a part failed at the end");
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
async fn terms(election: &Election, parts: &Parts, context: &Context, leading: &Gauge) -> anyhow::Result<()> {
    loop {
        let leader = tokio::select! {
            leader = election.lead() => leader,
            () = context.shutdown.wait() => return Ok(()),
        };
        let term = leader.term().clone();
        info!(token = term.token(), "leads");
        leading.set(1);
        let mut tasks = parts.lead(context, &term);
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

async fn resign(leader: Leader, term: &Term) {
    if term.check().is_err() {
        warn!(token = term.token(), "the lease is lost; waiting for it again");
        return;
    }
    match timeout(RESIGN, leader.resign()).await {
        Ok(Ok(())) => info!(token = term.token(), "the lease is given back"),
        Ok(Err(error)) => warn!(%error, "the lease is not given back; it ends by itself"),
        Err(_) => warn!("the lease is not given back: the API server does not answer; it ends by itself"),
    }
}

/// Waits for a part that ends without a shutdown.
async fn ended(tasks: &mut Tasks) -> anyhow::Result<()> {
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
        match now {
            Standing::Asking => {}
            Standing::Waiting { holder } => {
                info!(holder, "another replica leads");
                ready.ready("lease");
            }
            Standing::Leading => ready.ready("lease"),
            Standing::Unreachable { why } => {
                warn!(why, "the lease cannot be had");
                ready.not_ready("lease", &why);
            }
        }
        if standing.changed().await.is_err() {
            // Never happens while the election exists, which outlives this task.
            std::future::pending::<()>().await;
        }
    }
}
