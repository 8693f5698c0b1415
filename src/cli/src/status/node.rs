//! State of one node: readiness of node and relay, versions, provider, sandboxes by phase.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context;
use peerpod_node::admin::NodeStatus;
use serde::{Deserialize, Serialize};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::mark;
use crate::output::{Colour, paint, safe};
use crate::source::{Node, http};

/// Time limit of each question to the relay.
const RELAY: Duration = Duration::from_secs(5);

/// State of a node.
#[derive(Debug, Serialize)]
pub(super) struct NodeAndRelay {
    node: NodeStatus,
    relay: Relay,
}

/// Answer of the relay's admin port.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Relay {
    ready: bool,
    #[serde(default)]
    waiting: BTreeMap<String, String>,
    /// Version of `peerpod-relay`, if its metrics name it.
    #[serde(default)]
    version: Option<String>,
    /// Reason why the relay did not answer.
    #[serde(default)]
    error: Option<String>,
}

pub(super) async fn ask(node: &Node) -> anyhow::Result<NodeAndRelay> {
    let status: NodeStatus = node.get("/v1/node").await?;
    let relay = match relay(status.relay.admin).await {
        Ok(relay) => relay,
        Err(error) => Relay { error: Some(format!("{error:#}")), ..Relay::default() },
    };
    Ok(NodeAndRelay { node: status, relay })
}

async fn relay(admin: SocketAddr) -> anyhow::Result<Relay> {
    let ready = of_relay(admin, "/readyz").await?;
    let mut relay: Relay = serde_json::from_slice(&ready).context("/readyz has another form")?;
    let metrics = of_relay(admin, "/metrics").await?;
    relay.version = version(&String::from_utf8_lossy(&metrics));
    Ok(relay)
}

/// Asks the relay's admin port for a path.
///
/// # Errors
/// The port does not answer.
pub(crate) async fn of_relay(admin: SocketAddr, path: &str) -> anyhow::Result<Vec<u8>> {
    let asked = timeout(RELAY, async {
        let (_, body) = http(TcpStream::connect(admin).await?, path).await?;
        anyhow::Ok(body.to_vec())
    });
    let asked = asked.await.unwrap_or_else(|_| Err(anyhow::anyhow!("no answer within {RELAY:?}")));
    asked.with_context(|| format!("ask the relay at {admin} for {path}"))
}

/// Finds the version in the metric `peerpod_build_info`.
fn version(metrics: &str) -> Option<String> {
    let line = metrics.lines().find(|line| line.starts_with("peerpod_build_info{"))?;
    let (_, rest) = line.split_once("version=\"")?;
    rest.split_once('"').map(|(version, _)| version.to_owned())
}

impl NodeAndRelay {
    pub(super) fn is_ready(&self) -> bool {
        self.node.is_ready && self.relay.ready
    }

    /// Whether the relay has another version than the node: an upgrade of the relay is still to be done.
    fn is_relay_behind(&self) -> bool {
        self.relay.version.as_ref().is_some_and(|version| *version != self.node.version)
    }

    pub(super) fn text(&self) -> String {
        let NodeAndRelay { node, relay } = self;
        let mut text = String::new();
        let mut line = |name: &str, value: String| writeln!(text, "{name:<12} {value}").ok();
        line("node", format!("{}: {}", node.node, mark(self.is_ready(), "ready", "not ready")));
        for (name, why) in &node.waiting {
            line("  waiting", format!("{name}: {}", safe(why)));
        }
        for (name, why) in &node.warnings {
            line("  warning", format!("{}: {}", paint(Colour::Yellow, name), safe(why)));
        }
        let commit = node.commit.as_deref().unwrap_or("commit unknown");
        line("version", format!("peerpod-node {} ({commit})", node.version));
        let version = relay.version.as_deref().unwrap_or("of unknown version");
        let behind =
            if self.is_relay_behind() { paint(Colour::Yellow, ", behind the node") } else { String::new() };
        line(
            "relay",
            format!("peerpod-relay {version}: {}{behind}", mark(relay.ready, "ready", "not ready")),
        );
        for (name, why) in &relay.waiting {
            line("  waiting", format!("{name}: {}", safe(why)));
        }
        if let Some(error) = &relay.error {
            line("  error", safe(error));
        }
        let listen = node.relay.listen.map_or("unknown".to_owned(), |address| address.to_string());
        line("guests dial", listen);
        line("provider", format!("{} (in this build: {})", node.provider, node.providers.join(", ")));
        line("cluster", format!("{}, installation {}", node.cluster, node.installation));
        let phases: Vec<String> =
            node.sandboxes.iter().map(|(phase, count)| format!("{count} {phase}")).collect();
        line("sandboxes", if phases.is_empty() { "none".to_owned() } else { phases.join(", ") });
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_that_of_the_metric() {
        let metrics = "# TYPE peerpod_build_info gauge\npeerpod_build_info{program=\"peerpod-relay\",version=\"1.2.3\"} 1\n";
        assert_eq!(version(metrics).as_deref(), Some("1.2.3"));
        assert_eq!(version("x{version=\"1\"} 1\n"), None);
    }
}
