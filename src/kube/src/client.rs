//! A client for the API server, and a deadline for each of its calls: a server that took a request and never answers must
//! not hold anybody up. Its errors name the server's address and every cause ([`explain`]).

use std::{future::Future, path::Path, time::Duration};

use kube::{
    Client, Config,
    client::ClientBuilder,
    config::{KubeConfigOptions, Kubeconfig},
    core::Status,
};
use peerpod_base::chain::chain;
use tokio::time::timeout;
use tower::{BoxError, util::MapErrLayer};

/// How long the TCP connection to the API server may take.
const CONNECT: Duration = Duration::from_secs(5);

/// How long a connection on which something is awaited may be silent: a watch has a bookmark every minute or so, and an
/// API server that died without a word (its node was cut off) would otherwise be listened to for ever.
const SILENCE: Duration = Duration::from_secs(180);

/// How long one answer may take. Watches are longer: they go without [`within`].
pub const ANSWER: Duration = Duration::from_secs(15);

/// Why there is no answer of the API server.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kubeconfig, or the service account in the pod, cannot be used.
    #[error("the API server's address and credentials: {0}")]
    Config(String),
    /// The API server refused, or could not be reached.
    #[error("{what}: {said}", said = explain(error))]
    Api {
        /// What was attempted, on what.
        what: String,
        /// Why it failed.
        error: kube::Error,
    },
    /// Nothing came back in time.
    #[error("{what}: the API server did not answer within {after:?}")]
    Late {
        /// What was attempted, on what.
        what: String,
        /// The deadline.
        after: Duration,
    },
}

impl Error {
    /// The HTTP status that the API server refused with.
    pub fn status(&self) -> Option<u16> {
        match self {
            Error::Api { error: kube::Error::Api(status), .. } => Some(status.code),
            _ => None,
        }
    }

    /// Whether the object is not there. Where its kind is not there either, nothing is known of it.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Error::Api { error: kube::Error::Api(status), .. } if status.code == 404 && !is_unknown_kind(status))
    }

    /// Whether somebody else was first: it exists already, or is another one by now.
    pub fn is_conflict(&self) -> bool {
        self.status() == Some(409)
    }
}

/// A request that got no answer.
#[derive(Debug, thiserror::Error)]
#[error("the API server at {address}: {}", chain(source.as_ref()))]
struct Unanswered {
    address: String,
    source: BoxError,
}

/// The text of an error of kube's client or runtime: every cause once, the API server's own words without their frame.
pub fn explain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut at = Some(error);
    while let Some(one) = at {
        match one.downcast_ref::<kube::Error>() {
            Some(kube::Error::Api(status)) => return said(status),
            Some(kube::Error::Service(behind)) => return chain(behind.as_ref()),
            _ => at = one.source(),
        }
    }
    chain(error)
}

fn said(status: &Status) -> String {
    if is_unknown_kind(status) {
        return "the API server does not know this kind of object; see whether Peerpod's CustomResourceDefinitions (peerpods, \
                peerpodconfigs and peerpodvolumes.confidentialcontainers.org) are installed; this command installs them: \
                peerpod-cluster crds | kubectl apply --server-side -f -"
            .to_owned();
    }
    let Status { message, reason, code, .. } = status;
    if message.is_empty() { format!("{reason} ({code})") } else { format!("{message} ({code} {reason})") }
}

/// For a path that it does not serve the API server answers in plain text; for a missing object with a `NotFound`.
fn is_unknown_kind(status: &Status) -> bool {
    status.code == 404 && status.reason != "NotFound" && status.message.starts_with("404 page not found")
}

