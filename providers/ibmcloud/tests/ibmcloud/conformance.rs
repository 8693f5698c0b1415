//! Runs the conformance suite of all providers against the fake.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use peerpod_provider_api::conformance::{Harness, ListPages, ProviderRole};
use peerpod_provider_api::{CreateRequest, DiskRequest, InstanceId, Provider};
use peerpod_test_clouds::Fault;
use peerpod_test_clouds::ibmcloud::ZONES;
use peerpod_tests::cloud::report_promise;

use super::common::{CREATE, Site, request, stranger};

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
    site.cloud.with(|ibm, _| {
        ibm.delete_time = Duration::from_millis(50);
        ibm.attach_time = Duration::from_millis(30);
    });
    let volume = site.volume("pvc-1", ZONES[0]);
    // The volume holds its VMs in one zone, as their topology does in a cluster.
    Bench { provider: site.provider(&[]), site, volume, _runtime: runtime }
}

#[async_trait]
impl Harness for Bench {
    fn provider(&self) -> Arc<dyn Provider> {
        self.provider.clone()
    }

    async fn user_data(&self, id: &InstanceId) -> Option<Vec<u8>> {
        let data = |ibm: &mut peerpod_test_clouds::IbmCloud| {
            ibm.instances.get(id.as_str()).map(|one| one.user_data.clone().into_bytes())
        };
        self.site.cloud.with(|ibm, _| data(ibm))
    }

    async fn machines(&self) -> Option<usize> {
        Some(self.site.machines().len())
    }

    fn unknown_id(&self) -> Option<InstanceId> {
        InstanceId::new("0717_00000000-0000-4000-8000-none").ok()
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
        let message = "Can't start instance because resource capacity is unavailable.";
        self.site.cloud.fail(CREATE, Fault::refuse_late("cannot_start_capacity", message), 1);
        Some(request("late"))
    }

    fn pages(&self) -> Option<ListPages<'_>> {
        self.site.cloud.with(|ibm, _| ibm.page = 2);
        let lose_next = Box::new(|| self.site.cloud.fail("list_instances second page", Fault::Reset, 1));
        Some(ListPages { size: 2, lose_next })
    }

    fn record(&self, is_kept: bool) {
        report_promise("ibmcloud", is_kept);
    }
}

peerpod_provider_api::conformance_suite!(make);
