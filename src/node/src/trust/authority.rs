//! Makes a CA, restores it from disk, and signs leaves with it. Pure except for random numbers.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use peerpod_link::tls;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKey,
    PublicKeyData, SanType, SerialNumber,
};
use rustls_pki_types::{CertificateDer, CertificateSigningRequestDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use sha2::{Digest, Sha256};

use super::{Error, Identity, Signed};

/// Certificates are valid from a day before they are made: the clock of a newly booted VM may be behind.
const SKEW: Duration = Duration::from_secs(86_400);

/// Size limit of a request; one for a P-256 key has some 200 bytes.
const MAX_REQUEST: usize = 4096;

/// Length limit of a common name (X.520).
const MAX_COMMON_NAME: usize = 64;

#[derive(Clone)]
pub(super) struct Authority {
    pub(super) certificate: CertificateDer<'static>,
    pub(super) not_after: SystemTime,
    issuer: Arc<Issuer<'static, KeyPair>>,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").field("not_after", &self.not_after).finish_non_exhaustive()
    }
}

fn failed(what: &'static str) -> impl FnOnce(rcgen::Error) -> Error {
    move |why| Error::Certificate { what, why }
}

impl Authority {
    pub(super) fn make(now: SystemTime, validity: Duration) -> Result<Authority, Error> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed("make the CA's key"))?;
        let mut tag = [0; 4];
        getrandom::fill(&mut tag).map_err(Error::Random)?;
        // Names differ, so that two CAs in one list of trusted CAs cannot be confused.
        let name = format!("peerpod node CA {:08x}", u32::from_be_bytes(tag));
        let not_after = whole_seconds(now + validity);
        let mut params = params(&name, now, not_after)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key).map_err(failed("make the CA's certificate"))?;
        let certificate = certificate.der().clone();
        Ok(Authority { certificate, not_after, issuer: Arc::new(Issuer::new(params, key)) })
    }

    pub(super) fn restore(
        certificate: Vec<u8>,
        key: Vec<u8>,
        not_after: SystemTime,
    ) -> Result<Authority, rcgen::Error> {
        let certificate = CertificateDer::from(certificate);
        let key = PrivatePkcs8KeyDer::from(key);
        let key = KeyPair::from_pkcs8_der_and_sign_algo(&key, &PKCS_ECDSA_P256_SHA256)?;
        let fits = contains(&certificate, key.public_key_raw());
        let issuer = Issuer::from_ca_cert_der(&certificate, key)?;
        if !fits {
            return Err(rcgen::Error::CouldNotParseKeyPair);
        }
        Ok(Authority { certificate, not_after, issuer: Arc::new(issuer) })
    }

    /// Returns the key in PKCS#8, for the file.
    pub(super) fn key_der(&self) -> Vec<u8> {
        self.issuer.key().serialize_der()
    }

    /// Makes a leaf with a new key for the relay.
    pub(super) fn relay_identity(&self, now: SystemTime) -> Result<Identity, Error> {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed("make the relay's key"))?;
        let mut params = self.leaf("peerpod relay", now, self.not_after)?;
        let name = tls::SERVER_NAME.try_into().map_err(failed("name the relay"))?;
        params.subject_alt_names = vec![SanType::DnsName(name)];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let leaf = params.signed_by(&key, &self.issuer).map_err(failed("sign the relay's certificate"))?;
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
        Ok((vec![leaf.der().clone(), self.certificate.clone()], key))
    }

    /// Signs a leaf for the key in a guest's request. Only the key is taken from the request.
    pub(super) fn sign_guest(
        &self,
        sandbox: &str,
        csr: &[u8],
        now: SystemTime,
        validity: Duration,
    ) -> Result<Signed, Error> {
        let (public_key, _) = request(csr)?;
        let name: String = sandbox.chars().take(MAX_COMMON_NAME).collect();
        let mut params = self.leaf(&name, now, now + validity)?;
        let uri = format!("peerpod:sandbox:{sandbox}");
        let uri = uri.as_str().try_into().map_err(failed("name the guest by its sandbox id"))?;
        params.subject_alt_names = vec![SanType::URI(uri)];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let leaf =
            params.signed_by(&public_key, &self.issuer).map_err(failed("sign the guest's certificate"))?;
        Ok(Signed {
            certificate_sha256: tls::fingerprint(leaf.der()),
            chain: vec![leaf.der().to_vec(), self.certificate.to_vec()],
        })
    }

    /// Returns the parameters that all leaves share; no leaf outlives its CA.
    fn leaf(&self, name: &str, now: SystemTime, not_after: SystemTime) -> Result<CertificateParams, Error> {
        let mut params = params(name, now, not_after.min(self.not_after))?;
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        Ok(params)
    }
}

/// Returns the key in a guest's request, which its signature proves, and the key's SHA-256.
pub(super) fn request(csr: &[u8]) -> Result<(PublicKey, [u8; 32]), Error> {
    if csr.len() > MAX_REQUEST {
        return Err(Error::Request("larger than any request for a P-256 key"));
    }
    let der = CertificateSigningRequestDer::from(csr);
    let request = CertificateSigningRequestParams::from_der(&der).map_err(|why| {
        Error::Request(match why {
            rcgen::Error::InvalidCertificationRequestSignature => "not signed by its own key",
            rcgen::Error::UnsupportedExtension => "it requests an unknown extension",
            _ => "not a PKCS#10 request",
        })
    })?;
    let key = request.public_key;
    // The algorithm is read from the signature; the length of the point identifies the curve of the key itself.
    if key.algorithm() != &PKCS_ECDSA_P256_SHA256 || key.der_bytes().len() != 65 {
        return Err(Error::Request("its key is not P-256"));
    }
    let sha256 = Sha256::digest(key.subject_public_key_info()).into();
    Ok((key, sha256))
}

/// Returns parameters with a common name alone as the subject, dates, and a random serial number.
fn params(name: &str, now: SystemTime, not_after: SystemTime) -> Result<CertificateParams, Error> {
    let mut serial = [0; 16];
    getrandom::fill(&mut serial).map_err(Error::Random)?;
    serial[0] = serial[0] & 0x7f | 0x40; // positive, and never with leading zeros
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    params.not_before = (now - SKEW).into();
    params.not_after = not_after.into();
    Ok(params)
}

/// Rounds down to whole seconds, the resolution of certificates.
fn whole_seconds(time: SystemTime) -> SystemTime {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    SystemTime::UNIX_EPOCH + Duration::from_secs(since.as_secs())
}

fn contains(certificate: &[u8], key: &[u8]) -> bool {
    certificate.windows(key.len()).any(|window| window == key)
}
