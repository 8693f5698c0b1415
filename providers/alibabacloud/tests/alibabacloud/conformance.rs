//! Runs the conformance suite of all providers against the fake.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use peerpod_provider_api::conformance::{Harness, ListPages, ProviderRole};
use peerpod_provider_api::{DiskRequest, InstanceId, Provider};
use peerpod_test_clouds::Fault;
use peerpod_test_clouds::alibaba::ZONES;
use peerpod_tests::cloud::report_promise;

use super::common::{Site, stranger};

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
    site.cloud.set_latency(Duration::from_millis(2), Duration::from_millis(2));
    site.cloud.with(|alibaba, _| alibaba.delete_time = Duration::from_millis(50));
    let volume = site.disk(ZONES[0]);
    Bench { provider: site.provider(&[]), site, volume, _runtime: runtime }
}

#[async_trait]
impl Harness for Bench {
    fn provider(&self) -> Arc<dyn Provider> {
        self.provider.clone()
    }

    async fn user_data(&self, id: &InstanceId) -> Option<Vec<u8>> {
        Some(self.site.vm(id.as_str())?.user_data)
    }

    async fn machines(&self) -> Option<usize> {
        Some(self.site.machines().len())
    }

    fn unknown_id(&self) -> Option<InstanceId> {
        InstanceId::new("i-2zeaaaaaaaaaaaaaaaaaaa").ok()
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

    fn pages(&self) -> Option<ListPages<'_>> {
        self.site.cloud.with(|alibaba, _| alibaba.page = 2);
        let lose_next = Box::new(|| self.site.cloud.fail("DescribeInstances second page", Fault::Reset, 1));
        Some(ListPages { size: 2, lose_next })
    }

    fn record(&self, is_kept: bool) {
        report_promise("alibabacloud", is_kept);
    }
}

peerpod_provider_api::conformance_suite!(make);
