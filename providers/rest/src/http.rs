//! Sends one request and reads one answer of bounded size. May touch the network and read the file of CA certificates.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use peerpod_base::chain::chain;
use peerpod_base::config::Secret;
use peerpod_provider_api::Error;
use reqwest::header::{AUTHORIZATION, CONTENT_LENGTH, HeaderValue};
use reqwest::redirect::Policy;
use reqwest::{Client, ClientBuilder, Method, Response};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, ConfigBuilder, RootCertStore, WantsVerifier};

use crate::request::{HttpAnswer, Request};

mod pin;

/// Longest time until a connection is established.
const CONNECT: Duration = Duration::from_secs(5);
/// Largest body of an answer. The largest known one is Azure's list of SKUs of a region, some 5 MiB.
const MAX_BODY: usize = 16 << 20;

/// Settings of a client.
#[derive(Debug, Clone)]
pub struct HttpSettings {
    /// PEM file of the CA certificates to trust; `None`: those of the system.
    pub ca_file: Option<PathBuf>,
    /// Longest time from the request to the end of its answer.
    pub call_timeout: Duration,
}

/// HTTP client of one provider. It follows no redirect and keeps no cookies. Clones share its connections.
#[derive(Debug, Clone)]
pub struct Http {
    client: Client,
    /// Uses no proxy: metadata services are on the node's own link.
    direct: Client,
}

/// Request without an answer.
#[derive(Debug)]
pub enum NoAnswer {
    /// The request was sent, or may have been; its effect is unknown.
    Lost(String),
    /// The request was not sent.
    Unsent(String),
}

impl NoAnswer {
    /// Returns the cause.
    pub fn why(&self) -> &str {
        match self {
            NoAnswer::Lost(why) | NoAnswer::Unsent(why) => why,
        }
    }
}

impl Http {
    /// Sets up a client; makes no connection. The proxy comes from the environment (`HTTPS_PROXY`, `NO_PROXY`).
    ///
    /// # Errors
    /// [`Error::Invalid`] when the CA certificates cannot be read.
    pub fn new(settings: &HttpSettings) -> Result<Http, Error> {
        Http::with_tls(settings, tls(settings)?)
    }

    /// Same as [`Http::new`], but trusts the server with the certificate of this SHA-256, and no other. Ignores
    /// [`HttpSettings::ca_file`].
    ///
    /// # Errors
    /// Same as [`Http::new`].
    pub fn pinned(settings: &HttpSettings, sha256: [u8; 32]) -> Result<Http, Error> {
        Http::with_tls(settings, pin::tls(sha256)?)
    }

    fn with_tls(settings: &HttpSettings, tls: ClientConfig) -> Result<Http, Error> {
        let build = |builder: ClientBuilder| {
            let client = builder
                .tls_backend_preconfigured(tls.clone())
                .redirect(Policy::none())
                .retry(reqwest::retry::never())
                .referer(false)
                .connect_timeout(CONNECT)
                .timeout(settings.call_timeout)
                .user_agent(concat!("peerpod/", env!("CARGO_PKG_VERSION")))
                .build();
            client.map_err(|error| Error::invalid(format!("set up HTTP: {}", chain(&error))))
        };
        Ok(Http { client: build(Client::builder())?, direct: build(Client::builder().no_proxy())? })
    }

    /// Sends a request once, with the token as its `Authorization` if there is one.
    ///
    /// # Errors
    /// [`NoAnswer`] without a whole answer. Its text has no URL, because a query may hold a signature.
    pub async fn send(&self, request: &Request, token: Option<&Secret>) -> Result<HttpAnswer, NoAnswer> {
        self.send_by(&self.client, request, token).await
    }

    /// Same as [`Http::send`], without a proxy and without a token, for metadata services.
    ///
    /// # Errors
    /// Same as [`Http::send`].
    pub async fn send_direct(&self, request: &Request) -> Result<HttpAnswer, NoAnswer> {
        self.send_by(&self.direct, request, None).await
    }

    async fn send_by(
        &self,
        client: &Client,
        request: &Request,
        token: Option<&Secret>,
    ) -> Result<HttpAnswer, NoAnswer> {
        let Request { method, url, headers, body } = request.clone();
        let mut ask = client.request(method, url).headers(headers);
        if let Some(body) = body {
            ask = ask.body(body);
        } else if matches!(*request.method(), Method::POST | Method::PUT | Method::PATCH) {
            // Servers may demand the length of an absent body (411).
            ask = ask.header(CONTENT_LENGTH, HeaderValue::from_static("0"));
        }
        if let Some(token) = token {
            let value = HeaderValue::from_str(&format!("Bearer {}", token.expose()));
            let mut value =
                value.map_err(|_| NoAnswer::Unsent("the token has a control character".to_owned()))?;
            value.set_sensitive(true);
            ask = ask.header(AUTHORIZATION, value);
        }
        read(ask.send().await.map_err(lost)?).await
    }
}

async fn read(mut response: Response) -> Result<HttpAnswer, NoAnswer> {
    let status = response.status().as_u16();
    let too_long = || NoAnswer::Lost(format!("the answer {status} is longer than {} MiB", MAX_BODY >> 20));
    if response.content_length().is_some_and(|length| length > MAX_BODY as u64) {
        return Err(too_long());
    }
    let headers = response.headers().clone();
    let mut body = BytesMut::new();
    while let Some(part) = response.chunk().await.map_err(lost)? {
        if body.len() + part.len() > MAX_BODY {
            return Err(too_long());
        }
        body.extend_from_slice(&part);
    }
    Ok(HttpAnswer { status, headers, body: Bytes::from(body) })
}

fn lost(error: reqwest::Error) -> NoAnswer {
    let error = error.without_url();
    let is_unsent = error.is_connect() || error.is_builder();
    let why = chain(&error);
    if is_unsent { NoAnswer::Unsent(why) } else { NoAnswer::Lost(why) }
}

fn tls(settings: &HttpSettings) -> Result<ClientConfig, Error> {
    let mut roots = RootCertStore::empty();
    match &settings.ca_file {
        None => {
            let found = rustls_native_certs::load_native_certs();
            let (good, _) = roots.add_parsable_certificates(found.certs);
            if good == 0 {
                // Plain HTTP needs none, and the handshake names the cause.
                tracing::warn!("the system has no CA certificates: TLS connections fail; set SSL_CERT_FILE");
            }
        }
        Some(file) => {
            let unreadable = |why: String| {
                let file = file.display();
                Error::invalid(format!("read the CA certificates in {file}: {why}; correct ca-file"))
            };
            let all = CertificateDer::pem_file_iter(file).map_err(|error| unreadable(error.to_string()))?;
            for certificate in all {
                let certificate = certificate.map_err(|error| unreadable(error.to_string()))?;
                roots.add(certificate).map_err(|error| unreadable(error.to_string()))?;
            }
            if roots.is_empty() {
                return Err(unreadable("it has none".to_owned()));
            }
        }
    }
    Ok(builder()?.with_root_certificates(roots).with_no_client_auth())
}

/// Returns the beginning of a configuration of TLS.
fn builder() -> Result<ConfigBuilder<ClientConfig, WantsVerifier>, Error> {
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let versions = ClientConfig::builder_with_provider(ring).with_safe_default_protocol_versions();
    versions.map_err(|error| Error::invalid(format!("set up TLS: {error}")))
}
