//! Runs the conformance suite with files in place of VMs.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use peerpod_provider_api::conformance::{Harness, ProviderRole};
use peerpod_provider_api::{InstanceId, Provider};
use peerpod_provider_fake::{Fake, FakeConfig, FakeVm};

struct Files {
    provider: Arc<Fake>,
    successor: Arc<Fake>,
    dir: PathBuf,
}

fn make() -> Files {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let dir = std::env::temp_dir().join(format!("peerpod-fake-{}-{number}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let config = FakeConfig {
        dir: dir.clone(),
        first_address: [10, 200, 0, 1].into(),
        max_batch: 8,
        takes: Duration::ZERO,
    };
    Files { provider: Arc::new(Fake::new(config.clone())), successor: Arc::new(Fake::new(config)), dir }
}

#[async_trait]
impl Harness for Files {
    fn provider(&self) -> Arc<dyn Provider> {
        self.provider.clone()
    }

    fn other(&self, role: ProviderRole) -> Option<Arc<dyn Provider>> {
        match role {
            ProviderRole::Stranger => None,
            ProviderRole::Successor | ProviderRole::Collector => Some(self.successor.clone()),
        }
    }

    async fn user_data(&self, id: &InstanceId) -> Option<Vec<u8>> {
        let bytes = fs::read(self.dir.join(format!("{id}.json"))).unwrap();
        Some(serde_json::from_slice::<FakeVm>(&bytes).unwrap().user_data.into_bytes())
    }

    async fn machines(&self) -> Option<usize> {
        let files = fs::read_dir(&self.dir).unwrap();
        let whole = |name: std::ffi::OsString| name.to_string_lossy().ends_with(".json");
        Some(files.filter(|entry| whole(entry.as_ref().unwrap().file_name())).count())
    }

    fn unknown_id(&self) -> Option<InstanceId> {
        InstanceId::new("fake-unknown").ok()
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.dir));
    }
}

peerpod_provider_api::conformance_suite!(make);
