//! Keeps the identity of this VM: its key, made here and never sent; the certificate that the node issued for it; the
//! CAs that it trusts.
//!
//! All of it lies on a tmpfs, 0600, so that a restarted guest program is the same guest. Only fingerprints are ever
//! logged.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use anyhow::{Context, anyhow, ensure};
use peerpod_link::{tls, user_data};
use rcgen::{CertificateParams, KeyPair};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use serde::{Deserialize, Serialize};

use crate::files;

const KEY: &str = "key.der";
const GRANT: &str = "identity.json";
const VERSION: u32 = 1;
const MAX_LEN: u64 = 256 << 10;
const MAX_CERTIFICATES: usize = 8;

/// Grant of the node; on disk as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Grant {
    version: u32,
    sandbox_id: String,
    /// Certificates as DER in hex, leaf first.
    certificates: Vec<String>,
    /// Replaces the list of user-data after a CA rotation; empty until then.
    #[serde(default)]
    ca_sha256: Vec<String>,
}

/// Key and, once granted, its certificate.
pub(crate) struct GuestIdentity {
    dir: PathBuf,
    /// Set once it was needed, or at the start if it is on disk.
    key: OnceLock<KeyPair>,
    sandbox_id: String,
    chain: Vec<CertificateDer<'static>>,
    /// CA fingerprints of a rotation; empty = those of user-data.
    pins: Vec<[u8; 32]>,
}

impl GuestIdentity {
    /// Reads the identity from `dir` (made if need be). A missing key is made when it is needed.
    pub(crate) fn load(dir: &Path) -> anyhow::Result<GuestIdentity> {
        files::make_folder(dir).with_context(|| format!("making {}", dir.display()))?;
        let path = dir.join(KEY);
        let stored = files::read(&path, MAX_LEN).with_context(|| format!("reading {}", path.display()))?;
        let key = stored.map(KeyPair::try_from).transpose();
        let key = key.inspect_err(|error| {
            tracing::warn!(path = %path.display(), %error, "the stored key is damaged, making another one");
        });
        let key = key.ok().flatten().map(OnceLock::from).unwrap_or_default();
        let mut identity = GuestIdentity {
            dir: dir.to_owned(),
            key,
            sandbox_id: String::new(),
            chain: Vec::new(),
            pins: Vec::new(),
        };
        if let Some(grant) = identity.read_grant() {
            identity.take(grant);
        }
        Ok(identity)
    }

    /// Returns the sandbox that this VM belongs to; empty before the first grant.
    pub(crate) fn sandbox_id(&self) -> &str {
        &self.sandbox_id
    }

    pub(crate) fn is_granted(&self) -> bool {
        !self.chain.is_empty()
    }

    /// Makes the key, if there is none. The wait for the node's first answer is a good time for it.
    pub(crate) fn prepare(&self) -> anyhow::Result<()> {
        self.key().map(drop)
    }

    /// Returns a certificate request for the key. The subject is empty: the node writes its own.
    pub(crate) fn csr(&self) -> anyhow::Result<Vec<u8>> {
        let request = CertificateParams::default().serialize_request(self.key()?);
        Ok(request.context("making a certificate request")?.der().to_vec())
    }

    /// Stores the node's grant, after a check that it can be used with the key. `trusted` are the new CAs of a rotation
    /// (DER); empty = the previous ones.
    pub(crate) fn grant(
        &mut self,
        sandbox_id: &str,
        certificates: &[Vec<u8>],
        trusted: &[Vec<u8>],
    ) -> anyhow::Result<()> {
        let (count, trusted_count) = (certificates.len(), trusted.len());
        ensure!(
            (1..=MAX_CERTIFICATES).contains(&count) && trusted_count <= MAX_CERTIFICATES,
            "the node sent {count} certificates and {trusted_count} trusted CAs; 1 to {MAX_CERTIFICATES} of each are \
             accepted"
        );
        let ours = &self.sandbox_id;
        ensure!(
            ours.is_empty() || ours == sandbox_id,
            "the node names sandbox {sandbox_id}, this VM belongs to {ours} already"
        );
        let chain: Vec<_> = certificates.iter().map(|der| CertificateDer::from(der.clone())).collect();
        config(&[[0; 32]], Some((chain.clone(), self.private_key()?)))?;
        let pins = match trusted {
            [] => self.pins.clone(),
            some => some.iter().map(|der| tls::fingerprint(&CertificateDer::from(der.as_slice()))).collect(),
        };
        self.write_grant(sandbox_id, &chain, &pins)?;
        (self.sandbox_id, self.chain, self.pins) = (sandbox_id.to_owned(), chain, pins);
        Ok(())
    }

