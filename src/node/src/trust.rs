//! Holds the node's own CA, which guests pin by SHA-256, in `<state-dir>/trust/ca.json` (0600, versioned). Signs the
//! guests' CSRs, of which it uses the key alone, makes the relay's key, and issues tickets ([`Ticket`]).
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

mod store;
mod ticket;

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use peerpod_link::tls;
use peerpod_pki::{Authority, Identity, RequestedKey};
use rustls_pki_types::CertificateDer;
use sha2::{Digest, Sha256};

pub(crate) use ticket::Ticket;

/// Name of the node's CAs.
const CA: &str = "peerpod node CA";

/// Reason that a certificate, a ticket or the CA is not available.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{what} {}: {why}; check the state directory's disk and permissions", path.display())]
    Disk { what: &'static str, path: PathBuf, why: std::io::Error },
    #[error(
        "read the node's CA from {}: {why}; restore it from a backup, or move it away when no pod VM is running",
        path.display()
    )]
    Damaged {
        path: PathBuf,
        /// The fault; never the content.
        why: String,
    },
    #[error(
        "read the node's CA from {}: it has version {version}, this release reads version 1; use the newer release",
        path.display()
    )]
    Newer { path: PathBuf, version: u64 },
    #[error(transparent)]
    Pki(#[from] peerpod_pki::Error),
}

/// Validity of certificates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Validity {
    /// Validity of a CA. A CA should be rotated when a third of it is left.
    pub(crate) ca: Duration,
    /// Validity of a guest's certificate, at most that of the CA. It must exceed a pod's life, or the guest must renew.
    pub(crate) guest: Duration,
}

const DAY: Duration = Duration::from_secs(86_400);

