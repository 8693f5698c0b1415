//! Builds the TLS 1.3 configurations of the link; older versions are refused. The guest is always the client.
//!
//! * The guest pins a fingerprint (SHA-256 of the node CA's DER, from user-data). The server sends its leaf and that
//!   CA; the leaf must chain to the CA and carry [`SERVER_NAME`], independent of the dialled address.
//! * The relay requests a client certificate and verifies it if the guest sends one. A guest without one may only
//!   claim a ticket.
//!
//! A configuration is immutable; a change of trust needs a new configuration. This module reads no file but
//! `/proc/cpuinfo`, and no environment. It keeps the memory per connection small: no session tickets, no resumption, no
//! caches.
//!
//! This module does not check the expiry of a CA, because webpki uses only the key and name of an anchor. The node
//! never issues a leaf that outlives its CA, and the dates of a leaf are checked.

use std::fmt::Display;
use std::fs::File;
use std::io::Read;
use std::sync::{Arc, LazyLock};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{CertificateError, DigitallySignedStruct, RootCertStore, SignatureScheme};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use sha2::{Digest, Sha256};

/// Name in every relay certificate. The CA is the identity; the name only bars guest certificates from a server.
pub const SERVER_NAME: &str = "node.peerpod.internal";

/// ALPN name of the protocol inside TLS; an incompatible successor would be `peerpod/2`.
pub const ALPN: &[u8] = b"peerpod/1";

/// Error of building a TLS configuration, as text. Handshake failures are `rustls::Error`s instead.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TlsError(String);

impl TlsError {
    fn of(what: impl Display) -> impl Fn(rustls::Error) -> TlsError {
        move |why| TlsError(format!("{what}: {why}"))
    }
}

/// The kernel's description of each processor.
const PROCESSORS: &str = "/proc/cpuinfo";

/// Crypto provider of both ends. The client's order of the suites counts. AES-128 comes first, as the fastest suite, or
/// ChaCha20 where AES is slow. 256-bit keys add nothing to P-256.
static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
    use ring::cipher_suite::{
        TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
    };
    let [first, second] = if is_slow_at_aes(&first_processor()) {
        [TLS13_CHACHA20_POLY1305_SHA256, TLS13_AES_128_GCM_SHA256]
    } else {
        [TLS13_AES_128_GCM_SHA256, TLS13_CHACHA20_POLY1305_SHA256]
    };
    Arc::new(CryptoProvider {
        cipher_suites: vec![first, second, TLS13_AES_256_GCM_SHA384],
        ..ring::default_provider()
    })
});

/// Returns the beginning of [`PROCESSORS`], or an empty text. The first processor has some 2 KiB.
fn first_processor() -> String {
    let mut text = Vec::new();
    let read = File::open(PROCESSORS).and_then(|file| file.take(8 << 10).read_to_end(&mut text));
    if read.is_ok() { String::from_utf8_lossy(&text).into_owned() } else { String::new() }
}

/// Whether a processor lacks instructions for AES, or QEMU emulates it: each such instruction is then a call.
fn is_slow_at_aes(processor: &str) -> bool {
    let value = |names: [&str; 2]| {
        let fields = processor.lines().filter_map(|line| line.split_once(':'));
        fields.into_iter().find(|(name, _)| names.contains(&name.trim())).map(|(_, value)| value)
    };
    let is_emulated = value(["model name"; 2]).is_some_and(|name| name.contains("QEMU TCG"));
    let lacks =
        value(["flags", "Features"]).is_some_and(|all| !all.split_whitespace().any(|one| one == "aes"));
    is_emulated || lacks
}

const VERSIONS: &[&rustls::SupportedProtocolVersion] = &[&rustls::version::TLS13];

/// Returns the SHA-256 of a certificate's DER. User-data, the ledger and the relay identify certificates by it.
pub fn fingerprint(cert: &CertificateDer<'_>) -> [u8; 32] {
    Sha256::digest(cert.as_ref()).into()
}

/// Returns [`SERVER_NAME`] in the form that `tokio_rustls::TlsConnector::connect` takes.
pub fn server_name() -> ServerName<'static> {
    ServerName::try_from(SERVER_NAME).expect("a constant, valid DNS name")
}

