//! A CA of our own, kept in a Secret: made once, rolled over before it ends, with old and new trusted side by side.
//!
//! [`State`] is what is kept, and what time makes of it, pure; [`keeper`] keeps it in the API server. Used by the
//! webhook's own certificates and by the service that answers nodes. Private keys are wiped from memory when they are
//! dropped, as far as the libraries below let us. May touch: nothing but random numbers.

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData,
    SanType, SerialNumber, SignatureAlgorithm, SigningKey,
};
use rustls_pki_types::{
    CertificateDer, CertificateSigningRequestDer, PrivateKeyDer, PrivatePkcs8KeyDer, pem::PemObject,
};
use serde::{Deserialize, Serialize};
use zeroize::{Zeroize, Zeroizing};

pub mod keeper;
pub mod served;
#[cfg(test)]
mod tests;

/// The format that this program writes.
const VERSION: u32 = 1;
/// Two are usual: one that signs, and the one before or after it.
const MOST: usize = 8;
/// A request for a P-256 key has some 200 bytes.
const MAX_REQUEST: usize = 4096;
/// X.520's bound on a common name.
const MAX_COMMON_NAME: usize = 64;
/// Certificates are good from an hour before they are made: clocks differ.
const SKEW: Duration = Duration::from_secs(3600);

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// What was kept cannot be used.
    #[error("what is kept of the CA cannot be used ({0}); delete the Secret, and a new CA is made")]
    Kept(String),
    /// The library refused.
    #[error("{what}: {why}")]
    Certificate {
        /// What was attempted.
        what: &'static str,
        /// Why it failed.
        why: rcgen::Error,
    },
    /// The kernel gave no randomness.
    #[error("random numbers: {0}")]
    Random(getrandom::Error),
    /// No certificate request that we sign.
    #[error(
        "the certificate request cannot be signed: {0}; send a PKCS#10 request for a P-256 key, signed by that key"
    )]
    Request(&'static str),
}

fn failed(what: &'static str) -> impl FnOnce(rcgen::Error) -> Error {
    move |why| Error::Certificate { what, why }
}

/// How long things last.
#[derive(Clone, Debug)]
pub struct Policy {
    /// What the CA is for, in its name.
    pub name: String,
    /// A CA's life. The next one is made when a third of it is left.
    pub validity: Duration,
    /// The longest life of a certificate that it signs.
    pub leaf: Duration,
    /// From when the next CA is seen published until it signs: for everybody to have heard of it.
    pub settle: Duration,
}

/// All CAs that are known, oldest first; as it is kept.
#[derive(Clone, Serialize, Deserialize)]
pub struct State {
    version: u32,
    cas: Vec<Ca>,
}

/// Times are seconds since 1970.
#[derive(Clone, Serialize, Deserialize)]
struct Ca {
    /// DER, base64 by PEM.
    certificate: String,
    /// PKCS#8, PEM; empty when it does not sign any more.
    key: Zeroizing<String>,
    not_after: u64,
    /// When it was first seen where those who are to trust it look.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    published: Option<u64>,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ends: Vec<u64> = self.cas.iter().map(|ca| ca.not_after).collect();
        f.debug_struct("State").field("not_after", &ends).finish_non_exhaustive()
    }
}

impl Default for State {
    fn default() -> State {
        State { version: VERSION, cas: Vec::new() }
    }
}

impl State {
    /// Reads what was kept.
    ///
    /// # Errors
    /// [`Error::Kept`].
    pub fn read(bytes: &[u8]) -> Result<State, Error> {
        let kept = |why: &str| Error::Kept(why.to_owned());
        let state: State = serde_json::from_slice(bytes).map_err(|why| {
            Error::Kept(format!("line {} column {}: no JSON of ours", why.line(), why.column()))
        })?;
        if state.version != VERSION {
            return Err(Error::Kept(format!("version {}, and this program knows {VERSION}", state.version)));
        }
        if state.cas.is_empty() || state.cas.len() > MOST {
            return Err(kept("no CA, or too many"));
        }
        for ca in &state.cas {
            CertificateDer::from_pem_slice(ca.certificate.as_bytes())
                .map_err(|_| kept("a certificate is no PEM"))?;
            if !ca.key.is_empty() {
                ca.signer()?;
            }
        }
        Ok(state)
    }

