//! `peerpod status`: whether pods can start, on the node or in the cluster. Read-only.

mod cluster;
mod node;
mod relays;

pub(crate) use node::of_relay;

use std::process::ExitCode;
use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::output::{Colour, Output, paint};
use crate::source::{Source, SourceArgs};

/// Interval of the questions of `--wait`.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Arguments of `peerpod status`.
#[derive(Debug, clap::Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    from: SourceArgs,
    #[command(flatten)]
    output: Output,
    /// Waits until pods can start
    #[arg(long)]
    wait: bool,
    /// Longest time of --wait
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = crate::duration)]
    timeout: Duration,
}

/// State of the node or of the cluster.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Status {
    Node(Box<node::NodeAndRelay>),
    Cluster(cluster::ClusterStatus),
}

impl Status {
    fn is_ready(&self) -> bool {
        match self {
            Status::Node(node) => node.is_ready(),
            Status::Cluster(cluster) => cluster.is_ready(),
        }
    }

    fn text(&self, wide: bool) -> String {
        match self {
            Status::Node(node) => node.text(),
            Status::Cluster(cluster) => cluster.text(wide),
        }
    }
}

/// Prints the state. Exit code 1 if pods cannot start.
pub(crate) async fn run(args: StatusArgs) -> anyhow::Result<ExitCode> {
    let source = args.from.open().await?;
    let deadline = Instant::now() + args.timeout;
    let status = loop {
        let asked = match &source {
            Source::Node(node) => node::ask(node).await.map(|status| Status::Node(Box::new(status))),
            Source::Cluster(cluster) => cluster::ask(cluster).await.map(Status::Cluster),
        };
        let is_over = !args.wait || Instant::now() >= deadline;
        match asked {
            Ok(status) if is_over || status.is_ready() => break status,
            Err(error) if is_over => return Err(error),
            _ => sleep(ASK_AGAIN).await,
        }
    };
    args.output.print(&status, |wide| status.text(wide))?;
    Ok(if status.is_ready() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The word for a state, coloured.
fn mark(is_good: bool, good: &str, bad: &str) -> String {
    if is_good { paint(Colour::Green, good) } else { paint(Colour::Red, bad) }
}