/// Returns the relay's configuration. `chain` is the leaf followed by the CA that issued it; `trusted_cas` are the CAs
/// that may have issued guest certificates (two during a rotation). A client certificate is optional.
pub fn server_config(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    trusted_cas: &[CertificateDer<'static>],
) -> Result<Arc<rustls::ServerConfig>, TlsError> {
    if chain.len() < 2 {
        let certificates = chain.len();
        return Err(TlsError(format!(
            "tls server: the chain has {certificates} certificate(s); guests need the leaf and the CA that issued it"
        )));
    }
    if trusted_cas.is_empty() {
        return Err(TlsError("tls server: no trusted CA was given; guests could not be verified".to_owned()));
    }
    let mut roots = RootCertStore::empty();
    for (index, ca) in trusted_cas.iter().enumerate() {
        roots.add(ca.clone()).map_err(TlsError::of(format_args!("trusted CA number {index}")))?;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), PROVIDER.clone())
        .allow_unauthenticated()
        .build()
        .map_err(|why| TlsError(format!("tls server: client verifier: {why}")))?;
    let failed = TlsError::of("tls server: certificate or key");
    let mut config = rustls::ServerConfig::builder_with_provider(PROVIDER.clone())
        .with_protocol_versions(VERSIONS)
        .map_err(&failed)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .map_err(failed)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    // Resumption would let a guest skip the certificate check after its CA or certificate was withdrawn.
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(Arc::new(config))
}

/// Returns the guest's configuration. The server's chain must contain a CA with one of these fingerprints, and that CA
/// must have issued the leaf for [`SERVER_NAME`]. `identity` is the guest's own chain and key.
pub fn client_config(
    ca_sha256: &[[u8; 32]],
    identity: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
) -> Result<Arc<rustls::ClientConfig>, TlsError> {
    if ca_sha256.is_empty() {
        let why = "tls client: no CA fingerprint is pinned; user-data must carry node.ca_sha256";
        return Err(TlsError(why.to_owned()));
    }
    let failed = TlsError::of("tls client: certificate or key");
    let builder = rustls::ClientConfig::builder_with_provider(PROVIDER.clone())
        .with_protocol_versions(VERSIONS)
        .map_err(&failed)?
        .dangerous() // no weaker: the usual verifier, with the pinned CA as its only root
        .with_custom_certificate_verifier(Arc::new(PinnedCa { pins: ca_sha256.to_vec() }));
    let mut config = match identity {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key).map_err(failed)?,
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.resumption = Resumption::disabled();
    config.enable_sni = false; // SNI would reveal the purpose to the network
    Ok(Arc::new(config))
}

/// Server verifier that trusts a CA of the server's chain if its fingerprint is pinned, and leaves the rest to webpki.
#[derive(Debug)]
struct PinnedCa {
    pins: Vec<[u8; 32]>,
}

