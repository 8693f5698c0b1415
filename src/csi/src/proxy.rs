//! Forwards every call between Kubernetes and the driver unchanged, with metadata, trailers and status, for any method.
//! Only the few methods that a role intercepts ([`Intercept`]) are handled. May touch: the driver's socket.

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
use crate::metrics::CsiMetrics;
use crate::upstream::{DriverAnswer, Upstream, collect};

/// Answer to a call, or the status with which this program refuses it.
pub(crate) type Answered = Result<Response<Body>, Status>;

/// Handling of intercepted calls by a role.
#[async_trait]
pub(crate) trait Intercept: Send + Sync + 'static {
    /// Returns the paths of the intercepted methods; all other calls are forwarded.
    fn methods(&self) -> &'static [&'static str];

    /// Answers an intercepted call; may forward it, as it is or changed.
    async fn handle(&self, call: Intercepted) -> Answered;
}

/// An intercepted unary call.
#[derive(Debug)]
pub(crate) struct Intercepted {
    /// Short name of the method.
    pub(crate) method: &'static str,
    /// Headers of the request.
    pub(crate) head: request::Parts,
    pub(crate) message: Bytes,
    /// Time at which the caller stops waiting.
    pub(crate) until: Instant,
    patience: Patience,
    upstream: Arc<Upstream>,
}

impl Intercepted {
    /// Parses the message, and answers the call with `work`. A message of another form is forwarded.
    pub(crate) async fn parsed<M, F>(self, work: impl FnOnce(Intercepted, M) -> F) -> Answered
    where
        M: Message,
        F: Future<Output = Answered>,
    {
        match M::parse_from_bytes(&self.message) {
            Ok(message) => work(self, message).await,
            Err(_) => self.pass(None).await,
        }
    }

    /// Forwards the call as it is, or with another message, and streams the answer back.
    pub(crate) async fn pass(self, message: Option<Bytes>) -> Answered {
        let message = message.unwrap_or(self.message);
        let request = Request::from_parts(self.head, Body::whole(Some(grpc::frame(&message)), None));
        let response = self.upstream.send(request).await?;
        Ok(response.map(|body| Body::answer(body, self.patience)))
    }

    /// Forwards the call with another message, and reads the whole answer.
    pub(crate) async fn exchange(self, message: Bytes) -> Result<DriverAnswer, Status> {
        self.upstream.exchange(self.head, &message).await
    }
}

pub(crate) struct Proxy {
    pub(crate) upstream: Arc<Upstream>,
    pub(crate) role: Arc<dyn Intercept>,
    pub(crate) metrics: CsiMetrics,
    /// Time for which a call without a deadline may be silent.
    pub(crate) patience: Duration,
}

impl Proxy {
    pub(crate) async fn answer(&self, request: Request<Incoming>) -> Response<Body> {
        let began = Clock::now();
        let path = request.uri().path();
        let known = self.role.methods().iter().find(|known| **known == path);
        let method = known.and_then(|path| path.rsplit('/').next());
        let answered = match method {
            None => self.pass(request).await,
            Some(method) => self.inspect(method, request).await,
        };
        self.metrics.answered(method, answered.as_ref().err(), began.elapsed());
        answered.unwrap_or_else(|status| {
            tracing::debug!(?method, code = ?status.code, why = status.message, "call refused");
            status.answer()
        })
    }

    async fn pass(&self, request: Request<Incoming>) -> Answered {
        let (mut head, body) = request.into_parts();
        complete(&mut head)?;
        let patience = self.patience(&head);
        let request = Request::from_parts(head, Body::request(body));
        let sent = timeout_at(patience.end(), self.upstream.send(request)).await;
        let response = sent.map_err(|_| late())??;
        Ok(response.map(|body| Body::answer(body, patience)))
    }

    async fn inspect(&self, method: &'static str, request: Request<Incoming>) -> Answered {
        let (mut head, body) = request.into_parts();
        complete(&mut head)?;
        let patience = self.patience(&head);
        let until = patience.end();
        let work = async {
            let (message, _) = collect(body, self.upstream.max_message).await?;
            let message = grpc::unframe(message)?;
            let upstream = self.upstream.clone();
            self.role.handle(Intercepted { method, head, message, until, patience, upstream }).await
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
