//! Makes every call of the PowerVS API. Sets up credentials, hosts and rates. May touch the network.

use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use peerpod_provider_api::Error;
use peerpod_provider_cloud::calls::{BucketLimits, Table};
use peerpod_provider_cloud::{ApiCall, Scheduler};
use peerpod_provider_rest::header::{HeaderName, HeaderValue};
use peerpod_provider_rest::sources::ApiKey;
use peerpod_provider_rest::{
    Failure, Hosts, Http, HttpAnswer, HttpSettings, Method, Request, Rest, Token, TokenSource, Tokens, ibm,
    read,
};
use serde_json::Value;

use crate::config::PowerVsConfig;
use crate::refusal::DIALECT;

/// Remedy of a refused token.
const LOGIN: &str = "check that the API key of provider.ibmcloud-powervs exists";

/// Client of one workspace.
#[derive(Clone)]
pub(crate) struct Power {
    rest: Rest,
    zone: String,
    workspace: String,
    /// Account of the key, once a token has named it.
    account: Arc<OnceLock<String>>,
}

/// Returns the limits of an account. IBM publishes none, so these are guesses; its throttles teach the true ones.
pub(crate) fn table() -> Table {
    Table::new(BucketLimits::new(10.0, 100)).with(
        "create",
        &["pvminstances.post"],
        BucketLimits::new(5.0, 50),
    )
}

impl Power {
    /// Sets up the client. Reads the settings and certificates; makes no call.
    ///
    /// # Errors
    /// [`Error::Invalid`] or [`Error::Auth`] for settings that cannot work.
    pub(crate) fn connect(config: &PowerVsConfig, scheduler: Scheduler) -> Result<Power, Error> {
        let http = Http::new(&HttpSettings { ca_file: None, call_timeout: config.call_timeout })?;
        let regional = || format!("https://{}.power-iaas.cloud.ibm.com", config.region());
        let hosts = Hosts::parse(&config.endpoint.clone().unwrap_or_else(regional), &[])?;
        let key = config.key.clone().ok_or_else(|| Error::Auth {
            text: "find IBM Cloud credentials: there are none; set provider.ibmcloud-powervs.api-key"
                .to_owned(),
        })?;
        let account = Arc::default();
        let source = ApiKey { url: ibm::token_url(&config.iam)?, key, remedy: LOGIN };
        let tokens = Tokens::new(Named { source, account: Arc::clone(&account) });
        Ok(Power {
            rest: Rest::new(http, hosts, tokens, scheduler, &DIALECT),
            zone: config.zone.clone(),
            workspace: config.workspace.clone(),
            account,
        })
    }

    /// Fetches a token if there is none. Its claims name the account.
    pub(crate) async fn log_in(&self) -> Result<(), Error> {
        self.rest.log_in().await
    }

    /// Returns a request for this path of the workspace.
    pub(crate) fn request<'s>(&'s self, method: Method, path: impl IntoIterator<Item = &'s str>) -> Request {
        let workspace = ["pcloud", "v1", "cloud-instances", &self.workspace];
        Request::new(method, self.rest.hosts().path(workspace.into_iter().chain(path)))
    }

    /// Makes a call; see [`Rest::call`].
    pub(crate) async fn call(&self, call: ApiCall<'_>, request: &Request) -> Result<HttpAnswer, Failure> {
        // The header needs the account, which the first token names.
        self.log_in().await.map_err(|error| error.during(call.what))?;
        let account = self.account.get().map(String::as_str).unwrap_or_default();
        let crn = format!("crn:v1:bluemix:public:power-iaas:{}:a/{account}:{}::", self.zone, self.workspace);
        let crn = HeaderValue::from_str(&crn)
            .map_err(|_| Error::invalid(format!("{}: the account of the token is none", call.what)))?;
        self.rest.call(call, &request.clone().with(HeaderName::from_static("crn"), crn)).await
    }

    /// Reads one object; `None`: it does not exist.
    pub(crate) async fn find<'s>(
        &'s self,
        call: ApiCall<'_>,
        path: impl IntoIterator<Item = &'s str>,
    ) -> Result<Option<Value>, Failure> {
        match self.call(call, &self.request(Method::GET, path)).await {
            Ok(answer) => Ok(Some(answer.json())),
            Err(failure) if matches!(failure.error, Error::NotFound { .. }) => Ok(None),
            Err(failure) => Err(failure),
        }
    }
}

/// Source that keeps the account which a token names.
struct Named {
    source: ApiKey,
    account: Arc<OnceLock<String>>,
}

#[async_trait]
impl TokenSource for Named {
    async fn fetch(&self, http: &Http) -> Result<Token, Error> {
        let token = self.source.fetch(http).await?;
        let named = account(token.secret.expose())
            .ok_or_else(|| Error::transient("get an access token: it names no account; it is tried again"))?;
        // A key belongs to one account for ever.
        self.account.get_or_init(|| named);
        Ok(token)
    }
}

/// Reads the account in the claims of a token. IAM has signed it, and the API checks that.
fn account(token: &str) -> Option<String> {
    let claims = URL_SAFE_NO_PAD.decode(token.split('.').nth(1)?.trim_end_matches('=')).ok()?;
    let claims: Value = serde_json::from_slice(&claims).ok()?;
    let account = read::text(&claims, "/account/bss")?;
    let is_id = account.len() <= 64 && account.chars().all(|c| c.is_ascii_alphanumeric());
    is_id.then(|| account.to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_token_names_its_account() {
        let token = |claims: &Value| format!("h.{}.s", URL_SAFE_NO_PAD.encode(claims.to_string()));
        assert_eq!(account(&token(&json!({"account": {"bss": "0a1b"}}))).as_deref(), Some("0a1b"));
        for bad in
            [json!({}), json!({"account": {"bss": "a:b"}}), json!({"account": {"bss": "x".repeat(65)}})]
        {
            assert_eq!(account(&token(&bad)), None, "{bad}");
        }
        assert_eq!((account(""), account("a.b.c")), (None, None));
    }
}
