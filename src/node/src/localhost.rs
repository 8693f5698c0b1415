//! Carries connections to a pod's `localhost` into its VM. Opens the listeners in the pod's namespace on the node,
//! passes them to the relay, and installs the rules that redirect connections to them
//! ([`peerpod_podnet::localhost`]). Nothing is recorded: the relay reports the listeners that it holds, and the
//! rules can be installed again at any time.

use nix::errno::Errno;
use peerpod_base::fd_handoff::LOCALHOST_LISTENERS;
use peerpod_common::blocking::blocking;
use peerpod_podnet::localhost;
use peerpod_podnet::netns::Netns;
use tokio::task::spawn_blocking;
use tracing::warn;

use crate::relay_client::RelayClient;
use crate::sandbox::ports::NetworkError;
use crate::spec::SandboxId;

const KIND: &str = "localhost";

/// Whether this node carries the pods' localhost connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Localhost {
    works: bool,
}

impl Localhost {
    /// Probes the kernel; logs one warning if support is missing.
    pub(crate) async fn new(wanted: bool) -> Localhost {
        if !wanted {
            return Localhost { works: false };
        }
        let (error, remedy) = match spawn_blocking(localhost::probe).await {
            Ok(Ok(())) => return Localhost { works: true },
            Ok(Err(error)) => (error.to_string(), remedy(&error)),
            Err(error) => (error.to_string(), ""),
        };
        warn!(error, remedy, "connections to pods' localhost (port-forward) do not reach the VMs");
        Localhost { works: false }
    }

    /// Carries connections to the pod's localhost into its VM. The relay must have the sandbox. Repeatable.
    pub(crate) async fn carry(
        self,
        netns: &Netns,
        id: &SandboxId,
        relay: &RelayClient,
    ) -> Result<(), NetworkError> {
        if !self.works {
            return Ok(());
        }
        let held = relay.held(KIND, Some(id)).await.map_err(NetworkError::transient)?;
        let held = held.and_then(|ports| serde_json::from_value(ports).ok());
        let ports = match held {
            Some(ports) => ports,
            None => {
                let inside = netns.clone();
                let open = move || localhost::open(&inside).map_err(NetworkError::from);
                let (ports, listeners) = blocking(open).await?;
                let detail = serde_json::to_value(ports).map_err(NetworkError::transient)?;
                let named = LOCALHOST_LISTENERS.into_iter().zip(listeners);
                let listeners =
                    named.filter_map(|(name, listener)| Some((name.to_owned(), listener?))).collect();
                let passed = relay.hand_off(KIND, Some(id), detail, listeners).await;
                passed.map_err(NetworkError::transient)?;
                ports
            }
        };
        // Only after the listeners exist: a rule without a listener refuses connections.
        let inside = netns.clone();
        blocking(move || Ok(localhost::redirect(&inside, ports)?)).await
    }
}

/// Remedy for a kernel that cannot carry localhost, as far as its errno identifies the cause.
fn remedy(error: &peerpod_podnet::Error) -> &'static str {
    match error.errno() {
        Some(Errno::ENOENT | Errno::EOPNOTSUPP | Errno::EPROTONOSUPPORT) => {
            "load the kernel modules nft_tproxy and nft_socket, or set tunnel.localhost: false"
        }
        Some(Errno::EPERM | Errno::EACCES) => {
            "give peerpod-node the capabilities NET_ADMIN and SYS_ADMIN, or set tunnel.localhost: false"
        }
        _ => "set tunnel.localhost: false to disable it",
    }
}
