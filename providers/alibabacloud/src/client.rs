//! Makes every call of the APIs of ECS and VPC. May touch the network, and what the credentials' sources touch.
//!
//! Parameters are in the query, as the vendor's client sends them. Those of a call with user-data are in a form: a query
//! has not the space, and logs of proxies have queries.

use peerpod_provider_api::Error;
use peerpod_provider_cloud::calls::{BucketLimits, Table};
use peerpod_provider_cloud::{ApiCall, Scheduler};
use peerpod_provider_rest::header::{HeaderName, HeaderValue};
use peerpod_provider_rest::{Failure, Hosts, Http, HttpSettings, Method, Next, Request, Rest, Tokens, Url};
use serde_json::Value;

use crate::config::AlibabaCloudConfig;
use crate::credentials;
use crate::refusal::DIALECT;
use crate::sign::SIGNATURE;

/// Items of a page of VMs or disks; the API gives no more.
pub(crate) const PAGE: (&str, &str) = ("MaxResults", "100");

/// Calls that have no region as a parameter; the endpoint has it.
const WITHOUT_REGION: [&str; 3] = ["AttachDisk", "DetachDisk", "DescribeInstanceTypes"];

/// Returns the limits of an account. Alibaba Cloud counts by the minute of the clock, for each action. It shows its
/// figures in the Quota Center of the account only, so these are ours; the provider learns from throttle replies.
pub(crate) fn table() -> Table {
    let group = || BucketLimits::per_minute(300);
    Table::new(group())
        .with("run", &["RunInstances"], group())
        .with("delete", &["DeleteInstances"], group())
        .with("describe", &["DescribeInstances"], BucketLimits::per_minute(600))
        .with("disks", &["AttachDisk", "DetachDisk", "DescribeDisks"], BucketLimits::per_minute(600))
}

/// Parameters of a call. Those of lists are flat: `Tag.1.Key`.
#[derive(Debug, Clone, Default)]
pub(crate) struct Parameters(Vec<(String, String)>);

impl Parameters {
    /// Adds a parameter.
    #[must_use]
    pub(crate) fn with(mut self, name: impl Into<String>, value: impl Into<String>) -> Parameters {
        self.0.push((name.into(), value.into()));
        self
    }

    /// Removes a parameter.
    #[must_use]
    pub(crate) fn without(mut self, name: &str) -> Parameters {
        self.0.retain(|(one, _)| one != name);
        self
    }

    /// Adds a list of values: `InstanceId.1`, `InstanceId.2`.
    #[must_use]
    pub(crate) fn list<'v>(self, name: &str, values: impl IntoIterator<Item = &'v String>) -> Parameters {
        (1..).zip(values).fold(self, |all, (number, value)| all.with(format!("{name}.{number}"), value))
    }

    /// Adds tags to set, or to select by.
    #[must_use]
    pub(crate) fn tags<'v>(self, tags: impl IntoIterator<Item = (&'v String, &'v String)>) -> Parameters {
        (1..).zip(tags).fold(self, |all, (number, (key, value))| {
            all.with(format!("Tag.{number}.Key"), key).with(format!("Tag.{number}.Value"), value)
        })
    }

    /// Adds ids as the look-ups take them: a JSON list.
    #[must_use]
    pub(crate) fn ids(self, name: &str, ids: &[String]) -> Parameters {
        self.with(name, Value::from(ids.to_vec()).to_string())
    }

    #[cfg(test)]
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(one, _)| one == name).map(|(_, value)| value.as_str())
    }
}

/// Client of the APIs for one region. Clones share connections, key and scheduler.
#[derive(Clone)]
pub(crate) struct Ecs {
    pub rest: Rest,
    region: String,
    vpc: Url,
}