    /// Trusts new CAs, which are announced before they issue a certificate to this VM.
    pub(crate) fn trust(&mut self, trusted: &[Vec<u8>]) -> anyhow::Result<()> {
        let chain: Vec<_> = self.chain.iter().map(|der| der.to_vec()).collect();
        let sandbox_id = self.sandbox_id.clone();
        self.grant(&sandbox_id, &chain, trusted)
    }

    /// Returns the TLS configuration for a dial: without certificate for a claim, with it for everything else.
    pub(crate) fn tls(
        &self,
        birth_pins: &[[u8; 32]],
        with_certificate: bool,
    ) -> anyhow::Result<Arc<rustls::ClientConfig>> {
        let pins = if self.pins.is_empty() { birth_pins } else { &self.pins };
        let identity = match with_certificate {
            true => Some((self.chain.clone(), self.private_key()?)),
            false => None,
        };
        config(pins, identity)
    }

    /// Returns the key; a new one is stored before its use.
    fn key(&self) -> anyhow::Result<&KeyPair> {
        if let Some(key) = self.key.get() {
            return Ok(key);
        }
        let key = KeyPair::generate().context("making a key")?; // P-256
        let path = self.dir.join(KEY);
        files::write(&path, key.serialized_der()).with_context(|| format!("writing {}", path.display()))?;
        Ok(self.key.get_or_init(|| key))
    }

    fn private_key(&self) -> anyhow::Result<PrivateKeyDer<'static>> {
        Ok(PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.key()?.serialize_der())))
    }

    fn read_grant(&self) -> Option<Grant> {
        let path = self.dir.join(GRANT);
        let content = files::read(&path, MAX_LEN).ok().flatten()?;
        match serde_json::from_slice::<Grant>(&content) {
            Ok(grant) if grant.version == VERSION => Some(grant),
            other => {
                let why = other.map_or_else(|e| e.to_string(), |grant| format!("version {}", grant.version));
                tracing::warn!(path = %path.display(), reason = %why, "not using the stored certificate");
                None
            }
        }
    }

    fn take(&mut self, grant: Grant) {
        let chain: Option<Vec<_>> =
            grant.certificates.iter().map(|text| hex::decode(text).ok().map(CertificateDer::from)).collect();
        let pins: Option<Vec<_>> = grant.ca_sha256.iter().map(|text| user_data::from_hex(text)).collect();
        let (Some(chain), Some(pins), Ok(key)) = (chain, pins, self.private_key()) else { return };
        if config(&[[0; 32]], Some((chain.clone(), key))).is_ok() {
            (self.sandbox_id, self.chain, self.pins) = (grant.sandbox_id, chain, pins);
        }
    }

    fn write_grant(
        &self,
        sandbox_id: &str,
        chain: &[CertificateDer<'static>],
        pins: &[[u8; 32]],
    ) -> anyhow::Result<()> {
        let grant = Grant {
            version: VERSION,
            sandbox_id: sandbox_id.to_owned(),
            certificates: chain.iter().map(hex::encode).collect(),
            ca_sha256: pins.iter().map(hex::encode).collect(),
        };
        let path = self.dir.join(GRANT);
        files::write_json(&path, &grant).with_context(|| format!("writing {}", path.display()))
    }
}

