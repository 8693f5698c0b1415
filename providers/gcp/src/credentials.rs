//! Finds the source of access tokens: a service-account key, workload identity federation, or the metadata service of
//! the node or of GKE. May read the environment and the file of credentials.

use std::path::{Path, PathBuf};

use async_trait::async_trait;
use peerpod_base::config::Secret;
use peerpod_provider_api::Error;
use peerpod_provider_rest::sources::{Exchange, Impersonation, JwtBearer, Metadata, Subject};
use peerpod_provider_rest::{Http, Token, TokenSource, Url, read};
use serde_json::Value;
use tokio::io::AsyncReadExt;

use crate::config::{GcpConfig, GcpCredentials};

/// Scope of the tokens: Compute Engine alone.
const SCOPE: &str = "https://www.googleapis.com/auth/compute";
/// Scope of a federated identity that uses a service account.
const CLOUD: &str = "https://www.googleapis.com/auth/cloud-platform";
/// Path of the token in the metadata service.
const METADATA_PATH: &str = "/computeMetadata/v1/instance/service-accounts/default/token";
/// Largest file of credentials.
const MAX_FILE: u64 = 64 << 10;

const REMEDY: &str = "check that the service account exists and its key is enabled, and the node's clock";
const FEDERATION: &str =
    "check the pool, the provider and the service account of workload identity federation";
const NODE: &str =
    "give the node or its Kubernetes service account a service account, or set credentials-file";

/// Returns the source of access tokens. The file is read at each fetch, because it changes.
pub(crate) fn source(config: &GcpConfig) -> Result<Box<dyn TokenSource>, Error> {
    // A fake cloud has no TLS.
    let plain = config.endpoint.as_deref().is_some_and(|endpoint| endpoint.starts_with("http://"));
    let of_the_environment = || std::env::var_os("GOOGLE_APPLICATION_CREDENTIALS").map(PathBuf::from);
    let file = match &config.credentials {
        GcpCredentials::Json(json) => return of_json(json, plain),
        GcpCredentials::File(path) => Some(path.clone()),
        GcpCredentials::Default => of_the_environment(),
    };
    if let Some(path) = file {
        return Ok(Box::new(File { path, plain }));
    }
    let url = format!("{}{METADATA_PATH}", config.metadata.trim_end_matches('/'));
    let url = Url::parse(&url).map_err(|_| Error::invalid("the URL of the metadata service is none"))?;
    Ok(Box::new(Metadata { url, header: ("metadata-flavor", "Google"), remedy: NODE }))
}

/// File of credentials.
struct File {
    path: PathBuf,
    plain: bool,
}

#[async_trait]
impl TokenSource for File {
    async fn fetch(&self, http: &Http) -> Result<Token, Error> {
        let json = read_file(&self.path).await?;
        let source = of_json(&json, self.plain);
        source
            .map_err(|error| error.during(format!("credentials in {}", self.path.display())))?
            .fetch(http)
            .await
    }
}

async fn read_file(path: &Path) -> Result<Secret, Error> {
    let read = async {
        let mut text = String::new();
        tokio::fs::File::open(path).await?.take(MAX_FILE).read_to_string(&mut text).await?;
        Ok::<_, std::io::Error>(text)
    };
    let text = read.await.map_err(|error| Error::Auth {
        text: format!("read the credentials in {}: {error}; mount them there", path.display()),
    })?;
    Ok(Secret::new(text))
}

/// Returns the source that a file of credentials describes. Errors hold nothing of the file but its type.
fn of_json(json: &Secret, plain: bool) -> Result<Box<dyn TokenSource>, Error> {
    let body: Value = serde_json::from_str(json.expose())
        .map_err(|error| bad(&format!("they are no JSON (line {})", error.line())))?;
    match read::text(&body, "/type") {
        Some("service_account") => of_key(&body, plain),
        Some("external_account") => federated(&body, plain),
        Some(other) => {
            Err(bad(&format!("their type {:.40} is none of service_account and external_account", other)))
        }
        None => Err(bad("they have no type")),
    }
}

