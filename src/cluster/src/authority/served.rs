//! Serves a certificate of the project's own CA ([`crate::authority`]): makes a key that only this process has, in
//! memory alone, and renews the certificate in time.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use parking_lot::RwLock;
use rustls::crypto::CryptoProvider;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use super::maintainer::{Authority, Current};

/// Delay after a failure.
const AGAIN: Duration = Duration::from_secs(5);
/// Longest sleep, because the clock may be set meanwhile.
const LOOK: Duration = Duration::from_secs(600);

/// Certificate in use. Clones share it.
#[derive(Clone, Debug)]
pub struct Served {
    names: Arc<Vec<String>>,
    validity: Duration,
    crypto: Arc<CryptoProvider>,
    current: Arc<RwLock<Option<Arc<CertifiedKey>>>>,
}

impl Served {
    /// Returns a server certificate for these names, which is empty until [`Served::follow`] makes it.
    pub fn new(names: Vec<String>, validity: Duration, crypto: Arc<CryptoProvider>) -> Served {
        Served { names: Arc::new(names), validity, crypto, current: Arc::default() }
    }

    /// Runs for ever: makes the certificate, and a new one when the CA changes or two thirds of its life are over.
    /// Calls `issued` after each.
    pub async fn follow(self, mut authority: Authority, issued: impl Fn()) {
        let mut renew = SystemTime::UNIX_EPOCH;
        let mut signed_by = Vec::new();
        loop {
            let current = authority.borrow_and_update().clone();
            let now = SystemTime::now();
            let mut pause = renew.duration_since(now).unwrap_or_default();
            if let Some(current) = current
                && (signed_by != current.signer.certificate().as_ref() || now >= renew)
            {
                pause = match self.issue(&current, now) {
                    Ok(until) => {
                        signed_by = current.signer.certificate().to_vec();
                        let life = until.duration_since(now).unwrap_or_default() * 2 / 3;
                        renew = now + life;
                        info!(names = self.names.join(" "), renewed_in = ?life, "certificate made");
                        issued();
                        life
                    }
                    Err(why) => {
                        warn!(error = why, "no new certificate; the old one stays in use");
                        AGAIN
                    }
                };
            }
            let news = timeout(pause.min(LOOK), authority.changed()).await;
            // The task that maintains the CA ended with the process.
            if matches!(news, Ok(Err(_))) {
                sleep(AGAIN).await;
            }
        }
    }

    fn issue(&self, current: &Current, now: SystemTime) -> Result<SystemTime, String> {
        let leaf = current.signer.server(&self.names, now, self.validity).map_err(|why| why.to_string())?;
        let pair = CertifiedKey::from_der(leaf.chain, leaf.key, &self.crypto);
        let pair = Arc::new(pair.map_err(|why| why.to_string())?);
        *self.current.write() = Some(pair);
        Ok(leaf.not_after)
    }
}

impl ResolvesServerCert for Served {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.current.read().clone()
    }
}
