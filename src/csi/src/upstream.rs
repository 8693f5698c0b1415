//! The real driver: one HTTP/2 connection to its socket, made again when it is gone. May touch: that socket.

use std::{path::PathBuf, time::Duration};

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::{
    HeaderMap, Request, Response,
    body::{Body as _, Incoming},
    client::conn::http2::{self, SendRequest},
    header::{CONTENT_TYPE, HeaderValue, TE},
    http::{request, response},
};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::Mutex;
use peerpod_base::chain::chain;
use protobuf::Message;
use tokio::{net::UnixStream, time::timeout};

use crate::{
    body::Body,
    grpc::{self, Code, Status},
};

/// A local socket answers at once or never.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// What may be under way in one stream and in all: nothing large passes here.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 8 << 20;
/// A status with details may have many kilobytes.
const HEADERS: u32 = 1 << 20;

/// The driver behind us.
#[derive(Debug)]
pub struct Upstream {
    path: PathBuf,
    max_message: usize,
    ready: Mutex<Option<SendRequest<Body>>>,
    connecting: tokio::sync::Mutex<()>,
}

/// A unary answer, taken in whole.
#[derive(Debug)]
pub struct Answer {
    /// Status line and headers.
    pub head: response::Parts,
    /// The message, where there was one.
    pub message: Option<Bytes>,
    /// What came after it.
    pub trailers: Option<HeaderMap>,
}

impl Upstream {
    /// At this socket, which need not be there yet. Messages that are looked into have at most so many bytes.
    pub fn new(path: PathBuf, max_message: usize) -> Upstream {
        Upstream { path, max_message, ready: Mutex::new(None), connecting: tokio::sync::Mutex::new(()) }
    }

    /// Sends a request on; its answer's headers.
    ///
    /// # Errors
    /// UNAVAILABLE when the driver is not there or breaks off.
    pub async fn send(&self, mut request: Request<Body>) -> Result<Response<Incoming>, Status> {
        for last in [false, true] {
            let mut sender = self.sender().await?;
            match sender.try_send_request(request).await {
                Ok(response) => return Ok(response),
                // Not a byte of it went out: the driver was restarted since the last call.
                Err(mut failed) => match failed.take_message() {
                    Some(back) if !last => {
                        self.forget();
                        request = back;
                    }
                    _ => return Err(self.away("the call broke off", chain(failed.error()))),
                },
            }
        }
        Err(self.away("the call", "its connection ends again and again"))
    }

    /// Sends a unary request on and takes its answer in.
    ///
    /// # Errors
    /// As [`Upstream::send`]; RESOURCE_EXHAUSTED for an answer that is too large. A driver's own error is an [`Answer`].
    pub async fn exchange(&self, head: request::Parts, message: &[u8]) -> Result<Answer, Status> {
        let request = Request::from_parts(head, Body::whole(grpc::frame(message), None));
        let (head, body) = self.send(request).await?.into_parts();
        let (data, trailers) = collect(body, self.max_message).await?;
        let message = if data.is_empty() { None } else { Some(grpc::unframe(data)?) };
        Ok(Answer { head, message, trailers })
    }

    /// A call of our own.
    ///
    /// # Errors
    /// The driver's status, or as [`Upstream::exchange`]; DEADLINE_EXCEEDED.
    pub async fn call<A: Message>(
        &self,
        path: &'static str,
        message: &impl Message,
        within: Duration,
    ) -> Result<A, Status> {
        let mut head = Request::post(path).body(()).map_err(|why| internal(&why))?.into_parts().0;
        head.uri = hyper::Uri::builder()
            .scheme("http")
            .authority("localhost")
            .path_and_query(path)
            .build()
            .map_err(|why| internal(&why))?;
        head.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        head.headers.insert(TE, HeaderValue::from_static("trailers"));
        grpc::put_timeout(&mut head.headers, within);
        let message = grpc::encode(message)?;
        let answer = timeout(within, self.exchange(head, &message)).await.map_err(|_| {
            let driver = self.path.display();
            Status::new(Code::DeadlineExceeded, format!("{path} of {driver}: no answer in {within:?}"))
        })??;
        answer.status()?;
        let bytes = answer.message.unwrap_or_default();
        A::parse_from_bytes(&bytes).map_err(|why| internal(&why))
    }

