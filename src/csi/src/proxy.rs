//! Forwards every call between Kubernetes and the driver unchanged in both directions, with metadata, trailers and
//! status, for any method. Only the few methods that a role intercepts ([`Intercept`]) are handled. May touch: the
//! driver's socket.

use std::sync::Arc;
use std::time::{Duration, Instant as Clock};

use async_trait::async_trait;
use bytes::Bytes;
use hyper::body::Incoming;
use hyper::http::{request, uri};
use hyper::{Request, Response, Uri};
use protobuf::Message;
use tokio::time::{Instant, timeout_at};

use crate::body::{Body, GRACE, Patience};
use crate::grpc::{self, Code, Status};
use crate::metrics::{CsiMetrics, Handling};
use crate::upstream::{DriverAnswer, Upstream, collect};

/// Handling of intercepted calls by a role.
#[async_trait]
pub trait Intercept: Send + Sync + 'static {
    /// Returns the short name of an intercepted method; `None`: the call is forwarded.
    fn looks_into(&self, path: &str) -> Option<&'static str>;

    /// Answers an intercepted call; may forward it, as it is or changed.
    async fn handle(&self, call: InterceptedCall) -> Result<Response<Body>, Status>;
}

/// An intercepted unary call.
#[derive(Debug)]
pub struct InterceptedCall {
    /// Short name of the method.
    pub method: &'static str,
    /// Headers of the request.
    pub head: request::Parts,
    /// The message.
    pub message: Bytes,
    /// Time at which the caller stops waiting.
    pub until: Instant,
    patience: Patience,
    upstream: Arc<Upstream>,
}

impl InterceptedCall {
    /// Parses the message, and answers the call with `work`. A message of another form is forwarded.
    ///
    /// # Errors
    /// Those of `work`; the driver cannot be reached.
    pub async fn parsed<M, F>(
        self,
        work: impl FnOnce(InterceptedCall, M) -> F,
    ) -> Result<Response<Body>, Status>
    where
        M: Message,
        F: Future<Output = Result<Response<Body>, Status>>,
    {
        match M::parse_from_bytes(&self.message) {
            Ok(message) => work(self, message).await,
            Err(_) => self.pass(None).await,
        }
    }

    /// Forwards the call as it is, or with another message, and streams the answer back.
    ///
    /// # Errors
    /// The driver cannot be reached.
    pub async fn pass(self, message: Option<Bytes>) -> Result<Response<Body>, Status> {
        let message = message.unwrap_or(self.message);
        let request = Request::from_parts(self.head, Body::whole(grpc::frame(&message), None));
        let response = self.upstream.send(request).await?;
        Ok(response.map(|body| Body::answer(body, self.patience)))
    }

    /// Forwards the call with another message, and reads the whole answer.
    ///
    /// # Errors
    /// The driver cannot be reached, or its answer is too large.
    pub async fn exchange(self, message: Bytes) -> Result<DriverAnswer, Status> {
        self.upstream.exchange(self.head, &message).await
    }
}

/// Forwards calls to the driver.
pub struct Proxy {
    upstream: Arc<Upstream>,
    role: Arc<dyn Intercept>,
    metrics: CsiMetrics,
    patience: Duration,
    max_message: usize,
}

impl Proxy {
    /// Makes a proxy for this driver. Calls without a deadline may be silent for `patience`; intercepted messages have
    /// at most `max_message` bytes.
    pub fn new(
        upstream: Arc<Upstream>,
        role: Arc<dyn Intercept>,
        metrics: CsiMetrics,
        patience: Duration,
        max_message: usize,
    ) -> Proxy {
        Proxy { upstream, role, metrics, patience, max_message }
    }

    /// Answers any request.
    pub async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let began = Clock::now();
        let method = self.role.looks_into(request.uri().path());
        let answered = match method {
            None => self.pass(request).await,
            Some(method) => self.inspect(method, request).await,
        };
        let way = if method.is_some() { Handling::LookedInto } else { Handling::Passed };
        self.metrics.answered(way, method, answered.as_ref().err(), began.elapsed());
        answered.unwrap_or_else(|status| {
            tracing::debug!(?method, code = ?status.code, why = status.message, "call refused");
            status.answer()
        })
    }

    async fn pass(&self, request: Request<Incoming>) -> Result<Response<Body>, Status> {
        let (mut head, body) = request.into_parts();
        complete(&mut head)?;
        let patience = self.patience(&head);
        let request = Request::from_parts(head, Body::request(body));
        let sent = timeout_at(patience.end(), self.upstream.send(request)).await;
        let response = sent.map_err(|_| late())??;
        Ok(response.map(|body| Body::answer(body, patience)))
    }

    async fn inspect(
        &self,
        method: &'static str,
        request: Request<Incoming>,
    ) -> Result<Response<Body>, Status> {
        let (mut head, body) = request.into_parts();
        complete(&mut head)?;
        let patience = self.patience(&head);
        let until = patience.end();
        let work = async {
            let (message, _) = collect(body, self.max_message).await?;
            let message = grpc::unframe(message)?;
            let upstream = self.upstream.clone();
            self.role.handle(InterceptedCall { method, head, message, until, patience, upstream }).await
        };
        timeout_at(until, work).await.map_err(|_| late())?
    }

    fn patience(&self, head: &request::Parts) -> Patience {
        match grpc::timeout(&head.headers) {
            Some(within) => Patience::Until(Instant::now() + within + GRACE),
            None => Patience::Silence(self.patience),
        }
    }
}

/// Adds a missing `:authority`: HTTP/2 clients need one, and the driver ignores it.
fn complete(head: &mut request::Parts) -> Result<(), Status> {
    if head.uri.scheme().is_some() && head.uri.authority().is_some() {
        return Ok(());
    }
    let mut parts = uri::Parts::from(std::mem::take(&mut head.uri));
    parts.scheme.get_or_insert(uri::Scheme::HTTP);
    parts.authority.get_or_insert(uri::Authority::from_static("localhost"));
    head.uri = Uri::from_parts(parts)
        .map_err(|why| Code::Unimplemented.status(format!("no path of a gRPC method: {why}")))?;
    Ok(())
}

fn late() -> Status {
    Code::DeadlineExceeded.status("the CSI driver did not answer in time; its log may name the cause")
}
