//! Runs the service: its port, its CA, its own certificate, and the verification of client certificates.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use peerpod_base::listen::listen;
use rustls::{
    RootCertStore, ServerConfig,
    crypto::CryptoProvider,
    server::{NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier},
    version::TLS13,
};
use rustls_pki_types::{CertificateDer, pem::PemObject};
use tokio::{sync::watch, task::JoinSet};
use tracing::{info, warn};

use super::{answer::Desk, caller::Callers, config::SecretsConfig, metrics::Metrics};
use crate::{
    authority::{
        keeper::{Authority, Current, Keeper, Published},
        served::Served,
    },
    controller::{Context, Part},
    serve,
};

/// Name of the service in `/readyz`.
const NAME: &str = "secrets";
/// Time for which requests are still answered after a stop, until nodes are no longer routed to this replica.
const LEAVE_AFTER: Duration = Duration::from_secs(1);

/// Reasons why the service does not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The port cannot be bound.
    #[error(
        "listen for nodes that ask for pull secrets on {address}: {why}; choose another secrets.listen or free this one"
    )]
    Listen {
        /// `secrets.listen`.
        address: SocketAddr,
        /// The cause.
        why: io::Error,
    },
    /// The libraries refused the TLS configuration.
    #[error("TLS for the secrets service: {0}")]
    Tls(String),
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
    let keeper = Keeper {
        client: client.clone(),
        namespace: namespace.clone(),
        secret: config.ca_secret,
        published: Published::ConfigMap(config.ca_config_map),
        policy: config.policy.clone(),
    };
    let (sender, authority) = watch::channel(None);
    let names = match config.names {
        names if names.is_empty() => vec![format!("peerpod-secrets.{namespace}.svc")],
        names => names,
    };
    let served = Served::new(names, config.policy.leaf, crypto.clone());
    let mut parts: JoinSet<Result<(), Error>> = JoinSet::new();
    parts.spawn(async move {
        keeper.run(sender).await;
        Ok(())
    });
    {
        let (served, authority, made) = (served.clone(), authority.clone(), metrics.certificates.clone());
        parts.spawn(async move {
            served
                .follow(authority, move || {
                    made.inc();
                })
                .await;
            Ok(())
        });
    }
    ready.not_ready(NAME, "the CA was not read yet");
    let first = {
        let mut authority = authority.clone();
        tokio::select! {
            first = async move { authority.wait_for(Option::is_some).await.ok().and_then(|first| first.clone()) } => first,
            () = shutdown.wait() => return Ok(()),
        }
    };
    let Some(first) = first else { return Err(Error::Ended("the CA's keeper".to_owned())) };
    let resolver: Arc<dyn ResolvesServerCert> = Arc::new(served);
    let tls = watch::Sender::new(Arc::new(configured(&first, resolver.clone(), crypto.clone())?));
    let account = config.node_account.unwrap_or_else(|| format!("{namespace}:peerpod-node"));
    let callers = Callers::new(client.clone(), config.audience, &account);
    let desk =
        Desk::new(client, config.runtime_classes, config.policy.leaf, authority.clone(), callers, metrics);
    parts.spawn({
        let (tls, drain) = (tls.subscribe(), drain.clone());
        async move {
            serve::accept(listener, tls, Arc::new(desk), drain).await;
            Ok(())
        }
    });
    parts.spawn(follow(authority, tls, resolver, crypto));
    ready.ready(NAME);
    info!(%address, nodes = account, "pull secrets are given to nodes");
    tokio::select! {
        () = shutdown.wait() => {}
        ended = parts.join_next() => return Err(match ended {
            Some(Ok(Err(why))) => why,
            other => Error::Ended(format!("{other:?}")),
        }),
    }
    // Nodes may still be routed to this replica.
    tokio::time::sleep(LEAVE_AFTER).await;
    Ok(())
}

/// Keeps the accepted client certificates up to date with the CA's bundle.
async fn follow(
    mut authority: Authority,
    tls: watch::Sender<Arc<ServerConfig>>,
    resolver: Arc<dyn ResolvesServerCert>,
    crypto: Arc<CryptoProvider>,
) -> Result<(), Error> {
    loop {
        if authority.changed().await.is_err() {
            return Err(Error::Ended("the CA's keeper".to_owned()));
        }
        let current = authority.borrow_and_update().clone();
        match current.map(|current| configured(&current, resolver.clone(), crypto.clone())) {
            Some(Ok(new)) => {
                tls.send_replace(Arc::new(new));
            }
            Some(Err(why)) => warn!(error = %why, "the new CA is not used"),
            None => {}
        }
    }
}

/// Returns a configuration for TLS 1.3 with an optional client certificate. There is no resumption, which could outlive
/// a certificate.
fn configured(
    current: &Current,
    resolver: Arc<dyn ResolvesServerCert>,
    crypto: Arc<CryptoProvider>,
) -> Result<ServerConfig, Error> {
    let failed = |why: &dyn std::fmt::Display| Error::Tls(why.to_string());
    let mut roots = RootCertStore::empty();
    for root in CertificateDer::pem_slice_iter(current.bundle.as_bytes()) {
        roots.add(root.map_err(|why| failed(&why))?).map_err(|why| failed(&why))?;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), crypto.clone())
        .allow_unauthenticated()
        .build()
        .map_err(|why| failed(&why))?;
    let mut tls = ServerConfig::builder_with_provider(crypto)
        .with_protocol_versions(&[&TLS13])
        .map_err(|why| failed(&why))?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(resolver);
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    tls.session_storage = Arc::new(NoServerSessionStorage {});
    tls.send_tls13_tickets = 0;
    Ok(tls)
}
