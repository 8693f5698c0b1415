//! Holds the node's own CA, signs certificates, and issues tickets.
//!
//! * The CA is made once and kept in `<state-dir>/trust/ca.json` (0600, versioned). Guests pin it by SHA-256.
//! * A guest makes its own key. The node signs the guest's CSR with a subject of its own and ignores the requested
//!   names.
//! * The relay's key is made here and sent over `relay.sock`; it is the only private key besides the CA key.
//! * A [`Ticket`] lets a newly booted VM request its certificate. The ledger binds it to a key.
//!
//! # Rotation
//! [`Trust::rotate`] takes one step at a time, and each step is on disk before it returns:
//! 1. *stable → announced*: a next CA exists, and signs nothing yet. New VMs pin both CAs, and the relay trusts both.
//!    Running guests must receive both ([`Trust::trusted_cas`]) before the next step.
//! 2. *announced → overlap*: the next CA becomes current and signs guests, so all running guests must request a new
//!    certificate. The relay's identity still comes from the previous CA, because all VMs pin it. A VM with user-data
//!    from before the announcement pins no other CA.
//! 3. *overlap → stable*: the previous CA is dropped. The relay needs a new identity ([`Trust::relay_identity`]). This
//!    step must wait until every ticket that pins the previous CA alone has expired and every guest has a new
//!    certificate.
//!
//! May touch: its directory. Functions take the time as a parameter, except where their docs differ. Blocking, small
//! files.

mod authority;
mod error;
mod store;
mod ticket;

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use peerpod_link::tls;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use authority::Authority;
pub use error::Error;
pub use ticket::Ticket;

/// Validity of certificates.
#[derive(Clone, Copy, Debug)]
pub struct Validity {
    /// Validity of a CA. A CA should be rotated when a third of it is left.
    pub ca: Duration,
    /// Validity of a guest's certificate; it never exceeds that of the signing CA. It must exceed the life of a pod, or
    /// the guest must renew its certificate.
    pub guest: Duration,
}

const DAY: Duration = Duration::from_secs(86_400);

impl Default for Validity {
    fn default() -> Validity {
        Validity { ca: DAY * 3650, guest: DAY * 365 }
    }
}

/// Stage of a CA rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// There is one CA.
    Stable,
    /// The next CA exists and is announced to all guests; it signs nothing yet.
    Announced,
    /// The next CA is the current one; the previous one still signs the relay's certificate.
    Overlap,
}

/// A guest's signed certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signed {
    /// DER, the leaf first, then the CA that signed it.
    pub chain: Vec<Vec<u8>>,
    /// SHA-256 of the DER of the key's SubjectPublicKeyInfo, as [`Trust::csr_key_sha256`] returns it.
    pub key_sha256: [u8; 32],
    /// SHA-256 of the leaf's DER, by which the relay recognises the guest.
    pub certificate_sha256: [u8; 32],
}

/// A certificate chain, the leaf first, and the leaf's key.
pub type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// The node's CA, with the next or the previous one during a rotation. Debug shows no key.
#[derive(Debug)]
pub struct Trust {
    file: PathBuf,
    validity: Validity,
    authorities: Authorities,
}

/// The CAs that are kept on disk.
#[derive(Clone, Debug)]
struct Authorities {
    current: Authority,
    next: Option<Authority>,
    previous: Option<Authority>,
    /// When the current stage began.
    since: SystemTime,
}

impl Trust {
    /// Reads the CA from `dir`, or makes the directory and a CA. `now` is the node's clock.
    ///
    /// # Errors
    /// The file cannot be read or written, is damaged or from a newer version. It is never replaced then: a new CA
    /// would cut off every running guest.
    pub fn open(dir: &Path, now: SystemTime) -> Result<Trust, Error> {
        Trust::open_with(dir, now, Validity::default())
    }

    /// Opens it with other validities.
    ///
    /// # Errors
    /// See [`Trust::open`].
    pub fn open_with(dir: &Path, now: SystemTime, validity: Validity) -> Result<Trust, Error> {
        store::prepare(dir)?;
        let file = dir.join("ca.json");
        let authorities = match store::read(&file)? {
            Some(kept) if kept.current.not_after > now => kept,
            ended => {
                if ended.is_some() {
                    // No valid certificate of it can exist: it expired, or was made while the clock was wrong.
                    tracing::warn!(file = %file.display(), "the node's CA has expired and is replaced");
                }
                let current = Authority::make(now, validity.ca)?;
                let made = Authorities { current, next: None, previous: None, since: now };
                store::write(&file, &made)?;
                made
            }
        };
        Ok(Trust { file, validity, authorities })
    }