/// A client by this kubeconfig; without one as a pod's service account, or as `KUBECONFIG` and `~/.kube/config` say.
/// Nothing is asked of the server yet.
///
/// # Errors
/// [`Error::Config`] when no address or no credentials can be read.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<Client, Error> {
    let unusable = |error: &dyn std::error::Error| Error::Config(chain(error));
    let mut config = match kubeconfig {
        Some(path) => {
            let read = Kubeconfig::read_from(path).map_err(|error| unusable(&error))?;
            Config::from_custom_kubeconfig(read, &KubeConfigOptions::default())
                .await
                .map_err(|error| unusable(&error))?
        }
        None => Config::infer().await.map_err(|error| unusable(&error))?,
    };
    config.connect_timeout = Some(CONNECT);
    config.read_timeout = Some(SILENCE);
    // The time that a pooled connection lay idle is no silence.
    config.reset_reader_on_write = true;
    let address = config.cluster_url.to_string();
    let builder = ClientBuilder::try_from(config).map_err(|error| unusable(&error))?;
    Ok(builder.with_layer(&MapErrLayer::new(move |error| unanswered(&address, error))).build())
}

/// Adds the server's address, except to an error of the client itself (about credentials, for instance).
fn unanswered(address: &str, source: BoxError) -> BoxError {
    if source.is::<kube::Error>() {
        source
    } else {
        Unanswered { address: address.to_owned(), source }.into()
    }
}

/// One call with its deadline; `what` says what was attempted, on what.
///
/// # Errors
/// [`Error::Api`] or [`Error::Late`].
pub async fn within<T>(
    what: impl Into<String>,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Error> {
    match timeout(ANSWER, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(Error::Api { what: what.into(), error }),
        Err(_) => Err(Error::Late { what: what.into(), after: ANSWER }),
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[tokio::test]
    async fn a_server_that_is_not_there_is_named_with_the_cause() {
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let folder = std::env::temp_dir().join(format!("peerpod-kube-client-{}", std::process::id()));
        let kubeconfig = format!(
            "{{apiVersion: v1, kind: Config, current-context: c, clusters: [{{name: c, cluster: {{server: 'http://{closed}'}}}}], \
             users: [{{name: c, user: {{token: t}}}}], contexts: [{{name: c, context: {{cluster: c, user: c}}}}]}}"
        );
        std::fs::write(&folder, kubeconfig).unwrap();
        let client = connect(Some(&folder)).await.unwrap();
        std::fs::remove_file(&folder).unwrap();
        let pods: kube::Api<k8s_openapi::api::core::v1::Pod> = kube::Api::all(client);
        let error = within("list Pods", pods.list(&kube::api::ListParams::default())).await.unwrap_err();
        let text = error.to_string();
        assert!(text.starts_with(&format!("list Pods: the API server at http://{closed}/: ")), "{text}");
        assert!(text.contains("Connection refused"), "{text}");
        assert_eq!(text.matches("Connection refused").count(), 1, "{text}");
        // As the runtime hands it on.
        let watched = kube::runtime::watcher(pods, kube::runtime::watcher::Config::default());
        let errors = futures_util::StreamExt::filter_map(watched, |event| std::future::ready(event.err()));
        let error = futures_util::StreamExt::next(&mut std::pin::pin!(errors)).await.unwrap();
        assert!(explain(&error).starts_with(&format!("the API server at http://{closed}/: ")), "{error}");
        assert!(error.to_string().contains("Connection refused"), "shown by its own text, too: {error}");
    }

    #[test]
    fn a_kind_that_is_not_installed_is_no_missing_object() {
        let api = |message: &str, reason: &str| Error::Api {
            what: "read PeerPod a/b".to_owned(),
            error: kube::Error::Api(Box::new(Status::failure(message, reason).with_code(404))),
        };
        let missing = api("404 page not found", "Failed to parse error data");
        assert!(!missing.is_not_found());
        let text = missing.to_string();
        assert!(text.starts_with("read PeerPod a/b: the API server does not know this kind"), "{text}");
        assert!(text.contains("peerpod-cluster crds | kubectl apply --server-side -f -"), "{text}");
        let gone = api("peerpods \"b\" not found", "NotFound");
        assert!(gone.is_not_found());
        assert_eq!(gone.to_string(), "read PeerPod a/b: peerpods \"b\" not found (404 NotFound)");
    }
}
