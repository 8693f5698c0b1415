//! Fetches the pull secrets of this node's pods from the cluster's service: the node itself has no right to read
//! secrets.
//!
//! The node identifies itself with its service account's bound token, which kubelet rotates in its file. It also shows
//! a certificate that the service issued for such a token (`identity.rs`). The certificate's key is made here and is in
//! memory only. Every request has a deadline, and the number of concurrent requests stays below the service's limit for
//! one node. Secrets are never written to disk and never logged. May touch: the token's and the CA's file, the service.

mod ask;
mod config;
mod identity;

use std::{sync::Arc, time::Duration};

use tokio::sync::Semaphore;

pub use ask::Given;
pub use config::SecretsConfig;

use crate::{sandbox::ports::PullSecretError, spec::PodRef};

/// Concurrent requests. The service allows a node more; the rest is for a second node process during an upgrade.
const AT_ONCE: usize = 8;

/// Client of the pull-secret service. Clones share one state.
#[derive(Clone)]
pub struct PullSecrets(Arc<Inner>);

struct Inner {
    config: SecretsConfig,
    places: Semaphore,
    identity: identity::Holder,
}

impl PullSecrets {
    /// Creates a client. It neither reads nor requests anything yet.
    pub fn new(config: SecretsConfig) -> PullSecrets {
        let identity = identity::Holder::default();
        PullSecrets(Arc::new(Inner { config, places: Semaphore::new(AT_ONCE), identity }))
    }

    /// Returns the interval at which a running pod's secrets are requested again.
    pub fn refresh(&self) -> Duration {
        self.0.config.refresh
    }

    /// Returns the secrets with which the pod's images are pulled, and notes about unusable ones.
    ///
    /// # Errors
    /// The service refused, or did not answer before `secrets.deadline`.
    pub async fn of(&self, pod: &PodRef) -> Result<Given, PullSecretError> {
        let config = &self.0.config;
        let late = || PullSecretError {
            text: format!(
                "pull secrets of pod {pod}: {} did not answer within {:?}",
                config.address, config.deadline
            ),
            refused: false,
        };
        tokio::time::timeout(config.deadline, self.0.of(pod)).await.map_err(|_| late())?.map_err(|why| {
            let text = format!("pull secrets of pod {pod}, from {}: {}", config.address, why.text);
            PullSecretError { text, refused: why.refused }
        })
    }
}

impl Inner {
    async fn of(&self, pod: &PodRef) -> Result<Given, ask::Error> {
        // Fails only for a closed semaphore, and no code closes it.
        let _place = self.places.acquire().await;
        let token = self.config.token().await?;
        let identity = self.identity.get(&self.config, &token).await?;
        match ask::pull_secrets(&self.config, &identity, &token, pod).await {
            // The CA or the node's identity may have changed since: one retry with a new certificate.
            Err(why) if why.unknown => {
                self.identity.forget(&identity).await;
                let identity = self.identity.get(&self.config, &token).await?;
                ask::pull_secrets(&self.config, &identity, &token, pod).await
            }
            other => other,
        }
    }
}
