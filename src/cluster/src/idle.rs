//! Checks that the cluster has no PeerPod. The chart runs this check before its removal.
//!
//! May touch: the API server, where it lists PeerPods.

use std::path::PathBuf;

use anyhow::bail;
use kube::api::ListParams;
use kube::{Api, ResourceExt};
use peerpod_base::config::Reader;
use peerpod_kube::client::{connect, within};
use peerpod_kube::crds::PeerPod;

/// Number of PeerPods that the error names.
const NAMED: u32 = 10;

/// Settings of the check.
pub(crate) struct IdleSettings {
    kubeconfig: Option<PathBuf>,
}

impl IdleSettings {
    pub(crate) fn read(reader: &mut Reader) -> IdleSettings {
        let help = "how the API server is reached; the pod's service account when not set";
        IdleSettings { kubeconfig: reader.optional("kubernetes.kubeconfig", help) }
    }
}

/// Returns when the cluster has no PeerPod, or does not know the kind.
///
/// # Errors
/// PeerPods exist, or the API server cannot list them.
pub(crate) async fn check(settings: IdleSettings) -> anyhow::Result<()> {
    let client = connect(settings.kubeconfig.as_deref()).await?;
    let some = ListParams::default().limit(NAMED);
    let found = match within("list PeerPods", Api::<PeerPod>::all(client).list_metadata(&some)).await {
        Ok(found) => found,
        Err(error) if error.is_unknown_kind() => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let names: Vec<String> = found
        .items
        .iter()
        .map(|one| format!("{}/{}", one.namespace().unwrap_or_default(), one.name_any()))
        .collect();
    let more = found.metadata.remaining_item_count.filter(|more| *more > 0);
    if names.is_empty() {
        return Ok(());
    }
    bail!(
        "PeerPods exist: {}{}; delete their pods and wait until `kubectl get peerpods -A` is empty, or remove the \
         release with `helm uninstall --no-hooks`, which ends these pods and may leave their VMs at the provider",
        names.join(", "),
        more.map_or_else(String::new, |more| format!(" and {more} more"))
    )
}
