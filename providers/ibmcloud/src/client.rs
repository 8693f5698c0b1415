//! Makes every call to IBM Cloud. Sets up credentials, hosts and rates. May touch the network and the file of a projected
//! token.

use peerpod_provider_api::Error;
use peerpod_provider_cloud::calls::{BucketLimits, Table};
use peerpod_provider_cloud::{ApiCall, Scheduler};
use peerpod_provider_rest::sources::{ApiKey, ComputeResource};
use peerpod_provider_rest::{
    Failure, Hosts, Http, HttpAnswer, HttpSettings, Method, Next, Request, Rest, TokenSource, Tokens, Url,
    ibm,
};
use serde_json::Value;

use crate::config::{IbmCloudConfig, IbmCloudCredentials};
use crate::refusal::DIALECT;

/// Version of the API; answers have the form of this day.
const VERSION: &str = "2026-10-06";
/// Generation of the compute resources; there is no other one.
const GENERATION: &str = "2";
/// Items of a page; the API gives no more.
const PAGE: &str = "100";
/// Hosts that get the token beside the endpoint: those that give tags to resources.
const SUFFIXES: &[&str] = &[".global-search-tagging.cloud.ibm.com"];
/// Remedy of a refused token.
const LOGIN: &str = "check that the API key of provider.ibmcloud exists, or that the trusted profile accepts the cluster's \
                     service account";

/// Client with credentials and a region.
#[derive(Clone)]
pub(crate) struct Vpc {
    rest: Rest,
    tagging: Url,
}

/// Returns the limits of an account. IBM publishes none, so these are guesses; its throttles teach the true ones.
pub(crate) fn table() -> Table {
    Table::new(BucketLimits::new(20.0, 200))
        .with("create", &["create_instance"], BucketLimits::new(10.0, 100))
        .with("delete", &["delete_*"], BucketLimits::new(10.0, 100))
}

impl Vpc {
    /// Sets up the client. Reads the settings and certificates; makes no call.
    ///
    /// # Errors
    /// [`Error::Invalid`] or [`Error::Auth`] for settings that cannot work.
    pub(crate) fn connect(config: &IbmCloudConfig, scheduler: Scheduler) -> Result<Vpc, Error> {
        let http = Http::new(&HttpSettings { ca_file: None, call_timeout: config.call_timeout })?;
        let regional = || format!("https://{}.iaas.cloud.ibm.com", config.region());
        let endpoint = config.endpoint.clone().unwrap_or_else(regional);
        let endpoint = endpoint.trim_end_matches('/');
        let hosts = Hosts::parse(endpoint.strip_suffix("/v1").unwrap_or(endpoint), SUFFIXES)?;
        let tokens = Tokens::new(source(config)?);
        Ok(Vpc {
            rest: Rest::new(http, hosts, tokens, scheduler, &DIALECT),
            tagging: Hosts::parse(&config.tagging, &[])?.path(["v3", "tags", "attach"]),
        })
    }

    /// Fetches a token if there is none, for the preflight.
    pub(crate) async fn log_in(&self) -> Result<(), Error> {
        self.rest.log_in().await
    }

    /// Returns a request for this path below the API's version.
    pub(crate) fn request<'s>(&self, method: Method, path: impl IntoIterator<Item = &'s str>) -> Request {
        let url = self.rest.hosts().path(["v1"].into_iter().chain(path));
        Request::new(method, url).query("version", VERSION).query("generation", GENERATION)
    }

    /// Returns a GET of this path.
    pub(crate) fn get<'s>(&self, path: impl IntoIterator<Item = &'s str>) -> Request {
        self.request(Method::GET, path)
    }

    /// Returns the request that gives a tag to a resource.
    pub(crate) fn tagging(&self) -> Request {
        Request::new(Method::POST, self.tagging.clone()).query("tag_type", "user")
    }

    /// Makes a call; see [`Rest::call`].
    pub(crate) async fn call(&self, call: ApiCall<'_>, request: &Request) -> Result<HttpAnswer, Failure> {
        self.rest.call(call, request).await
    }

    /// Reads one object; `None`: it does not exist.
    pub(crate) async fn find(&self, call: ApiCall<'_>, request: &Request) -> Result<Option<Value>, Failure> {
        match self.call(call, request).await {
            Ok(answer) if answer.json().is_object() => Ok(Some(answer.json())),
            Ok(_) => {
                let what = call.what;
                Err(Error::transient(format!("{what}: the answer is no object; it is tried again")).into())
            }
            Err(failure) if matches!(failure.error, Error::NotFound { .. }) => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Returns the items of all pages of a list that `read` accepts. The list has this name in its pages.
    pub(crate) async fn list<T>(
        &self,
        call: ApiCall<'_>,
        name: &str,
        first: Request,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Vec<T>, Failure> {
        let mut items = Vec::new();
        let page = |page: &Value| {
            // A page without the list is no page: items would be missing.
            let list = page.get(name).and_then(Value::as_array);
            let list = list.ok_or_else(|| Error::transient("the answer has no list"))?;
            items.extend(list.iter().filter_map(&read));
            Ok(())
        };
        self.rest.pages(call, &first.query("limit", PAGE), Next::Part("/next/href", "start"), page).await?;
        Ok(items)
    }
}

/// Returns the source of tokens that the settings describe.
fn source(config: &IbmCloudConfig) -> Result<Box<dyn TokenSource>, Error> {
    let url = ibm::token_url(&config.iam)?;
    match &config.credentials {
        IbmCloudCredentials::ApiKey(key) => Ok(Box::new(ApiKey { url, key: key.clone(), remedy: LOGIN })),
        IbmCloudCredentials::Profile { id, file } => {
            Ok(Box::new(ComputeResource { url, file: file.clone(), profile: id.clone(), remedy: LOGIN }))
        }
        IbmCloudCredentials::Missing => Err(Error::Auth {
            text:
                "find IBM Cloud credentials: there are none; set provider.ibmcloud.api-key or iam-profile-id"
                    .to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::read;

    #[test]
    fn the_token_goes_to_the_region_and_to_tagging_alone() {
        let config = IbmCloudConfig {
            credentials: IbmCloudCredentials::Profile { id: "p".to_owned(), file: "/token".into() },
            endpoint: Some("https://us-south.iaas.cloud.ibm.com/v1".to_owned()),
            ..read(&[]).unwrap()
        };
        let vpc = Vpc::connect(&config, Scheduler::new(table())).unwrap();
        let request = vpc.get(["instances", "0717_a"]);
        let url = "https://us-south.iaas.cloud.ibm.com/v1/instances/0717_a?version=2026-10-06&generation=2";
        assert_eq!(request.url().as_str(), url);
        assert!(vpc.rest.hosts().allows(vpc.tagging().url()) && vpc.rest.hosts().allows(request.url()));
        for other in ["https://eu-de.iaas.cloud.ibm.com/v1/instances", "https://iam.cloud.ibm.com/"] {
            assert!(vpc.rest.hosts().follow(other).is_err(), "{other}");
        }
    }

    #[test]
    fn without_credentials_the_remedy_is_named() {
        let error = Vpc::connect(&read(&[]).unwrap(), Scheduler::new(table())).err().unwrap();
        assert!(
            error.class() == "auth" && error.to_string().contains("set provider.ibmcloud.api-key"),
            "{error}"
        );
    }
}
