//! Answers questions about this node on its admin socket, for `peerpod` on the same machine. Read-only. The answers
//! contain no ticket, no user-data and no key.
//!
//! | GET | Answer |
//! |---|---|
//! | `/v1/node` | [`NodeStatus`] |
//! | `/v1/sandboxes` | [`Sandbox`] of each that is not a tombstone |
//! | `/v1/sandboxes/ID` | [`Detail`], also of a tombstone |
//! | `/v1/sandboxes/ID/console` | the end of the VM's console, as text |
//! | `/v1/orphans` | [`Orphan`] of each VM without a record |

mod answers;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use anyhow::Context;
use peerpod_base::admin::Ready;
use peerpod_base::admin::local::{self, Answer};
use peerpod_common::unix_socket::{self, Bound};
use prometheus_client::registry::Registry;
use serde::Serialize;

pub use crate::ledger::Stage;
pub use answers::{Detail, NetworkDetail, NodeStatus, Orphan, RelayStatus, Sandbox, VmDetail};

use crate::config::NodeConfig;
use crate::preflight::PreflightFacts;
use crate::relay_client::RelayClient;
use crate::sandbox::phase::Phase;
use crate::sandbox::ports::Guest;
use crate::sandbox::{Orphans, Sandboxes};
use crate::spec::SandboxId;

/// Name of the socket in `paths.run-dir`.
pub const SOCKET: &str = "node-admin.sock";

/// Commit that this program was built from, if the build set `PEERPOD_COMMIT`.
pub const COMMIT: Option<&str> = option_env!("PEERPOD_COMMIT");

/// Facts about the node that do not change.
#[derive(Clone, Debug)]
pub(crate) struct AboutNode {
    node: String,
    cluster: String,
    installation: String,
    provider: String,
    relay_admin: SocketAddr,
    facts: PreflightFacts,
}

impl AboutNode {
    pub(crate) fn new(
        config: &NodeConfig,
        provider: &str,
        installation: &str,
        facts: PreflightFacts,
    ) -> AboutNode {
        AboutNode {
            node: config.sandbox.node_name.clone(),
            cluster: config.sandbox.cluster_id.clone(),
            installation: installation.to_owned(),
            provider: provider.to_owned(),
            relay_admin: config.relay_admin,
            facts,
        }
    }
}

/// The parts of the node that answer. Clones share them.
#[derive(Clone)]
pub(crate) struct Questions(Arc<Inner>);

struct Inner {
    about: AboutNode,
    sandboxes: Sandboxes,
    relay: RelayClient,
    ready: Ready,
    orphans: Orphans,
}

impl Questions {
    pub(crate) fn new(
        about: AboutNode,
        sandboxes: Sandboxes,
        relay: RelayClient,
        ready: Ready,
        orphans: Orphans,
    ) -> Questions {
        Questions(Arc::new(Inner { about, sandboxes, relay, ready, orphans }))
    }

    /// Binds the socket in this folder for the owner alone, and serves it until the runtime ends.
    pub(crate) fn serve(self, run_dir: &Path, registry: Arc<Registry>) -> anyhow::Result<Bound> {
        let path = run_dir.join(SOCKET);
        let (listener, bound) =
            unix_socket::bind(&path).with_context(|| format!("listen on {}", path.display()))?;
        let ready = self.0.ready.clone();
        local::serve(listener, registry, ready, move |path| {
            let questions = self.clone();
            async move { questions.answer(&path).await }
        });
        Ok(bound)
    }

    async fn answer(&self, path: &str) -> Answer {
        let path: Vec<&str> = path.trim_start_matches("/v1/").split('/').collect();
        match path[..] {
            ["node"] => json(self.status()),
            ["sandboxes"] => json(self.0.sandboxes.views().iter().map(Sandbox::of).collect::<Vec<_>>()),
            ["sandboxes", id] => self.of_sandbox(id, false).await,
            ["sandboxes", id, "console"] => self.of_sandbox(id, true).await,
            ["orphans"] => self.orphans().await,
            _ => Answer::NotFound("this version of the node has no such path".to_owned()),
        }
    }

    fn status(&self) -> NodeStatus {
        let Inner { about, sandboxes, relay, ready, .. } = &*self.0;
        let waiting = ready.waiting();
        let mut status = NodeStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit: COMMIT.map(str::to_owned),
            providers: peerpod_providers::kinds().into_iter().map(str::to_owned).collect(),
            node: about.node.clone(),
            cluster: about.cluster.clone(),
            installation: about.installation.clone(),
            provider: about.provider.clone(),
            preflight: about.facts.get(),
            is_ready: waiting.is_empty(),
            waiting,
            warnings: ready.warnings(),
            relay: RelayStatus {
                is_connected: relay.connection().borrow().is_some(),
                listen: relay.listen(),
                admin: about.relay_admin,
            },
            sandboxes: Default::default(),
        };
        for view in sandboxes.views() {
            *status.sandboxes.entry(view.phase.name().to_owned()).or_default() += 1;
        }
        status
    }

    async fn of_sandbox(&self, id: &str, console: bool) -> Answer {
        let unknown = || Answer::NotFound(format!("this node has no sandbox {id}"));
        let Ok(id) = id.parse::<SandboxId>() else { return unknown() };
        let ports = &self.0.sandboxes.0.ports;
        let record = match ports.store.recall(&id).await {
            Ok(Some(record)) => record,
            Ok(None) => return unknown(),
            Err(error) => return Answer::Failed(error.to_string()),
        };
        if !console {
            let guest = match record.phase {
                Phase::Gone => Guest::default(),
                _ => ports.relay.guest(&id).borrow().clone(),
            };
            let faults = self.0.sandboxes.view(&id).map(|view| view.borrow().faults.clone());
            return json(Detail::of(&record, &guest, &faults.unwrap_or_default()));
        }
        let Some(vm) = record.phase.vm() else {
            return Answer::NotFound(format!("sandbox {id} has no VM; its phase is {}", record.phase.name()));
        };
        match ports.cloud.console(vm).await {
            Some(text) => Answer::Json(text.into()),
            None => Answer::Failed(format!(
                "provider {} gives no console of VM {vm}; its settings or its API may have one",
                self.0.about.provider
            )),
        }
    }

    async fn orphans(&self) -> Answer {
        let Inner { sandboxes, orphans, .. } = &*self.0;
        let owned = match sandboxes.0.ports.cloud.owned().await {
            Ok(owned) => owned,
            Err(error) => return Answer::Failed(format!("list the provider's VMs: {error}")),
        };
        let found = orphans.unclaimed(&owned, sandboxes).into_iter().map(|vm| Orphan {
            vm: vm.id.to_string(),
            name: vm.name.clone(),
            state: vm.state,
            created_ms: vm
                .created
                .and_then(|at| at.duration_since(UNIX_EPOCH).ok())
                .map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
        });
        json(found.collect::<Vec<_>>())
    }
}

fn json(value: impl Serialize) -> Answer {
    serde_json::to_value(value).map_or_else(|error| Answer::Failed(error.to_string()), Answer::Json)
}
