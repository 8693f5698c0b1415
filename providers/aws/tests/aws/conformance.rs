//! Runs the conformance suite of all providers against moto behind the fault proxy.

use std::sync::Arc;

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use peerpod_provider_api::conformance::{Harness, ListPages, ProviderRole};
use peerpod_provider_api::{DiskRequest, InstanceId, Provider};
use peerpod_provider_aws::AwsProvider;
use peerpod_test_ec2::{Fault, xml};
use peerpod_tests::cloud::report_promise;

use super::common::{Cloud, stranger};

struct Ec2 {
    provider: Arc<dyn Provider>,
    cloud: Arc<Cloud>,
    volume: String,
    /// Runtime of the proxy; ends after it.
    _runtime: tokio::runtime::Runtime,
}

fn make() -> Ec2 {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let cloud = Arc::new(runtime.block_on(Cloud::start()));
    let volume = runtime.block_on(cloud.volume("eu-central-1a"));
    Ec2 { provider: cloud.provider(&[]), cloud, volume, _runtime: runtime }
}

#[async_trait]
impl Harness for Ec2 {
    fn provider(&self) -> Arc<dyn Provider> {
        self.provider.clone()
    }

    async fn user_data(&self, id: &InstanceId) -> Option<Vec<u8>> {
        let params = [("InstanceId", id.as_str()), ("Attribute", "userData")];
        let answer = self.cloud.proxy.ask("DescribeInstanceAttribute", &params).await.unwrap();
        STANDARD.decode(xml::value(&answer, "value").unwrap()).ok()
    }

    async fn machines(&self) -> Option<usize> {
        Some(self.cloud.machines().await.len())
    }

    fn unknown_id(&self) -> Option<InstanceId> {
        InstanceId::new("i-0123456789abcdef0").ok()
    }

    fn other(&self, role: ProviderRole) -> Option<Arc<dyn Provider>> {
        Some(match role {
            ProviderRole::Stranger => Arc::new(AwsProvider::new(self.cloud.config(&[]), stranger())),
            ProviderRole::Successor => self.cloud.provider(&[]),
            ProviderRole::Collector => self.cloud.collector(),
        })
    }

    fn pages(&self) -> Option<ListPages<'_>> {
        self.cloud.proxy.set_page(2);
        let lose_next = Box::new(|| self.cloud.proxy.fail("DescribeInstances second page", Fault::Reset, 1));
        Some(ListPages { size: 2, lose_next })
    }

    fn record(&self, is_kept: bool) {
        report_promise("aws", is_kept);
    }

    fn volume(&self) -> Option<DiskRequest> {
        Some(DiskRequest { volume: self.volume.clone(), ..DiskRequest::default() })
    }
}

peerpod_provider_api::conformance_suite!(make);
