//! Makes every call to Azure Resource Manager. Sets up credentials, hosts and rates. May touch the network, the
//! environment, and the file of a federated token.

use std::env;
use std::path::PathBuf;

use peerpod_provider_api::Error;
use peerpod_provider_cloud::calls::{BucketLimits, Table};
use peerpod_provider_cloud::settings::is_secret_safe;
use peerpod_provider_cloud::{ApiCall, Scheduler};
use peerpod_provider_rest::sources::{ClientSecret, Federated, Metadata};
use peerpod_provider_rest::{
    Failure, Hosts, Http, HttpAnswer, HttpSettings, Method, Next, Request, Rest, TokenSource, Tokens, Url,
};
use serde_json::Value;

use crate::config::{AzureConfig, AzureCredentials};
use crate::ids::ResourceId;
use crate::refusal::DIALECT;

/// Version of the API of virtual machines. It has `If-None-Match` and `attachDetachDataDisks`.
pub(crate) const COMPUTE: &str = "2024-07-01";
/// Version of the API of networks; the VM's body names it, too, and knows no newer one.
pub(crate) const NETWORK: &str = "2022-11-01";
/// Version of the API of disks.
pub(crate) const DISKS: &str = "2023-10-02";
/// Version of the API of galleries.
pub(crate) const GALLERY: &str = "2023-07-03";
/// Version of the API of SKUs.
pub(crate) const SKUS: &str = "2021-07-01";
/// Version of the API of rights.
pub(crate) const RIGHTS: &str = "2022-04-01";
/// Remedy of a refused token.
const LOGIN: &str = "check tenant-id, client-id and the client's secret or federated credential, or give the node a managed \
                     identity";

/// Client with credentials, a subscription and a region.
#[derive(Clone)]
pub(crate) struct Arm {
    rest: Rest,
    subscription: String,
    group: String,
    region: String,
}

/// Returns the token buckets of a subscription in a region, as Azure publishes them ("Understand how Azure Resource
/// Manager throttles requests", "Compute throttling limits").
pub(crate) fn table() -> Table {
    Table::new(BucketLimits::new(25.0, 250))
        .with("create", &["VirtualMachines_CreateOrUpdate"], BucketLimits::new(500.0 / 60.0, 1500))
        .with("delete", &["VirtualMachines_Delete"], BucketLimits::new(500.0 / 60.0, 1500))
        .with("update", &["VirtualMachines_AttachDetachDataDisks"], BucketLimits::new(500.0 / 60.0, 1500))
        .with("get", &["VirtualMachines_Get"], BucketLimits::new(8000.0 / 60.0, 24_000))
        .with("list", &["VirtualMachines_List"], BucketLimits::new(5.0, 900))
        .with("operation", &["Operations_Get"], BucketLimits::new(5000.0 / 60.0, 15_000))
        .with(
            "network-read",
            &["NetworkInterfaces_List", "PublicIPAddresses_List"],
            BucketLimits::new(33.0, 5000),
        )
        .with(
            "network-write",
            &["NetworkInterfaces_Delete", "PublicIPAddresses_Delete"],
            BucketLimits::new(3.3, 500),
        )
}

impl Arm {
    /// Sets up the client. Reads the settings, the environment and certificates; makes no call.
    ///
    /// # Errors
    /// [`Error::Invalid`] or [`Error::Auth`] for settings that cannot work.
    pub(crate) fn connect(config: &AzureConfig, scheduler: Scheduler) -> Result<Arm, Error> {
        let http = Http::new(&HttpSettings { ca_file: None, call_timeout: config.call_timeout })?;
        let endpoint = config.endpoint.as_deref().unwrap_or(config.cloud.manager());
        let hosts = Hosts::parse(endpoint, config.cloud.managers())?;
        let tokens = Tokens::new(source(config, &|name| env::var(name).ok())?);
        Ok(Arm {
            rest: Rest::new(http, hosts, tokens, scheduler, &DIALECT),
            subscription: config.subscription.to_ascii_lowercase(),
            group: config.group.to_ascii_lowercase(),
            region: config.region.clone(),
        })
    }

