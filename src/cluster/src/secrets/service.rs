//! Runs the service: its port, its CA and its own certificate.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use peerpod_base::listen::listen;
use rustls::server::NoServerSessionStorage;
use rustls::version::TLS13;
use tokio::task::JoinSet;
use tracing::info;

use super::answer::Desk;
use super::caller::Callers;
use super::config::SecretsConfig;
use super::metrics::SecretsMetrics;
use crate::authority::maintainer::{CaMaintainer, Published};
use crate::controller::Context;
use crate::serve;

/// Name of the service in `/readyz`.
const NAME: &str = "secrets";
/// Time for which requests are still answered after a stop, until nodes are no longer routed to this replica.
const LEAVE_AFTER: Duration = Duration::from_secs(1);

/// Binds the port, waits for the CA, and answers until a shutdown. The process's `drain` covers the requests in flight
/// then.
pub(crate) async fn run(config: SecretsConfig, metrics: SecretsMetrics, context: Context) -> Result<()> {
    let Context { client, namespace, ready, shutdown, drain, .. } = context;
    let failed = |why: std::io::Error| {
        anyhow!("listen for nodes that ask for pull secrets on {}: {why}; free the port", config.listen)
    };
    let listener = listen(config.listen).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let crypto = Arc::new(rustls::crypto::ring::default_provider());
    let maintainer = CaMaintainer {
        client: client.clone(),
        namespace: namespace.clone(),
        secret: config.ca_secret,
        published: Published::ConfigMap(config.ca_config_map),
        policy: config.policy,
    };
    let names = match config.names {
        names if names.is_empty() => vec![format!("peerpod-secrets.{namespace}.svc")],
        names => names,
    };
    let mut parts = JoinSet::new();
    let made = metrics.certificates.clone();
    let (certificate, mut authority) = maintainer.serve(names, crypto.clone(), &mut parts, move || {
        made.inc();
    });
    drop(metrics.in_use.set((certificate.clone(), authority.clone())));
    let mut tls = serve::tls(crypto, &[&TLS13], certificate, None).context("TLS for the secrets service")?;
    tls.session_storage = Arc::new(NoServerSessionStorage {});
    tls.send_tls13_tickets = 0;
    ready.not_ready(NAME, "the CA was not read yet");
    tokio::select! {
        first = authority.wait_for(Option::is_some) => {
            first.context("a part of the secrets service ended: the CA's maintainer")?;
        }
        () = shutdown.wait() => return Ok(()),
    }
    let account = config.node_account.unwrap_or_else(|| format!("{namespace}:peerpod-node"));
    let callers = Callers::new(client.clone(), config.audience, &account);
    let desk = Desk::new(client, config.runtime_classes, callers, metrics);
    parts.spawn(serve::accept(listener, tls, Arc::new(desk), drain));
    ready.ready(NAME);
    info!(%address, nodes = account, "pull secrets are given to nodes");
    tokio::select! {
        () = shutdown.wait() => {}
        ended = parts.join_next() => bail!("a part of the secrets service ended: {ended:?}"),
    }
    // Nodes may still be routed to this replica.
    tokio::time::sleep(LEAVE_AFTER).await;
    Ok(())
}
