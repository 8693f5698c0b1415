//! Finds the access key: that of the settings, of a role that a Kubernetes service account may assume (RRSA), or of the
//! RAM role of the node's instance. May read the environment and the file of the service account's token.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use peerpod_base::config::Secret;
use peerpod_provider_api::Error;
use peerpod_provider_cloud::refusal::clip;
use peerpod_provider_rest::header::{HeaderName, HeaderValue};
use peerpod_provider_rest::{
    Http, HttpAnswer, Method, NoAnswer, Request, Token, TokenSource, Url, read, sources,
};
use serde_json::Value;

use crate::config::{AlibabaCloudConfig, AlibabaCloudCredentials};
use crate::sign::AccessKey;

/// Time for which a key of the settings is used before it is read again.
const SETTINGS_LIFE: Duration = Duration::from_secs(24 * 3600);
/// Life of a temporary key whose end is not stated.
const UNKNOWN_LIFE: Duration = Duration::from_secs(300);
/// Life of a key that is asked for by RRSA, in seconds; a role's own limit is at least this.
const RRSA_LIFE: &str = "3600";
/// Path of the roles in the metadata service.
const ROLES: &str = "/latest/meta-data/ram/security-credentials/";
/// Path of the metadata service's tokens, and their life in seconds.
const TOKENS: (&str, &str) = ("/latest/api/token", "60");

const RRSA: &str =
    "check the role, its trust in the OIDC provider, and the annotation of the service account";
const NODE: &str = "give the node's instance a RAM role, use RRSA, or set access-key-id and secret-key";

/// Returns the source of access keys. Files are read at each fetch, because they change.
pub(crate) fn source(config: &AlibabaCloudConfig) -> Result<Box<dyn TokenSource>, Error> {
    let of_environment = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let (role, provider, file) = match config.credentials.clone() {
        AlibabaCloudCredentials::Key { id, secret, token } => {
            return Ok(Box::new(Settings(AccessKey { id: id.expose().to_owned(), secret, token })));
        }
        AlibabaCloudCredentials::Role { role, provider, file } => (
            role.or_else(|| of_environment("ALIBABA_CLOUD_ROLE_ARN")),
            provider.or_else(|| of_environment("ALIBABA_CLOUD_OIDC_PROVIDER_ARN")),
            file.or_else(|| of_environment("ALIBABA_CLOUD_OIDC_TOKEN_FILE").map(PathBuf::from)),
        ),
    };
    match (role, provider, file) {
        (Some(role), Some(provider), Some(file)) => {
            let url = url(&config.service("sts"))?;
            Ok(Box::new(Rrsa { url, role, provider, file }))
        }
        (None, None, None) => Ok(Box::new(RamRole { url: url(&config.metadata)? })),
        _ => Err(Error::Auth {
            text: format!(
                "get an access key: RRSA needs a role, an OIDC provider and a token file, and some are missing; {RRSA}"
            ),
        }),
    }
}

fn url(text: &str) -> Result<Url, Error> {
    Url::parse(text).map_err(|_| Error::invalid("get an access key: the URL of its service is none"))
}

/// Access key of the settings.
struct Settings(AccessKey);

#[async_trait]
impl TokenSource for Settings {
    async fn fetch(&self, _http: &Http) -> Result<Token, Error> {
        Ok(Token { secret: self.0.pack(), life: SETTINGS_LIFE })
    }
}

/// Role that a Kubernetes service account may assume. The call needs no signature.
struct Rrsa {
    url: Url,
    role: String,
    provider: String,
    file: PathBuf,
}

