//! TLS 1.3 with certificates on both sides, for a provider elsewhere in the cluster. Reads the configured files.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use peerpod_provider_api::Error;
use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use crate::TlsFiles;

/// ALPN name of the protocol: a peer with another name is no provider.
const ALPN: &[u8] = b"peerpod-provider/1";
/// Most bytes read of a file; certificate files have a few kilobytes.
const MAX_FILE: u64 = 1 << 20;

/// Returns the TLS configuration of the node.
pub(crate) fn client(files: &TlsFiles) -> Result<ClientConfig, Error> {
    let (roots, chain, key) = read(files)?;
    let mut config = ClientConfig::builder_with_provider(crypto())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| unfit(files, &error))?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain, key)
        .map_err(|error| unfit(files, &error))?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    // Connections are rare, and resumption would only outlive a revoked certificate.
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// Returns the TLS configuration of the provider, which requires a client certificate of the CA.
pub(crate) fn server(files: &TlsFiles) -> Result<ServerConfig, Error> {
    let (roots, chain, key) = read(files)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), crypto())
        .build()
        .map_err(|error| Error::invalid(format!("use CA {}: {error}", files.ca.display())))?;
    let mut config = ServerConfig::builder_with_provider(crypto())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| unfit(files, &error))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(chain, key)
        .map_err(|error| unfit(files, &error))?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    config.send_tls13_tickets = 0;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(config)
}

fn crypto() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn unfit(files: &TlsFiles, error: &rustls::Error) -> Error {
    let (certificate, key) = (files.certificate.display(), files.key.display());
    Error::Auth { text: format!("use certificate {certificate} with key {key}: {error}") }
}

type Material = (RootCertStore, Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

fn read(files: &TlsFiles) -> Result<Material, Error> {
    let mut roots = RootCertStore::empty();
    for ca in certificates(&files.ca)? {
        roots.add(ca).map_err(|error| broken(&files.ca, error))?;
    }
    let chain = certificates(&files.certificate)?;
    let (pem, about) = bytes(&files.key)?;
    if about.mode() & 0o077 != 0 {
        let text = format!(
            "read key {}: others than its user may read it (mode {:04o}); chmod 600 it",
            files.key.display(),
            about.mode() & 0o7777
        );
        return Err(Error::Auth { text });
    }
    let key = PrivateKeyDer::from_pem_slice(&pem).map_err(|error| broken(&files.key, error))?;
    Ok((roots, chain, key))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let (pem, _) = bytes(path)?;
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let found = found.map_err(|error| broken(path, error))?;
    if found.is_empty() {
        return Err(broken(path, "there is no certificate in it"));
    }
    Ok(found)
}

fn bytes(path: &Path) -> Result<(Vec<u8>, Metadata), Error> {
    let failed = |error: std::io::Error| Error::Auth { text: format!("read {}: {error}", path.display()) };
    // Checked before opening, because opening a pipe would block for ever.
    if !std::fs::metadata(path).map_err(failed)?.is_file() {
        return Err(broken(path, "not a file"));
    }
    let file = File::open(path).map_err(failed)?;
    let about = file.metadata().map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut bytes).map_err(failed)?;
    Ok((bytes, about))
}

fn broken(path: &Path, why: impl std::fmt::Display) -> Error {
    Error::Auth { text: format!("read {}: {why}; it must be a PEM file", path.display()) }
}
