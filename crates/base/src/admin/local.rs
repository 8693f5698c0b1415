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

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;
    use std::os::unix::process::CommandExt;
    use std::path::Path;
    use std::process::Command;

    use super::*;

    /// Variable with the socket, for the process of another user.
    const ASK: &str = "PEERPOD_TEST_ASK";
    const NOBODY: u32 = 65534;

    fn ask(socket: &Path, request: &str) -> String {
        let mut stream = UnixStream::connect(socket).unwrap();
        // A refused connection may be closed before the request is written.
        write!(stream, "{request} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").ok();
        let mut text = String::new();
        stream.read_to_string(&mut text).ok();
        text
    }

    #[test]
    fn asks_as_another_user() {
        if let Some(socket) = std::env::var_os(ASK) {
            println!("answer: {:?}", ask(Path::new(&socket), "GET /healthz"));
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_program_answers_its_own_paths_and_no_other_user() {
        let folder = std::env::temp_dir().join(format!("peerpod-admin-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let socket = folder.join("admin.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        std::fs::set_permissions(&folder, PermissionsExt::from_mode(0o755)).unwrap();
        std::fs::set_permissions(&socket, PermissionsExt::from_mode(0o666)).unwrap();
        let own = |path: String| async move {
            match &*path {
                "/v1/known" => Answer::Json(serde_json::json!({"known": true})),
                "/v1/broken" => Answer::Failed("it is broken".to_owned()),
                _ => Answer::NotFound(format!("no {path}")),
            }
        };
        serve(listener, Arc::default(), Ready::default(), own);
        for (request, status, part) in [
            ("GET /v1/known", 200, "{\"known\":true}"),
            ("GET /v1/broken", 500, "it is broken"),
            ("GET /v1/x", 404, "no /v1/x"),
            ("POST /v1/known", 405, "only GET"),
            ("GET /healthz", 200, "ok"),
            ("GET /readyz", 200, "\"ready\":true"),
        ] {
            let answer = ask(&socket, request);
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status}")) && answer.contains(part),
                "{request}: {answer}"
            );
        }
        let mut command = Command::new("/proc/self/exe");
        command.args(["--exact", "admin::local::tests::asks_as_another_user", "--nocapture"]);
        let output = command.env(ASK, &socket).uid(NOBODY).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("answer: \"\""), "{text}{}", String::from_utf8_lossy(&output.stderr));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
