//! Serves a cloud over HTTP/1.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::core::{Core, Delivery};
use crate::fake::{Answer, Fake, Request, pairs};

/// Largest accepted request.
const MAX_BODY: usize = 4 << 20;

/// State that both listeners of a cloud share.
#[derive(Debug)]
pub(crate) struct Shared<F> {
    pub(crate) core: Mutex<Core<F>>,
    /// Calls that took effect and are not answered yet.
    pub(crate) late: AtomicUsize,
}

/// Serves on this listener. A `faulty` one is the provider's, the other one is a witness's.
pub(crate) fn serve<F: Fake>(
    listener: std::net::TcpListener,
    shared: Arc<Shared<F>>,
    faulty: bool,
) -> anyhow::Result<(SocketAddr, JoinHandle<()>)> {
    let address = listener.local_addr()?;
    listen(listener, move |request| answer(shared.clone(), request, address, faulty))
}

/// Serves HTTP/1 on this listener until the task is aborted. An error of `answer` closes the connection.
///
/// # Errors
/// When the listener cannot be used. Needs a runtime.
pub fn listen<A>(
    listener: std::net::TcpListener,
    answer: impl Fn(hyper::Request<Incoming>) -> A + Clone + Send + Sync + 'static,
) -> anyhow::Result<(SocketAddr, JoinHandle<()>)>
where
    A: Future<Output = anyhow::Result<Response<Full<Bytes>>>> + Send + 'static,
{
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let address = listener.local_addr()?;
    let task = tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            stream.set_nodelay(true).ok();
            let service = service_fn(answer.clone());
            // The client may close and the cloud may reset a connection; neither is an error here.
            let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
            tokio::spawn(async move { connection.await.ok() });
        }
    });
    Ok((address, task))
}

/// Answers a request.
async fn answer<F: Fake>(
    shared: Arc<Shared<F>>,
    request: hyper::Request<Incoming>,
    address: SocketAddr,
    faulty: bool,
) -> anyhow::Result<Response<Full<Bytes>>> {
    let request = read(request).await?;
    // URLs in answers name the host that the caller used, as a cloud's own do.
    let endpoint = match request.header("host") {
        "" => format!("http://{address}"),
        host => format!("http://{host}"),
    };
    if !faulty {
        return write(shared.core.lock().plain(&request, &endpoint));
    }
    // The work runs in a task of its own: a cloud completes a call even if the client no longer waits.
    let work = tokio::spawn(async move {
        let (before, after) = shared.core.lock().faults.latency;
        tokio::time::sleep(before).await;
        let (answer, delivery) = shared.core.lock().faulty(&request, &endpoint);
        match delivery {
            Delivery::Broken => None,
            Delivery::After(time) => {
                shared.late.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(after + time).await;
                shared.late.fetch_sub(1, Ordering::Relaxed);
                Some(answer)
            }
        }
    });
    match work.await? {
        Some(answer) => write(answer),
        None => bail!("this connection breaks"),
    }
}

async fn read(request: hyper::Request<Incoming>) -> anyhow::Result<Request> {
    let (head, body) = request.into_parts();
    let body = Limited::new(body, MAX_BODY).collect().await;
    let body = body.map_err(|error| anyhow::anyhow!("{error}")).context("read a request")?.to_bytes();
    let header = |(name, value): (&hyper::header::HeaderName, &hyper::header::HeaderValue)| {
        (name.as_str().to_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned())
    };
    Ok(Request {
        method: head.method.as_str().to_owned(),
        path: head.uri.path().to_owned(),
        query: pairs(head.uri.query().unwrap_or_default()),
        headers: head.headers.iter().map(header).collect(),
        body,
    })
}

fn write(answer: Answer) -> anyhow::Result<Response<Full<Bytes>>> {
    let mut response = Response::builder().status(answer.status);
    for (name, value) in answer.headers {
        response = response.header(name, value);
    }
    Ok(response.body(Full::new(answer.body))?)
}
