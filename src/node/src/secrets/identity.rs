//! Holds the node's client certificate: requested with the token when there is none, and again after half of its
//! validity.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, SystemTime},
};

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use rcgen::{CertificateParams, DistinguishedName, KeyPair, PKCS_ECDSA_P256_SHA256};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::sync::Mutex;
use tracing::{info, warn};
use zeroize::{Zeroize, Zeroizing};

use super::{
    SecretsConfig,
    ask::{self, Error},
};

/// A certificate and its key.
pub(super) struct Identity {
    pub(super) chain: Vec<CertificateDer<'static>>,
    key: Zeroizing<Vec<u8>>,
    renew: SystemTime,
    not_after: SystemTime,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("not_after", &self.not_after).finish_non_exhaustive()
    }
}

impl Identity {
    pub(super) fn key(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::from(PrivatePkcs8KeyDer::from(self.key.to_vec()))
    }
}

/// The certificate in use.
#[derive(Default)]
pub(super) struct Holder(Mutex<Option<Arc<Identity>>>);

impl Holder {
    /// Returns the certificate in use, or a new one where it is due. Concurrent callers wait for the same renewal.
    ///
    /// # Errors
    /// There is no valid certificate, and the service issues none.
    pub(super) async fn get(&self, config: &SecretsConfig, token: &str) -> Result<Arc<Identity>, Error> {
        let mut held = self.0.lock().await;
        let now = SystemTime::now();
        if let Some(identity) = held.as_ref().filter(|identity| now < identity.renew) {
            return Ok(identity.clone());
        }
        match enrol(config, token, now).await {
            Ok(identity) => {
                info!(?identity, "the secrets service issued a certificate to this node");
                let identity = Arc::new(identity);
                *held = Some(identity.clone());
                Ok(identity)
            }
            Err(why) => {
                let good = held.as_ref().filter(|identity| now < identity.not_after).cloned();
                good.inspect(|_| {
                    warn!(error = why.text, "cannot renew the certificate for the secrets service yet")
                })
                .ok_or(why)
            }
        }
    }

    /// Drops a certificate that the service refused, so that the next request gets a new one.
    pub(super) async fn forget(&self, refused: &Arc<Identity>) {
        let mut held = self.0.lock().await;
        if held.as_ref().is_some_and(|held| Arc::ptr_eq(held, refused)) {
            *held = None;
        }
    }
}

async fn enrol(config: &SecretsConfig, token: &str, now: SystemTime) -> Result<Identity, Error> {
    let failed = |why: rcgen::Error| Error::away(format!("make a key and a certificate request: {why}"));
    let mut key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed)?;
    let mut params = CertificateParams::default();
    // The service identifies the node by its token, so the subject is empty.
    params.distinguished_name = DistinguishedName::new();
    let request = params.serialize_request(&key).map_err(failed)?;
    let secret = Zeroizing::new(key.serialize_der());
    key.zeroize();
    let ask::Enrolled { certificates, not_after } = ask::enrol(config, token, request.der()).await?;
    let chain: Result<Vec<_>, _> =
        certificates.iter().map(|der| BASE64.decode(der).map(CertificateDer::from)).collect();
    let chain = chain.ok().filter(|chain| !chain.is_empty());
    let chain = chain.ok_or_else(|| Error::away("the certificate in the answer is not base64".to_owned()))?;
    let life = Duration::from_secs(not_after)
        .saturating_sub(now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default());
    if life.is_zero() || life > Duration::from_secs(366 * 86_400) {
        return Err(Error::away(
            "the certificate has ended already, or never ends; compare the clocks".to_owned(),
        ));
    }
    Ok(Identity { chain, key: secret, renew: now + life / 2, not_after: now + life })
}
