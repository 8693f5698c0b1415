//! The pod's `localhost`: opens the sockets in the node's side of a pod's namespace, hands them to the relay, and makes
//! the rules that lead connections there ([`peerpod_link::net::localhost`]). Nothing of it is recorded: the relay says
//! what it holds, and the rules can always be made again.

use peerpod_link::net::{localhost, netns::Netns};
use tokio::task::spawn_blocking;
use tracing::warn;

use crate::{relay_client::RelayClient, sandbox::effects::NetworkError, spec::SandboxId};

/// The word for it between node and relay.
const KIND: &str = "localhost";

/// Whether and how it is done on this node.
#[derive(Clone, Copy, Debug)]
pub struct Localhost {
    works: bool,
}

impl Localhost {
    /// Finds out whether the kernel can; says so once if not.
    pub async fn new(wanted: bool) -> Localhost {
        if !wanted {
            return Localhost { works: false };
        }
        let tried = spawn_blocking(localhost::probe).await.map_err(|error| error.to_string());
        match tried.and_then(|tried| tried.map_err(|error| error.to_string())) {
            Ok(()) => Localhost { works: true },
            Err(error) => {
                warn!(
                    %error,
                    "connections to pods' localhost (port-forward) are not carried; load the kernel's modules nft_tproxy, \
                     nft_socket, nft_log and nfnetlink_log, or set tunnel.localhost: false"
                );
                Localhost { works: false }
            }
        }
    }

    /// Has connections to the pod's localhost carried into its VM. The sandbox must be put to the relay before. Again
    /// after a restart of either of us; what is open goes on.
    ///
    /// # Errors
    /// The relay or the namespace is away; trying again helps.
    pub async fn carry(self, netns: &Netns, id: &SandboxId, relay: &RelayClient) -> Result<(), NetworkError> {
        if !self.works {
            return Ok(());
        }
        let failed = |text: String| NetworkError { text, permanent: false };
        let held = relay.held(KIND, Some(id)).await.map_err(|error| failed(error.text))?;
        let held = held.and_then(|way| serde_json::from_value(way).ok());
        let way = match held {
            Some(way) => way,
            None => {
                let inside = netns.clone();
                let (way, sockets) = blocking(move || localhost::open(&inside)).await?;
                let detail = serde_json::to_value(way).map_err(|error| failed(error.to_string()))?;
                relay.hand_in(KIND, Some(id), detail, sockets).await.map_err(|error| failed(error.text))?;
                way
            }
        };
        // Only now: a rule without a listener behind it refuses.
        let inside = netns.clone();
        blocking(move || localhost::redirect(&inside, &way)).await
    }

    /// Takes the rules away, also those of a node that was configured otherwise.
    ///
    /// # Errors
    /// The kernel's.
    pub async fn remove(self, netns: &Netns) -> Result<(), NetworkError> {
        let inside = netns.clone();
        blocking(move || localhost::remove(&inside)).await
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, peerpod_link::net::Error> + Send + 'static,
) -> Result<T, NetworkError> {
    match spawn_blocking(work).await {
        Ok(done) => done.map_err(NetworkError::from),
        Err(error) => Err(NetworkError { text: format!("a step ended early: {error}"), permanent: false }),
    }
}
