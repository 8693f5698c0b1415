//! A client for the API server, and a deadline for each of its calls: a server that took a request and never answers must
//! not hold anybody up.

use std::{future::Future, path::Path, time::Duration};

use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use tokio::time::timeout;

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
    #[error("{what}: {error}")]
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

    /// Whether the object is not there.
    pub fn is_not_found(&self) -> bool {
        self.status() == Some(404)
    }

    /// Whether somebody else was first: it exists already, or is another one by now.
    pub fn is_conflict(&self) -> bool {
        self.status() == Some(409)
    }
}

/// A client by this kubeconfig; without one as a pod's service account, or as `KUBECONFIG` and `~/.kube/config` say.
/// Nothing is asked of the server yet.
///
/// # Errors
/// [`Error::Config`] when no address or no credentials can be read.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<Client, Error> {
    let unusable = |error: &dyn std::fmt::Display| Error::Config(error.to_string());
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
    Client::try_from(config).map_err(|error| unusable(&error))
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
