//! Implements a CA that is kept in a Secret: made once, rotated before it ends, with old and new CA trusted side by
//! side.
//!
//! [`StoredCas`] is the stored state and its changes over time, pure; [`maintainer`] stores it in the API server. The
//! webhook's certificates and the secrets service use it. Private keys are wiped from memory on drop, as far as the
//! libraries allow. May touch: nothing but random numbers.

use std::fmt;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, anyhow};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use peerpod_pki::Authority;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

pub(crate) mod maintainer;
pub(crate) mod served;
#[cfg(test)]
mod tests;

/// Format that this program writes.
const VERSION: u32 = 1;
/// Limit of stored CAs. Two are usual: the one that signs, and its predecessor or successor.
const MOST: usize = 8;

/// Returns the error of a stored state that cannot be used.
fn unusable(why: impl fmt::Display) -> anyhow::Error {
    anyhow!("the stored CA cannot be used ({why}); remove the Secret's data, and a new CA is made")
}

/// Lifetimes of the CA and its certificates.
#[derive(Clone, Debug)]
pub(crate) struct Policy {
    /// Purpose of the CA, which is part of its name.
    pub(crate) name: String,
    /// Lifetime of a CA. The next one is made when a third of it is left.
    pub(crate) validity: Duration,
    /// Longest lifetime of a certificate that the CA signs.
    pub(crate) leaf: Duration,
    /// Time from the publication of the next CA until it signs, so that every client has read it.
    pub(crate) settle: Duration,
}

/// All known CAs, oldest first, in the stored form.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct StoredCas {
    version: u32,
    cas: Vec<Ca>,
}

/// One CA. Times are seconds since 1970.
#[derive(Clone, Serialize, Deserialize)]
struct Ca {
    /// Certificate in PEM.
    certificate: String,
    /// PKCS#8 in PEM; empty when the CA no longer signs.
    key: Zeroizing<String>,
    not_after: u64,
    /// When it was first seen published where clients read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    published: Option<u64>,
}

impl fmt::Debug for StoredCas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ends: Vec<u64> = self.cas.iter().map(|ca| ca.not_after).collect();
        f.debug_struct("StoredCas").field("not_after", &ends).finish_non_exhaustive()
    }
}

impl Default for StoredCas {
    fn default() -> StoredCas {
        StoredCas { version: VERSION, cas: Vec::new() }
    }
}

impl StoredCas {
    pub(crate) fn read(bytes: &[u8]) -> Result<StoredCas> {
        // The text of serde's error could repeat a part of a key.
        let state: StoredCas = serde_json::from_slice(bytes).map_err(|why| {
            unusable(format!("line {} column {}: no JSON of our form", why.line(), why.column()))
        })?;
        if state.version != VERSION {
            return Err(unusable(format!("version {}, and this program knows {VERSION}", state.version)));
        }
        if state.cas.is_empty() || state.cas.len() > MOST {
            return Err(unusable("no CA, or too many"));
        }
        for ca in &state.cas {
            if ca.key.is_empty() {
                ca.certificate()?;
            } else {
                ca.signer()?;
            }
        }
        Ok(state)
    }

    pub(crate) fn write(&self) -> Result<Zeroizing<Vec<u8>>> {
        Ok(Zeroizing::new(serde_json::to_vec(self).context("write the CA")?))
    }

    /// Applies the passage of time: makes the first or the next CA, removes an old one. Returns whether the state
    /// changed.
    pub(crate) fn advance(&mut self, policy: &Policy, now: SystemTime) -> Result<bool> {
        let at = seconds(now);
        let before = self.cas.len();
        self.cas.retain(|ca| ca.not_after > at);
        let mut changed = self.cas.len() != before;
        let third = policy.validity.as_secs() / 3;
        if self.cas.last().is_none_or(|ca| ca.not_after.saturating_sub(at) <= third) && self.cas.len() < MOST
        {
            self.cas.push(Ca::make(policy, now)?);
            changed = true;
        }
        let Some(signs) = self.signs(policy, now) else { return Ok(changed) };
        // By then every certificate of the older CAs has ended.
        let since = self.cas[signs].published.unwrap_or(at).saturating_add(policy.settle.as_secs());
        let ended = since.saturating_add(policy.leaf.as_secs()) < at;
        for ca in &mut self.cas[..signs] {
            if !ca.key.is_empty() {
                ca.key = Zeroizing::default();
                changed = true;
            }
        }
        if ended && signs > 0 {
            self.cas.drain(..signs);
            changed = true;
        }
        Ok(changed)
    }