    /// Returns the SHA-256 of the DER of every CA, for new VMs to pin.
    pub fn ca_sha256(&self) -> Vec<[u8; 32]> {
        self.all().map(|ca| tls::fingerprint(&ca.certificate)).collect()
    }

    /// Returns the CAs that may have signed guests' certificates, and that running guests must pin.
    pub fn trusted_cas(&self) -> Vec<CertificateDer<'static>> {
        self.all().map(|ca| ca.certificate.clone()).collect()
    }

    /// Makes a new key and certificate for the relay, valid as long as its CA. The oldest CA signs it, because every
    /// guest pins that one. The chain is the leaf and the CA. Dated by the system's clock.
    ///
    /// # Errors
    /// The key cannot be made.
    pub fn relay_identity(&self) -> Result<Identity, Error> {
        let authorities = &self.authorities;
        let oldest = authorities.previous.as_ref().unwrap_or(&authorities.current);
        oldest.relay_identity(SystemTime::now())
    }

    /// Signs a guest's CSR, valid from now by the system's clock. The same key may be signed again.
    ///
    /// # Errors
    /// The CSR is malformed, is not signed by its own key, or the key is not P-256.
    pub fn sign_guest(&self, sandbox: &str, csr_der: &[u8]) -> Result<Signed, Error> {
        self.sign_guest_at(sandbox, csr_der, SystemTime::now())
    }

    /// Signs a guest's CSR, valid from `now`.
    ///
    /// # Errors
    /// See [`Trust::sign_guest`].
    pub fn sign_guest_at(&self, sandbox: &str, csr_der: &[u8], now: SystemTime) -> Result<Signed, Error> {
        self.authorities.current.sign_guest(sandbox, csr_der, now, self.validity.guest)
    }

    /// Returns the key of a CSR: SHA-256 of the DER of its SubjectPublicKeyInfo. Makes the checks of
    /// [`Trust::sign_guest`].
    ///
    /// # Errors
    /// See [`Trust::sign_guest`].
    pub fn csr_key_sha256(csr_der: &[u8]) -> Result<[u8; 32], Error> {
        authority::request(csr_der).map(|(_, key)| key)
    }

    /// Returns the stage of the rotation.
    pub fn stage(&self) -> Stage {
        match (&self.authorities.previous, &self.authorities.next) {
            (Some(_), _) => Stage::Overlap,
            (None, Some(_)) => Stage::Announced,
            (None, None) => Stage::Stable,
        }
    }

    /// Returns the time at which the stage began.
    pub fn stage_since(&self) -> SystemTime {
        self.authorities.since
    }

    /// Whether a rotation should begin: less than a third of the CA's validity is left.
    pub fn is_rotation_due(&self, now: SystemTime) -> bool {
        self.stage() == Stage::Stable && now + self.validity.ca / 3 > self.authorities.current.not_after
    }

    /// Takes one step of the rotation and returns the new stage. The module's page lists the conditions for each step.
    ///
    /// # Errors
    /// The step could not be written to disk, and was not taken.
    pub fn rotate(&mut self, now: SystemTime) -> Result<Stage, Error> {
        let mut stepped = self.authorities.clone();
        stepped.since = now;
        match self.stage() {
            Stage::Stable => stepped.next = Some(Authority::make(now, self.validity.ca)?),
            Stage::Announced => {
                if let Some(next) = stepped.next.take() {
                    stepped.previous = Some(std::mem::replace(&mut stepped.current, next));
                }
            }
            Stage::Overlap => stepped.previous = None,
        }
        store::write(&self.file, &stepped)?;
        self.authorities = stepped;
        Ok(self.stage())
    }

    /// All CAs, the oldest first.
    fn all(&self) -> impl Iterator<Item = &Authority> {
        let kept = &self.authorities;
        kept.previous.iter().chain(std::iter::once(&kept.current)).chain(kept.next.iter())
    }
}

#[cfg(test)]
mod tests;