    async fn sender(&self) -> Result<SendRequest<Body>, Status> {
        if let Some(sender) = self.usable() {
            return Ok(sender);
        }
        let _one = self.connecting.lock().await;
        if let Some(sender) = self.usable() {
            return Ok(sender);
        }
        let stream = timeout(CONNECT_WITHIN, UnixStream::connect(&self.path))
            .await
            .map_err(|_| self.away("connect", "nobody accepts"))?
            .map_err(|why| self.away("connect", why))?;
        let (sender, connection) = http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(HEADERS)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|why| self.away("the HTTP/2 handshake", chain(&why)))?;
        let path = self.path.clone();
        tokio::spawn(async move {
            if let Err(why) = connection.await {
                tracing::debug!(driver = %path.display(), error = chain(&why), "connection to the driver ended");
            }
        });
        *self.slot() = Some(sender.clone());
        Ok(sender)
    }

    fn usable(&self) -> Option<SendRequest<Body>> {
        self.slot().as_ref().filter(|sender| !sender.is_closed()).cloned()
    }

    fn forget(&self) {
        *self.slot() = None;
    }

    fn slot(&self) -> parking_lot::MutexGuard<'_, Option<SendRequest<Body>>> {
        // One assignment: whole after a panic elsewhere.
        self.ready.lock()
    }

    fn away(&self, what: &str, why: impl std::fmt::Display) -> Status {
        let path = self.path.display();
        let text = format!("the CSI driver at {path}: {what}: {why}; see whether its container runs");
        Status::new(Code::Unavailable, text)
    }
}

impl Answer {
    /// How the call ended.
    ///
    /// # Errors
    /// The driver's status.
    pub fn status(&self) -> Result<(), Status> {
        let said = self.trailers.as_ref().and_then(Status::of).or_else(|| Status::of(&self.head.headers));
        let nothing = || Status::new(Code::Unknown, "the CSI driver's answer has no gRPC status");
        said.unwrap_or_else(|| Err(nothing()))
    }

    /// The answer as the driver gave it.
    pub fn pass(self) -> Response<Body> {
        let body = match (self.message, self.trailers) {
            (None, trailers) => Body::trailers(trailers),
            (Some(message), trailers) => Body::whole(grpc::frame(&message), trailers),
        };
        Response::from_parts(self.head, body)
    }
}

/// A body, as long as it has at most so many bytes of message; what came after it.
///
/// # Errors
/// It is larger, or broke off.
pub async fn collect(body: Incoming, most: usize) -> Result<(Bytes, Option<HeaderMap>), Status> {
    let large = || {
        Status::new(Code::ResourceExhausted, format!("a message has more than csi.max-message, {most} bytes"))
    };
    let mut body = body;
    if body.size_hint().lower() > most as u64 + 5 {
        return Err(large());
    }
    let (mut first, mut all, mut trailers) = (Bytes::new(), BytesMut::new(), None);
    while let Some(frame) = body.frame().await {
        let frame = frame
            .map_err(|why| Status::new(Code::Unavailable, format!("a message broke off: {}", chain(&why))))?;
        match frame.into_data() {
            Ok(data) => {
                if first.len() + all.len() + data.len() > most + 5 {
                    return Err(large());
                }
                // Nearly always there is one piece, which is then not copied.
                if first.is_empty() && all.is_empty() {
                    first = data;
                } else {
                    if !first.is_empty() {
                        all.extend_from_slice(&std::mem::take(&mut first));
                    }
                    all.extend_from_slice(&data);
                }
            }
            Err(frame) => trailers = frame.into_trailers().ok(),
        }
    }
    Ok((if all.is_empty() { first } else { all.freeze() }, trailers))
}

fn internal(why: &dyn std::fmt::Display) -> Status {
    Status::new(Code::Internal, format!("a call of our own to the CSI driver: {why}"))
}