fn of_key(body: &Value, plain: bool) -> Result<Box<dyn TokenSource>, Error> {
    let url = url(body, "/token_uri", plain)?;
    let account = required(body, "/client_email")?;
    let key = Secret::new(required(body, "/private_key")?.to_owned());
    let id = read::text(body, "/private_key_id");
    Ok(Box::new(JwtBearer::new(url, (account, id), &key, SCOPE, REMEDY)?))
}

fn federated(body: &Value, plain: bool) -> Result<Box<dyn TokenSource>, Error> {
    let Some(file) = read::text(body, "/credential_source/file") else {
        return Err(bad("their credential_source is no file, and other sources are not supported"));
    };
    let is_json = read::text(body, "/credential_source/format/type") == Some("json");
    let field = match is_json {
        true => Some(required(body, "/credential_source/format/subject_token_field_name")?.to_owned()),
        false => None,
    };
    let subject =
        Subject { file: PathBuf::from(file), field, kind: required(body, "/subject_token_type")?.to_owned() };
    let account = match body.get("service_account_impersonation_url") {
        Some(_) => Some(url(body, "/service_account_impersonation_url", plain)?),
        None => None,
    };
    let exchange = Exchange {
        url: url(body, "/token_url", plain)?,
        audience: required(body, "/audience")?.to_owned(),
        subject,
        scope: if account.is_some() { CLOUD } else { SCOPE }.to_owned(),
        remedy: FEDERATION,
    };
    Ok(match account {
        Some(url) => Box::new(Impersonation {
            source: Box::new(exchange),
            url,
            scope: SCOPE.to_owned(),
            remedy: FEDERATION,
        }),
        None => Box::new(exchange),
    })
}

fn required<'v>(body: &'v Value, pointer: &str) -> Result<&'v str, Error> {
    read::text(body, pointer).ok_or_else(|| bad(&format!("they have no {}", pointer.trim_start_matches('/'))))
}

/// Returns a URL that gets a credential.
fn url(body: &Value, pointer: &str, plain: bool) -> Result<Url, Error> {
    let url = Url::parse(required(body, pointer)?).ok();
    let url = url.filter(|url| url.scheme() == "https" || (plain && url.scheme() == "http"));
    url.ok_or_else(|| bad(&format!("their {} is no https URL", pointer.trim_start_matches('/'))))
}

fn bad(why: &str) -> Error {
    Error::Auth {
        text: format!(
            "the credentials of Google Cloud cannot be used: {why}; create a new key or configuration"
        ),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refusal(body: &Value) -> String {
        match of_json(&Secret::new(body.to_string()), false) {
            Ok(_) => "no refusal".to_owned(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_bad_file_is_named_without_its_contents() {
        let key = json!({"type": "service_account", "client_email": "a@p", "token_uri": "https://t",
            "private_key": "a secret"});
        let cases = [
            (json!("a secret"), "no type"),
            (json!({"type": "authorized_user"}), "authorized_user is none of"),
            (json!({"type": "service_account"}), "no token_uri"),
            (json!({"type": "service_account", "token_uri": "http://t"}), "no https URL"),
            (key, "private key of a@p"),
            (json!({"type": "external_account", "credential_source": {"url": "https://x"}}), "no file"),
        ];
        for (body, part) in cases {
            let text = refusal(&body);
            assert!(text.contains(part) && !text.contains("a secret"), "{part} in {text}");
        }
    }

    #[test]
    fn workload_identity_federation_is_read() {
        let mut body = json!({"type": "external_account", "audience": "//iam/x",
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt", "token_url": "https://sts.googleapis.com/v1/token",
            "credential_source": {"file": "/var/run/token", "format": {"type": "json", "subject_token_field_name": "t"}}});
        assert_eq!(refusal(&body), "no refusal");
        body["service_account_impersonation_url"] = json!("https://iam/v1/x:generateAccessToken");
        assert_eq!(refusal(&body), "no refusal");
        body["service_account_impersonation_url"] = json!("ftp://iam");
        assert!(refusal(&body).contains("service_account_impersonation_url is no https URL"));
        body["credential_source"]["format"] = json!({"type": "json"});
        assert!(refusal(&body).contains("subject_token_field_name"));
    }
}