impl Default for Validity {
    fn default() -> Validity {
        Validity { ca: DAY * 3650, guest: DAY * 365 }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RotationStage {
    Stable,
    /// The next CA exists and is announced to all guests; it signs nothing yet.
    Announced,
    /// The next CA is the current one; the previous one still signs the relay's certificate.
    Overlap,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Signed {
    /// DER, the leaf first, then the CA that signed it.
    pub(crate) chain: Vec<Vec<u8>>,
    /// SHA-256 of the leaf's DER, by which the relay recognises the guest.
    pub(crate) certificate_sha256: [u8; 32],
}

/// The node's CA, with the next or the previous one during a rotation. Debug shows no key.
#[derive(Debug)]
pub(crate) struct Trust {
    file: PathBuf,
    validity: Validity,
    authorities: Authorities,
}

#[derive(Clone, Debug)]
struct Authorities {
    current: Authority,
    next: Option<Authority>,
    previous: Option<Authority>,
    since: SystemTime,
}

impl Trust {
    /// Reads the CA from `dir`, or makes the directory and a CA. A file that is damaged or from a newer version is an
    /// error and is never replaced: a new CA would cut off every running guest. With guests, neither is a CA past its
    /// end, because the clock may be wrong.
    pub(crate) fn open(
        dir: &Path,
        now: SystemTime,
        validity: Validity,
        has_guests: bool,
    ) -> Result<Trust, Error> {
        store::prepare(dir)?;
        let file = dir.join("ca.json");
        let kept = store::read(&file)?;
        let has_ended = kept.as_ref().is_some_and(|kept| kept.current.not_after <= now);
        let authorities = match kept {
            Some(kept) if !has_ended => kept,
            Some(kept) if has_guests => {
                tracing::error!(file = %file.display(), "the node's CA has expired and is kept, because sandboxes' guests trust only this CA; no guest can connect: correct the node's clock, or drain the node, and restart peerpod-node");
                kept
            }
            _ => {
                if has_ended {
                    tracing::warn!(file = %file.display(), "the node's CA has expired and is replaced");
                }
                let current = Authority::make(CA, now, validity.ca)?;
                let made = Authorities { current, next: None, previous: None, since: now };
                store::write(&file, &made)?;
                made
            }
        };
        Ok(Trust { file, validity, authorities })
    }

    /// Returns the SHA-256 of the DER of every CA, for new VMs to pin.
    pub(crate) fn ca_sha256(&self) -> Vec<[u8; 32]> {
        self.all().map(|ca| tls::fingerprint(&ca.certificate)).collect()
    }

    /// Returns the CAs that may have signed guests' certificates, and that running guests must pin.
    pub(crate) fn trusted_cas(&self) -> Vec<CertificateDer<'static>> {
        self.all().map(|ca| ca.certificate.clone()).collect()
    }

    /// Returns the end of the oldest CA in use. The relay's certificate, which it signs, ends at the same time.
    pub(crate) fn not_after(&self) -> SystemTime {
        let Authorities { previous, current, .. } = &self.authorities;
        previous.as_ref().unwrap_or(current).not_after
    }

    /// Makes the relay's new key and certificate. The oldest CA signs it, because every guest pins that one.
    pub(crate) fn relay_identity(&self) -> Result<Identity, Error> {
        let authorities = &self.authorities;
        let oldest = authorities.previous.as_ref().unwrap_or(&authorities.current);
        let names = [tls::SERVER_NAME.to_owned()];
        Ok(oldest.server("peerpod relay", &names, SystemTime::now(), oldest.not_after)?)
    }

    /// Signs a guest's CSR, valid from `now`. The same key may be signed again. Fails if the CSR is malformed, is not
    /// signed by its own key, or the key is not P-256.
    pub(crate) fn sign_guest(&self, sandbox: &str, csr_der: &[u8], now: SystemTime) -> Result<Signed, Error> {
        let (key, ca) = (RequestedKey::read(csr_der)?, &self.authorities.current);
        let uri = format!("peerpod:sandbox:{sandbox}");
        let leaf = ca.client(sandbox, &uri, &key, now, now + self.validity.guest)?;
        let certificate_sha256 = tls::fingerprint(&leaf);
        Ok(Signed { chain: vec![leaf.to_vec(), ca.certificate.to_vec()], certificate_sha256 })
    }

    /// Returns the SHA-256 of a CSR's SubjectPublicKeyInfo, after the checks of [`Trust::sign_guest`].
    pub(crate) fn csr_key_sha256(csr_der: &[u8]) -> Result<[u8; 32], Error> {
        Ok(Sha256::digest(RequestedKey::read(csr_der)?.info()).into())
    }

    pub(crate) fn stage(&self) -> RotationStage {
        match (&self.authorities.previous, &self.authorities.next) {
            (Some(_), _) => RotationStage::Overlap,
            (None, Some(_)) => RotationStage::Announced,
            (None, None) => RotationStage::Stable,
        }
    }

    /// Returns the time at which the stage began.
    pub(crate) fn stage_since(&self) -> SystemTime {
        self.authorities.since
    }

    /// Whether a rotation should begin: less than a third of the CA's validity is left, or the stage is as old as
    /// `every`. Never after the CA's end: guests with a correct clock would refuse certificates of the next CA.
    pub(crate) fn is_rotation_due(&self, now: SystemTime, every: Duration) -> bool {
        let left = self.authorities.current.not_after.duration_since(now).unwrap_or_default();
        let age = now.duration_since(self.authorities.since).unwrap_or_default();
        let is_due = left < self.validity.ca / 3 || age >= every;
        self.stage() == RotationStage::Stable && !left.is_zero() && is_due
    }

    /// Takes one step of the rotation, under the conditions above. A step that cannot be written to disk is not taken.
    pub(crate) fn rotate(&mut self, now: SystemTime) -> Result<RotationStage, Error> {
        let mut stepped = self.authorities.clone();
        stepped.since = now;
        match self.stage() {
            RotationStage::Stable => stepped.next = Some(Authority::make(CA, now, self.validity.ca)?),
            RotationStage::Announced => {
                if let Some(next) = stepped.next.take() {
                    stepped.previous = Some(std::mem::replace(&mut stepped.current, next));
                }
            }
            RotationStage::Overlap => stepped.previous = None,
        }
        store::write(&self.file, &stepped)?;
        self.authorities = stepped;
        Ok(self.stage())
    }

    /// All CAs, the oldest first.
    fn all(&self) -> impl Iterator<Item = &Authority> {
        let Authorities { previous, current, next, .. } = &self.authorities;
        previous.iter().chain([current]).chain(next)
    }
}

#[cfg(test)]
mod tests;
