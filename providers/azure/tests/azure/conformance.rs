//! Runs the conformance suite of all providers against the fake.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use peerpod_provider_api::conformance::{Harness, ListPages, ProviderRole};
use peerpod_provider_api::{CreateRequest, DiskRequest, InstanceId, Provider};
use peerpod_test_clouds::Fault;
use peerpod_test_clouds::azure::{GROUP, SUBSCRIPTION};
use peerpod_tests::cloud::report_promise;

use super::common::{Site, name, request, stranger};

struct Bench {
    provider: Arc<dyn Provider>,
    site: Site,
    volume: String,
    /// Runtime of the fake; ends after it.
    _runtime: tokio::runtime::Runtime,
}

fn make() -> Bench {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let site = runtime.block_on(Site::start());
    site.cloud.set_times(Duration::from_millis(30), Duration::from_millis(30));
    site.cloud.with(|azure, _| azure.delete_time = Duration::from_millis(50));
    let volume = site.disk("pvc-1", "1");
    Bench { provider: site.provider(&[]), site, volume, _runtime: runtime }
}

#[async_trait]
impl Harness for Bench {
    fn provider(&self) -> Arc<dyn Provider> {
        self.provider.clone()
    }

    async fn user_data(&self, id: &InstanceId) -> Option<Vec<u8>> {
        let key = name(id.as_str());
        let data = self.site.cloud.with(|azure, _| azure.vms.get(key).map(|vm| vm.user_data.clone()))?;
        STANDARD.decode(data).ok()
    }

    async fn machines(&self) -> Option<usize> {
        Some(self.site.machines().len())
    }

    fn unknown_id(&self) -> Option<InstanceId> {
        InstanceId::new(format!(
            "/subscriptions/{SUBSCRIPTION}/resourcegroups/{GROUP}/providers/microsoft.compute/virtualmachines/pp-none"
        ))
        .ok()
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
        let fault = Fault::refuse_late("ZonalAllocationFailed", "We do not have sufficient capacity.");
        self.site.cloud.fail("VirtualMachines_CreateOrUpdate", fault, 1);
        Some(request("late"))
    }

    fn pages(&self) -> Option<ListPages<'_>> {
        self.site.cloud.with(|azure, _| azure.page = 2);
        let lose_next =
            Box::new(|| self.site.cloud.fail("VirtualMachines_List second page", Fault::Reset, 1));
        Some(ListPages { size: 2, lose_next })
    }

    fn record(&self, is_kept: bool) {
        report_promise("azure", is_kept);
    }
}

peerpod_provider_api::conformance_suite!(make);
