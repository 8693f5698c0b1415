//! Serves a certificate of the project's own CA ([`crate::authority`]): makes a key that only this process has, in
//! memory alone, and renews the certificate in time.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use peerpod_base::metrics::Ends;
use rustls::crypto::CryptoProvider;
use rustls::sign::CertifiedKey;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use super::maintainer::{Authority, CaMaintainer, Current};
use crate::serve::InUse;

/// Delay after a failure.
const AGAIN: Duration = Duration::from_secs(5);
/// Longest sleep, because the clock may be set meanwhile.
const LOOK: Duration = Duration::from_secs(600);

impl CaMaintainer {
    /// Starts the tasks that maintain the CA and the certificate of a server of these names. Calls `issued` after each
    /// new certificate. Returns the certificate in use, which is empty at first, and the CA.
    pub(crate) fn serve(
        self,
        names: Vec<String>,
        crypto: Arc<CryptoProvider>,
        tasks: &mut JoinSet<()>,
        issued: impl Fn() + Send + 'static,
    ) -> (InUse, Authority) {
        let (sender, authority) = watch::channel(None);
        let in_use = InUse::default();
        let served = Served { names, validity: self.policy.leaf, crypto, in_use: in_use.clone() };
        tasks.spawn(self.run(sender));
        tasks.spawn(served.follow(authority.clone(), issued));
        (in_use, authority)
    }
}

/// Returns the ends of a served certificate and of its CA, by these names; those that are not known yet are left out.
pub(crate) fn ends(certificate: &InUse, authority: &Authority, [leaf, ca]: [&'static str; 2]) -> Ends {
    let signer = authority.borrow().as_ref().map(|current| current.not_after());
    let both = [(leaf, certificate.not_after()), (ca, signer)];
    both.into_iter().filter_map(|(name, end)| Some((name, end?))).collect()
}

struct Served {
    names: Vec<String>,
    validity: Duration,
    crypto: Arc<CryptoProvider>,
    in_use: InUse,
}

impl Served {
    /// Runs for ever: makes the certificate, and a new one when the CA changes or two thirds of its life are over.
    async fn follow(self, mut authority: Authority, issued: impl Fn()) {
        let mut renew = SystemTime::UNIX_EPOCH;
        let mut signed_by = Vec::new();
        loop {
            let current = authority.borrow_and_update().clone();
            let now = SystemTime::now();
            let mut pause = renew.duration_since(now).unwrap_or_default();
            if let Some(current) = current
                && (signed_by != current.signer.certificate.as_ref() || now >= renew)
            {
                pause = match self.issue(&current, now) {
                    Ok(until) => {
                        signed_by = current.signer.certificate.to_vec();
                        let life = until.duration_since(now).unwrap_or_default() * 2 / 3;
                        renew = now + life;
                        info!(names = self.names.join(" "), renewed_in = ?life, "certificate made");
                        issued();
                        life
                    }
                    Err(why) => {
                        warn!(error = format!("{why:#}"), "no new certificate; the old one stays in use");
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

    fn issue(&self, current: &Current, now: SystemTime) -> Result<SystemTime> {
        let name = self.names.first().map_or("peerpod", String::as_str);
        let leaf = current.signer.server(name, &self.names, now, now + self.validity)?;
        self.in_use.set(CertifiedKey::from_der(leaf.chain, leaf.key, &self.crypto)?);
        Ok(leaf.not_after)
    }
}
