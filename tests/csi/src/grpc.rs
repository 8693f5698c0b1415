//! Makes gRPC calls without generated code: any method, any bytes, and the complete answer.

use std::convert::Infallible;
use std::path::Path;
use std::pin::Pin;
use std::task::Poll;

use anyhow::{Context, Result};
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame};
use hyper::client::conn::http2::{self, SendRequest};
use hyper::header::HeaderValue;
use hyper::{HeaderMap, Request};
use hyper_util::rt::{TokioExecutor, TokioIo};
use protobuf::Message;
use tokio::net::UnixStream;

use crate::PATIENCE;

/// Connection to a server.
#[derive(Clone)]
pub struct Client(SendRequest<Pieces>);

/// Body like that of gRPC's libraries: it never ends with the headers, and its length is not announced.
struct Pieces(Option<Bytes>);

impl Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.take().filter(|all| !all.is_empty()).map(|all| Ok(Frame::data(all))))
    }
}

/// Complete answer to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The headers.
    pub headers: HeaderMap,
    /// The body, with the five-byte prefix of each message.
    pub body: Bytes,
    /// The trailers.
    pub trailers: HeaderMap,
}

impl Answer {
    /// Returns `grpc-status` from the trailers or the headers.
    pub fn code(&self) -> u16 {
        let code = self.trailers.get("grpc-status").or_else(|| self.headers.get("grpc-status"));
        code.and_then(|code| code.to_str().ok()?.parse().ok()).unwrap_or(u16::MAX)
    }

    /// Returns `grpc-message` from the trailers or the headers.
    pub fn message(&self) -> String {
        let text = self.trailers.get("grpc-message").or_else(|| self.headers.get("grpc-message"));
        text.and_then(|text| text.to_str().ok()).unwrap_or_default().to_owned()
    }
}

impl Client {
    /// Connects to this socket.
    ///
    /// # Errors
    /// When no server listens, or the server does not support HTTP/2.
    pub async fn connect(socket: &Path) -> Result<Client> {
        let stream = UnixStream::connect(socket).await.with_context(|| socket.display().to_string())?;
        let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        Ok(Client(sender))
    }

    /// Calls a method with these messages and headers.
    ///
    /// # Errors
    /// When there is no answer, or an incomplete one.
    pub async fn call(
        &mut self,
        path: &str,
        messages: &[&[u8]],
        headers: &[(&'static str, &str)],
    ) -> Result<Answer> {
        let mut request = Request::post(format!("http://localhost{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(Pieces(Some(frames(messages))))?;
        for (name, value) in headers {
            request.headers_mut().insert(*name, HeaderValue::from_str(value)?);
        }
        let exchange = async {
            let (head, body) = self.0.send_request(request).await?.into_parts();
            Ok::<_, hyper::Error>((head, body.collect().await?))
        };
        let (head, collected) = tokio::time::timeout(PATIENCE, exchange)
            .await
            .with_context(|| format!("{path}: no answer"))??;
        let trailers = collected.trailers().cloned().unwrap_or_default();
        Ok(Answer { headers: head.headers, body: collected.to_bytes(), trailers })
    }

    /// Makes a unary call of the CSI: `Node/NodePublishVolume`.
    ///
    /// # Errors
    /// The status, as `<code>: <message>`.
    pub async fn unary<A: Message>(&mut self, method: &str, request: &impl Message) -> Result<A> {
        let bytes = request.write_to_bytes()?;
        let (path, messages) = (format!("/csi.v1.{method}"), [bytes.as_slice()]);
        let answer = self.call(&path, &messages, &[]).await?;
        anyhow::ensure!(answer.code() == 0, "{}: {}", answer.code(), answer.message());
        Ok(A::parse_from_bytes(answer.body.get(5..).unwrap_or_default())?)
    }
}

/// Returns messages in their wire format.
pub fn frames(messages: &[&[u8]]) -> Bytes {
    let mut all = Vec::new();
    for message in messages {
        all.push(0);
        all.extend_from_slice(&u32::try_from(message.len()).unwrap_or(u32::MAX).to_be_bytes());
        all.extend_from_slice(message);
    }
    all.into()
}