    /// For keeping.
    ///
    /// # Errors
    /// [`Error::Kept`].
    pub fn write(&self) -> Result<Zeroizing<Vec<u8>>, Error> {
        serde_json::to_vec(self).map(Zeroizing::new).map_err(|why| Error::Kept(why.to_string()))
    }

    /// What time makes of it: the first CA, the next one, the end of an old one. Whether anything changed.
    ///
    /// # Errors
    /// No randomness.
    pub fn advance(&mut self, policy: &Policy, now: SystemTime) -> Result<bool, Error> {
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
        // All that older ones signed has ended by then.
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

    /// Notes that all of the bundle was seen published. Whether that was news.
    pub fn published(&mut self, now: SystemTime) -> bool {
        let mut news = false;
        for ca in self.cas.iter_mut().filter(|ca| ca.published.is_none()) {
            ca.published = Some(seconds(now));
            news = true;
        }
        news
    }

    /// Every CA to be trusted now, PEM, the one that signs first.
    pub fn bundle(&self, policy: &Policy, now: SystemTime) -> String {
        let signs = self.signs(policy, now);
        let live = |(_, ca): &(usize, &Ca)| ca.not_after > seconds(now);
        let mut cas: Vec<_> = self.cas.iter().enumerate().filter(live).collect();
        cas.sort_by_key(|(index, _)| Some(*index) != signs);
        cas.into_iter().map(|(_, ca)| ca.certificate.as_str()).collect()
    }

    /// The CA that signs now.
    ///
    /// # Errors
    /// There is none: [`State::advance`] was not called, or its key is not what it should be.
    pub fn signer(&self, policy: &Policy, now: SystemTime) -> Result<Signer, Error> {
        let none = || Error::Kept("no CA that still holds".to_owned());
        self.signs(policy, now).and_then(|index| self.cas.get(index)).ok_or_else(none)?.signer()
    }

    /// The newest one that everybody has heard of; where there is none, the oldest that holds: then nobody trusts
    /// anything yet.
    fn signs(&self, policy: &Policy, now: SystemTime) -> Option<usize> {
        let at = seconds(now);
        let usable = |ca: &Ca| ca.not_after > at && !ca.key.is_empty();
        let heard = |ca: &Ca| {
            ca.published.is_some_and(|published| published.saturating_add(policy.settle.as_secs()) <= at)
        };
        self.cas.iter().rposition(|ca| usable(ca) && heard(ca)).or_else(|| self.cas.iter().position(usable))
    }
}

impl Ca {
    fn make(policy: &Policy, now: SystemTime) -> Result<Ca, Error> {
        let key = Key(KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed("make the CA's key"))?);
        let mut tag = [0; 4];
        getrandom::fill(&mut tag).map_err(Error::Random)?;
        // Names differ, so that two CAs in one list of trust cannot be taken for each other.
        let name = format!("{} {:08x}", policy.name, u32::from_be_bytes(tag));
        let mut params = params(&name, now, now + policy.validity)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key).map_err(failed("make the CA's certificate"))?;
        let secret = Zeroizing::new(key.0.serialize_der());
        Ok(Ca {
            certificate: pem("CERTIFICATE", certificate.der()),
            key: Zeroizing::new(pem("PRIVATE KEY", &secret)),
            not_after: seconds(now + policy.validity),
            published: None,
        })
    }

    fn signer(&self) -> Result<Signer, Error> {
        let kept = |why: &str| Error::Kept(why.to_owned());
        let certificate = CertificateDer::from_pem_slice(self.certificate.as_bytes())
            .map_err(|_| kept("a certificate is no PEM"))?;
        let der =
            PrivatePkcs8KeyDer::from_pem_slice(self.key.as_bytes()).map_err(|_| kept("a key is no PEM"))?;
        let key = KeyPair::from_pkcs8_der_and_sign_algo(&der, &PKCS_ECDSA_P256_SHA256);
        let key = Key(key.map_err(|_| kept("a key is no P-256 key"))?);
        let fits = certificate.windows(65).any(|window| window == key.der_bytes());
        let issuer =
            Issuer::from_ca_cert_der(&certificate, key).map_err(|_| kept("a certificate is no CA's"))?;
        if !fits {
            return Err(kept("a key does not belong to its certificate"));
        }
        let not_after = SystemTime::UNIX_EPOCH + Duration::from_secs(self.not_after);
        Ok(Signer { certificate: certificate.into_owned(), not_after, issuer })
    }
}

