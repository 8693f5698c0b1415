//! Reads the server's certificate from two files, and reads it again when they change, without losing a connection.
//!
//! A new pair is used only when certificate and key match: a mount that is being replaced, or a half-written file,
//! leaves the old pair in use. May touch: the two files.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use rustls::crypto::CryptoProvider;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

/// Interval at which the files are read. Two small reads are cheap; watching would miss changes on a network mount.
const EVERY: Duration = Duration::from_secs(1);
/// Limit of a file in bytes. A chain of certificates has a few kilobytes.
const MOST: u64 = 256 * 1024;

/// Reasons why there is no usable certificate.
#[derive(Debug, thiserror::Error)]
pub enum CertificateError {
    /// A file cannot be read.
    #[error("read {}: {why}; mount the webhook's certificate there, or name other files", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        why: io::Error,
    },
    /// A file is malformed, or certificate and key do not match.
    #[error("certificate {} with key {}: {why}", certificate.display(), key.display())]
    Pair {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// The cause.
        why: String,
    },
}

/// Pair in use. Clones share it.
#[derive(Clone, Debug)]
pub struct Certificate {
    files: Arc<(PathBuf, PathBuf)>,
    provider: Arc<CryptoProvider>,
    current: Arc<RwLock<Current>>,
}

#[derive(Debug)]
struct Current {
    pair: Arc<CertifiedKey>,
    /// Contents of both files. They include the key, which is in memory anyway.
    bytes: (Vec<u8>, Vec<u8>),
}

impl Certificate {
    /// Reads the pair.
    ///
    /// # Errors
    /// See [`CertificateError`].
    pub fn load(
        certificate: &Path,
        key: &Path,
        provider: Arc<CryptoProvider>,
    ) -> Result<Certificate, CertificateError> {
        let files = (certificate.to_owned(), key.to_owned());
        let bytes = (read(certificate)?, read(key)?);
        let pair = Arc::new(pair(&files, &bytes, &provider)?);
        let current = Arc::new(RwLock::new(Current { pair, bytes }));
        Ok(Certificate { files: Arc::new(files), provider, current })
    }

    /// Reads the files again. Returns whether there was a new pair, which new connections then use.
    ///
    /// # Errors
    /// The files hold no valid pair; the old one stays in use.
    pub fn reload(&self) -> Result<bool, CertificateError> {
        let bytes = (read(&self.files.0)?, read(&self.files.1)?);
        if self.current.read().bytes == bytes {
            return Ok(false);
        }
        let pair = Arc::new(pair(&self.files, &bytes, &self.provider)?);
        *self.current.write() = Current { pair, bytes };
        Ok(true)
    }

    /// Reloads the files whenever they change, for ever. Calls `reloaded` after each reload.
    pub async fn follow(self, reloaded: impl Fn()) {
        let mut said = String::new();
        loop {
            tokio::time::sleep(EVERY).await;
            let me = self.clone();
            // The files may be on a mount that hangs.
            match tokio::task::spawn_blocking(move || me.reload()).await {
                Ok(Ok(true)) => {
                    tracing::info!("certificate reloaded");
                    reloaded();
                    said.clear();
                }
                Ok(Ok(false)) => said.clear(),
                Ok(Err(why)) => {
                    let why = why.to_string();
                    if why != said {
                        tracing::warn!(error = why, "the old certificate stays in use");
                        said = why;
                    }
                }
                Err(why) => tracing::warn!(error = %why, "certificate not looked at"),
            }
        }
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.read().pair.clone())
    }
}

fn read(path: &Path) -> Result<Vec<u8>, CertificateError> {
    let failed = |why| CertificateError::Read { path: path.to_owned(), why };
    let file = std::fs::File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    io::Read::read_to_end(&mut io::Read::take(file, MOST), &mut bytes).map_err(failed)?;
    Ok(bytes)
}

fn pair(
    (certificate, key): &(PathBuf, PathBuf),
    bytes: &(Vec<u8>, Vec<u8>),
    provider: &CryptoProvider,
) -> Result<CertifiedKey, CertificateError> {
    let failed =
        |why: String| CertificateError::Pair { certificate: certificate.clone(), key: key.clone(), why };
    let chain = CertificateDer::pem_slice_iter(&bytes.0).collect::<Result<Vec<_>, _>>();
    let chain = chain.map_err(|why| failed(format!("the certificate is no PEM: {why}")))?;
    if chain.is_empty() {
        return Err(failed("there is no certificate in the file".to_owned()));
    }
    let private =
        PrivateKeyDer::from_pem_slice(&bytes.1).map_err(|why| failed(format!("the key is no PEM: {why}")))?;
    let pair = CertifiedKey::from_der(chain, private, provider);
    pair.map_err(|why| failed(format!("{why}; make sure that they belong together")))
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
        let loaded = Certificate::load(&certificate, &key, provider).unwrap();
        let in_use = || loaded.current.read().pair.cert[0].clone();
        assert!(!loaded.reload().unwrap());

        write(&folder, "tls.crt", &pem("CERTIFICATE", new.cert.der()));
        assert!(loaded.reload().unwrap_err().to_string().contains("belong together"));
        assert_eq!(&in_use(), old.cert.der());
        write(&folder, "tls.key", &pem("PRIVATE KEY", new.signing_key.serialized_der()));
        assert!(loaded.reload().unwrap());
        assert_eq!(&in_use(), new.cert.der());
        write(&folder, "tls.crt", "");
        assert!(loaded.reload().unwrap_err().to_string().contains("no certificate"));
        std::fs::remove_file(&certificate).unwrap();
        assert!(loaded.reload().unwrap_err().to_string().contains("mount the webhook's certificate"));
        assert_eq!(&in_use(), new.cert.der());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
