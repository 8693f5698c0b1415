//! Holds one HTTP/2 connection to the driver's socket, and opens a new one when it ends. May touch: that socket.

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper::header::{CONTENT_TYPE, HeaderValue, TE};
use hyper::http::{request, response};
use hyper::{HeaderMap, Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::Mutex;
use peerpod_base::chain::chain;
use peerpod_proto::csi::{GetPluginInfoRequest, GetPluginInfoResponse};
use protobuf::Message;
use tokio::net::UnixStream;
use tokio::sync::OnceCell;
use tokio::time::timeout;

use crate::body::Body;
use crate::grpc::{self, Code, Status};

/// Deadline of requests that a driver answers by itself.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// Limit for connecting: a local socket answers at once or never.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// Flow-control windows in bytes, of one stream and of a connection. No large messages pass here.
pub(crate) const STREAM_WINDOW: u32 = 1 << 20;
pub(crate) const CONNECTION_WINDOW: u32 = 8 << 20;
/// Limit of a call's metadata in bytes: a status with details may have many kilobytes.
pub(crate) const HEADERS: u32 = 1 << 20;

#[derive(Debug)]
pub(crate) struct Upstream {
    path: PathBuf,
    /// Largest intercepted message, in bytes.
    pub(crate) max_message: usize,
    ready: Mutex<Option<SendRequest<Body>>>,
    connecting: tokio::sync::Mutex<()>,
    driver: OnceCell<String>,
}

#[derive(Debug)]
pub(crate) struct DriverAnswer {
    pub(crate) head: response::Parts,
    pub(crate) message: Option<Bytes>,
    pub(crate) trailers: Option<HeaderMap>,
}

impl Upstream {
    /// Makes a client for this socket, which need not exist yet.
    pub(crate) fn new(path: PathBuf, max_message: usize) -> Upstream {
        let (ready, connecting, driver) = (Mutex::default(), tokio::sync::Mutex::default(), OnceCell::new());
        Upstream { path, max_message, ready, connecting, driver }
    }

    /// Returns the driver's name, which is requested once.
    pub(crate) async fn driver(&self) -> Result<&str, Status> {
        let ask = async || -> Result<String, Status> {
            const INFO: &str = "/csi.v1.Identity/GetPluginInfo";
            let answer: GetPluginInfoResponse =
                self.call(INFO, &GetPluginInfoRequest::new(), ANSWER_WITHIN).await?;
            if answer.name.is_empty() {
                return Err(Code::Internal.status("the CSI driver has no name"));
            }
            Ok(answer.name)
        };
        self.driver.get_or_try_init(ask).await.map(String::as_str)
    }

    pub(crate) async fn send(&self, mut request: Request<Body>) -> Result<Response<Incoming>, Status> {
        for last in [false, true] {
            let mut sender = self.sender().await?;
            match sender.try_send_request(request).await {
                Ok(response) => return Ok(response),
                // Nothing of it was sent: the driver was restarted since the last call.
                Err(mut failed) => match failed.take_message() {
                    Some(back) if !last => {
                        *self.ready.lock() = None;
                        request = back;
                    }
                    _ => return Err(self.away("the call broke off", chain(failed.error()))),
                },
            }
        }
        Err(self.away("the call", "its connection ends again and again"))
    }

    /// Sends a unary request and reads its whole answer. The driver's own error is a [`DriverAnswer`].
    pub(crate) async fn exchange(
        &self,
        head: request::Parts,
        message: &[u8],
    ) -> Result<DriverAnswer, Status> {
        let request = Request::from_parts(head, Body::whole(Some(grpc::frame(message)), None));
        let (head, body) = self.send(request).await?.into_parts();
        let (data, trailers) = collect(body, self.max_message).await?;
        let message = if data.is_empty() { None } else { Some(grpc::unframe(data)?) };
        Ok(DriverAnswer { head, message, trailers })
    }

    /// Sends a call of this program itself.
    pub(crate) async fn call<A: Message>(
        &self,
        path: &'static str,
        message: &impl Message,
        within: Duration,
    ) -> Result<A, Status> {
        let request = Request::post(format!("http://localhost{path}")).body(());
        let mut head = request.map_err(|why| internal(&why))?.into_parts().0;
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
        let connected = timeout(CONNECT_WITHIN, UnixStream::connect(&self.path)).await;
        let connected = connected.map_err(|_| self.away("connect", "no process accepts connections"))?;
        let stream = connected.map_err(|why| self.away("connect", why))?;
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

    fn away(&self, what: &str, why: impl std::fmt::Display) -> Status {
        let path = self.path.display();
        let text = format!("the CSI driver at {path}: {what}: {why}; see whether its container runs");
        Code::Unavailable.status(text)
    }
}

impl DriverAnswer {
    /// Returns the result of the call.
    pub(crate) fn status(&self) -> Result<(), Status> {
        let said = self.trailers.as_ref().and_then(Status::of).or_else(|| Status::of(&self.head.headers));
        let nothing = || Code::Unknown.status("the CSI driver's answer has no gRPC status");
        said.unwrap_or_else(|| Err(nothing()))
    }

    /// Returns the answer as the driver sent it.
    pub(crate) fn pass(self) -> Response<Body> {
        let message = self.message.map(|message| grpc::frame(&message));
        Response::from_parts(self.head, Body::whole(message, self.trailers))
    }
}

/// Reads a body of at most `most` bytes of message, and returns it with its trailers.
pub(crate) async fn collect(body: Incoming, most: usize) -> Result<(Bytes, Option<HeaderMap>), Status> {
    let collected = Limited::new(body, most + 5).collect().await.map_err(|why| {
        if why.is::<LengthLimitError>() {
            Code::ResourceExhausted.status(format!("a message has more than {most} bytes"))
        } else {
            Code::Unavailable.status(format!("a message broke off: {}", chain(why.as_ref())))
        }
    })?;
    let trailers = collected.trailers().cloned();
    // There is nearly always one piece, which is then not copied.
    Ok((collected.to_bytes(), trailers))
}

fn internal(why: &dyn std::fmt::Display) -> Status {
    Code::Internal.status(format!("a call of our own to the CSI driver: {why}"))
}
