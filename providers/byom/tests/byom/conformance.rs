//! Runs the conformance suite of all providers against real OpenSSH servers.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use peerpod_provider_api::conformance::{Harness, ProviderRole, SuiteLimits};
use peerpod_provider_api::{InstanceId, Provider};
use peerpod_tests::cloud::report_promise;

use super::common::{Site, stranger};

/// Most VMs at once, and cuts of a create. Two more machines are for those that still reboot.
const CROWD: u8 = 8;

struct Bench {
    provider: Arc<dyn Provider>,
    site: Site,
}

fn make() -> Bench {
    let site = Site::start(CROWD + 2);
    Bench { provider: site.provider(&[]), site }
}

#[async_trait]
impl Harness for Bench {
    fn provider(&self) -> Arc<dyn Provider> {
        self.provider.clone()
    }

    async fn user_data(&self, id: &InstanceId) -> Option<Vec<u8>> {
        // The guest of the test reads it as the real one does.
        let find = || self.site.delivered().into_iter().find(|(vm, ..)| vm == id.as_str());
        while find().is_none() {
            tokio::task::yield_now().await;
        }
        find().map(|(_, _, user_data)| user_data.into_bytes())
    }

    async fn machines(&self) -> Option<usize> {
        Some(self.site.claimed().len())
    }

    fn unknown_id(&self) -> Option<InstanceId> {
        InstanceId::new(format!("{}/0123-4567", self.site.address(0))).ok()
    }

    fn other(&self, role: ProviderRole) -> Option<Arc<dyn Provider>> {
        Some(match role {
            ProviderRole::Stranger => self.site.provider_of(stranger(), &[]),
            ProviderRole::Successor => self.site.provider(&[]),
            ProviderRole::Collector => self.site.collector(&[]),
        })
    }

    fn record(&self, is_kept: bool) {
        report_promise("byom", is_kept && self.site.doubles() == 0);
    }

    fn limits(&self) -> SuiteLimits {
        SuiteLimits { crowd: CROWD.into(), drops: 6, patience: Duration::from_secs(600) }
    }
}

peerpod_provider_api::conformance_suite!(make);
