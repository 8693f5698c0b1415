//! Holds one HTTP/2 connection to the driver's socket, and opens a new one when it ends. May touch: that socket.

use std::path::PathBuf;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http2::{self, SendRequest};
use hyper::header::{CONTENT_TYPE, HeaderValue, TE};
use hyper::http::{request, response};
use hyper::{HeaderMap, Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::Mutex;
use peerpod_base::chain::chain;
use protobuf::Message;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::body::Body;
use crate::grpc::{self, Code, Status};

/// Limit for connecting: a local socket answers at once or never.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// Flow-control windows in bytes, of one stream and of a connection. No large messages pass here.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 8 << 20;
/// Limit of headers in bytes: a status with details may have many kilobytes.
const HEADERS: u32 = 1 << 20;

/// Connection to the proxied driver.
#[derive(Debug)]
pub struct Upstream {
    path: PathBuf,
    max_message: usize,
    ready: Mutex<Option<SendRequest<Body>>>,
    connecting: tokio::sync::Mutex<()>,
}

/// A whole unary answer.
#[derive(Debug)]
pub struct DriverAnswer {
    /// Status line and headers.
    pub head: response::Parts,
    /// The message, where there was one.
    pub message: Option<Bytes>,
    /// Trailers after the message.
    pub trailers: Option<HeaderMap>,
}

impl Upstream {
    /// Makes a client for this socket, which need not exist yet. Intercepted messages have at most `max_message` bytes.
    pub fn new(path: PathBuf, max_message: usize) -> Upstream {
        Upstream { path, max_message, ready: Mutex::new(None), connecting: tokio::sync::Mutex::new(()) }
    }

    /// Sends a request and returns the answer with its headers.
    ///
    /// # Errors
    /// UNAVAILABLE when the driver cannot be reached or breaks off.
    pub async fn send(&self, mut request: Request<Body>) -> Result<Response<Incoming>, Status> {
        for last in [false, true] {
            let mut sender = self.sender().await?;
            match sender.try_send_request(request).await {
                Ok(response) => return Ok(response),
                // Nothing of it was sent: the driver was restarted since the last call.
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

    /// Sends a unary request and reads its whole answer.
    ///
    /// # Errors
    /// As [`Upstream::send`]; RESOURCE_EXHAUSTED for an answer that is too large. The driver's own error is returned as
    /// an [`DriverAnswer`].
    pub async fn exchange(&self, head: request::Parts, message: &[u8]) -> Result<DriverAnswer, Status> {
        let request = Request::from_parts(head, Body::whole(grpc::frame(message), None));
        let (head, body) = self.send(request).await?.into_parts();
        let (data, trailers) = collect(body, self.max_message).await?;
        let message = if data.is_empty() { None } else { Some(grpc::unframe(data)?) };
        Ok(DriverAnswer { head, message, trailers })
    }

    /// Sends a call of this program itself.
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
            Code::DeadlineExceeded.status(format!("{path} of {driver}: no answer in {within:?}"))
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
            .map_err(|_| self.away("connect", "no process accepts connections"))?
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
        *self.ready.lock() = Some(sender.clone());
        Ok(sender)
    }

    fn usable(&self) -> Option<SendRequest<Body>> {
        self.ready.lock().as_ref().filter(|sender| !sender.is_closed()).cloned()
    }

    fn forget(&self) {
        *self.ready.lock() = None;
    }

    fn away(&self, what: &str, why: impl std::fmt::Display) -> Status {
        let path = self.path.display();
        let text = format!("the CSI driver at {path}: {what}: {why}; see whether its container runs");
        Code::Unavailable.status(text)
    }
}

impl DriverAnswer {
    /// Returns the result of the call.
    ///
    /// # Errors
    /// The driver's status.
    pub fn status(&self) -> Result<(), Status> {
        let said = self.trailers.as_ref().and_then(Status::of).or_else(|| Status::of(&self.head.headers));
        let nothing = || Code::Unknown.status("the CSI driver's answer has no gRPC status");
        said.unwrap_or_else(|| Err(nothing()))
    }

    /// Returns the answer as the driver sent it.
    pub fn pass(self) -> Response<Body> {
        let body = match (self.message, self.trailers) {
            (None, trailers) => Body::trailers(trailers),
            (Some(message), trailers) => Body::whole(grpc::frame(&message), trailers),
        };
        Response::from_parts(self.head, body)
    }
}

/// Reads a body of at most `most` bytes of message, and returns it with its trailers.
///
/// # Errors
/// The body is larger, or broke off.
pub async fn collect(body: Incoming, most: usize) -> Result<(Bytes, Option<HeaderMap>), Status> {
    let large = || Code::ResourceExhausted.status(format!("a message has more than {most} bytes"));
    let mut body = body;
    if body.size_hint().lower() > most as u64 + 5 {
        return Err(large());
    }
    let (mut first, mut all, mut trailers) = (Bytes::new(), BytesMut::new(), None);
    while let Some(frame) = body.frame().await {
        let frame =
            frame.map_err(|why| Code::Unavailable.status(format!("a message broke off: {}", chain(&why))))?;
        match frame.into_data() {
            Ok(data) => {
                if first.len() + all.len() + data.len() > most + 5 {
                    return Err(large());
                }
                // There is nearly always one piece, which is then not copied.
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
    Code::Internal.status(format!("a call of our own to the CSI driver: {why}"))
}
