//! Makes certificate authorities, restores them, and signs leaves with them. All keys are P-256; a CA's key is wiped from
//! memory on drop.
//!
//! The callers keep the CAs and decide when a CA is replaced: the node in a file, the cluster's programs in a Secret. May
//! touch: nothing but random numbers.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKey,
    PublicKeyData, SanType, SerialNumber,
};
use rustls_pki_types::{CertificateDer, CertificateSigningRequestDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use x509_parser::prelude::{FromDer, X509Certificate};
use zeroize::Zeroizing;

/// Certificates are valid from a day before they are made: the clock of a newly booted VM may be behind.
const SKEW: Duration = Duration::from_secs(86_400);
/// Size limit of a request in bytes; one for a P-256 key has some 200.
const MAX_REQUEST: usize = 4096;
/// Length limit of a common name (X.520).
const MAX_COMMON_NAME: usize = 64;
/// Bytes of an uncompressed point of P-256. The length identifies the curve.
const POINT: usize = 65;

/// Reason that a certificate cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The attempt, and the library's reason.
    #[error("{0}: {1}")]
    Certificate(&'static str, rcgen::Error),
    /// The kernel gives no random bytes.
    #[error("draw random bytes: {0}")]
    Random(#[from] getrandom::Error),
    /// The request is not usable.
    #[error("certificate request: {0}; the guest must send a PKCS#10 request for a P-256 key, signed by it")]
    Request(&'static str),
}

fn failed(attempt: &'static str) -> impl FnOnce(rcgen::Error) -> Error {
    move |why| Error::Certificate(attempt, why)
}

/// Returns the end of a certificate in DER; `None`: it is no certificate.
pub fn not_after(certificate: &[u8]) -> Option<SystemTime> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let seconds = u64::try_from(certificate.validity().not_after.timestamp()).ok()?;
    Some(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds))
}

/// A server's certificate and key.
pub struct Identity {
    /// DER, the leaf first, then its CA.
    pub chain: Vec<CertificateDer<'static>>,
    /// Key of the leaf. rustls wipes it once it is loaded.
    pub key: PrivateKeyDer<'static>,
    /// End of the leaf.
    pub not_after: SystemTime,
}

/// A CA that can sign.
#[derive(Clone)]
pub struct Authority {
    /// The CA's own certificate.
    pub certificate: CertificateDer<'static>,
    /// Its end, in whole seconds.
    pub not_after: SystemTime,
    key: Arc<Zeroizing<KeyPair>>,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority").field("not_after", &self.not_after).finish_non_exhaustive()
    }
}

