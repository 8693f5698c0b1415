//! Makes a call of a cloud's API: turn, token, request, answer, class of the refusal. May touch the network.

use std::sync::Arc;
use std::time::SystemTime;

use peerpod_base::config::Secret;
use peerpod_provider_api::Error;
use peerpod_provider_cloud::refusal::clip;
use peerpod_provider_cloud::{ApiCall, Scheduler};

use crate::dialect::Dialect;
use crate::failure::Failure;
use crate::hosts::Hosts;
use crate::http::{Http, NoAnswer};
use crate::request::{HttpAnswer, Request};
use crate::token::Tokens;

/// Way of a cloud whose requests carry a signature instead of a bearer token.
#[derive(Debug, Clone, Copy)]
pub struct Signature {
    /// Signs a request with the credential of the token's source.
    pub sign: fn(&Request, &Secret) -> Result<Request, Error>,
    /// Whether a refusal shows that the credential has ended, so that a new one helps.
    pub has_ended: fn(&HttpAnswer) -> bool,
}

/// Client of one API. Clones share connections, token and scheduler.
#[derive(Clone)]
pub struct Rest {
    http: Http,
    hosts: Hosts,
    tokens: Arc<Tokens>,
    scheduler: Scheduler,
    dialect: &'static Dialect,
    signature: Option<Signature>,
}

impl Rest {
    /// Returns a client; makes no call.
    pub fn new(
        http: Http,
        hosts: Hosts,
        tokens: Tokens,
        scheduler: Scheduler,
        dialect: &'static Dialect,
    ) -> Rest {
        Rest { http, hosts, tokens: Arc::new(tokens), scheduler, dialect, signature: None }
    }

    /// Signs each request instead of sending the token.
    #[must_use]
    pub fn signed(self, signature: Signature) -> Rest {
        Rest { signature: Some(signature), ..self }
    }

    /// Returns the hosts of the API.
    pub fn hosts(&self) -> &Hosts {
        &self.hosts
    }

    /// Returns the client below, for requests without the token (a signed URL).
    pub fn http(&self) -> &Http {
        &self.http
    }

    /// Returns the errors and limits of the cloud.
    pub fn dialect(&self) -> &'static Dialect {
        self.dialect
    }

    /// Fetches a token if there is none, for the preflight.
    ///
    /// # Errors
    /// The error of the source.
    pub async fn log_in(&self) -> Result<(), Error> {
        self.tokens.get(&self.http).await.map(drop)
    }

    /// Makes a call when it is its turn, and repeats it while the cloud throttles it. After a 401, or where the cloud
    /// shows that the signature's credential has ended, it renews the token and sends the call once more. Returns an answer with a status of 200 to 299.
    ///
    /// # Errors
    /// The refusal of the cloud, by its table; [`Error::Transient`] without an answer; the error of the token's source;
    /// [`Error::Invalid`] for a request to another host, which is not sent.
    pub async fn call(&self, call: ApiCall<'_>, request: &Request) -> Result<HttpAnswer, Failure> {
        let ApiCall { action, what, .. } = call;
        if !self.hosts.allows(request.url()) {
            // `follow` refuses it with the cause.
            let refused = self.hosts.follow(request.url().as_str()).err();
            let refused = refused.unwrap_or_else(|| Error::invalid("a request to another host"));
            return Err(refused.during(what).into());
        }
        self.scheduler.run(call, || self.ask(action, what, request)).await
    }

    async fn ask(&self, action: &str, what: &str, request: &Request) -> Result<HttpAnswer, Failure> {
        let token = self.tokens.get(&self.http).await.map_err(|error| error.during(what))?;
        let mut sent = self.send(request, &token).await.map_err(|error| error.during(what))?;
        if sent.as_ref().is_ok_and(|answer| self.has_ended(answer)) {
            let renewed = self.tokens.renew(&self.http, &token).await;
            if let Some(newer) = renewed.map_err(|error| error.during(what))? {
                sent = self.send(request, &newer).await.map_err(|error| error.during(what))?;
            }
        }
        let answer = sent.map_err(|lost| self.unanswered(action, what, &lost))?;
        if let Some(left) = (self.dialect.left)(&answer) {
            self.scheduler.left(action, left);
        }
        if answer.is_success() { Ok(answer) } else { Err(self.refused(action, what, answer)) }
    }

    /// Sends a request with this token, or signed with it. The outer error is that of the signature.
    async fn send(&self, request: &Request, token: &Secret) -> Result<Result<HttpAnswer, NoAnswer>, Error> {
        Ok(match self.signature {
            None => self.http.send(request, Some(token)).await,
            Some(signature) => self.http.send(&(signature.sign)(request, token)?, None).await,
        })
    }

    /// Whether an answer shows that the token has ended.
    fn has_ended(&self, answer: &HttpAnswer) -> bool {
        match self.signature {
            None => answer.status == 401,
            Some(signature) => (signature.has_ended)(answer),
        }
    }

    /// Returns the failure of a refused call.
    pub fn refused(&self, action: &str, what: &str, answer: HttpAnswer) -> Failure {
        let mut said = (self.dialect.said)(&answer);
        if said.code.is_empty() {
            said.code = format!("HTTP {}", answer.status);
        }
        if said.message.is_empty() {
            "no message".clone_into(&mut said.message);
        }
        let after = answer.retry_after(SystemTime::now());
        let refusals = &self.dialect.refusals;
        let error = refusals.refused(action, &said.code, &said.message, answer.status, after);
        Failure::new(error.during(what), said, answer)
    }

    fn unanswered(&self, action: &str, what: &str, lost: &NoAnswer) -> Failure {
        let refusals = &self.dialect.refusals;
        let error = match lost {
            NoAnswer::Lost(why) => refusals.unanswered(action, why),
            NoAnswer::Unsent(why) => Error::transient(format!(
                "{action} was not sent: {}; check the route from the node to the {} endpoint",
                clip(why),
                refusals.cloud
            )),
        };
        error.during(what).into()
    }
}