impl Ecs {
    /// Sets up the client; makes no call.
    pub(crate) fn connect(config: &AlibabaCloudConfig, scheduler: Scheduler) -> Result<Ecs, Error> {
        let http = Http::new(&HttpSettings { ca_file: None, call_timeout: config.call_timeout })?;
        let hosts = Hosts::parse(&config.service("ecs"), &[".aliyuncs.com"])?;
        let vpc = Hosts::parse(&config.service("vpc"), &[])?.base().clone();
        let tokens = Tokens::new(credentials::source(config)?);
        let rest = Rest::new(http, hosts, tokens, scheduler, &DIALECT).signed(SIGNATURE);
        Ok(Ecs { rest, region: config.region.clone(), vpc })
    }

    /// Makes a call of ECS with its parameters in the query.
    pub(crate) async fn ask(&self, call: ApiCall<'_>, parameters: Parameters) -> Result<Value, Failure> {
        self.send(call, &self.request(call, parameters)).await
    }

    /// Makes a call of ECS with its parameters in a form.
    pub(crate) async fn post(&self, call: ApiCall<'_>, parameters: Parameters) -> Result<Value, Failure> {
        let Parameters(all) = parameters.with("RegionId", &self.region);
        let fields: Vec<(&str, &str)> = all.iter().map(|(name, value)| (&name[..], &value[..])).collect();
        let request = self.empty(call, self.rest.hosts().base(), "2014-05-26").form(&fields);
        self.send(call, &request).await
    }

    /// Looks at vSwitches, which are objects of VPC.
    pub(crate) async fn vswitches(
        &self,
        call: ApiCall<'_>,
        parameters: Parameters,
    ) -> Result<Value, Failure> {
        let request = self.queried(call, self.empty(call, &self.vpc, "2016-04-28"), parameters);
        self.send(call, &request).await
    }

    /// Reads all pages of a list.
    pub(crate) async fn pages(
        &self,
        call: ApiCall<'_>,
        parameters: Parameters,
        page: impl FnMut(&Value) -> Result<(), Error>,
    ) -> Result<(), Failure> {
        let first = self.request(call, parameters);
        self.rest.pages(call, &first, Next::Token("/NextToken", "NextToken"), page).await
    }

    fn request(&self, call: ApiCall<'_>, parameters: Parameters) -> Request {
        self.queried(call, self.empty(call, self.rest.hosts().base(), "2014-05-26"), parameters)
    }

    fn queried(&self, call: ApiCall<'_>, request: Request, parameters: Parameters) -> Request {
        let Parameters(all) = match WITHOUT_REGION.contains(&call.action) {
            true => parameters,
            false => parameters.with("RegionId", &self.region),
        };
        all.iter().fold(request, |request, (name, value)| request.query(name, value))
    }

    fn empty(&self, call: ApiCall<'_>, url: &Url, version: &'static str) -> Request {
        Request::new(Method::POST, url.clone())
            .header(HeaderName::from_static("x-acs-action"), call.action)
            .header(HeaderName::from_static("x-acs-version"), version)
            .with(HeaderName::from_static("accept"), HeaderValue::from_static("application/json"))
    }

    async fn send(&self, call: ApiCall<'_>, request: &Request) -> Result<Value, Failure> {
        let body = self.rest.call(call, request).await?.json();
        if !body.is_object() {
            let text =
                format!("{}: the answer to {} is no JSON object; it is tried again", call.what, call.action);
            return Err(Error::transient(text).into());
        }
        Ok(body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_lists_are_flat() {
        let all = ["a".to_owned(), "b".to_owned()];
        let tags = std::collections::BTreeMap::from([("k".to_owned(), "v".to_owned())]);
        let parameters = Parameters::default().list("InstanceId", &all).tags(&tags).ids("InstanceIds", &all);
        assert_eq!(parameters.get("InstanceId.2"), Some("b"));
        assert_eq!((parameters.get("Tag.1.Key"), parameters.get("Tag.1.Value")), (Some("k"), Some("v")));
        assert_eq!(parameters.get("InstanceIds"), Some("[\"a\",\"b\"]"));
    }
}