impl ServerCertVerifier for PinnedCa {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let mut roots = RootCertStore::empty();
        // Never the leaf itself: an anchor skips the checks of its dates and name. rustls bounds this list.
        for ca in intermediates.iter().filter(|cert| self.pins.contains(&fingerprint(cert))) {
            roots.add(ca.clone().into_owned())?;
        }
        if roots.is_empty() {
            return Err(CertificateError::UnknownIssuer.into());
        }
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), PROVIDER.clone())
            .build()
            .map_err(|error| rustls::Error::General(error.to_string()))?
            .verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::PeerIncompatible::Tls12NotOfferedOrEnabled.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let supported = &PROVIDER.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, dss, supported)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        PROVIDER.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
        KeyUsagePurpose, date_time_ymd,
    };
    use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};

    use super::*;

    #[test]
    fn a_processor_without_instructions_for_aes_or_an_emulated_one_is_slow_at_it() {
        let x86 = |model: &str, flags: &str| {
            format!("processor\t: 0\nmodel name\t: {model}\nflags\t\t: fpu {flags} sse\n")
        };
        assert!(!is_slow_at_aes(&x86("AMD EPYC 7R13 Processor", "aes")));
        assert!(is_slow_at_aes(&x86("AMD EPYC 7R13 Processor", "vaes")));
        assert!(is_slow_at_aes(&x86("QEMU TCG CPU version 2.5+", "aes")));
        let arm = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd ";
        assert!(!is_slow_at_aes(&format!("{arm}aes pmull\n")));
        assert!(is_slow_at_aes(&format!("{arm}crc32\n")));
        assert!(!is_slow_at_aes(""), "nothing is known");
        assert!(!first_processor().is_empty());
    }

    type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

    struct Ca {
        der: CertificateDer<'static>,
        issuer: Issuer<'static, KeyPair>,
    }

    impl Ca {
        fn new(name: &str) -> Ca {
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::default();
            params.distinguished_name.push(DnType::CommonName, name);
            params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
            params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
            let der = params.self_signed(&key).unwrap().der().clone();
            Ca { der, issuer: Issuer::new(params, key) }
        }

        fn pin(&self) -> [u8; 32] {
            fingerprint(&self.der)
        }

        fn issue(&self, change: impl FnOnce(&mut CertificateParams)) -> Identity {
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::default();
            change(&mut params);
            let leaf = params.signed_by(&key, &self.issuer).unwrap();
            (
                vec![leaf.der().clone(), self.der.clone()],
                PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
            )
        }

        fn server(&self) -> Identity {
            self.issue(|params| {
                *params = CertificateParams::new(vec![SERVER_NAME.to_owned()]).unwrap();
                params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
            })
        }

        fn guest(&self) -> Identity {
            self.issue(|params| params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth])
        }

        fn relay(&self) -> Arc<ServerConfig> {
            let (chain, key) = self.server();
            server_config(chain, key, std::slice::from_ref(&self.der)).unwrap()
        }
    }

    /// Runs both ends in memory until both finish or one refuses.
    fn shake(
        client: Arc<ClientConfig>,
        server: Arc<ServerConfig>,
    ) -> Result<(ClientConnection, ServerConnection), String> {
        let mut client = Connection::Client(ClientConnection::new(client, server_name()).unwrap());
        let mut server = Connection::Server(ServerConnection::new(server).unwrap());
        for _ in 0..10 {
            for (from, to, who) in [(0, 1, "server"), (1, 0, "client")] {
                let ends = [&mut client, &mut server];
                let mut bytes = Vec::new();
                while ends[from].wants_write() {
                    ends[from].write_tls(&mut bytes).unwrap();
                }
                let mut rest = bytes.as_slice();
                while !rest.is_empty() {
                    ends[to].read_tls(&mut rest).unwrap();
                    ends[to].process_new_packets().map_err(|e| format!("{who}: {e}"))?;
                }
            }
        }
        assert!(!client.is_handshaking() && !server.is_handshaking());
        match (client, server) {
            (Connection::Client(client), Connection::Server(server)) => Ok((client, server)),
            _ => unreachable!(),
        }
    }

    #[test]
    fn a_guest_with_the_right_pin_gets_through_without_and_with_a_certificate() {
        let ca = Ca::new("node");
        let (client, server) = shake(client_config(&[ca.pin()], None).unwrap(), ca.relay()).unwrap();
        assert_eq!(client.alpn_protocol(), Some(ALPN));
        assert_eq!(server.alpn_protocol(), Some(ALPN));
        assert!(server.peer_certificates().is_none());
        assert_eq!(client.protocol_version(), Some(rustls::ProtocolVersion::TLSv1_3));

        let guest = ca.guest();
        let expected = fingerprint(&guest.0[0]);
        let (_, server) = shake(client_config(&[ca.pin()], Some(guest)).unwrap(), ca.relay()).unwrap();
        assert_eq!(fingerprint(&server.peer_certificates().unwrap()[0]), expected);
    }

    #[test]
    fn another_ca_of_the_same_name_is_refused() {
        let (ours, theirs) = (Ca::new("node"), Ca::new("node"));
        let error = shake(client_config(&[ours.pin()], None).unwrap(), theirs.relay()).unwrap_err();
        assert!(error.contains("UnknownIssuer"), "{error}");
    }

    #[test]
    fn showing_the_pinned_ca_beside_a_leaf_of_another_is_refused() {
        let (ours, theirs) = (Ca::new("node"), Ca::new("node"));
        let (chain, key) = theirs.server();
        let server =
            server_config(vec![chain[0].clone(), ours.der.clone()], key, std::slice::from_ref(&ours.der))
                .unwrap();
        let error = shake(client_config(&[ours.pin()], None).unwrap(), server).unwrap_err();
        assert!(error.contains("invalid peer certificate"), "{error}");
    }

    #[test]
    fn a_pinned_leaf_is_not_an_anchor() {
        let (ours, theirs) = (Ca::new("node"), Ca::new("other"));
        let (chain, key) = theirs.server();
        let pin = fingerprint(&chain[0]);
        let server = server_config(chain, key, std::slice::from_ref(&ours.der)).unwrap();
        assert!(shake(client_config(&[pin], None).unwrap(), server).is_err());
    }

    #[test]
    fn a_guests_certificate_does_not_pass_as_the_relays() {
        let ca = Ca::new("node");
        let (chain, key) = ca.guest();
        let server = server_config(chain, key, std::slice::from_ref(&ca.der)).unwrap();
        let error = shake(client_config(&[ca.pin()], None).unwrap(), server).unwrap_err();
        assert!(error.contains("invalid peer certificate"), "{error}");
    }

    #[test]
    fn an_expired_relay_certificate_is_refused() {
        let ca = Ca::new("node");
        let (chain, key) = ca.issue(|params| {
            *params = CertificateParams::new(vec![SERVER_NAME.to_owned()]).unwrap();
            params.not_before = date_time_ymd(2001, 1, 1);
            params.not_after = date_time_ymd(2002, 1, 1);
        });
        let server = server_config(chain, key, std::slice::from_ref(&ca.der)).unwrap();
        let error = shake(client_config(&[ca.pin()], None).unwrap(), server).unwrap_err();
        assert!(error.contains("certificate expired"), "{error}");
    }

    #[test]
    fn an_expired_guest_certificate_is_refused() {
        let ca = Ca::new("node");
        let guest = ca.issue(|params| {
            params.not_before = date_time_ymd(2001, 1, 1);
            params.not_after = date_time_ymd(2002, 1, 1);
        });
        let error = shake(client_config(&[ca.pin()], Some(guest)).unwrap(), ca.relay()).unwrap_err();
        assert!(error.starts_with("server") && error.contains("certificate expired"), "{error}");
    }

    #[test]
    fn a_guest_certificate_of_another_ca_is_refused() {
        let (ca, other) = (Ca::new("node"), Ca::new("node"));
        let error = shake(client_config(&[ca.pin()], Some(other.guest())).unwrap(), ca.relay()).unwrap_err();
        assert!(error.starts_with("server: invalid peer certificate"), "{error}");
    }

    #[test]
    fn both_cas_of_a_rotation_are_accepted() {
        let (old, new) = (Ca::new("node"), Ca::new("node"));
        let (chain, key) = new.server();
        let server = server_config(chain, key, &[old.der.clone(), new.der.clone()]).unwrap();
        let pins = [old.pin(), new.pin()];
        for ca in [&old, &new] {
            shake(client_config(&pins, Some(ca.guest())).unwrap(), server.clone()).unwrap();
        }
        assert!(shake(client_config(&[old.pin()], None).unwrap(), server).is_err());
    }

    #[test]
    fn tls_1_2_is_refused_on_both_sides() {
        let ca = Ca::new("node");
        let mut roots = RootCertStore::empty();
        roots.add(ca.der.clone()).unwrap();
        let provider = Arc::new(ring::default_provider());
        let old_client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS12])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let error = shake(Arc::new(old_client), ca.relay()).unwrap_err();
        assert!(error.starts_with("server: peer is incompatible"), "{error}");

        let (chain, key) = ca.server();
        let old_server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS12])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap();
        assert!(shake(client_config(&[ca.pin()], None).unwrap(), Arc::new(old_server)).is_err());
    }

    #[test]
    fn another_application_protocol_is_refused() {
        let ca = Ca::new("node");
        let mut client = (*client_config(&[ca.pin()], None).unwrap()).clone();
        client.alpn_protocols = vec![b"peerpod/2".to_vec()];
        assert!(shake(Arc::new(client), ca.relay()).is_err());
    }

    #[test]
    fn no_tls_session_is_resumed() {
        let ca = Ca::new("node");
        let (client, _) = shake(client_config(&[ca.pin()], None).unwrap(), ca.relay()).unwrap();
        assert_eq!(client.tls13_tickets_received(), 0);
    }

    #[test]
    fn settings_that_cannot_work_are_refused() {
        let ca = Ca::new("node");
        let refused = |config: Result<Arc<ServerConfig>, TlsError>, why: &str| {
            let error = config.unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        let no_pin = client_config(&[], None).unwrap_err().to_string();
        assert!(no_pin.contains("no CA fingerprint is pinned"), "{no_pin}");
        let (chain, key) = ca.server();
        let own_ca = std::slice::from_ref(&ca.der);
        let short = server_config(chain[..1].to_vec(), key.clone_key(), own_ca);
        refused(short, "the chain has 1 certificate(s)");
        refused(server_config(chain.clone(), key.clone_key(), &[]), "no trusted CA was given");
        let junk = CertificateDer::from(vec![1, 2, 3]);
        refused(server_config(chain.clone(), key, &[ca.der.clone(), junk]), "trusted CA number 1: ");
        let (_, other_key) = ca.server();
        refused(server_config(chain, other_key, own_ca), "tls server: certificate or key: ");
    }
}