    /// Records that the whole bundle was seen published. Returns whether the state changed.
    pub(crate) fn published(&mut self, now: SystemTime) -> bool {
        let mut news = false;
        for ca in self.cas.iter_mut().filter(|ca| ca.published.is_none()) {
            ca.published = Some(seconds(now));
            news = true;
        }
        news
    }

    /// Returns every CA to be trusted at `now` in PEM, the signing CA first.
    pub(crate) fn bundle(&self, policy: &Policy, now: SystemTime) -> String {
        let signs = self.signs(policy, now);
        let live = |(_, ca): &(usize, &Ca)| ca.not_after > seconds(now);
        let mut cas: Vec<_> = self.cas.iter().enumerate().filter(live).collect();
        cas.sort_by_key(|(index, _)| Some(*index) != signs);
        cas.into_iter().map(|(_, ca)| ca.certificate.as_str()).collect()
    }

    /// Returns the CA that signs at `now`. There is one after [`StoredCas::advance`].
    pub(crate) fn signer(&self, policy: &Policy, now: SystemTime) -> Result<Authority> {
        let signs = self.signs(policy, now).ok_or_else(|| unusable("no CA that is still valid"))?;
        self.cas[signs].signer()
    }

    /// Returns the newest CA with a settled publication. Where there is none, returns the oldest valid one: then no
    /// client trusts any CA yet.
    fn signs(&self, policy: &Policy, now: SystemTime) -> Option<usize> {
        let at = seconds(now);
        let usable = |ca: &Ca| ca.not_after > at && !ca.key.is_empty();
        let settled = |ca: &Ca| {
            ca.published.is_some_and(|published| published.saturating_add(policy.settle.as_secs()) <= at)
        };
        self.cas.iter().rposition(|ca| usable(ca) && settled(ca)).or_else(|| self.cas.iter().position(usable))
    }
}

impl Ca {
    fn make(policy: &Policy, now: SystemTime) -> Result<Ca> {
        let made = Authority::make(&policy.name, now, policy.validity)?;
        Ok(Ca {
            certificate: pem("CERTIFICATE", &made.certificate),
            key: Zeroizing::new(pem("PRIVATE KEY", made.key_der())),
            not_after: seconds(made.not_after),
            published: None,
        })
    }

    fn certificate(&self) -> Result<CertificateDer<'static>> {
        CertificateDer::from_pem_slice(self.certificate.as_bytes())
            .map_err(|_| unusable("a certificate is no PEM"))
    }

    fn signer(&self) -> Result<Authority> {
        let key = PrivatePkcs8KeyDer::from_pem_slice(self.key.as_bytes())
            .map_err(|_| unusable("a key is no PEM"))?;
        let not_after = SystemTime::UNIX_EPOCH + Duration::from_secs(self.not_after);
        Authority::restore(self.certificate()?, &key, not_after).map_err(unusable)
    }
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Returns PEM text, which common tools can read.
fn pem(label: &str, der: &[u8]) -> String {
    let text = Zeroizing::new(BASE64_STANDARD.encode(der));
    let mut pem = String::with_capacity(text.len() + text.len() / 64 + 2 * label.len() + 40);
    pem.push_str(&format!("-----BEGIN {label}-----\n"));
    for line in text.as_bytes().chunks(64) {
        pem.push_str(std::str::from_utf8(line).unwrap_or_default());
        pem.push('\n');
    }
    pem.push_str(&format!("-----END {label}-----\n"));
    pem
}
