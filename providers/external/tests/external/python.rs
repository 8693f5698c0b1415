//! Runs the conformance suite with the Python provider, to prove that another language works.

use super::common;
use std::fs;
use std::sync::Arc;

use async_trait::async_trait;
use common::{Folder, owner};
use peerpod_provider_api::conformance::{Harness, ProviderRole};
use peerpod_provider_api::{DiskRequest, InstanceId, Provider};
use peerpod_provider_external::External;

struct Python {
    // Dropped in this order: the providers, the runtime of their connections, the folder.
    provider: Arc<External>,
    stranger: Arc<External>,
    successor: Arc<External>,
    _runtime: tokio::runtime::Runtime,
    folder: Folder,
}

fn make() -> Python {
    let folder = Folder::new();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let open = |config| Arc::new(runtime.block_on(External::open(config)).unwrap());
    let provider = open(folder.shelf());
    let mut other = folder.dialled();
    other.owner = owner("another-node");
    let (stranger, successor) = (open(other), open(folder.dialled()));
    fs::write(folder.0.join("volumes/disk-1"), "").unwrap();
    Python { provider, stranger, successor, _runtime: runtime, folder }
}

#[async_trait]
impl Harness for Python {
    fn provider(&self) -> Arc<dyn Provider> {
        self.provider.clone()
    }

    async fn user_data(&self, id: &InstanceId) -> Option<Vec<u8>> {
        let record = fs::read(self.folder.0.join(format!("vms/{id}.json"))).unwrap();
        let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
        Some(record["user_data"].as_str().unwrap().as_bytes().to_vec())
    }

    async fn machines(&self) -> Option<usize> {
        Some(self.folder.machines())
    }

    fn unknown_id(&self) -> Option<InstanceId> {
        InstanceId::new(format!("shelf-{}", "0".repeat(40))).ok()
    }

    fn other(&self, role: ProviderRole) -> Option<Arc<dyn Provider>> {
        Some(match role {
            ProviderRole::Stranger => self.stranger.clone(),
            ProviderRole::Successor | ProviderRole::Collector => self.successor.clone(),
        })
    }

    fn volume(&self) -> Option<DiskRequest> {
        Some(DiskRequest { volume: "disk-1".into(), ..DiskRequest::default() })
    }
}

peerpod_provider_api::conformance_suite!(make);
