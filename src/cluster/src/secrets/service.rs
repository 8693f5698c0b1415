//! Runs the service: its port, its CA and its own certificate.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use peerpod_base::listen::listen;
use rustls::ServerConfig;
use rustls::server::NoServerSessionStorage;
use rustls::version::TLS13;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::info;

use super::answer::Desk;
use super::caller::Callers;
use super::config::SecretsConfig;
use super::metrics::Metrics;
use crate::authority::maintainer::{CaMaintainer, Published};
use crate::authority::served::Served;
use crate::controller::{Context, Part};
use crate::serve;

/// Name of the service in `/readyz`.
const NAME: &str = "secrets";
/// Time for which requests are still answered after a stop, until nodes are no longer routed to this replica.
const LEAVE_AFTER: Duration = Duration::from_secs(1);

/// Reasons why the service does not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The port cannot be bound.
    #[error("listen for nodes that ask for pull secrets on {address}: {why}; free the port")]
    Listen {
        /// Address of the port.
        address: SocketAddr,
        /// The cause.
        why: io::Error,
    },
    /// The libraries refused the TLS configuration.
    #[error("TLS for the secrets service: {0}")]
    Tls(#[from] rustls::Error),
    /// A task ended that never should.
    #[error("a part of the secrets service ended: {0}")]
    Ended(String),
}

/// Returns the service as a part of the controller, in every replica.
pub fn part(config: SecretsConfig, metrics: Metrics) -> Part {
    Part::new(NAME, false, move |context| {
        let (config, metrics) = (config.clone(), metrics.clone());
        async move { Ok(run(config, metrics, context).await?) }
    })
}

/// Binds the port, waits for the CA, and answers until a shutdown. The process's `drain` covers the requests in flight
/// then.
async fn run(config: SecretsConfig, metrics: Metrics, context: Context) -> Result<(), Error> {
    let Context { client, namespace, ready, shutdown, drain, .. } = context;
    let failed = |why| Error::Listen { address: config.listen, why };
    let listener = listen(config.listen).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let crypto = Arc::new(rustls::crypto::ring::default_provider());
    let maintainer = CaMaintainer {
        client: client.clone(),
        namespace: namespace.clone(),
        secret: config.ca_secret,
        published: Published::ConfigMap(config.ca_config_map),
        policy: config.policy.clone(),
    };
    let (sender, mut authority) = watch::channel(None);
    let names = match config.names {
        names if names.is_empty() => vec![format!("peerpod-secrets.{namespace}.svc")],
        names => names,
    };
    let served = Served::new(names, config.policy.leaf, crypto.clone());
    let mut tls = ServerConfig::builder_with_provider(crypto)
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(served.clone()));
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    tls.session_storage = Arc::new(NoServerSessionStorage {});
    tls.send_tls13_tickets = 0;
    let mut parts = JoinSet::new();
    parts.spawn(maintainer.run(sender));
    let made = metrics.certificates.clone();
    parts.spawn(served.follow(authority.clone(), move || {
        made.inc();
    }));
    ready.not_ready(NAME, "the CA was not read yet");
    tokio::select! {
        first = authority.wait_for(Option::is_some) => {
            first.map_err(|_| Error::Ended("the CA's maintainer".to_owned()))?;
        }
        () = shutdown.wait() => return Ok(()),
    }
    let account = config.node_account.unwrap_or_else(|| format!("{namespace}:peerpod-node"));
    let callers = Callers::new(client.clone(), config.audience, &account);
    let desk = Desk::new(client, config.runtime_classes, callers, metrics);
    parts.spawn(serve::accept(listener, Arc::new(tls), Arc::new(desk), drain));
    ready.ready(NAME);
    info!(%address, nodes = account, "pull secrets are given to nodes");
    tokio::select! {
        () = shutdown.wait() => {}
        ended = parts.join_next() => return Err(Error::Ended(format!("{ended:?}"))),
    }
    // Nodes may still be routed to this replica.
    tokio::time::sleep(LEAVE_AFTER).await;
    Ok(())
}
