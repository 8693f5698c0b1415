//! Trusts a server by the SHA-256 of its certificate. Pure.

use std::sync::Arc;

use peerpod_provider_api::Error;
use ring::digest;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    WebPkiSupportedAlgorithms, ring as crypto, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};

/// Accepts one certificate. Its name and its dates do not matter.
#[derive(Debug)]
struct Pinned {
    sha256: [u8; 32],
    algorithms: WebPkiSupportedAlgorithms,
}

/// Returns a configuration that trusts the certificate of this SHA-256, and no other.
pub(super) fn tls(sha256: [u8; 32]) -> Result<ClientConfig, Error> {
    let algorithms = crypto::default_provider().signature_verification_algorithms;
    let pinned = Arc::new(Pinned { sha256, algorithms });
    Ok(super::builder()?.dangerous().with_custom_certificate_verifier(pinned).with_no_client_auth())
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let found = digest::digest(&digest::SHA256, certificate);
        if found.as_ref() == self.sha256 {
            return Ok(ServerCertVerified::assertion());
        }
        Err(rustls::Error::General(format!(
            "the server's certificate has the SHA-256 fingerprint {}, another one is configured",
            found.as_ref().iter().map(|byte| format!("{byte:02x}")).collect::<String>()
        )))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
