//! Starts a role: binds its ports, then answers calls until a shutdown.

use std::sync::Arc;
use std::time::Duration;

use peerpod_base::admin::{self, Ready};
use peerpod_base::lifecycle::{Drain, Shutdown};
use prometheus_client::registry::Registry;
use tracing::{info, warn};

use crate::config::CsiConfig;
use crate::metrics::CsiMetrics;
use crate::proxy::{Intercept, Proxy};
use crate::server;
use crate::upstream::Upstream;

/// Limit for the calls in flight at the end.
const DRAIN: Duration = Duration::from_secs(10);

/// Shared parts that a role is made with.
pub struct RoleParts {
    /// Connection to the driver.
    pub upstream: Arc<Upstream>,
    /// Counters.
    pub metrics: CsiMetrics,
}

/// Binds the ports, serves, and drains.
///
/// # Errors
/// A port or socket cannot be bound, or a task ended that never should.
pub async fn run(
    config: &CsiConfig,
    shutdown: &Shutdown,
    role: impl AsyncFnOnce(&RoleParts) -> anyhow::Result<Arc<dyn Intercept>>,
) -> anyhow::Result<()> {
    let mut registry = Registry::default();
    let metrics = CsiMetrics::register(&mut registry);
    let ready = Ready::new();
    let starting = ready.block("start");
    let admin = admin::serve(config.admin_listen, Arc::new(registry), ready.clone()).await?;
    let upstream = Arc::new(Upstream::new(config.driver_endpoint.clone(), config.max_message));
    let parts = RoleParts { upstream: upstream.clone(), metrics: metrics.clone() };
    let role = role(&parts).await?;
    let proxy = Arc::new(Proxy::new(upstream, role, metrics, config.call_timeout, config.max_message));
    let listener = server::bind(&config.endpoint)?;
    let drain = Drain::new();
    let accepting = tokio::spawn(server::serve(listener, proxy, drain.clone()));
    drop(starting);
    info!(
        endpoint = %config.endpoint.display(), driver = %config.driver_endpoint.display(), %admin,
        "CSI calls are answered"
    );
    shutdown.wait().await;
    ready.not_ready("shutdown", "stopping");
    accepting.abort();
    if let Err(busy) = drain.drain(DRAIN).await {
        warn!(%busy, "calls cut off");
    }
    Ok(())
}
