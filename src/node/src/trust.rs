//! Who is who: the node's own CA, the certificates it signs, and tickets.
//!
//! * The CA is made once and kept in `<state-dir>/trust/ca.json` (0600, versioned). Guests pin it by SHA-256.
//! * A guest makes its own key; we sign its CSR with a subject of ours and ignore the names it asks for.
//! * The relay's key is made here and handed over `relay.sock`; it is the only private key besides the CA's.
//! * A [`Ticket`] lets a VM that just booted ask for its certificate. Binding it to a key is the ledger's work.
//!
//! # Roll-over
//! [`Trust::roll_over`] goes one step at a time, and each step is on disk before it returns:
//! 1. *stable → announced*: a next CA exists. New VMs pin both, the relay trusts both, running guests must be told
//!    ([`Trust::trusted_cas`]) before the next step. Nothing is signed by it yet.
//! 2. *announced → overlap*: the next one becomes current and signs guests, so all running guests must ask for a new
//!    certificate. The relay's identity still comes from the previous one: a VM that was born before the
//!    announcement pins only that, and everybody else pins it too.
//! 3. *overlap → stable*: the previous one is forgotten. The relay needs a new identity ([`Trust::relay_identity`]).
//!    Not before every ticket that pins it alone has expired and every guest has a new certificate.
//!
//! May touch: its directory. Knows no clock but what it is given, except where it says so. Blocking, small files.

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

/// How long certificates are good for.
#[derive(Clone, Copy, Debug)]
pub struct Validity {
    /// A CA's. It should be rolled over when a third of it is left.
    pub ca: Duration,
    /// A guest's; never longer than the CA's that signs it. Longer than a pod lives, or the guest must be rotated.
    pub guest: Duration,
}

const DAY: Duration = Duration::from_secs(86_400);

impl Default for Validity {
    fn default() -> Validity {
        Validity { ca: DAY * 3650, guest: DAY * 365 }
    }
}

/// How far a roll-over is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// One CA.
    Stable,
    /// The next CA exists and is told to everybody, nothing is signed by it.
    Announced,
    /// The next CA is the current one; the previous still vouches for the relay.
    Overlap,
}

/// A guest's signed certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signed {
    /// DER, the leaf first, then the CA that signed it.
    pub chain: Vec<Vec<u8>>,
    /// SHA-256 of the DER of the key's SubjectPublicKeyInfo, as [`Trust::csr_key_sha256`] gives it.
    pub key_sha256: [u8; 32],
    /// SHA-256 of the leaf's DER, as the relay recognises the guest.
    pub certificate_sha256: [u8; 32],
}

/// A certificate chain, the leaf first, and the leaf's key.
pub type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// The node's CA, with the one before or after it during a roll-over. Debug shows no key.
#[derive(Debug)]
pub struct Trust {
    file: PathBuf,
    validity: Validity,
    authorities: Authorities,
}

/// What is kept on disk.
#[derive(Clone, Debug)]
struct Authorities {
    current: Authority,
    next: Option<Authority>,
    previous: Option<Authority>,
    /// When the current stage began.
    since: SystemTime,
}

impl Trust {
    /// Reads the CA from `dir`, or makes both. `now` is the node's clock.
    ///
    /// # Errors
    /// The file cannot be read or written, is damaged or from a newer version. It is never replaced then: a new CA
    /// would cut off every running guest.
    pub fn open(dir: &Path, now: SystemTime) -> Result<Trust, Error> {
        Trust::open_with(dir, now, Validity::default())
    }

    /// The same with other validities.
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
                    // Nobody can hold a valid certificate of it: it ended, or was made while the clock was wrong.
                    tracing::warn!(file = %file.display(), "the node's CA has ended and is replaced");
                }
                let current = Authority::make(now, validity.ca)?;
                let made = Authorities { current, next: None, previous: None, since: now };
                store::write(&file, &made)?;
                made
            }
        };
        Ok(Trust { file, validity, authorities })
    }

    /// What new VMs pin: the SHA-256 of the DER of every CA there is.
    pub fn ca_sha256(&self) -> Vec<[u8; 32]> {
        self.all().map(|ca| tls::fingerprint(&ca.certificate)).collect()
    }

    /// The CAs that guests' certificates may come from, and that running guests are told to pin.
    pub fn trusted_cas(&self) -> Vec<CertificateDer<'static>> {
        self.all().map(|ca| ca.certificate.clone()).collect()
    }

    /// A new key and certificate for the relay, good as long as its CA. Signed by the oldest CA there is, because that
    /// is the one every guest pins. The chain is the leaf and the CA. Dated by the system's clock.
    ///
    /// # Errors
    /// The key cannot be made.
    pub fn relay_identity(&self) -> Result<Identity, Error> {
        let authorities = &self.authorities;
        let oldest = authorities.previous.as_ref().unwrap_or(&authorities.current);
        oldest.relay_identity(SystemTime::now())
    }

    /// Signs a guest's CSR, from now by the system's clock. The same key may come again.
    ///
    /// # Errors
    /// The CSR is no CSR, is not signed by its own key, or the key is not P-256.
    pub fn sign_guest(&self, sandbox: &str, csr_der: &[u8]) -> Result<Signed, Error> {
        self.sign_guest_at(sandbox, csr_der, SystemTime::now())
    }

    /// Signs a guest's CSR, from `now`.
    ///
    /// # Errors
    /// See [`Trust::sign_guest`].
    pub fn sign_guest_at(&self, sandbox: &str, csr_der: &[u8], now: SystemTime) -> Result<Signed, Error> {
        self.authorities.current.sign_guest(sandbox, csr_der, now, self.validity.guest)
    }

    /// The key a CSR is for: SHA-256 of the DER of its SubjectPublicKeyInfo. Checks what [`Trust::sign_guest`] checks.
    ///
    /// # Errors
    /// See [`Trust::sign_guest`].
    pub fn csr_key_sha256(csr_der: &[u8]) -> Result<[u8; 32], Error> {
        authority::request(csr_der).map(|(_, key)| key)
    }

    /// How far a roll-over is.
    pub fn stage(&self) -> Stage {
        match (&self.authorities.previous, &self.authorities.next) {
            (Some(_), _) => Stage::Overlap,
            (None, Some(_)) => Stage::Announced,
            (None, None) => Stage::Stable,
        }
    }

    /// When the stage began.
    pub fn stage_since(&self) -> SystemTime {
        self.authorities.since
    }

    /// Whether a roll-over should begin: less than a third of the CA's time is left.
    pub fn is_roll_over_due(&self, now: SystemTime) -> bool {
        self.stage() == Stage::Stable && now + self.validity.ca / 3 > self.authorities.current.not_after
    }

    /// Goes one step on and returns the new stage. See the module's page for what must be true before each step.
    ///
    /// # Errors
    /// The step could not be written down, and was not made.
    pub fn roll_over(&mut self, now: SystemTime) -> Result<Stage, Error> {
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

    /// Every CA there is, the oldest first.
    fn all(&self) -> impl Iterator<Item = &Authority> {
        let kept = &self.authorities;
        kept.previous.iter().chain(std::iter::once(&kept.current)).chain(kept.next.iter())
    }
}

#[cfg(test)]
mod tests;
