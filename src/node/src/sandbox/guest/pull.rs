//! Fetches the pod's pull secrets and keeps those of the guest up to date. The first query runs in the background from
//! CreateVM on. The guest gets the secrets with its pod assignment; further queries run while the pod runs. A service
//! that does not answer delays a pod by one query at most; the guest gets its secrets once they arrive. The secrets are
//! kept in memory only. A restarted node queries again, and meanwhile the guest keeps those it has.

use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::time::{Instant, sleep_until};
use tracing::{info, warn};
use zeroize::Zeroizing;

use crate::sandbox::lifecycle::{Completion, Phase, Task, Unapplied, Which, clip};
use crate::sandbox::ports::PullSecretError;

/// Maximum pause after a refusal, which is due to the pod or the cluster's settings.
const AFTER_REFUSAL: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(crate) struct Pull {
    secret: Option<Zeroizing<String>>,
    /// Digest that distinguishes secrets; empty for an empty one.
    digest: String,
    /// Whether the first query has ended, with any result.
    asked: bool,
    next: Option<Instant>,
    /// Whether the pod's owner got an Event about missing secrets.
    missed: bool,
}

impl Pull {
    pub(crate) fn secret(&self) -> Option<&str> {
        self.secret.as_ref().map(|secret| secret.as_str())
    }

    /// Returns the digest of the known secret, for the record.
    pub(crate) fn digest(&self) -> Option<&str> {
        self.secret.as_ref().map(|_| self.digest.as_str())
    }

    /// Whether the recorded digest is that of the known secret; true while none is known.
    pub(crate) fn is_same(&self, told: Option<&str>) -> bool {
        self.digest().is_none_or(|now| told.unwrap_or_default() == now)
    }
}

impl Task {
    /// Whether the guest need not wait for its pod's pull secrets any longer.
    pub(crate) fn is_pull_secret_asked(&self) -> bool {
        self.guest.pull.asked || !self.asks_for_pull_secret()
    }

    pub(crate) fn asks_for_pull_secret(&self) -> bool {
        self.record.pod.is_some() && self.ports.kubernetes.pull_secrets_every().is_some()
    }

    pub(crate) fn ask_pull_secret(&mut self) {
        if !self.in_flight.secret.is_idle() || self.ports.kubernetes.pull_secrets_every().is_none() {
            return;
        }
        let Some(pod) = self.record.pod.clone() else { return };
        // The query uses the pod's UID, if it is about to be known: the name may belong to another pod by now.
        let booting = matches!(self.record.phase, Phase::Created | Phase::Booting { .. });
        if booting && pod.uid.is_none() && self.ports.kubernetes.is_in_cluster() && !self.start.announced {
            return;
        }
        match self.guest.pull.next.filter(|next| *next > Instant::now()) {
            Some(next) => self.in_flight.secret.start(async move {
                sleep_until(next).await;
                Completion::Rested
            }),
            None => {
                let ports = self.ports.clone();
                let ask = async move { Completion::PullSecret(ports.kubernetes.pull_secret(&pod).await) };
                self.in_flight.secret.start(ask);
            }
        }
    }

    /// Handles the answer. A waiting guest goes on in any case.
    pub(crate) fn pull_secret_came(
        &mut self,
        answer: Result<Zeroizing<String>, PullSecretError>,
    ) -> Result<(), Unapplied> {
        self.guest.pull.asked = true;
        let every = self.ports.kubernetes.pull_secrets_every().unwrap_or(AFTER_REFUSAL);
        match answer {
            Ok(secret) => {
                self.worked(Which::Secret);
                self.guest.pull.next = Some(Instant::now() + every);
                if std::mem::take(&mut self.guest.pull.missed) {
                    info!("the pod's pull secrets arrived");
                }
                self.guest.pull.digest.clear();
                if !secret.is_empty() {
                    // Includes the sandbox's id, so that the digest does not reveal that two pods have the same secret.
                    let digest = Sha256::new_with_prefix(self.record.id.as_str());
                    self.guest.pull.digest =
                        hex::encode(digest.chain_update([0]).chain_update(secret.as_bytes()).finalize());
                }
                self.guest.pull.secret = Some(secret);
            }
            Err(error) => {
                if !std::mem::replace(&mut self.guest.pull.missed, true) {
                    let kept = match self.record.assigned.secret {
                        Some(_) => "keeps its present ones",
                        None => "goes on without them",
                    };
                    warn!(
                        error = clip(&error.text),
                        "no answer about the pod's pull secrets; the pod {kept}, and they follow later"
                    );
                    self.metrics.guests.pull_secrets_missed.inc();
                    let text = format!("{}; the pod {kept}, and they follow later", error.text);
                    self.tell("PullSecretsMissing", text);
                }
                if error.refused {
                    self.guest.pull.next = Some(Instant::now() + every.min(AFTER_REFUSAL));
                    self.trouble(Which::Secret, error.text);
                } else {
                    self.later(Which::Secret, error.text);
                }
            }
        }
        Ok(())
    }
}