    /// Returns the client below.
    pub(crate) fn rest(&self) -> &Rest {
        &self.rest
    }

    /// Returns the path of the subscription's location in the API of virtual machines.
    pub(crate) fn location(&self) -> String {
        format!("/subscriptions/{}/providers/Microsoft.Compute/locations/{}", self.subscription, self.region)
    }

    /// Returns the path of the resource group.
    pub(crate) fn group(&self) -> String {
        format!("/subscriptions/{}/resourceGroups/{}", self.subscription, self.group)
    }

    /// Returns the path of the subscription.
    pub(crate) fn subscription(&self) -> String {
        format!("/subscriptions/{}", self.subscription)
    }

    /// Whether the resource is in this subscription.
    pub(crate) fn has(&self, id: &ResourceId) -> bool {
        id.subscription == self.subscription
    }

    /// Returns the id of the VM of this name in the resource group, in lower case.
    pub(crate) fn vm(&self, name: &str) -> ResourceId {
        ResourceId {
            subscription: self.subscription.clone(),
            group: self.group.clone(),
            kind: crate::ids::VM.to_owned(),
            names: vec![name.to_ascii_lowercase()],
        }
    }

    fn url(&self, path: &str, version: &str) -> Url {
        let mut url = self.rest.hosts().path(path.split('/').filter(|part| !part.is_empty()));
        url.query_pairs_mut().append_pair("api-version", version);
        url
    }

    /// Returns a request for this path in this version of its API.
    pub(crate) fn request(&self, method: Method, path: &str, version: &str) -> Request {
        Request::new(method, self.url(path, version))
    }

    /// Returns a GET of this path in this version of its API.
    pub(crate) fn get(&self, path: &str, version: &str) -> Request {
        self.request(Method::GET, path, version)
    }

    /// Makes a call; see [`Rest::call`].
    pub(crate) async fn call(&self, call: ApiCall<'_>, request: &Request) -> Result<HttpAnswer, Failure> {
        self.rest.call(call, request).await
    }

