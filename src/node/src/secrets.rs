//! Fetches the pull secrets of this node's pods from the cluster's service: the node itself may not read secrets. It
//! shows its service account's bound token. Every request has a deadline, and the number of concurrent requests stays
//! below the service's limit for one node. Secrets are never written to disk and never logged.

mod ask;
mod config;

use std::time::Duration;

use tokio::sync::Semaphore;

use ask::Given;
pub(crate) use config::SecretsConfig;

use crate::sandbox::ports::PullSecretError;
use crate::spec::PodRef;

/// Concurrent requests. The service allows a node more; the rest is for a second node process during an upgrade.
const AT_ONCE: usize = 8;

pub(crate) struct PullSecrets {
    config: SecretsConfig,
    places: Semaphore,
}

impl PullSecrets {
    /// Creates a client. It neither reads nor requests anything yet.
    pub(crate) fn new(config: SecretsConfig) -> PullSecrets {
        PullSecrets { config, places: Semaphore::new(AT_ONCE) }
    }

    /// Returns the interval at which a running pod's secrets are requested again.
    pub(crate) fn refresh(&self) -> Duration {
        self.config.refresh
    }

    /// Returns the secrets that pull the pod's images, with notes on unusable ones. Fails without an answer in time.
    pub(crate) async fn of(&self, pod: &PodRef) -> Result<Given, PullSecretError> {
        let SecretsConfig { address, deadline, .. } = &self.config;
        let asked = async {
            // Fails only for a closed semaphore, and no code closes it.
            let _place = self.places.acquire().await;
            ask::pull_secrets(&self.config, pod).await
        };
        let Ok(given) = tokio::time::timeout(*deadline, asked).await else {
            let text = format!("pull secrets of pod {pod}: {address} did not answer within {deadline:?}");
            return Err(PullSecretError::away(text));
        };
        given.map_err(|PullSecretError { text, refused }| PullSecretError {
            text: format!("pull secrets of pod {pod}, from {address}: {text}"),
            refused,
        })
    }
}