/// A CA that can sign.
pub struct Signer {
    certificate: CertificateDer<'static>,
    not_after: SystemTime,
    issuer: Issuer<'static, Key>,
}

/// A server's certificate and key.
pub struct Leaf {
    /// DER, leaf first.
    pub chain: Vec<CertificateDer<'static>>,
    /// Wiped by rustls when it is dropped.
    pub key: PrivateKeyDer<'static>,
    /// When another one is needed.
    pub not_after: SystemTime,
}

impl Signer {
    /// The CA's own certificate.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// A certificate with a key of its own for a server of these names (DNS names or addresses).
    ///
    /// # Errors
    /// A name is none.
    pub fn server(&self, names: &[String], now: SystemTime, validity: Duration) -> Result<Leaf, Error> {
        let key = Key(KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed("make a server's key"))?);
        let not_after = (now + validity).min(self.not_after);
        let mut params = params(names.first().map_or("peerpod", String::as_str), now, not_after)?;
        let named = CertificateParams::new(names).map_err(failed("name a server"))?;
        params.subject_alt_names = named.subject_alt_names;
        leaf(&mut params, ExtendedKeyUsagePurpose::ServerAuth);
        let signed = params.signed_by(&key, &self.issuer).map_err(failed("sign a server's certificate"))?;
        let secret = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.0.serialize_der()));
        Ok(Leaf { chain: vec![signed.der().clone(), self.certificate.clone()], key: secret, not_after })
    }

    /// A certificate for the key in a client's request, with this URI as its name. Only the key is taken from it. The
    /// chain, and when it ends.
    ///
    /// # Errors
    /// [`Error::Request`].
    pub fn client(
        &self,
        request: &[u8],
        name: &str,
        uri: &str,
        now: SystemTime,
        validity: Duration,
    ) -> Result<(Vec<CertificateDer<'static>>, SystemTime), Error> {
        if request.len() > MAX_REQUEST {
            return Err(Error::Request("it is larger than any for a P-256 key"));
        }
        let der = CertificateSigningRequestDer::from(request);
        let request = CertificateSigningRequestParams::from_der(&der).map_err(|why| {
            Error::Request(match why {
                rcgen::Error::InvalidCertificationRequestSignature => "it is not signed by its own key",
                rcgen::Error::UnsupportedExtension => "it asks for an extension that is not known",
                _ => "it is no PKCS#10 request",
            })
        })?;
        let key = request.public_key;
        // The algorithm is read from the signature; the length of the point tells the curve of the key itself.
        if key.algorithm() != &PKCS_ECDSA_P256_SHA256 || key.der_bytes().len() != 65 {
            return Err(Error::Request("its key is not P-256"));
        }
        let not_after = (now + validity).min(self.not_after);
        let mut params = params(name, now, not_after)?;
        let uri = uri.try_into().map_err(failed("name a client"))?;
        params.subject_alt_names = vec![SanType::URI(uri)];
        leaf(&mut params, ExtendedKeyUsagePurpose::ClientAuth);
        let signed = params.signed_by(&key, &self.issuer).map_err(failed("sign a client's certificate"))?;
        Ok((vec![signed.der().clone(), self.certificate.clone()], not_after))
    }
}

/// A key that is wiped when it is dropped.
struct Key(KeyPair);

impl Drop for Key {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl PublicKeyData for Key {
    fn der_bytes(&self) -> &[u8] {
        self.0.der_bytes()
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        self.0.algorithm()
    }
}

impl SigningKey for Key {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        self.0.sign(message)
    }
}

fn leaf(params: &mut CertificateParams, usage: ExtendedKeyUsagePurpose) {
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![usage];
    params.use_authority_key_identifier_extension = true;
}

/// A subject with only a common name, dates, and a random serial number.
fn params(name: &str, now: SystemTime, not_after: SystemTime) -> Result<CertificateParams, Error> {
    let mut serial = [0; 16];
    getrandom::fill(&mut serial).map_err(Error::Random)?;
    serial[0] = serial[0] & 0x7f | 0x40; // positive, and never with leading zeros
    let name: String = name.chars().take(MAX_COMMON_NAME).collect();
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    params.not_before = (now - SKEW).into();
    params.not_after = not_after.into();
    Ok(params)
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Text for people's tools.
fn pem(label: &str, der: &[u8]) -> String {
    use base64::{Engine, prelude::BASE64_STANDARD};
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
