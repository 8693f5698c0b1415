//! Runs the conformance suite of all providers against the fake.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use peerpod_provider_api::conformance::{Harness, ProviderRole};
use peerpod_provider_api::{CreateRequest, InstanceId, Provider};
use peerpod_test_clouds::Fault;
use peerpod_tests::cloud::report_promise;

use super::common::{CREATE, Site, request, stranger};

struct Bench {
    provider: Arc<dyn Provider>,
    site: Site,
    /// Runtime of the fake; ends after it.
    _runtime: tokio::runtime::Runtime,
}

fn make() -> Bench {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let site = runtime.block_on(Site::start());
    site.cloud.set_times(Duration::from_millis(30), Duration::from_millis(30));
    site.cloud.with(|power, _| power.delete_time = Duration::from_millis(50));
    Bench { provider: site.provider(&[]), site, _runtime: runtime }
}

#[async_trait]
impl Harness for Bench {
    fn provider(&self) -> Arc<dyn Provider> {
        self.provider.clone()
    }

    async fn user_data(&self, id: &InstanceId) -> Option<Vec<u8>> {
        let data = self
            .site
            .cloud
            .with(|power, _| power.instances.get(id.as_str()).map(|one| one.user_data.clone()))?;
        STANDARD.decode(data).ok()
    }

    async fn machines(&self) -> Option<usize> {
        Some(self.site.machines().len())
    }

    fn unknown_id(&self) -> Option<InstanceId> {
        InstanceId::new("00000000-0000-4000-8000-999999999999").ok()
    }

    fn other(&self, role: ProviderRole) -> Option<Arc<dyn Provider>> {
        Some(match role {
            ProviderRole::Stranger => self.site.provider_of(stranger(), &[]),
            ProviderRole::Successor => self.site.provider(&[]),
            ProviderRole::Collector => self.site.collector(),
        })
    }

    async fn late_refusal(&self) -> Option<CreateRequest> {
        self.site.cloud.fail(CREATE, Fault::refuse_late("ERROR", "No valid host was found."), 1);
        Some(request("late"))
    }

    fn record(&self, is_kept: bool) {
        report_promise("ibmcloud-powervs", is_kept);
    }
}

peerpod_provider_api::conformance_suite!(make);
