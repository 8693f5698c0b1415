//! Asks the node by its admin socket: HTTP and JSON. The node permits root alone.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::header::HOST;
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use peerpod_base::chain::chain;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::task::JoinSet;

/// Size limit of an answer, in bytes.
const MOST: usize = 64 << 20;
/// Time limit of a request. The console and the list of VMs wait for the provider.
const ANSWER: Duration = Duration::from_secs(60);

/// A node's admin socket.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    socket: PathBuf,
}

impl Node {
    pub(crate) fn new(socket: PathBuf) -> Node {
        Node { socket }
    }

    /// Returns the answer to GET of this path, read as JSON.
    ///
    /// # Errors
    /// The node is away, refuses, or its answer has another form.
    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        let (_, body) = self.ask(path).await?;
        serde_json::from_slice(&body).with_context(|| {
            format!(
                "the node's answer to {path} has another form; use a `peerpod` of the node's version ({})",
                env!("CARGO_PKG_VERSION")
            )
        })
    }

    /// Returns status and body of the answer to GET of this path. Status 503 is an answer: the node is not ready.
    ///
    /// # Errors
    /// The node is away or refuses.
    pub(crate) async fn ask(&self, path: &str) -> anyhow::Result<(StatusCode, Bytes)> {
        let socket = self.socket.display();
        let asked = tokio::time::timeout(ANSWER, self.request(path)).await;
        let (status, body) = asked
            .with_context(|| format!("no answer within {ANSWER:?}"))
            .and_then(|answer| answer)
            .with_context(|| format!("ask the node at {socket} for {path}"))?;
        if !status.is_success() && status != StatusCode::SERVICE_UNAVAILABLE {
            bail!("ask the node at {socket} for {path}: {}", String::from_utf8_lossy(&body).trim());
        }
        Ok((status, body))
    }

    async fn request(&self, path: &str) -> anyhow::Result<(StatusCode, Bytes)> {
        let stream = UnixStream::connect(&self.socket).await;
        http(stream.context("connect; run this as root on a node where peerpod-node runs")?, path).await
    }
}

/// Sends GET of this path and returns status and body of the answer.
///
/// # Errors
/// The connection ended, or the answer is too large.
pub(crate) async fn http<S>(stream: S, path: &str) -> anyhow::Result<(StatusCode, Bytes)>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    // The task ends with this request: a dropped set aborts its task.
    let _connection = JoinSet::from_iter([async move { drop(connection.await) }]);
    let request = Request::get(path).header(HOST, "node").body(Empty::<Bytes>::new())?;
    let response = sender.send_request(request).await?;
    let status = response.status();
    let body = Limited::new(response.into_body(), MOST).collect().await;
    let body =
        body.map_err(|error| anyhow::anyhow!("read the answer: {}", chain(error.as_ref())))?.to_bytes();
    Ok((status, body))
}
