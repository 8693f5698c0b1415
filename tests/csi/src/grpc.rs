//! gRPC by hand: any method, any bytes, and all that comes back.

use std::{path::Path, time::Duration};

use anyhow::{Context, Result};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{
    HeaderMap, Request,
    client::conn::http2::{self, SendRequest},
    header::HeaderValue,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use protobuf::Message;
use tokio::net::UnixStream;

/// A connection.
#[derive(Clone)]
pub struct Client(SendRequest<Full<Bytes>>);

/// What came back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The headers.
    pub headers: HeaderMap,
    /// The body, with each message's five bytes.
    pub body: Bytes,
    /// The trailers.
    pub trailers: HeaderMap,
}

impl Answer {
    /// `grpc-status`, wherever it stands.
    pub fn code(&self) -> u16 {
        let code = self.trailers.get("grpc-status").or_else(|| self.headers.get("grpc-status"));
        code.and_then(|code| code.to_str().ok()?.parse().ok()).unwrap_or(u16::MAX)
    }

    /// `grpc-message`, wherever it stands.
    pub fn message(&self) -> String {
        let text = self.trailers.get("grpc-message").or_else(|| self.headers.get("grpc-message"));
        text.and_then(|text| text.to_str().ok()).unwrap_or_default().to_owned()
    }
}

impl Client {
    /// To this socket.
    ///
    /// # Errors
    /// Nobody there, or it does not speak HTTP/2.
    pub async fn connect(socket: &Path) -> Result<Client> {
        let stream = UnixStream::connect(socket).await.with_context(|| socket.display().to_string())?;
        let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        Ok(Client(sender))
    }

    /// Calls a method with these messages, these headers.
    ///
    /// # Errors
    /// No answer, or one that breaks off.
    pub async fn call(
        &mut self,
        path: &str,
        messages: &[&[u8]],
        headers: &[(&'static str, &str)],
    ) -> Result<Answer> {
        let mut request = Request::post(format!("http://localhost{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(Full::new(frames(messages)))?;
        for (name, value) in headers {
            request.headers_mut().insert(*name, HeaderValue::from_str(value)?);
        }
        let (head, body) = self.0.send_request(request).await?.into_parts();
        let collected = body.collect().await?;
        let trailers = collected.trailers().cloned().unwrap_or_default();
        Ok(Answer { headers: head.headers, body: collected.to_bytes(), trailers })
    }

    /// A unary call of the CSI: `Node/NodePublishVolume`.
    ///
    /// # Errors
    /// The status, as `<code>: <message>`.
    pub async fn unary<A: Message>(&mut self, method: &str, request: &impl Message) -> Result<A> {
        let bytes = request.write_to_bytes()?;
        let (path, messages) = (format!("/csi.v1.{method}"), [bytes.as_slice()]);
        let call = self.call(&path, &messages, &[]);
        let answer = tokio::time::timeout(Duration::from_secs(60), call).await??;
        anyhow::ensure!(answer.code() == 0, "{}: {}", answer.code(), answer.message());
        Ok(A::parse_from_bytes(answer.body.get(5..).unwrap_or_default())?)
    }
}

/// Messages as they are on the wire.
pub fn frames(messages: &[&[u8]]) -> Bytes {
    let mut all = Vec::new();
    for message in messages {
        all.push(0);
        all.extend_from_slice(&u32::try_from(message.len()).unwrap_or(u32::MAX).to_be_bytes());
        all.extend_from_slice(message);
    }
    all.into()
}
