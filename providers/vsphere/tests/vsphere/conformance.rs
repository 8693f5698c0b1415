//! Runs the conformance suite of all providers against the simulator.

use std::sync::Arc;

use async_trait::async_trait;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use peerpod_provider_api::conformance::{Harness, ListPages, ProviderRole};
use peerpod_provider_api::{CreateRequest, DiskRequest, InstanceId, Provider};
use peerpod_test_clouds::Fault;
use peerpod_test_clouds::vcsim::DATASTORES;
use peerpod_tests::cloud::report_promise;
use serde_json::json;

use super::common::{CREATE, Site, TestCloud, request, stranger};

struct Bench {
    provider: Arc<dyn Provider>,
    site: Site,
    volume: String,
    /// Runtime of the proxy; ends after it.
    _runtime: tokio::runtime::Runtime,
}

fn make() -> Bench {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let site = runtime.block_on(async { Site::start() });
    let (volume, _) = site.vcsim.first_class_disk("pvc-1", DATASTORES[0]);
    Bench { provider: site.provider(&[]), site, volume, _runtime: runtime }
}

#[async_trait]
impl Harness for Bench {
    fn provider(&self) -> Arc<dyn Provider> {
        self.provider.clone()
    }

    async fn user_data(&self, id: &InstanceId) -> Option<Vec<u8>> {
        let vm = self.site.vcsim.vm(id.as_str())?;
        BASE64_STANDARD.decode(vm["Extra"]["guestinfo.userdata"].as_str()?).ok()
    }

    async fn machines(&self) -> Option<usize> {
        Some(self.site.ids().await.len())
    }

    fn unknown_id(&self) -> Option<InstanceId> {
        InstanceId::new("pp-aaaaaaaa-aaaaaaaaaaaaaaaaaaaaaaaaaa").ok()
    }

    fn other(&self, role: ProviderRole) -> Option<Arc<dyn Provider>> {
        Some(match role {
            ProviderRole::Stranger => self.site.provider_of(stranger(), &[]),
            ProviderRole::Successor => self.site.provider(&[]),
            ProviderRole::Collector => self.site.collector(),
        })
    }

    fn volume(&self) -> Option<DiskRequest> {
        Some(DiskRequest { volume: self.volume.clone(), ..DiskRequest::default() })
    }

    async fn late_refusal(&self) -> Option<CreateRequest> {
        // The VM is made, and then not switched on.
        let order = json!({"op": "late", "method": CREATE, "fault": "InsufficientMemoryResourcesFault", "made": true});
        self.site.vcsim.order(&order);
        Some(request("late"))
    }

    fn record(&self, is_kept: bool) {
        report_promise("vsphere", is_kept);
    }

    fn pages(&self) -> Option<ListPages<'_>> {
        self.site.vcsim.set_page(2);
        let lose_next = Box::new(|| self.site.vcsim.fail("ContinueRetrievePropertiesEx", Fault::Reset, 1));
        Some(ListPages { size: 2, lose_next })
    }
}

peerpod_provider_api::conformance_suite!(make);
