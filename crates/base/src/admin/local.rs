//! Serves the admin port's paths and a program's own ones on a Unix socket, for root and the program's own user.

use std::future::Future;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use nix::unistd::geteuid;
use peerpod_common::accept::Acceptor;
use prometheus_client::registry::Registry;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tracing::warn;

use super::{Ready, connection, respond, response};

/// Limit of open connections; more wait in the kernel's queue.
const CONNECTIONS: usize = 8;

/// Answer of a program to one of its own paths.
#[derive(Debug)]
pub enum Answer {
    /// The answer as JSON.
    Json(serde_json::Value),
    /// The object of the request does not exist; the text names it.
    NotFound(String),
    /// The request failed; the text names the cause.
    Failed(String),
}

/// Serves a bound socket until the runtime ends. `own` answers GET of the paths that begin with `/v1/`.
pub fn serve<O, F>(listener: UnixListener, registry: Arc<Registry>, ready: Ready, own: O)
where
    O: Fn(String) -> F + Clone + Send + Sync + 'static,
    F: Future<Output = Answer> + Send + 'static,
{
    tokio::spawn(async move {
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        let mut acceptor = Acceptor::new("admin socket");
        loop {
            // Fails only for a closed semaphore, and this one is never closed.
            let Ok(place) = places.clone().acquire_owned().await else { return };
            let (stream, _) = acceptor.next(|| listener.accept()).await;
            if !is_permitted(&stream) {
                warn!("connection to the admin socket refused: its process is neither root nor of this user");
                continue;
            }
            let (registry, ready, own) = (registry.clone(), ready.clone(), own.clone());
            tokio::spawn(async move {
                let answer = |request: Request<Incoming>| {
                    let (registry, ready, own) = (&registry, &ready, &own);
                    async move {
                        let path = request.uri().path();
                        if request.method() != Method::GET || !path.starts_with("/v1/") {
                            return respond(&request, registry, ready);
                        }
                        let (status, value) = match own(path.to_owned()).await {
                            Answer::Json(value) => (StatusCode::OK, value),
                            Answer::NotFound(why) => (StatusCode::NOT_FOUND, why.into()),
                            Answer::Failed(why) => (StatusCode::INTERNAL_SERVER_ERROR, why.into()),
                        };
                        response(status, "application/json", format!("{value}\n"))
                    }
                };
                connection(stream, answer).await;
                drop(place);
            });
        }
    });
}

/// Whether the process at the other end is root or has this process's user.
fn is_permitted(stream: &UnixStream) -> bool {
    stream.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == geteuid().as_raw())
}
