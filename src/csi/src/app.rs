//! Starts a role: binds its ports, then answers calls until a shutdown.

use std::sync::Arc;
use std::time::Duration;

use peerpod_base::admin::{self, Ready};
use peerpod_base::lifecycle::{Drain, Shutdown};
use peerpod_base::metrics::program;
use tracing::{info, warn};

use crate::config::CsiConfig;
use crate::controller::ControllerRole;
use crate::metrics::CsiMetrics;
use crate::node::NodeRole;
use crate::proxy::{Intercept, Proxy};
use crate::server;
use crate::upstream::Upstream;

/// Limit for the calls in flight at the end.
const DRAIN: Duration = Duration::from_secs(10);

/// Place of the program.
#[derive(Clone, Copy, Debug)]
pub enum Role {
    /// Before the sidecars of the driver's controller.
    Controller,
    /// Before the driver's node plugin.
    Node,
}

/// Binds the ports, serves, and drains.
///
/// # Errors
/// A port or socket cannot be bound, or the role cannot be started.
pub async fn run(role: Role, config: &CsiConfig, shutdown: &Shutdown) -> anyhow::Result<()> {
    config.check_cluster()?;
    let mut registry = program("peerpod-csi", env!("CARGO_PKG_VERSION"));
    let metrics = CsiMetrics::register(&mut registry);
    let ready = Ready::default();
    let starting = ready.block("start");
    let admin = admin::serve(config.admin_listen, Arc::new(registry), ready.clone()).await?;
    let upstream = Arc::new(Upstream::new(config.driver_endpoint.clone(), config.max_message));
    let role: Arc<dyn Intercept> = match role {
        Role::Controller => Arc::new(ControllerRole::start(config, &upstream, &metrics).await?),
        Role::Node => Arc::new(NodeRole::start(config, &upstream, &metrics).await?),
    };
    let proxy = Arc::new(Proxy { upstream, role, metrics, patience: config.call_timeout });
    let (listener, socket) = server::bind(&config.endpoint)?;
    let drain = Drain::default();
    let accepting = tokio::spawn(server::serve(listener, proxy, drain.clone()));
    drop(starting);
    info!(
        endpoint = %config.endpoint.display(), driver = %config.driver_endpoint.display(), %admin,
        "CSI calls are answered"
    );
    shutdown.wait().await;
    ready.not_ready("shutdown", "stopping");
    accepting.abort();
    drop(socket);
    if let Err(busy) = drain.drain(DRAIN).await {
        warn!(%busy, "calls cut off");
    }
    Ok(())
}
