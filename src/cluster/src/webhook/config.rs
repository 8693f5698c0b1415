//! Reads the webhook's settings: section `webhook`.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use peerpod_base::config::Reader;
use rustls::crypto::CryptoProvider;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{RootCertStore, SupportedProtocolVersion, version};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use super::certificate::CertificateFiles;
use super::managed::Managed;
use super::mutate::{Profile, Totals};

/// The server's certificate (PEM, with its chain), as the chart mounts it; read again when it changes.
const CERTIFICATE_FILE: &str = "/etc/peerpod/webhook/tls.crt";
/// The certificate's key (PEM).
const KEY_FILE: &str = "/etc/peerpod/webhook/tls.key";

/// Address that the API server calls (TLS).
const LISTEN: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 9443);

/// Address of /metrics, /healthz and /readyz.
const ADMIN_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 8081);

/// Source of the server's certificate.
pub(super) enum Certificates {
    /// Two files that another system keeps up to date.
    Mounted(CertificateFiles),
    /// The webhook's own CA.
    SelfManaged(Managed),
}

pub(crate) struct WebhookConfig {
    pub(super) listen: SocketAddr,
    pub(super) admin_listen: SocketAddr,
    pub(super) certificates: Certificates,
    pub(super) versions: Vec<&'static SupportedProtocolVersion>,
    /// `webhook.tls-cipher-suites`: ring, with these suites alone.
    pub(super) crypto: Arc<CryptoProvider>,
    /// `webhook.client-ca`: verifies the API server's certificate; `None`: every caller is answered.
    pub(super) callers: Option<Arc<dyn ClientCertVerifier>>,
    pub(super) excluded: Vec<String>,
    pub(super) profile: Profile,
}

impl WebhookConfig {
    pub(crate) fn read(reader: &mut Reader) -> WebhookConfig {
        let (versions, crypto) = tls(reader);
        let callers = callers(reader, &crypto);
        WebhookConfig {
            listen: reader.constant("webhook.listen", "LISTEN", LISTEN),
            admin_listen: reader.constant("webhook.admin-listen", "ADMIN_LISTEN", ADMIN_LISTEN),
            certificates: certificates(reader),
            versions,
            crypto,
            callers,
            excluded: reader.get(
                "webhook.exclude-namespaces",
                "kube-system",
                "namespaces whose pods stay as they are, independent of the registration",
            ),
            profile: profile(reader),
        }
    }
}

fn certificates(reader: &mut Reader) -> Certificates {
    let from = reader.choice(
        "webhook.certificates",
        "mounted",
        &["mounted", "self-managed"],
        "source of the server's certificate: mounted (files, of cert-manager for instance) or self-managed \
         (our own CA, which is put into the registration)",
    );
    let files = CertificateFiles {
        certificate: reader.constant(
            "webhook.certificate-file",
            "CERTIFICATE_FILE",
            PathBuf::from(CERTIFICATE_FILE),
        ),
        key: reader.constant("webhook.key-file", "KEY_FILE", PathBuf::from(KEY_FILE)),
    };
    let managed = Managed::read(reader);
    if from == "self-managed" { Certificates::SelfManaged(managed) } else { Certificates::Mounted(files) }
}

fn profile(reader: &mut Reader) -> Profile {
    let runtime_classes: Vec<String> =
        reader.get("webhook.runtime-classes", "kata-remote", "the RuntimeClasses whose pods are peer pods");
    let resource: String = reader.get(
        "cluster.extended-resource",
        "kata.peerpods.io/vm",
        "extended resource by which Kubernetes counts peer pods; a pod takes one",
    );
    reader.removed("webhook.resource", "use cluster.extended-resource");
    let totals = reader.choice(
        "webhook.totals",
        "effective",
        &["effective", "sum"],
        "how a pod's need is added up: effective (Kubernetes' rule) or sum (all containers, as cloud-api-adaptor's webhook)",
    );
    let gpus: Vec<String> =
        reader.get("webhook.gpu-resources", "nvidia.com/gpu", "the resources that are GPUs");
    if runtime_classes.is_empty() {
        reader.mistake("webhook.runtime-classes", "none; name at least one");
    }
    reader.removed("webhook.profile", "all classes have the settings of section webhook");
    let totals = if totals == "sum" { Totals::Sum } else { Totals::Effective };
    Profile { runtime_classes, resource, totals, gpus }
}

/// Uses the names of the replaced webhook: `VersionTLS12`, IANA's names of suites.
fn tls(reader: &mut Reader) -> (Vec<&'static SupportedProtocolVersion>, Arc<CryptoProvider>) {
    let least = reader.choice(
        "webhook.tls-min-version",
        "VersionTLS12",
        &["VersionTLS12", "VersionTLS13"],
        "the oldest accepted version of TLS",
    );
    let suites: Option<Vec<String>> = reader.optional(
        "webhook.tls-cipher-suites",
        "the cipher suites of TLS 1.2, by IANA's names; all that are safe when not set",
    );
    let mut crypto = rustls::crypto::ring::default_provider();
    if let Some(wanted) = suites.filter(|suites| !suites.is_empty()) {
        if least == "VersionTLS13" {
            reader.mistake(
                "webhook.tls-cipher-suites",
                "TLS 1.3 has no choice of suites; remove them or allow VersionTLS12",
            );
        }
        let name = |suite: &rustls::SupportedCipherSuite| format!("{:?}", suite.suite());
        let known: Vec<String> =
            crypto.cipher_suites.iter().map(name).filter(|name| name.starts_with("TLS_")).collect();
        if wanted.iter().any(|suite| !known.contains(suite)) {
            reader.mistake(
                "webhook.tls-cipher-suites",
                format!("not all are known; there are {}", known.join(", ")),
            );
        }
        crypto.cipher_suites.retain(|suite| suite.tls13().is_some() || wanted.contains(&name(suite)));
    }
    let versions: &[_] =
        if least == "VersionTLS13" { &[&version::TLS13] } else { &[&version::TLS13, &version::TLS12] };
    (versions.to_vec(), Arc::new(crypto))
}

fn callers(reader: &mut Reader, crypto: &Arc<CryptoProvider>) -> Option<Arc<dyn ClientCertVerifier>> {
    let pem: Option<String> = reader.optional(
        "webhook.client-ca",
        "certificates (PEM) of the CA that signed the API server's client certificate; without it every caller is \
         answered. Use a CA that signs no other certificates",
    );
    let verifier = |pem: String| -> anyhow::Result<Arc<dyn ClientCertVerifier>> {
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
            roots.add(certificate?)?;
        }
        Ok(WebPkiClientVerifier::builder_with_provider(Arc::new(roots), crypto.clone()).build()?)
    };
    match pem.map(verifier) {
        None => None,
        Some(Ok(verifier)) => Some(verifier),
        Some(Err(why)) => {
            reader.mistake("webhook.client-ca", format!("{why}; write the CA's certificate in PEM"));
            None
        }
    }
}

#[cfg(test)]
mod tests;
