//! Logs in to the vCenter. A session's cookie is the token of later calls. May call `RetrieveServiceContent` and `Login`.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use peerpod_base::config::Secret;
use peerpod_provider_api::Error;
use peerpod_provider_rest::{Http, HttpAnswer, NoAnswer, Request, Token, TokenSource, Url, header};
use roxmltree::Node;

use crate::refusal::{self, REFUSALS};
use crate::soap::{self, Method, Moref, child, text};

/// Version of the API that the calls need: first-class disks came with it.
pub(crate) const VERSION: &str = "urn:vim25/6.5";
/// Name of the session's cookie.
const COOKIE: &str = "vmware_soap_session=";
/// Time after which a new session replaces one that works. The vCenter itself ends a session that is idle for 30 minutes.
const LIFE: Duration = Duration::from_secs(12 * 3600);

/// Services of the vCenter.
#[derive(Debug, Clone)]
pub(crate) struct Services {
    pub session_manager: Moref,
    pub property_collector: Moref,
    pub search_index: Moref,
    pub view_manager: Moref,
    /// Manager of first-class disks.
    pub disks: Moref,
    /// Name and version, for people.
    pub product: String,
}

/// Account of the provider.
pub(crate) struct Account {
    pub url: Url,
    pub username: String,
    pub password: Option<Secret>,
    /// Services of the vCenter, known after the first login.
    pub services: Arc<OnceLock<Services>>,
}

/// Returns the request for a call, without a session.
pub(crate) fn request(url: &Url, method: &Method) -> Request {
    let action = header::HeaderName::from_static("soapaction");
    Request::new(peerpod_provider_rest::Method::POST, url.clone())
        .header(action, VERSION)
        .xml(method.envelope())
}

/// Returns the error for an answer that is none of a vCenter's.
pub(crate) fn odd(action: &str, status: u16) -> Error {
    Error::transient(format!(
        "the answer {status} to {action} is none of a vCenter's; check provider.vsphere.url, it is tried again"
    ))
}

/// Returns the error for a request without an answer.
pub(crate) fn unanswered(action: &str, lost: &NoAnswer) -> Error {
    match lost {
        NoAnswer::Lost(why) => REFUSALS.unanswered(action, why),
        NoAnswer::Unsent(why) => Error::transient(format!(
            "{action} was not sent: {why}; check the route from the node to the vCenter, and its certificate"
        )),
    }
}

fn services(node: Node<'_, '_>) -> Option<Services> {
    let content = child(node, "returnval")?;
    let service = |name| child(content, name).and_then(Moref::read);
    let about = child(content, "about")?;
    Some(Services {
        session_manager: service("sessionManager")?,
        property_collector: service("propertyCollector")?,
        search_index: service("searchIndex")?,
        view_manager: service("viewManager")?,
        disks: service("vStorageObjectManager")?,
        product: soap::value(about, "fullName").unwrap_or("vCenter").chars().take(200).collect(),
    })
}

impl Account {
    async fn ask<T>(
        &self,
        http: &Http,
        method: &Method,
        read: impl FnOnce(Node<'_, '_>) -> Option<T>,
    ) -> Result<(T, HttpAnswer), Error> {
        let name = method.name;
        let answer = http.send(&request(&self.url, method), None).await;
        let answer = answer.map_err(|lost| unanswered(name, &lost))?;
        match soap::answer(answer.body(), read) {
            Some(Ok(read)) => Ok((read, answer)),
            Some(Err(said)) => Err(refusal::error(name, &said, answer.status())),
            None => Err(odd(name, answer.status())),
        }
    }
}

#[async_trait]
impl TokenSource for Account {
    async fn fetch(&self, http: &Http) -> Result<Token, Error> {
        let during = |error: Error| error.during("log in to the vCenter");
        if self.services.get().is_none() {
            let this = Moref { kind: "ServiceInstance".to_owned(), id: "ServiceInstance".to_owned() };
            let method = Method { name: "RetrieveServiceContent", this, arguments: String::new() };
            let (found, _) = self.ask(http, &method, services).await.map_err(during)?;
            self.services.get_or_init(|| found);
        }
        let this = self.services.get().map(|services| services.session_manager.clone());
        let this = this.ok_or_else(|| during(odd("RetrieveServiceContent", 200)))?;
        let password = self.password.as_ref().ok_or_else(|| Error::Auth {
            text: "log in to the vCenter: there is no password; set provider.vsphere.password, best by the variable \
                   PEERPOD_PROVIDER_VSPHERE_PASSWORD of the Secret peer-pods-secret"
                .to_owned(),
        })?;
        let arguments = text("userName", &self.username) + &text("password", password.expose());
        let method = Method { name: "Login", this, arguments };
        let (_, answer) =
            self.ask(http, &method, |node| child(node, "returnval").map(drop)).await.map_err(during)?;
        let cookie = answer.header("set-cookie").and_then(|cookie| cookie.split(';').next());
        let cookie = cookie.filter(|cookie| cookie.starts_with(COOKIE));
        let cookie = cookie.ok_or_else(|| during(odd("Login", answer.status())))?;
        Ok(Token { secret: Secret::new(cookie.to_owned()), life: LIFE })
    }
}