#[async_trait]
impl TokenSource for Rrsa {
    async fn fetch(&self, http: &Http) -> Result<Token, Error> {
        let subject = sources::file(&self.file).await?;
        let request = Request::new(Method::POST, self.url.clone())
            .query("Action", "AssumeRoleWithOIDC")
            .query("Version", "2015-04-01")
            .query("Format", "JSON")
            .query("Timestamp", &jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string())
            .form(&[
                ("RoleArn", &self.role),
                ("OIDCProviderArn", &self.provider),
                ("OIDCToken", subject.expose()),
                ("RoleSessionName", "peerpod"),
                ("DurationSeconds", RRSA_LIFE),
            ]);
        let answer = successful(&self.url, http.send(&request, None).await, RRSA)?;
        let body = answer.json();
        token(body.get("Credentials").unwrap_or(&Value::Null), &self.url)
    }
}

/// RAM role of the node's instance, from the metadata service. It is asked without a proxy.
struct RamRole {
    url: Url,
}

#[async_trait]
impl TokenSource for RamRole {
    async fn fetch(&self, http: &Http) -> Result<Token, Error> {
        let at = |path: &str| self.url.join(path).map_err(|_| no_key(&self.url));
        let ask = Request::new(Method::PUT, at(TOKENS.0)?)
            .header(HeaderName::from_static("x-aliyun-ecs-metadata-token-ttl-seconds"), TOKENS.1);
        // An instance whose metadata service has no tokens answers without one.
        let pass = http.send_direct(&ask).await.ok().filter(HttpAnswer::is_success);
        let get = |url: Url| {
            let value = pass.as_ref().and_then(|pass| HeaderValue::from_bytes(pass.body()).ok());
            let name = HeaderName::from_static("x-aliyun-ecs-metadata-token");
            match value {
                Some(value) => Request::get(url).with(name, value),
                None => Request::get(url),
            }
        };
        let roles = successful(&self.url, http.send_direct(&get(at(ROLES)?)).await, NODE)?;
        let roles = String::from_utf8_lossy(roles.body()).into_owned();
        let role = roles.lines().next().map(str::trim).filter(|role| is_role(role));
        let role = role.ok_or_else(|| no_key(&self.url))?;
        let answer = http.send_direct(&get(at(&format!("{ROLES}{role}"))?)).await;
        let body = successful(&self.url, answer, NODE)?.json();
        token(&body, &self.url)
    }
}

/// Whether a text is the name of a RAM role.
fn is_role(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 64
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
}

/// Reads a temporary key.
fn token(body: &Value, url: &Url) -> Result<Token, Error> {
    let text = |name: &str| read::text(body, name).map(str::to_owned);
    let (Some(id), Some(secret), Some(token)) =
        (text("/AccessKeyId"), text("/AccessKeySecret"), text("/SecurityToken"))
    else {
        return Err(no_key(url));
    };
    let end = read::time(body, "/Expiration");
    let life = end.map_or(UNKNOWN_LIFE, |end| end.duration_since(SystemTime::now()).unwrap_or_default());
    let key = AccessKey { id, secret: Secret::new(secret), token: Some(Secret::new(token)) };
    Ok(Token { secret: key.pack(), life })
}

/// Returns the answer of a source if it is no refusal.
fn successful(url: &Url, answer: Result<HttpAnswer, NoAnswer>, remedy: &str) -> Result<HttpAnswer, Error> {
    let host = url.host_str().unwrap_or_default();
    let answer = answer.map_err(|lost| {
        Error::transient(format!(
            "get an access key: no answer from {host}: {}; check the route from the node to it",
            clip(lost.why())
        ))
    })?;
    if answer.is_success() {
        return Ok(answer);
    }
    let (status, body) = (answer.status(), answer.json());
    let text = |pointer| read::text(&body, pointer).map(clip);
    let (code, message) = (text("/Code").unwrap_or_default(), text("/Message").unwrap_or_default());
    let words = format!("get an access key: {host} refused it ({status} {code}): {message}");
    Err(match status {
        429 | 500.. => Error::transient(format!("{words}; it is tried again")),
        _ => Error::Auth { text: format!("{words}; {remedy}") },
    })
}

fn no_key(url: &Url) -> Error {
    let host = url.host_str().unwrap_or_default();
    Error::Auth { text: format!("get an access key: the answer of {host} has none; {NODE}") }
}
