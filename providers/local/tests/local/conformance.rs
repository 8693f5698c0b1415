//! Runs the conformance suite with VMs in real namespaces. Needs root.

use super::common;
use std::fs;
use std::sync::Arc;

use async_trait::async_trait;
use common::{IDLE, Place, config};
use peerpod_provider_api::conformance::{Harness, ProviderRole};
use peerpod_provider_api::{DiskRequest, InstanceId, Provider};
use peerpod_provider_local::LocalProvider;

struct Local {
    // Dropped in this order: the provider releases its directory before the directory is removed.
    provider: Arc<LocalProvider>,
    stranger: Arc<LocalProvider>,
    place: Place,
}

fn make() -> Local {
    let place = Place::new(IDLE);
    let provider = Arc::new(LocalProvider::open(place.config()).unwrap());
    let mut other = config(&place.dir);
    other.state_dir = place.dir.join("stranger");
    other.network.bridge = "pplocal8".into();
    other.second.bridge = "pplocal9".into();
    let stranger = Arc::new(LocalProvider::open(other).unwrap());
    Local { provider, stranger, place }
}

#[async_trait]
impl Harness for Local {
    fn provider(&self) -> Arc<dyn Provider> {
        self.provider.clone()
    }

    async fn user_data(&self, id: &InstanceId) -> Option<Vec<u8>> {
        let (_, pid) = self.place.pids(id);
        // Read through the VM's own root directory.
        fs::read(format!("/proc/{pid}/root/media/cidata/user-data")).ok()
    }

    async fn machines(&self) -> Option<usize> {
        Some(self.place.machines().len())
    }

    fn unknown_id(&self) -> Option<InstanceId> {
        InstanceId::new(format!("local-{}", "0".repeat(32))).ok()
    }

    fn volume(&self) -> Option<DiskRequest> {
        fs::create_dir_all(self.place.dir.join("volumes")).unwrap();
        let file = fs::File::create(self.place.dir.join("volumes/disk-1")).unwrap();
        file.set_len(1 << 20).unwrap();
        Some(DiskRequest { volume: "disk-1".into(), ..DiskRequest::default() })
    }

    fn other(&self, role: ProviderRole) -> Option<Arc<dyn Provider>> {
        match role {
            ProviderRole::Stranger => Some(self.stranger.clone()),
            ProviderRole::Successor | ProviderRole::Collector => None,
        }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.place.assert_clean();
        }
    }
}

peerpod_provider_api::conformance_suite!(make);
