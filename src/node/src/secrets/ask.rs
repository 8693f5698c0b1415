//! Sends one request to the service: TLS 1.3, HTTP/1.1, JSON. The caller's deadline bounds it.

use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use peerpod_base::chain::chain;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName};
use serde::Deserialize;
use serde_json::json;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tracing::warn;
use zeroize::Zeroizing;

use super::SecretsConfig;
use crate::one_line;
use crate::sandbox::ports::PullSecretError as Error;
use crate::spec::PodRef;

/// Size limit of an answer. The service sends at most 2 MiB, in which JSON may write a byte as six.
const MOST: usize = 16 << 20;
/// Length limit of the service's text in an error or a note.
const WORDS: usize = 600;
const NOTES: usize = 16;
const PULL_SECRETS: &str = "/v1/pull-secrets";

#[derive(Deserialize)]
struct Answered {
    dockerconfigjson: Zeroizing<String>,
    #[serde(default)]
    notes: Vec<String>,
}

/// A pod's pull secrets.
pub(crate) struct Given {
    /// A `.dockerconfigjson`; empty: the pod has none.
    pub config: Zeroizing<String>,
    /// The pod's secrets that cannot be used, with the reasons.
    pub notes: Vec<String>,
}

pub(super) async fn pull_secrets(config: &SecretsConfig, pod: &PodRef) -> Result<Given, Error> {
    let uid = pod.uid.as_deref().unwrap_or_default();
    let body = json!({"namespace": pod.namespace, "name": pod.name, "uid": uid}).to_string();
    let answered = post(config, body).await?;
    let notes: Vec<String> = answered.notes.iter().take(NOTES).map(|note| one_line(note, WORDS)).collect();
    for note in &notes {
        warn!(%pod, note, "some of the pod's pull secrets cannot be used");
    }
    Ok(Given { config: answered.dockerconfigjson, notes })
}

async fn post(config: &SecretsConfig, body: String) -> Result<Answered, Error> {
    let token = config.token().await?;
    let tls = TlsConnector::from(Arc::new(configured(config).await?));
    let name = ServerName::try_from(config.server_name.clone())
        .map_err(|_| Error::away(format!("secrets.address: {:?} is not a name", config.server_name)))?;
    let connect = |why: std::io::Error| Error::away(format!("connect: {why}"));
    let stream = TcpStream::connect(&config.address).await.map_err(connect)?;
    stream.set_nodelay(true).map_err(connect)?;
    let handshake = |why: std::io::Error| Error::away(format!("TLS: {why}"));
    let stream = tls.connect(name, stream).await.map_err(handshake)?;
    let asked = |why: hyper::Error| Error::away(chain(&why));
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(asked)?;
    // The task ends with the connection, and the connection ends with this request: a dropped set aborts its task.
    let connection = JoinSet::from_iter([async move { drop(connection.await) }]);
    let request = Request::builder()
        .method(Method::POST)
        .uri(PULL_SECRETS)
        .header(HOST, &config.server_name)
        .header(CONTENT_TYPE, "application/json")
        .header(AUTHORIZATION, format!("Bearer {}", token.as_str()))
        .body(Full::new(Bytes::from(body)));
    // For example, a token with a line break.
    let request = request.map_err(|_| Error::away("the token is not valid in an HTTP header".to_owned()))?;
    let response = sender.send_request(request).await.map_err(asked)?;
    let status = response.status();
    let body = Limited::new(response.into_body(), MOST).collect().await;
    let body = body.map_err(|why| Error::away(format!("the answer: {}", chain(why.as_ref()))))?.to_bytes();
    drop(connection);
    if status != StatusCode::OK {
        return Err(refused(status, &body));
    }
    // The error repeats no part of the answer.
    serde_json::from_slice(&body).map_err(|why| {
        Error::away(format!("the answer is not valid: {:?} at line {}", why.classify(), why.line()))
    })
}

fn refused(status: StatusCode, body: &[u8]) -> Error {
    #[derive(Deserialize)]
    struct Said {
        error: String,
    }
    let said: Option<Said> = serde_json::from_slice(body).ok();
    let text = said.map_or_else(|| format!("status {status}"), |said| one_line(&said.error, WORDS));
    let refused = [400, 401, 403, 409, 422].contains(&status.as_u16());
    Error { text, refused }
}

async fn configured(config: &SecretsConfig) -> Result<ClientConfig, Error> {
    let file = config.ca_file.display();
    let pem = config.ca().await?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        let certificate = certificate.map_err(|why| Error::away(format!("{file}: {why}")))?;
        roots.add(certificate).map_err(|why| Error::away(format!("{file}: {why}")))?;
    }
    if roots.is_empty() {
        return Err(Error::away(format!("{file} has no CA certificate yet; the controller fills it in")));
    }
    let failed = |why: rustls::Error| Error::away(format!("TLS: {why}"));
    let crypto = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = ClientConfig::builder_with_provider(crypto)
        .with_protocol_versions(&[&TLS13])
        .map_err(failed)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(tls)
}
