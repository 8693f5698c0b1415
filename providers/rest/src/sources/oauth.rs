//! Client credentials of OAuth 2.0, with a secret or with the token of another issuer, and the answers of all token
//! endpoints.

use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use peerpod_base::config::Secret;
use peerpod_provider_api::Error;
use peerpod_provider_cloud::refusal::clip;
use reqwest::{Method, Url};

use crate::http::{Http, NoAnswer};
use crate::read;
use crate::request::{HttpAnswer, Request};
use crate::token::{Token, TokenSource};

/// Life of a token whose answer names none.
const UNKNOWN_LIFE: u64 = 300;
/// Longest life of a token.
const LONGEST_LIFE: u64 = 24 * 3600;
/// Type of a client assertion (RFC 7523).
const ASSERTION_TYPE: &str = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer";

/// Client with a secret.
#[derive(Debug, Clone)]
pub struct ClientSecret {
    /// Token endpoint.
    pub url: Url,
    /// Id of the client.
    pub client_id: String,
    /// Secret of the client.
    pub secret: Secret,
    /// Scope of the token.
    pub scope: String,
    /// Remedy of a refusal, without a full stop.
    pub remedy: &'static str,
}

/// Client that proves itself with a token from a file, which another issuer projects (workload identity).
#[derive(Debug, Clone)]
pub struct Federated {
    /// Token endpoint.
    pub url: Url,
    /// Id of the client.
    pub client_id: String,
    /// File with the token of the other issuer.
    pub file: PathBuf,
    /// Scope of the token.
    pub scope: String,
    /// Remedy of a refusal, without a full stop.
    pub remedy: &'static str,
}

#[async_trait]
impl TokenSource for ClientSecret {
    async fn fetch(&self, http: &Http) -> Result<Token, Error> {
        let fields = [
            ("grant_type", "client_credentials"),
            ("client_id", &self.client_id),
            ("client_secret", self.secret.expose()),
            ("scope", &self.scope),
        ];
        ask(http, &form(&self.url, &fields), self.remedy).await
    }
}

#[async_trait]
impl TokenSource for Federated {
    async fn fetch(&self, http: &Http) -> Result<Token, Error> {
        let assertion = super::file(&self.file).await?;
        let fields = [
            ("grant_type", "client_credentials"),
            ("client_id", self.client_id.as_str()),
            ("client_assertion_type", ASSERTION_TYPE),
            ("client_assertion", assertion.expose()),
            ("scope", &self.scope),
        ];
        ask(http, &form(&self.url, &fields), self.remedy).await
    }
}

/// Returns the request of a form to a token endpoint.
pub(super) fn form(url: &Url, fields: &[(&str, &str)]) -> Request {
    Request::new(Method::POST, url.clone()).form(fields)
}

/// Asks a token endpoint.
pub(super) async fn ask(http: &Http, request: &Request, remedy: &str) -> Result<Token, Error> {
    let answer = http.send(request, None).await;
    token(request.url(), answer, remedy)
}

/// Reads the answer of a token endpoint.
pub(super) fn token(url: &Url, answer: Result<HttpAnswer, NoAnswer>, remedy: &str) -> Result<Token, Error> {
    let answer = successful(url, answer, remedy)?;
    let body = answer.json();
    let secret = read::text(&body, "/access_token").ok_or_else(|| no_token(url))?;
    let life = read::number(&body, "/expires_in").unwrap_or(UNKNOWN_LIFE).min(LONGEST_LIFE);
    Ok(Token { secret: Secret::new(secret.to_owned()), life: Duration::from_secs(life) })
}

/// Returns the answer of a token endpoint if it is no refusal.
pub(super) fn successful(
    url: &Url,
    answer: Result<HttpAnswer, NoAnswer>,
    remedy: &str,
) -> Result<HttpAnswer, Error> {
    let host = url.host_str().unwrap_or_default();
    let answer = answer.map_err(|lost| {
        Error::transient(format!(
            "get an access token: no answer from {host}: {}; check the route from the node to it",
            clip(lost.why())
        ))
    })?;
    if answer.is_success() {
        return Ok(answer);
    }
    let (status, body) = (answer.status(), answer.json());
    let text = |pointer| read::text(&body, pointer);
    let first = |pointers: [&'static str; 3]| pointers.into_iter().find_map(text);
    // OAuth has a text in `error`, Google's other APIs an object, IBM's IAM `errorCode`.
    let code = first(["/error", "/error/status", "/errorCode"]).unwrap_or("no code");
    let message = first(["/error_description", "/error/message", "/errorMessage"]).unwrap_or("no message");
    let words =
        format!("get an access token: {host} refused it ({status} {}): {}", clip(code), clip(message));
    Err(match status {
        // Metadata services answer 404 and 410 while they start or are updated.
        404 | 410 | 429 | 500.. => Error::transient(format!("{words}; it is tried again")),
        _ => Error::Auth { text: format!("{words}; {remedy}") },
    })
}

/// Error for an answer without a token.
pub(super) fn no_token(url: &Url) -> Error {
    let host = url.host_str().unwrap_or_default();
    Error::transient(format!("get an access token: the answer of {host} has none; it is tried again"))
}
