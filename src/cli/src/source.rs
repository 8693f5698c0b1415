//! The origin of facts about peer pods: the node beside this program, by its admin socket, or a cluster, by a
//! kubeconfig.

mod cluster;
mod kubectl;
mod node;
mod vm;

use std::path::{Path, PathBuf};

use anyhow::Context;

pub(crate) use cluster::{Cluster, RESOURCE};
pub(crate) use kubectl::NO_DAEMON;
pub(crate) use node::{Node, http};
pub(crate) use vm::{Vm, since};

/// The node's admin socket with the default of `paths.run-dir`.
const SOCKET: &str = "/run/peerpod/node-admin.sock";

/// Options that name the source.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct SourceArgs {
    /// The node's admin socket [default: /run/peerpod/node-admin.sock if it exists, or else the cluster]
    #[arg(long, value_name = "PATH", conflicts_with = "kubeconfig")]
    socket: Option<PathBuf>,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// The option that names the cluster.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct ClusterArgs {
    /// The kubeconfig of the cluster [default: KUBECONFIG, ~/.kube/config, or the pod's service account]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

impl ClusterArgs {
    /// Makes a client for the cluster. Sends no request.
    ///
    /// # Errors
    /// No kubeconfig can be read.
    pub(crate) async fn open(&self) -> Result<Cluster, peerpod_kube::client::Error> {
        let client = peerpod_kube::client::connect(self.kubeconfig.as_deref()).await?;
        Ok(Cluster::new(client, self.kubeconfig.clone()))
    }

    /// Makes a client that returns a refusal for now at once. Sends no request.
    ///
    /// # Errors
    /// As [`ClusterArgs::open`].
    pub(crate) async fn open_without_repeats(&self) -> Result<Cluster, peerpod_kube::client::Error> {
        let client = peerpod_kube::client::connect_without_repeats(self.kubeconfig.as_deref()).await?;
        Ok(Cluster::new(client, self.kubeconfig.clone()))
    }
}

/// An opened source.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Node(Node),
    Cluster(Cluster),
}

impl SourceArgs {
    /// Opens the source. Sends no request.
    ///
    /// # Errors
    /// There is no socket, and no kubeconfig can be read.
    pub(crate) async fn open(&self) -> anyhow::Result<Source> {
        if let Some(socket) = self.node_socket() {
            return Ok(Source::Node(Node::new(socket)));
        }
        let cluster = self.cluster.open().await.with_context(|| {
            format!(
                "no node serves {SOCKET}, and no cluster is known; name one with --socket or --kubeconfig"
            )
        })?;
        Ok(Source::Cluster(cluster))
    }

    fn node_socket(&self) -> Option<PathBuf> {
        if self.cluster.kubeconfig.is_some()
            || std::env::var_os("KUBECONFIG").is_some() && self.socket.is_none()
        {
            return None;
        }
        self.socket.clone().or_else(|| Some(PathBuf::from(SOCKET)).filter(|path| Path::exists(path)))
    }
}

/// Returns the text at a place of a JSON value.
pub(crate) fn text(value: &serde_json::Value, pointer: &str) -> Option<String> {
    value.pointer(pointer)?.as_str().map(str::to_owned)
}
