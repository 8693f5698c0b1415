//! Runs a foreign mutating webhook and registers webhooks. Tests use it for reinvocation, and, because it does nothing
//! over the same libraries, as the measure of Peerpod's webhook.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Result;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::AbortHandle;
use tokio_rustls::TlsAcceptor;

pub(crate) fn pem(label: &str, der: &[u8]) -> String {
    let text = BASE64_STANDARD.encode(der);
    let lines: Vec<&str> =
        text.as_bytes().chunks(64).filter_map(|line| std::str::from_utf8(line).ok()).collect();
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"))
}

/// CA that issues server certificates for 127.0.0.1.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    /// Makes a new CA.
    ///
    /// # Errors
    /// When there is no randomness.
    pub fn new() -> Result<Authority> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Ok(Authority(CertifiedIssuer::self_signed(params, KeyPair::generate()?)?))
    }

    /// Returns its own certificate, PEM.
    pub fn pem(&self) -> String {
        pem("CERTIFICATE", self.0.der())
    }

    /// Issues a certificate and returns it with its key, both PEM.
    ///
    /// # Errors
    /// When there is no randomness.
    pub fn issue(&self) -> Result<(String, String)> {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new(["127.0.0.1".to_owned()])?.signed_by(&key, &self.0)?;
        Ok((pem("CERTIFICATE", certificate.der()), pem("PRIVATE KEY", key.serialized_der())))
    }
}

/// Returns a MutatingWebhookConfiguration of one webhook at `https://<address><path>`; `more` has the webhook's other
/// fields.
pub fn registration(name: &str, address: SocketAddr, path: &str, ca: &str, more: Value) -> Value {
    let mut webhook = json!({
        "name": name,
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "clientConfig": {"url": format!("https://{address}{path}"), "caBundle": BASE64_STANDARD.encode(ca)},
    });
    if let (Value::Object(webhook), Value::Object(more)) = (&mut webhook, more) {
        webhook.extend(more);
    }
    json!({"metadata": {"name": name}, "webhooks": [webhook]})
}

/// A running webhook; ends when dropped.
pub struct Hook {
    address: SocketAddr,
    authority: Authority,
    calls: Arc<AtomicUsize>,
    task: AbortHandle,
}

impl Hook {
    /// Starts a webhook that answers each object with the JSON patch that `patch` returns, or with none.
    ///
    /// # Errors
    /// When there is no port or no randomness.
    pub async fn start(patch: impl Fn(&Value) -> Option<Value> + Send + Sync + 'static) -> Result<Hook> {
        let authority = Authority::new()?;
        let (certificate, key) = authority.issue()?;
        let chain = CertificateDer::pem_slice_iter(certificate.as_bytes()).collect::<Result<Vec<_>, _>>()?;
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes())?;
        let ring = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ServerConfig::builder_with_provider(ring).with_safe_default_protocol_versions()?;
        let tls = TlsAcceptor::from(Arc::new(tls.with_no_client_auth().with_single_cert(chain, key)?));
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let calls = Arc::new(AtomicUsize::new(0));
        let task = tokio::spawn(serve(listener, tls, Arc::new(patch), calls.clone())).abort_handle();
        Ok(Hook { address, authority, calls, task })
    }

    /// Returns the number of its calls.
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    /// Returns its [`registration`].
    pub fn registration(&self, name: &str, more: Value) -> Value {
        registration(name, self.address, "/", &self.authority.pem(), more)
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        self.task.abort();
    }
}

type Patching = dyn Fn(&Value) -> Option<Value> + Send + Sync;

async fn serve(listener: TcpListener, tls: TlsAcceptor, patch: Arc<Patching>, calls: Arc<AtomicUsize>) {
    while let Ok((stream, _)) = listener.accept().await {
        let (tls, patch, calls) = (tls.clone(), patch.clone(), calls.clone());
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                calls.fetch_add(1, Ordering::Relaxed);
                let patch = patch.clone();
                async move { Ok::<_, Infallible>(answer(request, &*patch).await) }
            });
            let Ok(stream) = tls.accept(stream).await else { return };
            // The result does not matter: the peer may close the connection at any time.
            drop(
                hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service)
                    .await,
            );
        });
    }
}

async fn answer(request: Request<Incoming>, patch: &Patching) -> Response<Full<Bytes>> {
    let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let review: Value = serde_json::from_slice(&body).unwrap_or_default();
    let mut response = json!({"uid": review["request"]["uid"], "allowed": true});
    if let Some(patch) = patch(&review["request"]["object"]) {
        response["patchType"] = json!("JSONPatch");
        response["patch"] = json!(BASE64_STANDARD.encode(patch.to_string()));
    }
    let answer =
        json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response});
    Response::new(Full::new(Bytes::from(answer.to_string())))
}
