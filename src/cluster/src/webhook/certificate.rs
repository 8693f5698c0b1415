//! Reads the server's certificate from two files, and reads it again when they change, without losing a connection.
//!
//! A new pair is used only when certificate and key match: a mount that is being replaced, or a half-written file,
//! leaves the old pair in use. May touch: the two files.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, anyhow};
use peerpod_common::blocking::blocking;
use rustls::crypto::CryptoProvider;
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use crate::serve::InUse;

/// Interval at which the files are read. Two small reads are cheap; watching would miss changes on a network mount.
const EVERY: Duration = Duration::from_secs(1);
/// Limit of a file in bytes. A chain of certificates has a few kilobytes.
const MOST: u64 = 256 * 1024;

/// Files of a certificate and its key.
#[derive(Clone, Debug)]
pub(super) struct CertificateFiles {
    pub(super) certificate: PathBuf,
    pub(super) key: PathBuf,
}

/// Contents of both files. They include the key, which is in memory anyway.
#[derive(PartialEq)]
struct Pair {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

/// Certificate that is kept up to date.
pub(super) struct Certificate {
    files: CertificateFiles,
    crypto: Arc<CryptoProvider>,
    read: Pair,
    in_use: InUse,
}

impl Certificate {
    pub(super) fn load(files: CertificateFiles, crypto: Arc<CryptoProvider>) -> Result<Certificate> {
        let (read, in_use) = (files.read()?, InUse::default());
        in_use.set(files.parse(&read, &crypto)?);
        Ok(Certificate { files, crypto, read, in_use })
    }

    pub(super) fn in_use(&self) -> InUse {
        self.in_use.clone()
    }

    /// Takes a changed pair into use, for new connections. Returns whether it has changed. After an error the old one
    /// stays in use.
    fn take(&mut self, read: Pair) -> Result<bool> {
        if self.read == read {
            return Ok(false);
        }
        self.in_use.set(self.files.parse(&read, &self.crypto)?);
        self.read = read;
        Ok(true)
    }

    /// Reloads the files whenever they change, for ever. Calls `reloaded` after each reload.
    pub(super) async fn follow(mut self, reloaded: impl Fn()) {
        let mut said = String::new();
        loop {
            tokio::time::sleep(EVERY).await;
            let files = self.files.clone();
            // The files may be on a mount that hangs.
            let why = match blocking(move || files.read()).await.and_then(|read| self.take(read)) {
                Ok(changed) => {
                    if changed {
                        tracing::info!("certificate reloaded");
                        reloaded();
                    }
                    String::new()
                }
                Err(why) => why.to_string(),
            };
            if why != said && !why.is_empty() {
                tracing::warn!(error = why, "the old certificate stays in use");
            }
            said = why;
        }
    }
}

impl CertificateFiles {
    fn read(&self) -> Result<Pair> {
        Ok(Pair { certificate: read(&self.certificate)?, key: read(&self.key)? })
    }

    fn parse(&self, pair: &Pair, crypto: &CryptoProvider) -> Result<CertifiedKey> {
        let (certificate, key) = (self.certificate.display(), self.key.display());
        let failed = |why: String| anyhow!("certificate {certificate} with key {key}: {why}");
        let chain = CertificateDer::pem_slice_iter(&pair.certificate).collect::<Result<Vec<_>, _>>();
        let chain = chain.map_err(|why| failed(format!("the certificate is no PEM: {why}")))?;
        if chain.is_empty() {
            return Err(failed("there is no certificate in the file".to_owned()));
        }
        let private = PrivateKeyDer::from_pem_slice(&pair.key)
            .map_err(|why| failed(format!("the key is no PEM: {why}")))?;
        CertifiedKey::from_der(chain, private, crypto)
            .map_err(|why| failed(format!("{why}; make sure that they belong together")))
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MOST).read_to_end(&mut bytes));
    read.map_err(|why| {
        let path = path.display();
        anyhow!("read {path}: {why}; mount the webhook's certificate there, or name other files")
    })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::prelude::BASE64_STANDARD;

    use super::*;

    fn pem(label: &str, der: &[u8]) -> String {
        format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", BASE64_STANDARD.encode(der))
    }

    fn write(folder: &Path, name: &str, text: &str) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn a_half_replaced_pair_leaves_the_old_one_in_use() {
        let folder = std::env::temp_dir().join(format!("peerpod-certificate-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let made = || rcgen::generate_simple_self_signed(["x".to_owned()]).unwrap();
        let (old, new) = (made(), made());
        let certificate = write(&folder, "tls.crt", &pem("CERTIFICATE", old.cert.der()));
        let key = write(&folder, "tls.key", &pem("PRIVATE KEY", old.signing_key.serialized_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let files = CertificateFiles { certificate: certificate.clone(), key };
        let mut loaded = Certificate::load(files.clone(), provider).unwrap();
        let current = loaded.in_use();
        let in_use = || current.get().unwrap().cert[0].clone();
        let mut reload = || files.read().and_then(|read| loaded.take(read)).map_err(|why| why.to_string());
        assert!(!reload().unwrap());

        write(&folder, "tls.crt", &pem("CERTIFICATE", new.cert.der()));
        assert!(reload().unwrap_err().contains("belong together"));
        assert_eq!(&in_use(), old.cert.der());
        write(&folder, "tls.key", &pem("PRIVATE KEY", new.signing_key.serialized_der()));
        assert!(reload().unwrap());
        assert_eq!(&in_use(), new.cert.der());
        write(&folder, "tls.crt", "");
        assert!(reload().unwrap_err().contains("no certificate"));
        std::fs::remove_file(&certificate).unwrap();
        assert!(reload().unwrap_err().contains("mount the webhook's certificate"));
        assert_eq!(&in_use(), new.cert.der());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
