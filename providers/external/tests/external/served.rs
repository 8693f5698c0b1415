//! Runs the conformance suite with a Rust provider that `serve` exposes over mutual TLS. Values survive both halves of
//! the crate unchanged.

use super::common;
use super::pki;
use std::collections::HashMap;
use std::fs;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use common::{Folder, config, owner};
use peerpod_provider_api::conformance::{Harness, ProviderRole};
use peerpod_provider_api::{Error, InstanceId, Provider};
use peerpod_provider_external::serve::{Serving, listen_with_tls};
use peerpod_provider_external::{Endpoint, External, Owner};
use peerpod_provider_fake::{Fake, FakeConfig, FakeVm};
use pki::Pki;
use tokio::net::TcpListener;

struct Served {
    provider: Arc<External>,
    stranger: Arc<External>,
    _serving: Serving,
    _runtime: tokio::runtime::Runtime,
    folder: Folder,
}

/// Returns the folder of an owner's fake provider.
fn fake_of(folder: &Folder, owner: &Owner) -> std::path::PathBuf {
    folder.0.join(format!("fake-{}", owner.node_name))
}

fn make() -> Served {
    let folder = Folder::new();
    let pki = Pki::new(&folder.0);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let fakes = Mutex::new(HashMap::<Owner, Arc<dyn Provider>>::new());
    let root = folder.0.clone();
    let provider_of = move |owner: &Owner| {
        let mut fakes = fakes.lock().unwrap();
        let fake = fakes.entry(owner.clone()).or_insert_with(|| {
            let dir = root.join(format!("fake-{}", owner.node_name));
            fs::create_dir_all(&dir).unwrap();
            Arc::new(Fake::new(FakeConfig {
                dir,
                first_address: [10, 200, 0, 1].into(),
                max_batch: 4,
                takes: std::time::Duration::ZERO,
            }))
        });
        Ok::<_, Error>(fake.clone())
    };
    let (serving, address) = runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let listener = listen_with_tls(listener, &pki.server).unwrap();
        (Serving::start("fake", listener, provider_of).await.unwrap(), address)
    });
    let open = |node: &str| {
        let server_name = "provider.test".try_into().unwrap();
        let files = pki.client.clone();
        let mut config = config(Endpoint::Tls { address: address.to_string(), server_name, files });
        config.owner = owner(node);
        Arc::new(runtime.block_on(External::open(config)).unwrap())
    };
    let (provider, stranger) = (open("node"), open("stranger"));
    Served { provider, stranger, _serving: serving, _runtime: runtime, folder }
}

#[async_trait]
impl Harness for Served {
    fn provider(&self) -> Arc<dyn Provider> {
        self.provider.clone()
    }

    async fn user_data(&self, id: &InstanceId) -> Option<Vec<u8>> {
        let file = fake_of(&self.folder, &owner("node")).join(format!("{id}.json"));
        let fake_vm: FakeVm = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
        Some(fake_vm.user_data.into_bytes())
    }

    async fn machines(&self) -> Option<usize> {
        let files = fs::read_dir(fake_of(&self.folder, &owner("node"))).unwrap().flatten();
        Some(files.filter(|file| file.file_name().to_string_lossy().ends_with(".json")).count())
    }

    fn unknown_id(&self) -> Option<InstanceId> {
        InstanceId::new("fake-unknown").ok()
    }

    fn other(&self, role: ProviderRole) -> Option<Arc<dyn Provider>> {
        match role {
            ProviderRole::Stranger => Some(self.stranger.clone()),
            ProviderRole::Successor | ProviderRole::Collector => None,
        }
    }
}

peerpod_provider_api::conformance_suite!(make);