    /// Returns the items of all pages of a list that `read` accepts.
    pub(crate) async fn list<T>(
        &self,
        call: ApiCall<'_>,
        first: &Request,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Vec<T>, Failure> {
        let mut items = Vec::new();
        let page = |page: &Value| {
            // A page without the list is no page: items would be missing.
            let list = page.get("value").and_then(Value::as_array);
            let list = list.ok_or_else(|| Error::transient("the answer has no list"))?;
            items.extend(list.iter().filter_map(&read));
            Ok(())
        };
        self.rest.pages(call, first, Next::Link("/nextLink"), page).await?;
        Ok(items)
    }
}

/// Returns the source of tokens that settings and environment describe.
fn source(config: &AzureConfig, env: &dyn Fn(&str) -> Option<String>) -> Result<Box<dyn TokenSource>, Error> {
    let set = |name: &str| env(name).filter(|value| !value.is_empty());
    let scope = format!("{}/.default", config.cloud.manager());
    let authority = || {
        let host = config.authority_host.clone().or_else(|| set("AZURE_AUTHORITY_HOST"));
        host.unwrap_or_else(|| config.cloud.authority().to_owned())
    };
    let endpoint = |tenant: &str| {
        if !is_secret_safe(&authority()) {
            return Err(Error::invalid("the URL of Entra ID is not https://…; correct AZURE_AUTHORITY_HOST"));
        }
        Hosts::parse(&authority(), &[]).map(|hosts| hosts.path([tenant, "oauth2", "v2.0", "token"]))
    };
    let (tenant, client, file) = match &config.credentials {
        AzureCredentials::Secret { tenant, client, secret } => {
            return Ok(Box::new(ClientSecret {
                url: endpoint(tenant)?,
                client_id: client.clone(),
                secret: secret.clone(),
                scope,
                remedy: LOGIN,
            }));
        }
        AzureCredentials::Identity { tenant, client, file } => (
            tenant.clone().or_else(|| set("AZURE_TENANT_ID")),
            client.clone().or_else(|| set("AZURE_CLIENT_ID")),
            file.clone().or_else(|| set("AZURE_FEDERATED_TOKEN_FILE")),
        ),
    };
    match (file, tenant, client) {
        (Some(file), Some(tenant), Some(client)) => Ok(Box::new(Federated {
            url: endpoint(&tenant)?,
            client_id: client,
            file: PathBuf::from(file),
            scope,
            remedy: LOGIN,
        })),
        (Some(_), ..) => Err(Error::Auth {
            text: "find Azure credentials: there is a federated token, but no tenant or no client; set tenant-id and \
                   client-id, or AZURE_TENANT_ID and AZURE_CLIENT_ID"
                .to_owned(),
        }),
        (None, _, client) => {
            let mut url = Hosts::parse(&config.metadata, &[])?.path(["metadata", "identity", "oauth2", "token"]);
            let resource = format!("{}/", config.cloud.manager());
            url.query_pairs_mut().append_pair("api-version", "2018-02-01").append_pair("resource", &resource);
            if let Some(client) = client {
                url.query_pairs_mut().append_pair("client_id", &client);
            }
            Ok(Box::new(Metadata { url, header: ("metadata", "true"), remedy: LOGIN }))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Cloud;

    #[test]
    fn each_cloud_has_hosts_that_get_its_token_and_no_others() {
        for cloud in [Cloud::Public, Cloud::UsGovernment, Cloud::China] {
            let hosts = Hosts::parse(cloud.manager(), cloud.managers()).unwrap();
            let regional = cloud.manager().replace("https://", "https://westeurope.");
            assert!(hosts.follow(&regional).is_ok(), "{regional}");
            Hosts::parse(cloud.authority(), &[]).unwrap();
            let storage = Hosts::new(hosts.base().clone(), cloud.storage());
            for suffix in cloud.storage() {
                let url = format!("https://account{suffix}/log?sig=x");
                assert!(storage.follow(&url).is_ok() && hosts.follow(&url).is_err(), "{url}");
            }
        }
        let public = Hosts::parse(Cloud::Public.manager(), Cloud::Public.managers()).unwrap();
        assert!(public.follow(Cloud::China.manager()).is_err(), "another cloud is another host");
    }

    #[test]
    fn credentials_come_from_settings_then_from_the_environment() {
        let config = crate::config::tests::read(&[]).unwrap();
        let env = |pairs: &'static [(&str, &str)]| {
            move |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        };
        source(&config, &env(&[])).unwrap();
        let webhook = env(&[
            ("AZURE_FEDERATED_TOKEN_FILE", "/var/run/secrets/azure/tokens/azure-identity-token"),
            ("AZURE_TENANT_ID", "tenant"),
            ("AZURE_CLIENT_ID", "client"),
            ("AZURE_AUTHORITY_HOST", "https://login.microsoftonline.com/"),
        ]);
        source(&config, &webhook).unwrap();
        let half = env(&[("AZURE_FEDERATED_TOKEN_FILE", "/token"), ("AZURE_TENANT_ID", "")]);
        let error = source(&config, &half).err().unwrap();
        assert!(
            error.class() == "auth" && error.to_string().contains("set tenant-id and client-id"),
            "{error}"
        );
        let odd = env(&[
            ("AZURE_FEDERATED_TOKEN_FILE", "/token"),
            ("AZURE_TENANT_ID", "tenant"),
            ("AZURE_CLIENT_ID", "client"),
            ("AZURE_AUTHORITY_HOST", "http://login.microsoftonline.com"),
        ]);
        assert_eq!(source(&config, &odd).err().unwrap().class(), "invalid");
    }
}
