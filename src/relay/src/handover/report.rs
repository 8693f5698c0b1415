//! Reports a failed handover to the node, which posts an Event on this relay's pod: the relay has no API server.

use std::path::Path;
use std::time::Duration;

use peerpod_proto::node::TakeOverFailedRequest;
use peerpod_proto::node_ttrpc::NodeClient;
use ttrpc::r#async::Client;
use ttrpc::context::with_duration;

/// Time limit of the report. If the node is away, only the log has the reason.
const PATIENCE: Duration = Duration::from_secs(2);

/// Reports the failure to the node that serves this run-dir.
pub(crate) async fn failed(run_dir: &Path, [namespace, name, uid]: [String; 3], why: &impl ToString) {
    let socket = format!("unix://{}", run_dir.join("node.sock").display());
    let request = TakeOverFailedRequest {
        namespace,
        name,
        uid,
        why: why.to_string(),
        ..TakeOverFailedRequest::default()
    };
    let told = async {
        let client = NodeClient::new(Client::connect(&socket).await?);
        client.take_over_failed(with_duration(PATIENCE), &request).await
    };
    match tokio::time::timeout(PATIENCE, told).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => tracing::warn!(socket, %error, "cannot report the failed handover to the node"),
        Err(_) => tracing::warn!(socket, "cannot report the failed handover to the node: it does not answer"),
    }
}
