//! Runs the conformance suite with the local provider behind the protocol of `providers/external`, with real VMs. Needs
//! root.

use super::common;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use common::{IDLE, Place};
use peerpod_provider_api::conformance::Harness;
use peerpod_provider_api::{InstanceId, Provider};
use peerpod_provider_external::serve::{Serving, listen_on_socket};
use peerpod_provider_external::{Endpoint, External, ExternalConfig, Owner};
use peerpod_provider_local::LocalProvider;
use tokio::runtime::Runtime;

struct Remote {
    // Dropped in this order: the client, the server, its runtime, the place.
    provider: Arc<External>,
    _serving: Serving,
    _runtime: Runtime,
    place: Place,
}

fn make() -> Remote {
    // The runtime's threads start in the network namespace of the place.
    let place = Place::new(IDLE);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let socket = place.dir.join("provider.sock");
    let local: Arc<dyn Provider> = Arc::new(LocalProvider::open(place.config()).unwrap());
    let patience = Duration::from_secs(30);
    let config = ExternalConfig {
        endpoint: Endpoint::Unix { socket: socket.clone(), peer_uid: None, command: None },
        owner: Owner { cluster_id: "c".into(), node_name: "n".into(), installation: "i".into() },
        handshake_timeout: patience,
        call_timeout: patience,
        health_every: patience,
        health_timeout: patience,
    };
    let (serving, provider) = runtime.block_on(async {
        let listener = listen_on_socket(&socket).unwrap();
        let serving = Serving::start("local", listener, move |_: &_| Ok(local.clone())).await.unwrap();
        (serving, Arc::new(External::open(config).await.unwrap()))
    });
    Remote { provider, _serving: serving, _runtime: runtime, place }
}

#[async_trait]
impl Harness for Remote {
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
}

peerpod_provider_api::conformance_suite!(make);
