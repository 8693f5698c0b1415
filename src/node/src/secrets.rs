//! Fetches the pull secrets of this node's pods from the cluster's service: the node itself has no right to read
//! secrets.
//!
//! The node identifies itself with its service account's bound token, which kubelet rotates in its file. Every request
//! has a deadline, and the number of concurrent requests stays below the service's limit for one node. Secrets are never
//! written to disk and never logged. May touch: the token's and the CA's file, the service.

mod ask;
mod config;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

pub use ask::Given;
pub use config::SecretsConfig;

use crate::sandbox::ports::PullSecretError;
use crate::spec::PodRef;

/// Concurrent requests. The service allows a node more; the rest is for a second node process during an upgrade.
const AT_ONCE: usize = 8;

/// Client of the pull-secret service. Clones share one state.
#[derive(Clone)]
pub struct PullSecrets(Arc<Inner>);

struct Inner {
    config: SecretsConfig,
    places: Semaphore,
}

impl PullSecrets {
    /// Creates a client. It neither reads nor requests anything yet.
    pub fn new(config: SecretsConfig) -> PullSecrets {
        PullSecrets(Arc::new(Inner { config, places: Semaphore::new(AT_ONCE) }))
    }

    /// Returns the interval at which a running pod's secrets are requested again.
    pub fn refresh(&self) -> Duration {
        self.0.config.refresh
    }

    /// Returns the secrets with which the pod's images are pulled, and notes about unusable ones.
    ///
    /// # Errors
    /// The service refused, or did not answer in time.
    pub async fn of(&self, pod: &PodRef) -> Result<Given, PullSecretError> {
        let config = &self.0.config;
        let late = || PullSecretError {
            text: format!(
                "pull secrets of pod {pod}: {} did not answer within {:?}",
                config.address, config.deadline
            ),
            refused: false,
        };
        let asked = async {
            // Fails only for a closed semaphore, and no code closes it.
            let _place = self.0.places.acquire().await;
            ask::pull_secrets(config, pod).await
        };
        tokio::time::timeout(config.deadline, asked).await.map_err(|_| late())?.map_err(|why| {
            let text = format!("pull secrets of pod {pod}, from {}: {}", config.address, why.text);
            PullSecretError { text, refused: why.refused }
        })
    }
}
