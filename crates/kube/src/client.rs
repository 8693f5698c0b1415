//! Builds a client for the API server and gives each call a deadline. A server that accepts a request and never answers
//! therefore delays no caller for ever. Errors name the server's address and every cause ([`explain`]).

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::core::v1::Namespace;
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::Status;
use kube::{Api, Client, Config};
use peerpod_base::chain::chain;
use tokio::time::timeout;
use tower::BoxError;
use tower::util::MapErrLayer;

/// Limit for the TCP connection to the API server.
const CONNECT: Duration = Duration::from_secs(5);

/// Limit for the silence of a connection with a pending answer. A watch receives a bookmark about every minute. Without
/// the limit, a watch would wait for ever when the API server's node is cut off.
const SILENCE: Duration = Duration::from_secs(180);

/// Deadline of one call. Watches last longer and do not use [`within`].
pub const ANSWER: Duration = Duration::from_secs(15);

/// Reasons why the API server gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kubeconfig, or the service account in the pod, cannot be used.
    #[error("the API server's address and credentials: {0}")]
    Config(String),
    /// The API server refused, or could not be reached.
    #[error("{what}: {said}", said = explain(error))]
    Api {
        /// The attempted operation and its object.
        what: String,
        /// The cause.
        error: kube::Error,
    },
    /// No answer to this operation arrived before the deadline.
    #[error("{0}: the API server did not answer within {ANSWER:?}")]
    Late(String),
}

impl Error {
    /// Returns the HTTP status of the API server's refusal.
    pub fn status(&self) -> Option<u16> {
        match self {
            Error::Api { error: kube::Error::Api(status), .. } => Some(status.code),
            _ => None,
        }
    }

    /// Whether the object does not exist. False where its kind is not installed either: the error then proves nothing
    /// about the object.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Error::Api { error: kube::Error::Api(status), .. } if status.code == 404 && !is_unknown_kind(status))
    }

    /// Whether the API server does not know the kind of the object: no object of the kind exists.
    pub fn is_unknown_kind(&self) -> bool {
        matches!(self, Error::Api { error: kube::Error::Api(status), .. } if is_unknown_kind(status))
    }

    /// Whether another writer was first: the object exists already, or has changed since it was read.
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

/// Returns the UID of the namespace `kube-system`, which is as old as its cluster: no other cluster has it.
///
/// # Errors
/// The API server did not answer, or the right `get` on this namespace is missing.
pub async fn cluster_uid(client: &Client) -> Result<String, Error> {
    let namespaces: Api<Namespace> = Api::all(client.clone());
    let found =
        within("read the UID of namespace kube-system", namespaces.get_metadata("kube-system")).await?;
    // Every stored object has a UID.
    Ok(found.metadata.uid.unwrap_or_default())
}

/// Returns the text of an error of kube's client or runtime: every cause once, and the API server's message without the
/// wrapping that kube adds.
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

/// The API server answers in plain text for a path that it does not serve, and with reason `NotFound` for a missing
/// object.
fn is_unknown_kind(status: &Status) -> bool {
    status.code == 404 && status.reason != "NotFound" && status.message.starts_with("404 page not found")
}

/// Builds a client from this kubeconfig, or else from the pod's service account, `KUBECONFIG` or `~/.kube/config`.
/// Sends no request.
///
/// # Errors
/// [`Error::Config`] when no address or no credentials can be read.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<Client, Error> {
    build(kubeconfig, true).await
}

/// Builds the same client without repeats: it returns a refusal for now (429, as of a PodDisruptionBudget) at once.
///
/// # Errors
/// As [`connect`].
pub async fn connect_without_repeats(kubeconfig: Option<&Path>) -> Result<Client, Error> {
    build(kubeconfig, false).await
}

async fn build(kubeconfig: Option<&Path>, repeats: bool) -> Result<Client, Error> {
    let unusable = |error: BoxError| Error::Config(chain(error.as_ref()));
    let mut config = read(kubeconfig).await.map_err(unusable)?;
    config.default_retry = repeats;
    config.connect_timeout = Some(CONNECT);
    config.read_timeout = Some(SILENCE);
    // The idle time of a pooled connection does not count as silence.
    config.reset_reader_on_write = true;
    let address = config.cluster_url.to_string();
    let builder = ClientBuilder::try_from(config).map_err(|error| unusable(error.into()))?;
    Ok(builder.with_layer(&MapErrLayer::new(move |error| unanswered(&address, error))).build())
}

async fn read(kubeconfig: Option<&Path>) -> Result<Config, BoxError> {
    let Some(path) = kubeconfig else { return Ok(Config::infer().await?) };
    let read = Kubeconfig::read_from(path)?;
    Ok(Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await?)
}

/// Adds the server's address to an error, except to an error of the client itself (about credentials, for instance).
fn unanswered(address: &str, source: BoxError) -> BoxError {
    if source.is::<kube::Error>() {
        source
    } else {
        Unanswered { address: address.to_owned(), source }.into()
    }
}

/// Runs one call with its deadline. The first argument names the operation and its object.
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
        Err(_) => Err(Error::Late(what.into())),
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
        // The same error through kube's runtime.
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
