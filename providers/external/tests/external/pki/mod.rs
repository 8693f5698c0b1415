//! Certificates of a test CA, for both sides.

#![allow(unreachable_pub, missing_docs, clippy::unwrap_used)] // a module of tests

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use peerpod_provider_external::TlsFiles;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};

pub struct Pki {
    pub server: TlsFiles,
    pub client: TlsFiles,
}

impl Pki {
    /// Creates a CA in this folder, with a certificate for `provider.test` and one for a node.
    pub fn new(folder: &Path) -> Pki {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let ca_file = folder.join("ca.pem");
        fs::write(&ca_file, pem("CERTIFICATE", ca.der())).unwrap();
        let side = |name: &str, usage| {
            let mut params = CertificateParams::new(vec![format!("{name}.test")]).unwrap();
            params.extended_key_usages = vec![usage];
            let key = KeyPair::generate().unwrap();
            let certificate = folder.join(format!("{name}.pem"));
            fs::write(&certificate, pem("CERTIFICATE", params.signed_by(&key, &ca).unwrap().der())).unwrap();
            let key_file = folder.join(format!("{name}.key"));
            fs::write(&key_file, pem("PRIVATE KEY", &key.serialize_der())).unwrap();
            fs::set_permissions(&key_file, fs::Permissions::from_mode(0o600)).unwrap();
            TlsFiles { ca: ca_file.clone(), certificate, key: key_file }
        };
        Pki {
            server: side("provider", ExtendedKeyUsagePurpose::ServerAuth),
            client: side("node", ExtendedKeyUsagePurpose::ClientAuth),
        }
    }
}

fn pem(what: &str, der: &[u8]) -> String {
    let text = BASE64_STANDARD.encode(der);
    let lines: Vec<_> = text.as_bytes().chunks(64).map(|line| std::str::from_utf8(line).unwrap()).collect();
    format!("-----BEGIN {what}-----\n{}\n-----END {what}-----\n", lines.join("\n"))
}