impl Authority {
    /// Makes a CA. Its name is `name` with a random number: two CAs of one list must not be confused.
    pub fn make(name: &str, now: SystemTime, validity: Duration) -> Result<Authority, Error> {
        let key = new_key("make the CA's key")?;
        let mut tag = [0; 4];
        getrandom::fill(&mut tag)?;
        // Certificates have a resolution of seconds.
        let since = (now + validity).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let not_after = SystemTime::UNIX_EPOCH + Duration::from_secs(since.as_secs());
        let mut params = params(&format!("{name} {:08x}", u32::from_be_bytes(tag)), now, not_after)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&*key).map_err(failed("make the CA's certificate"))?;
        Ok(Authority { certificate: certificate.der().clone(), not_after, key: Arc::new(key) })
    }

    /// Returns the CA that these parts were kept of. Fails if they do not belong together.
    pub fn restore(
        certificate: CertificateDer<'static>,
        key: &PrivatePkcs8KeyDer<'_>,
        not_after: SystemTime,
    ) -> Result<Authority, &'static str> {
        let key = KeyPair::from_pkcs8_der_and_sign_algo(key, &PKCS_ECDSA_P256_SHA256);
        let key = Zeroizing::new(key.map_err(|_| "a key is no P-256 key")?);
        Issuer::from_ca_cert_der(&certificate, &*key).map_err(|_| "a certificate belongs to no CA")?;
        if !certificate.windows(POINT).any(|window| window == key.public_key_raw()) {
            return Err("a key does not belong to its certificate");
        }
        Ok(Authority { certificate, not_after, key: Arc::new(key) })
    }

    /// Returns the key in PKCS#8, to be kept.
    pub fn key_der(&self) -> &[u8] {
        self.key.serialized_der()
    }

    /// Makes a key and a certificate for a server with these names: DNS names or addresses.
    pub fn server(
        &self,
        common_name: &str,
        names: &[String],
        now: SystemTime,
        until: SystemTime,
    ) -> Result<Identity, Error> {
        let key = new_key("make a server's key")?;
        let named = CertificateParams::new(names).map_err(failed("name a server"))?;
        let usage = ExtendedKeyUsagePurpose::ServerAuth;
        let leaf = self.sign((common_name, named.subject_alt_names), usage, &*key, (now, until))?;
        let chain = vec![leaf, self.certificate.clone()];
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
        Ok(Identity { chain, key, not_after: until.min(self.not_after) })
    }

    /// Signs a client's key. The name in the certificate is a URI.
    pub fn client(
        &self,
        common_name: &str,
        uri: &str,
        key: &RequestedKey,
        now: SystemTime,
        until: SystemTime,
    ) -> Result<CertificateDer<'static>, Error> {
        let uri = uri.try_into().map_err(failed("name a client"))?;
        let usage = ExtendedKeyUsagePurpose::ClientAuth;
        self.sign((common_name, vec![SanType::URI(uri)]), usage, &key.0, (now, until))
    }

    /// Signs a leaf. No leaf outlives its CA.
    fn sign(
        &self,
        (common_name, names): (&str, Vec<SanType>),
        usage: ExtendedKeyUsagePurpose,
        key: &impl PublicKeyData,
        (now, until): (SystemTime, SystemTime),
    ) -> Result<CertificateDer<'static>, Error> {
        let mut params = params(common_name, now, until.min(self.not_after))?;
        params.subject_alt_names = names;
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![usage];
        params.use_authority_key_identifier_extension = true;
        let issuer =
            Issuer::from_ca_cert_der(&self.certificate, &**self.key).map_err(failed("read the CA"))?;
        let signed = params.signed_by(key, &issuer).map_err(failed("sign a certificate"))?;
        Ok(signed.der().clone())
    }
}

/// Key in a request (PKCS#10). The request's signature proves that the requester has it.
pub struct RequestedKey(PublicKey);

impl RequestedKey {
    /// Reads a request in DER.
    pub fn read(csr: &[u8]) -> Result<RequestedKey, Error> {
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
        // The algorithm is read from the signature, and says nothing of the key's own curve.
        if key.algorithm() != &PKCS_ECDSA_P256_SHA256 || key.der_bytes().len() != POINT {
            return Err(Error::Request("its key is not P-256"));
        }
        Ok(RequestedKey(key))
    }

    /// Returns the SubjectPublicKeyInfo in DER.
    pub fn info(&self) -> Vec<u8> {
        self.0.subject_public_key_info()
    }
}

fn new_key(attempt: &'static str) -> Result<Zeroizing<KeyPair>, Error> {
    Ok(Zeroizing::new(KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed(attempt))?))
}

/// Returns parameters with a common name as the only subject, the dates, and a random serial number.
fn params(
    common_name: &str,
    now: SystemTime,
    not_after: SystemTime,
) -> Result<CertificateParams, getrandom::Error> {
    let mut serial = [0; 16];
    getrandom::fill(&mut serial)?;
    serial[0] = serial[0] & 0x7f | 0x40; // positive, and never with leading zeros
    let common_name: String = common_name.chars().take(MAX_COMMON_NAME).collect();
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    params.not_before = (now - SKEW).into();
    params.not_after = not_after.into();
    Ok(params)
}