fn config(
    pins: &[[u8; 32]],
    identity: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
) -> anyhow::Result<Arc<rustls::ClientConfig>> {
    tls::client_config(pins, identity)
        .map_err(|error| anyhow!("the certificate from the node cannot be used: {error}"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use rcgen::{BasicConstraints, CertificateSigningRequestParams, IsCa, Issuer};

    use super::*;
    use crate::files::testing::TempDir;

    /// Returns a node's answer to the request: leaf and CA.
    fn sign(csr: &[u8]) -> Vec<Vec<u8>> {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = params.self_signed(&key).unwrap().der().to_vec();
        let request = CertificateSigningRequestParams::from_der(&csr.into()).unwrap();
        let leaf = request.signed_by(&Issuer::new(params, key)).unwrap();
        vec![leaf.der().to_vec(), ca]
    }

    #[test]
    fn the_key_is_made_once_and_is_for_root_alone() {
        let dir = TempDir::new();
        let state = dir.path().join("guest");
        let first = GuestIdentity::load(&state).unwrap();
        assert!(!state.join(KEY).exists(), "not before it is needed");
        first.prepare().unwrap();
        let again = GuestIdentity::load(&state).unwrap();
        let public = |identity: &GuestIdentity| identity.key().unwrap().public_key_raw().to_vec();
        assert_eq!(public(&first), public(&again));
        assert!(!again.is_granted());
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&state), mode(&state.join(KEY))), (0o700, 0o600));
    }

    #[test]
    fn a_grant_survives_a_restart_and_its_file_is_for_root_alone() {
        let dir = TempDir::new();
        let mut identity = GuestIdentity::load(dir.path()).unwrap();
        let chain = sign(&identity.csr().unwrap());
        identity.grant("sandbox-1", &chain, &[]).unwrap();
        let path = dir.path().join(GRANT);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);

        let mut again = GuestIdentity::load(dir.path()).unwrap();
        assert!(again.is_granted());
        assert_eq!(again.sandbox_id(), "sandbox-1");
        assert!(again.tls(&[[1; 32]], true).is_ok());

        let other = again.grant("sandbox-2", &chain, &[]).unwrap_err().to_string();
        assert!(other.contains("sandbox sandbox-2, this VM belongs to sandbox-1"), "{other}");

        // The trust of a rotation is stored, too, and suffices alone.
        assert!(again.pins.is_empty());
        again.trust(&chain[1..]).unwrap();
        let third = GuestIdentity::load(dir.path()).unwrap();
        assert_eq!(third.pins, [tls::fingerprint(&CertificateDer::from(chain[1].as_slice()))]);
        assert!(third.tls(&[], true).is_ok());
    }

    #[test]
    fn a_certificate_for_another_key_or_none_is_refused_and_nothing_is_kept() {
        let (dir, other) = (TempDir::new(), TempDir::new());
        let mut identity = GuestIdentity::load(dir.path()).unwrap();
        let theirs = GuestIdentity::load(other.path()).unwrap();
        let chain = sign(&theirs.csr().unwrap());
        let mut refused = |chain: &[Vec<u8>]| identity.grant("s", chain, &[]).unwrap_err().to_string();
        assert!(refused(&chain).contains("the certificate from the node cannot be used"));
        assert!(refused(&[]).contains("sent 0 certificates and 0 trusted CAs"));
        assert!(refused(&vec![vec![1]; 9]).contains("sent 9 certificates and 0 trusted CAs"));
        assert!(!identity.is_granted() && !dir.path().join(GRANT).exists());
    }

    #[test]
    fn damaged_files_are_replaced_not_fatal() {
        let dir = TempDir::new();
        let mut identity = GuestIdentity::load(dir.path()).unwrap();
        let chain = sign(&identity.csr().unwrap());
        identity.grant("s", &chain, &[]).unwrap();
        for content in ["{", "{\"version\":2}", r#"{"version":1,"sandbox_id":"s","certificates":["zz"]}"#] {
            std::fs::write(dir.path().join(GRANT), content).unwrap();
            assert!(!GuestIdentity::load(dir.path()).unwrap().is_granted());
        }
        std::fs::write(dir.path().join(KEY), "junk").unwrap();
        let other = GuestIdentity::load(dir.path()).unwrap();
        let public = |identity: &GuestIdentity| identity.key().unwrap().public_key_raw().to_vec();
        assert_ne!(public(&other), public(&identity));
        assert_eq!(
            public(&other),
            public(&GuestIdentity::load(dir.path()).unwrap()),
            "kept in the place of the junk"
        );
    }
}
