//! Makes every call of the Compute Engine API. May touch the network and the files of credentials.

use peerpod_provider_api::Error;
use peerpod_provider_cloud::calls::{BucketLimits, Table};
use peerpod_provider_cloud::{ApiCall, Scheduler};
use peerpod_provider_rest::{Failure, Hosts, Http, HttpSettings, Method, Next, Request, Rest, Tokens};
use serde_json::Value;

use crate::config::GcpConfig;
use crate::credentials;
use crate::links::VmId;
use crate::refusal::DIALECT;

/// Public endpoint of the API.
const ENDPOINT: &str = "https://compute.googleapis.com";
/// Version of the API, as in the paths.
const VERSION: [&str; 2] = ["compute", "v1"];
/// Items of a page; the API gives no more.
const PAGE: &str = "500";

/// Returns the limits of a project, as Google publishes them: groups of methods, counted by the minute of the clock. A
/// bulk insert has limits of its own: a refusal for those in progress stands for less than a minute.
pub(crate) fn table() -> Table {
    let group = || BucketLimits::per_minute(1500);
    Table::new(group())
        .with("mutate", &["instances.insert", "instances.delete"], group())
        .with("bulk", &["instances.bulkInsert"], BucketLimits { at_once: 10, ..BucketLimits::new(20.0, 20) })
        .with("disks", &["instances.attachDisk", "instances.detachDisk"], group())
        .with("operations", &["zoneOperations.*"], group())
        .with("list", &["instances.list", "instances.aggregatedList", "machineTypes.list"], group())
}

/// Client of the API for one project. Clones share connections, token and scheduler.
#[derive(Clone)]
pub(crate) struct Compute {
    pub rest: Rest,
    pub project: String,
}

impl Compute {
    /// Sets up the client; makes no call.
    pub(crate) fn connect(config: &GcpConfig, scheduler: Scheduler) -> Result<Compute, Error> {
        let http = Http::new(&HttpSettings { ca_file: None, call_timeout: config.call_timeout })?;
        let endpoint = config.endpoint.as_deref().unwrap_or(ENDPOINT).trim_end_matches('/');
        let endpoint = endpoint.strip_suffix("/compute/v1").unwrap_or(endpoint);
        let hosts = Hosts::parse(endpoint, &[])?;
        let tokens = Tokens::new(credentials::source(config)?);
        let rest = Rest::new(http, hosts, tokens, scheduler, &DIALECT);
        Ok(Compute { rest, project: config.project.clone() })
    }

    /// Returns a request for a path below the API's version.
    fn request(&self, method: Method, path: &str, query: &[(&str, &str)]) -> Request {
        let url = self.rest.hosts().path(VERSION.into_iter().chain(path.split('/')));
        let request = Request::new(method, url);
        query.iter().fold(request, |request, (name, value)| request.query(name, value))
    }

    /// Returns the path of something in the project of the VMs.
    pub(crate) fn own(&self, path: &str) -> String {
        format!("projects/{}/{path}", self.project)
    }

    /// Reads one object.
    pub(crate) async fn get(
        &self,
        call: ApiCall<'_>,
        path: &str,
        query: &[(&str, &str)],
    ) -> Result<Value, Failure> {
        self.send(call, &self.request(Method::GET, path, query)).await
    }

    /// Sends a body; returns the operation.
    pub(crate) async fn post(
        &self,
        call: ApiCall<'_>,
        path: &str,
        query: &[(&str, &str)],
        body: Option<&Value>,
    ) -> Result<Value, Failure> {
        let request = self.request(Method::POST, path, query);
        let request = match body {
            Some(body) => request.json(body),
            None => request,
        };
        self.send(call, &request).await
    }

    /// Deletes a VM. The call has no `requestId`: a later VM may have the same name, and the id of a finished delete
    /// would hide that it is there.
    pub(crate) async fn delete(&self, call: ApiCall<'_>, vm: &VmId) -> Result<Value, Failure> {
        self.send(call, &self.request(Method::DELETE, &self.own(&vm.path()), &[])).await
    }

    /// Looks at the operation of a zone by its name.
    pub(crate) async fn operation(
        &self,
        call: ApiCall<'_>,
        zone: &str,
        name: &str,
    ) -> Result<Value, Failure> {
        self.get(call, &self.own(&format!("zones/{zone}/operations/{name}")), &[]).await
    }

    /// Reads all pages of a list.
    pub(crate) async fn pages(
        &self,
        call: ApiCall<'_>,
        path: &str,
        query: &[(&str, &str)],
        page: impl FnMut(&Value) -> Result<(), Error>,
    ) -> Result<(), Failure> {
        let first = self.request(Method::GET, path, query).query("maxResults", PAGE);
        self.rest.pages(call, &first, Next::Token("/nextPageToken", "pageToken"), page).await
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
    fn a_bulk_insert_does_not_wait_for_the_next_minute_with_the_inserts() {
        let table = table();
        let (bulk, limits) = table.bucket("instances.bulkInsert");
        let (one, minute) = table.bucket("instances.insert");
        assert!(bulk != one && minute.by_minute && !limits.by_minute, "{bulk} {one}");
    }
}
