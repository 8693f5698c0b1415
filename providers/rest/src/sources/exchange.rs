//! Token in exchange for that of another issuer (RFC 8693), and the token of a service account that another identity
//! may use: Google's workload identity federation.

use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use peerpod_base::config::Secret;
use peerpod_provider_api::Error;
use reqwest::{Method, Url};
use serde_json::{Value, json};

use crate::http::Http;
use crate::read;
use crate::request::Request;
use crate::sources::oauth;
use crate::token::{Token, TokenSource};

/// Type of the grant.
const GRANT: &str = "urn:ietf:params:oauth:grant-type:token-exchange";
/// Type of the requested token.
const ACCESS_TOKEN: &str = "urn:ietf:params:oauth:token-type:access_token";
/// Life of a token of [`Impersonation`], in seconds; Google gives no longer one by default.
const LIFE: u64 = 3600;

/// Token of the other issuer.
#[derive(Debug, Clone)]
pub struct Subject {
    /// File with the token.
    pub file: PathBuf,
    /// Field of the token where the file is a JSON object; `None`: the file is the token.
    pub field: Option<String>,
    /// Type of the token, like `urn:ietf:params:oauth:token-type:jwt`.
    pub kind: String,
}

/// Exchange of a token.
#[derive(Debug, Clone)]
pub struct Exchange {
    /// Token endpoint.
    pub url: Url,
    /// Audience of the new token.
    pub audience: String,
    /// Token of the other issuer.
    pub subject: Subject,
    /// Scope of the new token.
    pub scope: String,
    /// Remedy of a refusal, without a full stop.
    pub remedy: &'static str,
}

impl Subject {
    async fn token(&self) -> Result<Secret, Error> {
        let text = super::file(&self.file).await?;
        let Some(field) = &self.field else { return Ok(text) };
        let body: Value = serde_json::from_str(text.expose()).unwrap_or_default();
        let token = body.get(field).and_then(Value::as_str).map(|token| Secret::new(token.to_owned()));
        token.ok_or_else(|| Error::Auth {
            text: format!(
                "read the token in {}: it is no JSON object with the field {field}; correct the credential file",
                self.file.display()
            ),
        })
    }
}

#[async_trait]
impl TokenSource for Exchange {
    async fn fetch(&self, http: &Http) -> Result<Token, Error> {
        let subject = self.subject.token().await?;
        let fields = [
            ("grant_type", GRANT),
            ("audience", self.audience.as_str()),
            ("scope", &self.scope),
            ("requested_token_type", ACCESS_TOKEN),
            ("subject_token_type", &self.subject.kind),
            ("subject_token", subject.expose()),
        ];
        oauth::ask(http, &oauth::form(&self.url, &fields), self.remedy).await
    }
}

/// Service account that the identity of another source may use (`generateAccessToken` of Google's IAM).
pub struct Impersonation {
    /// Source of the identity.
    pub source: Box<dyn TokenSource>,
    /// URL of `generateAccessToken` of the service account.
    pub url: Url,
    /// Scope of the token.
    pub scope: String,
    /// Remedy of a refusal, without a full stop.
    pub remedy: &'static str,
}

#[async_trait]
impl TokenSource for Impersonation {
    async fn fetch(&self, http: &Http) -> Result<Token, Error> {
        let own = self.source.fetch(http).await?;
        let body = json!({"scope": [self.scope], "lifetime": format!("{LIFE}s")});
        let request = Request::new(Method::POST, self.url.clone()).json(&body);
        let answer = http.send(&request, Some(&own.secret)).await;
        let body = oauth::successful(&self.url, answer, self.remedy)?.json();
        let secret = read::text(&body, "/accessToken").ok_or_else(|| oauth::no_token(&self.url))?;
        Ok(Token { secret: Secret::new(secret.to_owned()), life: Duration::from_secs(LIFE) })
    }
}
