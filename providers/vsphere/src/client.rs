//! Makes every call of the vCenter: turn, session, request, answer, class of the fault. May touch the network.

use std::sync::{Arc, OnceLock};

use peerpod_provider_api::Error;
use peerpod_provider_cloud::calls::{BucketLimits, Table};
use peerpod_provider_cloud::{ApiCall, Scheduler};
use peerpod_provider_rest::{Failure, Http, HttpAnswer, HttpSettings, Request, Said, Tokens, Url, header};
use roxmltree::Node;

use crate::config::VsphereConfig;
use crate::refusal;
use crate::session::{self, Account, Services};
use crate::soap::{self, Method, Moref};

/// Clone that shares the disk of the template's snapshot. Each costs a host one of 16 units at a time.
pub(crate) const LINKED: &str = "CloneVM_Task (linked)";
/// Clone that copies the template's disk. Each costs the template's host four of 16 units at a time.
pub(crate) const FULL: &str = "CloneVM_Task (full)";

/// Returns the limits of a vCenter. It publishes no rates. A host makes a limited number of clones at a time, and all
/// clones of a template concern the template's host; a vCenter queues the others, where they time out.
pub(crate) fn table() -> Table {
    let calls = || BucketLimits::new(100.0, 400);
    Table::new(calls()).with("linked", &[LINKED], BucketLimits { at_once: 16, ..calls() }).with(
        "full",
        &[FULL],
        BucketLimits { at_once: 4, ..calls() },
    )
}

/// Returns the value of a header, which logs do not show.
fn value(text: &str) -> Result<header::HeaderValue, Error> {
    let mut value = header::HeaderValue::from_str(text).map_err(|_| {
        Error::transient("the vCenter's cookie has a control character; check provider.vsphere.url")
    })?;
    value.set_sensitive(true);
    Ok(value)
}

/// Client of one vCenter. Clones share connections, session and scheduler.
#[derive(Clone)]
pub(crate) struct Vcenter {
    http: Http,
    url: Url,
    tokens: Arc<Tokens>,
    services: Arc<OnceLock<Services>>,
    pub scheduler: Scheduler,
}

impl Vcenter {
    /// Sets up the client; makes no call.
    pub(crate) fn connect(config: &VsphereConfig, scheduler: Scheduler) -> Result<Vcenter, Error> {
        let settings = HttpSettings { ca_file: config.ca_file.clone(), call_timeout: config.call_timeout };
        let http = match config.fingerprint {
            Some(sha256) => Http::pinned(&settings, sha256)?,
            None => Http::new(&settings)?,
        };
        let url = config.url.clone();
        let url = url.ok_or_else(|| Error::invalid("there is no vCenter; set provider.vsphere.url"))?;
        let services = Arc::new(OnceLock::new());
        let account = Account {
            url: url.clone(),
            username: config.username.clone(),
            password: config.password.clone(),
            services: Arc::clone(&services),
        };
        Ok(Vcenter { http, url, tokens: Arc::new(Tokens::new(account)), services, scheduler })
    }

    /// Logs in if there is no session. Returns the services of the vCenter.
    pub(crate) async fn services(&self) -> Result<&Services, Error> {
        self.tokens.get(&self.http).await?;
        self.services.get().ok_or_else(|| session::odd("RetrieveServiceContent", 200))
    }

    /// Makes a call when it is its turn.
    pub(crate) async fn call<T>(
        &self,
        call: ApiCall<'_>,
        method: &Method,
        read: impl Fn(Node<'_, '_>) -> Option<T>,
    ) -> Result<T, Failure> {
        let asked = || self.ask(call.what, method, &read);
        self.scheduler.run(call, asked).await
    }

    /// Makes a call that starts a task, in the turn of the caller.
    pub(crate) async fn start(&self, what: &str, method: &Method) -> Result<Moref, Failure> {
        match self.ask(what, method, &soap::returned).await? {
            Some(task) => Ok(task),
            None => Err(session::odd(method.name, 200).during(what).into()),
        }
    }

    /// Makes a call once, and once more with a new session if the vCenter does not know the old one.
    async fn ask<T>(
        &self,
        what: &str,
        method: &Method,
        read: &impl Fn(Node<'_, '_>) -> Option<T>,
    ) -> Result<T, Failure> {
        let request = session::request(&self.url, method);
        let (answer, read) = self.sent(what, method.name, &request, read).await?;
        match read {
            Some(Ok(read)) => Ok(read),
            Some(Err(said)) => {
                let error = refusal::error(method.name, &said, answer.status()).during(what);
                Err(Failure::new(error, said, answer))
            }
            None => Err(session::odd(method.name, answer.status()).during(what).into()),
        }
    }

    async fn sent<T>(
        &self,
        what: &str,
        action: &str,
        request: &Request,
        read: &impl Fn(Node<'_, '_>) -> Option<T>,
    ) -> Result<(HttpAnswer, Option<Result<T, Said>>), Failure> {
        let during = |error: Error| Failure::from(error.during(what));
        let old = self.tokens.get(&self.http).await.map_err(during)?;
        let send = async |cookie: &str| {
            let request = request.clone().with(header::COOKIE, value(cookie).map_err(during)?);
            let answer = self.http.send(&request, None).await;
            answer.map_err(|lost| during(session::unanswered(action, &lost)))
        };
        let answer = send(old.expose()).await?;
        let mut found = soap::answer(answer.body(), read);
        if !matches!(&found, Some(Err(said)) if said.code == "NotAuthenticated") {
            return Ok((answer, found));
        }
        let Some(newer) = self.tokens.renew(&self.http, &old).await.map_err(during)? else {
            return Ok((answer, found));
        };
        let answer = send(newer.expose()).await?;
        found = soap::answer(answer.body(), read);
        Ok((answer, found))
    }

    /// Reads the end of a file in a datastore, at most about `limit` bytes. `None`: there is no such file.
    pub(crate) async fn file(
        &self,
        call: ApiCall<'_>,
        (datacenter, datastore, path): (&str, &str, &str),
        limit: usize,
    ) -> Result<Option<Vec<u8>>, Failure> {
        let mut url = self.url.clone();
        url.set_path("");
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.push("folder").extend(path.split('/'));
        }
        let request = Request::get(url).query("dcPath", datacenter).query("dsName", datastore);
        let during = |error: Error| Failure::from(error.during(call.what));
        let end = value(&format!("bytes=-{limit}")).map_err(during)?;
        let request = request.with(header::RANGE, end);
        let ask = || async {
            let cookie = self.tokens.get(&self.http).await.map_err(during)?;
            let request = request.clone().with(header::COOKIE, value(cookie.expose()).map_err(during)?);
            let sent = self.http.send(&request, None).await;
            sent.map_err(|lost| during(session::unanswered(call.action, &lost)))
        };
        let answer: HttpAnswer = self.scheduler.run(call, ask).await?;
        match answer.status() {
            200 | 206 => Ok(Some(answer.body().to_vec())),
            // The file is empty.
            416 => Ok(Some(Vec::new())),
            404 => Ok(None),
            status => {
                let said = Said { code: format!("HTTP {status}"), message: "no message".to_owned() };
                Err(during(refusal::error(call.action, &said, status)))
            }
        }
    }
}
