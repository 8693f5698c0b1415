//! Pull secrets of this node's pods, asked of the cluster's service: the node itself has no right on secrets.
//!
//! Who we are is shown twice: by our service account's bound token, which kubelet rotates in its file, and by a
//! certificate that the service gave for such a token (`identity.rs`); its key is made here and is in memory only. Every
//! question has a deadline, and so many are asked at once as the service lets one node. Secrets are never written down
//! and never logged. May touch: the token's and the CA's file, the service.

mod ask;
mod config;
mod identity;

use std::{sync::Arc, time::Duration};

use tokio::sync::Semaphore;

pub use ask::Given;
pub use config::SecretsConfig;

use crate::{sandbox::effects::PullSecretError, spec::PodRef};

/// The service lets a node have more; the rest is for another node program during an upgrade.
const AT_ONCE: usize = 8;

/// Asks the service. Clones are the same.
#[derive(Clone)]
pub struct PullSecrets(Arc<Inner>);

struct Inner {
    config: SecretsConfig,
    places: Semaphore,
    identity: identity::Holder,
}

impl PullSecrets {
    /// One that asks as it is told. Nothing is read or asked yet.
    pub fn new(config: SecretsConfig) -> PullSecrets {
        let identity = identity::Holder::default();
        PullSecrets(Arc::new(Inner { config, places: Semaphore::new(AT_ONCE), identity }))
    }

    /// How often a running pod's secrets are asked for again.
    pub fn refresh(&self) -> Duration {
        self.0.config.refresh
    }

    /// What the pod's images are pulled with, and what of it cannot be used.
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
            let text = format!("pull secrets of pod {pod}, asked of {}: {}", config.address, why.text);
            PullSecretError { text, refused: why.refused }
        })
    }
}

impl Inner {
    async fn of(&self, pod: &PodRef) -> Result<Given, ask::Error> {
        // Fails only for a closed semaphore, and nobody closes it.
        let _place = self.places.acquire().await;
        let token = self.config.token().await?;
        let identity = self.identity.get(&self.config, &token).await?;
        match ask::pull_secrets(&self.config, &identity, &token, pod).await {
            // The CA or the node may be another one since: once with a new certificate.
            Err(why) if why.unknown => {
                self.identity.forget(&identity).await;
                let identity = self.identity.get(&self.config, &token).await?;
                ask::pull_secrets(&self.config, &identity, &token, pod).await
            }
            other => other,
        }
    }
}
